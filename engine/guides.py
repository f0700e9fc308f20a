"""The guides of the requests in an engine: compiled beside its thread, then a mask for each step, token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from engine.grammars import GrammarError, Grammars, Guide
from engine.request import Finish, Request
from engine.step import Ints, Progress, StepPlan

COMPILE_TIMEOUT_S = 10.0
"""A grammar that has not compiled after so long is given up. The service has tried it before, within a second of CPU
time, so this is for what got past that: its thread cannot be ended and stays behind."""
_NUM_COMPILING = 2
"""Grammars that are compiled at once."""


class Guides:
    """Implements step.Masks. `compile` may be called from any thread, all else from the engine's."""

    def __init__(self, grammars: Grammars | GrammarError) -> None:
        """A GrammarError says why this engine has no grammars."""
        self._grammars = grammars
        self._guides: dict[str, Guide] = {}
        self._slots = threading.Semaphore(_NUM_COMPILING)

    def compile(self, request: Request, on_done: Callable[[Guide | GrammarError], None]) -> None:
        """Call on_done, once and from another thread, with the guide of a request that has a grammar."""
        thread = threading.Thread(target=self._compile, args=(request, on_done), name="grammar", daemon=True)
        thread.start()

    def add(self, request_id: str, guide: Guide) -> None:
        self._guides[request_id] = guide

    def of(self, request_id: str) -> Guide | None:
        return self._guides.get(request_id)

    def forget(self, request_id: str) -> None:
        """Nothing happens for requests without a guide."""
        self._guides.pop(request_id, None)

    def masks(self, plan: StepPlan) -> dict[int, Ints]:
        """What may come behind each chunk that samples by a grammar: made when its newest token came."""
        if not self._guides:
            return {}
        guides = {chunk: self._guides.get(plan.request_ids[chunk]) for chunk in plan.sampling_chunks}
        return {chunk: guide.mask for chunk, guide in guides.items() if guide is not None and guide.mask is not None}

    def advance(self, progress: Iterable[Progress]) -> None:
        """Requests have gained tokens; one that a token has ended needs no guide any more."""
        if not self._guides:
            return
        gained: Sequence[tuple[Guide, int]] = [
            (self._guides[each.request_id], token_id)
            for each in progress
            if each.request_id in self._guides and each.finish is not Finish.STOP
            for token_id in each.token_ids
        ]
        assert not isinstance(self._grammars, GrammarError)
        self._grammars.advance(gained)

    def _compile(self, request: Request, on_done: Callable[[Guide | GrammarError], None]) -> None:
        lock, is_done = threading.Lock(), False

        def done(result: Guide | GrammarError) -> None:
            nonlocal is_done
            with lock:
                if is_done:
                    return
                is_done = True
            self._slots.release()
            on_done(result)

        self._slots.acquire()
        late = GrammarError(f"The grammar did not compile within {COMPILE_TIMEOUT_S:g} s.")
        timer = threading.Timer(COMPILE_TIMEOUT_S, done, (late,))
        timer.daemon = True
        timer.start()
        try:
            done(self._compiled(request))
        finally:
            timer.cancel()

    def _compiled(self, request: Request) -> Guide | GrammarError:
        if isinstance(self._grammars, GrammarError):
            return self._grammars
        assert request.sampling.grammar is not None
        try:
            return self._grammars.compile(request.sampling.grammar, request.resumed_ids)
        except GrammarError as error:
            return error
        except Exception as error:  # its caller gets an end whatever happens
            return GrammarError(f"The grammar cannot be compiled: {type(error).__name__}: {error}")
