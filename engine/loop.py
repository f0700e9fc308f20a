"""The engine's thread: requests in from any thread, one step after another, outputs out once per step."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.detokenizer import Detokenizer, TextStream
from engine.grammars import GrammarError, Grammars, Guide
from engine.guides import Guides
from engine.request import Finish, Output, Request, Sampling, Stats
from engine.scheduler import Scheduler
from engine.step import Progress, Runner
from engine.stops import StopMatcher

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0
"""How long close() waits for the step that is being computed."""


_NO_GRAMMARS = GrammarError("This engine has no grammars.")


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A request, and what has come of its grammar."""

    request: Request
    guide: Guide | GrammarError


class EngineLoop:
    """Continuous batching over one runner: implements request.Engine.

    The thread alone touches scheduler, runner and detokenizer; other threads leave word in the inbox. Between steps
    it empties the inbox; without work it sleeps until word comes. A request with a grammar waits outside until that is
    compiled, on a thread beside.

    An abort shows nothing more: text that is held back then belongs to the tokens that a later attempt resumes from.
    The last Output of any other end carries the rest of the text.

    A thread that dies by an exception leaves the live requests without an Output: nobody may take its last state for
    a result. `failure` says why; the process is expected to exit, and the jobs are resumed elsewhere.
    """

    def __init__(
        self,
        runner: Runner,
        detokenizer: Detokenizer,
        scheduler: Scheduler,
        grammars: Grammars | GrammarError = _NO_GRAMMARS,
    ) -> None:
        """Runner and scheduler, made for each other, are the loop's from here on; the runner is closed with it.

        grammars  or why there are none: requests that have one then end with that
        """
        self._runner = runner
        self._detokenizer = detokenizer
        self._scheduler = scheduler
        self._guides = Guides(grammars)
        self._transcripts: dict[str, _Transcript] = {}
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

        self._word = threading.Condition()  # guards what follows
        self._inbox: list[Request | _Compiled | str] = []  # requests to take, ids to abort, in the order they came
        self._compiling: dict[str, Request] = {}  # whose grammars are; the engine's thread alone takes them out
        self._live: set[str] = set()
        self._stats = self._scheduler.stats()
        self._is_closing = False
        self._is_runner_closed = False

    def start(self, on_outputs: Callable[[Sequence[Output]], None]) -> None:
        """Run steps on a thread of its own; on_outputs gets each step's outputs there, never an empty list."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._run, args=(on_outputs,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take a request from any thread. It ends in exactly one Output with a finish.

        Raises ValueError for an id whose last Output is still to come, and EngineStoppedError after the engine's end.
        """
        with self._word:
            if self._is_closing or self._failure is not None:
                raise EngineStoppedError(self._failure or "the engine is closed")
            if request.id in self._live:
                raise ValueError(f"request {request.id} is already in the engine")
            self._live.add(request.id)
            if request.sampling.grammar is None:
                self._inbox.append(request)
                self._word.notify()
                return
            self._compiling[request.id] = request
        self._guides.compile(request, lambda guide: self._put(_Compiled(request, guide)))

    def _put(self, message: _Compiled) -> None:
        with self._word:
            self._inbox.append(message)
            self._word.notify()

    def abort(self, request_id: str) -> None:
        """Take a request back from any thread, in any state, within one step; unknown ids are ignored."""
        with self._word:
            if request_id in self._live:
                self._inbox.append(request_id)
                self._word.notify()

    def stats(self) -> Stats:
        """The engine after its last step; requests that it has not taken yet count as waiting. From any thread."""
        with self._word:
            stats = self._stats
            arrived = Counter(request.rank for request in self._inbox if isinstance(request, Request))
            arrived.update(request.rank for request in self._compiling.values())
            compiled = sum(isinstance(message, _Compiled) for message in self._inbox)
            compiling = max(0, len(self._compiling) - compiled)
        if not arrived:
            return stats
        num_ranks = max(len(stats.waiting_by_rank), max(arrived) + 1)
        padding = (0,) * (num_ranks - len(stats.waiting_by_rank))
        waiting = [count + arrived[rank] for rank, count in enumerate(stats.waiting_by_rank + padding)]
        return replace(
            stats,
            waiting=stats.waiting + arrived.total(),
            compiling=compiling,
            running_by_rank=stats.running_by_rank + padding,
            waiting_by_rank=tuple(waiting),
        )

    @property
    def failure(self) -> str | None:
        """Why the engine's thread ended by itself, or None."""
        return self._failure

    def close(self) -> None:
        """End the thread within a step; what is left ends as aborted. May be called twice, from any thread.

        Waits 30 s at most; a runner that is still computing then is left alone, and so is the (daemon) thread.
        """
        with self._word:
            self._is_closing = True
            self._word.notify()
        if self._thread is threading.current_thread():
            return  # the loop ends after the outputs it is handing over, and closes the runner itself
        if self._thread is None:
            self._close_runner()
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the engine's step did not end within %s s", _CLOSE_TIMEOUT_S)

    def _run(self, on_outputs: Callable[[Sequence[Output]], None]) -> None:
        try:
            while self._wait_for_work():
                self._hand_over(self._empty_inbox() + self._expire() + self._step(), on_outputs)
            self._hand_over(self._abort_all(), on_outputs)
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._close_runner()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False once the engine is to end."""
        with self._word:
            self._word.wait_for(lambda: self._is_closing or self._inbox or self._stats.running or self._stats.waiting)
            return not self._is_closing

    def _empty_inbox(self) -> list[Output]:
        """Take and abort what the inbox says; the outputs of requests that end by it."""
        with self._word:
            messages = list(self._inbox)
        outputs = [output for message in messages if (output := self._receive(message))]
        with self._word:
            # Only now, together with the new stats: a request is counted at every instant.
            del self._inbox[: len(messages)]
            self._stats = self._scheduler.stats()
        return outputs

    def _receive(self, message: Request | _Compiled | str) -> Output | None:
        if isinstance(message, Request):
            return self._take(message)
        if isinstance(message, _Compiled):
            return self._take_compiled(message)
        return self._abort(message)

    def _take_compiled(self, message: _Compiled) -> Output | None:
        request = message.request
        if self._compiling.get(request.id) is not request:
            return None  # it was aborted meanwhile, and another one may have its name
        output = self._take(request, message.guide)
        with self._word:
            del self._compiling[request.id]
            self._stats = self._scheduler.stats()
        return output

    def _take(self, request: Request, guide: Guide | GrammarError | None = None) -> Output | None:
        end = self._scheduler.add(request, time.monotonic())
        if end and end.finish is Finish.ERROR:
            return self._make_output(end, "")  # nothing is made of its fields: they may be what is wrong
        self._transcripts[request.id] = transcript = _Transcript(self._detokenizer.stream(), request.sampling)
        resumed_ids = request.resumed_ids
        if end and end.finish is Finish.STOP:
            resumed_ids = resumed_ids[:-1]  # an end-of-sequence or stop token, which has no text
        transcript.push(resumed_ids)
        if end:
            return self._output(end)
        if transcript.is_stopped:
            return self._stop(Progress(request.id), "")
        if isinstance(guide, GrammarError):
            return self._fail(Progress(request.id), "", str(guide))
        if guide is not None:
            self._guides.add(request.id, guide)
            if guide.is_complete:
                return self._stop(Progress(request.id), transcript.flush())
        return None

    def _abort(self, request_id: str) -> Output | None:
        if not self._scheduler.abort(request_id) and request_id not in self._compiling:
            return None
        with self._word:
            self._compiling.pop(request_id, None)
        self._forget(request_id)
        return self._make_output(Progress(request_id, finish=Finish.ABORTED), "")

    def _abort_all(self) -> list[Output]:
        outputs = self._empty_inbox()
        left = [*self._transcripts, *self._compiling]
        outputs += [output for request_id in left if (output := self._abort(request_id))]
        with self._word:
            self._stats = self._scheduler.stats()
        return outputs

    def _expire(self) -> list[Output]:
        """As an abort, it shows nothing more."""
        expired = self._scheduler.expire(time.monotonic())
        for progress in expired:
            self._forget(progress.request_id)
        return [self._make_output(progress, "") for progress in expired]

    def _step(self) -> list[Output]:
        started = time.monotonic()
        plan = self._scheduler.plan(started)
        if plan is None:
            return []
        if masks := self._guides.masks(plan):
            plan = replace(plan, masks=masks)
        sampled = self._runner.execute(plan)
        progress = self._scheduler.commit(plan, sampled, elapsed_ms=1000 * (time.monotonic() - started))
        self._guides.advance(progress)
        outputs = [self._output(gained) for gained in progress]
        with self._word:
            self._stats = self._scheduler.stats()
        return outputs

    def _output(self, progress: Progress) -> Output:
        """The output for what the scheduler booked: text, and the end where a stop string or a grammar makes one."""
        transcript = self._transcripts[progress.request_id]
        guide = self._guides.of(progress.request_id)
        is_complete = guide is not None and guide.is_complete
        # The scheduler's own STOP is an end-of-sequence or stop token, which has no text.
        text = "" if progress.finish is Finish.STOP else transcript.push(progress.token_ids)
        if (progress.finish and progress.finish is not Finish.ERROR) or is_complete:
            text += transcript.flush()
        if transcript.is_stopped or is_complete:
            return self._stop(progress, text)
        if progress.finish:
            self._forget(progress.request_id)
        elif guide is not None and guide.problem is not None:
            return self._fail(progress, text, guide.problem)
        return self._make_output(progress, text)

    def _stop(self, progress: Progress, text: str) -> Output:
        """End a request whose text is whole by a stop string or its grammar, which the scheduler does not know."""
        self._scheduler.stop(progress.request_id)
        self._forget(progress.request_id)
        return self._make_output(progress._replace(finish=Finish.STOP, error=None), text)

    def _fail(self, progress: Progress, text: str, error: str) -> Output:
        """End a request that its grammar leaves no way to go on."""
        self._scheduler.abort(progress.request_id)
        self._forget(progress.request_id)
        return self._make_output(progress._replace(finish=Finish.ERROR, error=error), text)

    def _forget(self, request_id: str) -> None:
        self._transcripts.pop(request_id, None)
        self._guides.forget(request_id)

    def _make_output(self, progress: Progress, text: str) -> Output:
        return Output(
            request_id=progress.request_id,
            token_ids=progress.token_ids,
            text=text,
            step=self._scheduler.steps,
            finish=progress.finish,
            error=progress.error,
            logprobs=progress.logprobs,
        )

    def _hand_over(self, outputs: list[Output], on_outputs: Callable[[Sequence[Output]], None]) -> None:
        if not outputs:
            return
        with self._word:
            # Before the call: whoever gets a request's end may submit it again at once.
            self._live.difference_update(output.request_id for output in outputs if output.finish)
        on_outputs(outputs)

    def _close_runner(self) -> None:
        with self._word:
            if self._is_runner_closed:
                return
            self._is_runner_closed = True
        self._runner.close()


class _Transcript:
    """What one request has shown: a pure function of its tokens, so a resumed one goes on exactly where it was."""

    def __init__(self, stream: TextStream, sampling: Sampling) -> None:
        self._stream = stream
        self._stops = StopMatcher(sampling.stop)
        self._num_early = sampling.min_tokens  # tokens to come before one that may end the text
        self._may_stop = not sampling.min_tokens  # whether the newest token may

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown after these tokens."""
        early, token_ids = token_ids[: self._num_early], token_ids[self._num_early :]
        self._num_early -= len(early)
        text = self._stops.push(self._stream.push(early), may_stop=False) if early else ""
        if not token_ids:
            return text
        self._may_stop = True
        return text + self._stops.push(self._stream.push(token_ids))

    def flush(self) -> str:
        """The rest of the text; it may complete a stop string."""
        return self._stops.push(self._stream.flush(), may_stop=self._may_stop) + self._stops.flush()
