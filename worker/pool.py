"""The Celery pool whose slots are the engine's slots.

A message goes straight into the continuous batch, beside all others. Celery's own trace runs when its jobs have ended,
so that its signals, events, revokes, time limits and `inspect` work as they do with any pool.

    hub thread:  on_apply ─▶ JobService.take           accept_callback (acknowledges)      callback
    claimer, writer threads:           └─▶ claimed ────────┘      ... done ─▶ trace ──────────┘
                                                                     (finisher thread)
"""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool, apply_target
from celery.platforms import EX_OK
from celery.worker import state

from app import models
from app.broker import GENERATE, tier_of
from app.commands import CANNOT_START
from app.errors import SetupError
from app.models import Model
from app.settings import Settings, get_settings
from app.tiers import POLICIES, Tier
from engine.builder import build
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.garbage import collect_rarely
from engine.limits import Preemption, Prefill
from engine.request import Engine
from worker.attempts import Task
from worker.consumer import ConsumerWatch
from worker.intake import FairOrder, Intake
from worker.jobs import JobService
from worker.tasks import DONE_TASK
from worker.vital import end_process, time_limit

logger = logging.getLogger(__name__)

FINISHERS = 2
"""Threads that run Celery's trace of messages whose jobs have ended; a trace takes well under a millisecond."""
OTHERS = 2
"""Threads for tasks that are not the engine's, such as Celery's own."""
TICK_S = 0.1
"""The hub wakes so often at least, to see whether the engine has room for a tier that it had none for."""
GIL_SWITCH_S = 0.0005
"""The engine's thread, back from a step, waits no longer than this for a thread that runs Python."""
TIME_LIMIT = "time_limit"
"""The code of a job whose message had a time limit that passed."""

Callback = Callable[..., object]


@dataclass(eq=False)
class _Message:
    """A message in the pool's hands, with what Celery wants called. Only the hub's thread touches it."""

    pid: int
    """Stands for a process id: Celery's way to name what it wants terminated."""
    trace: Callable[[], Any]
    """Celery's own, around the task's body."""
    accept: Callback
    finish: Callback
    time_out: Callback
    soft_limit_s: float | None
    hard_limit_s: float | None
    cancel: Callable[[int], None]
    timers: list[Any] = field(default_factory=list)
    is_over: bool = False

    def terminate(self, signum: int) -> None:
        """Called by Celery for a message that was revoked before its jobs were claimed."""
        self.cancel(self.pid)


class EnginePool(BasePool):  # type: ignore[misc]
    signal_safe = False
    body_can_be_buffer = True
    uses_semaphore = False
    task_join_will_block = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hub: Any = None
        self._pids = itertools.count(1)
        # Celery keeps only a weak reference to what on_apply returns.
        self._messages: dict[int, tuple[_Message, Task]] = {}
        self._callbacks: deque[Callable[[], object]] = deque()
        self._is_in_haste = False
        self._stopping = threading.Lock()
        self._is_stopped = False

    # ---- start and stop, on the main thread

    def on_start(self) -> None:
        """Load the model and join the workers. What cannot be mended by a new start ends the process with one line."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, _leave_at_once)  # while the model loads nothing is ours yet
        sys.setswitchinterval(GIL_SWITCH_S)
        self._settings = get_settings()
        try:
            model = models.describe(self._settings)
            limit_s = self._settings.load_limit_s
            complaint = f"the model {model.name} was not loaded in {limit_s:g} s (EVERBATCH_LOAD_LIMIT_S)"
            with time_limit(limit_s, complaint):
                engine = _build(self._settings, model)
        except (SetupError, ModelError) as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(CANNOT_START) from None
        collect_rarely()
        assert self._settings.redis_url
        self._watch = ConsumerWatch(self._settings.redis_url, leave=self._leave)
        self._service = JobService(self._settings, model, engine, is_ready=lambda: self._watch.is_ready)
        self._finishers = ThreadPoolExecutor(FINISHERS, thread_name_prefix="finisher")
        self._others = ThreadPoolExecutor(OTHERS, thread_name_prefix="other")
        Intake.order = FairOrder(self._settings.tiers)
        Intake.open_tiers = self._service.open_tiers
        self._watch.start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop; at the second signal, or at SIGQUIT, without waiting for running jobs.

        Celery's own cold shutdown would cancel the messages one by one, which we take for the wish to cancel the jobs.
        """
        self._is_in_haste = state.should_stop is not None or number == signal.SIGQUIT
        state.should_stop = EX_OK

    def on_close(self) -> None:
        """Celery stops taking messages, and so do we. Those that are not claimed yet go back to the broker."""
        Intake.open_tiers = frozenset
        self._watch.close()
        self._service.stop_taking()
        logger.info("the worker takes no more jobs; those that run have %s s to end", self._settings.drain_s)

    def on_stop(self) -> None:
        """Let running jobs end for a while, their streams flowing; hand back the rest."""
        self._end_service(self._run_callbacks)
        self._finishers.shutdown()
        self._others.shutdown(wait=False, cancel_futures=True)
        self._run_callbacks()

    def _leave(self) -> NoReturn:
        """Stop without Celery, whose thread may hang. What it did not acknowledge comes again, as duplicates."""
        self.on_close()
        self._end_service(_nothing)
        end_process()

    def _end_service(self, between: Callable[[], object]) -> None:
        """Wait for running jobs, calling `between` again and again; hand back the rest. The first call does it."""
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
            deadline = time.monotonic() + self._settings.drain_s
            while self._service.is_busy and time.monotonic() < deadline and not self._is_in_haste:
                between()
                time.sleep(0.01)
            self._service.close()

    def on_terminate(self) -> None:
        self._is_in_haste = True
        self.on_stop()

    # ---- messages, on the hub's thread

    def register_with_event_loop(self, hub: Any) -> None:
        """Called at each connection to the broker. kombu's get_event_loop() knows no hub any more after the first."""
        self._hub = hub
        hub.call_repeatedly(TICK_S, _nothing)

    def on_apply(
        self,
        target: Callback,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        accept_callback: Callback | None = None,
        timeout_callback: Callback | None = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _Message | Future[None] | None:
        """Take a message from Celery. Never raises.

        kombu takes a KeyError from here for a lost connection, and gets the message again and again; Celery takes
        others for its own end. A message that cannot be understood fails alone.
        """
        message = _Message(
            pid=next(self._pids),
            trace=lambda: target(*args, **(kwargs or {})),
            accept=accept_callback or _nothing,
            finish=callback or _nothing,
            time_out=timeout_callback or _nothing,
            soft_limit_s=soft_timeout,
            hard_limit_s=timeout,
            cancel=self.terminate_job,
        )
        try:
            if args[0] != GENERATE:
                return self._others.submit(
                    apply_target, target, args, kwargs, self._on_hub(message.finish), self._on_hub(message.accept)
                )
            self._take(message, args[2])
        except Exception:
            logger.exception("a message was not understood and is dropped")
            self._soon(lambda: message.accept(message.pid, time.monotonic()))
            failure = ExceptionInfo()
            self._soon(lambda: message.finish((True, failure, 0.0)))
            return None
        return message

    def _take(self, message: _Message, request: Mapping[str, Any]) -> None:
        """Give the jobs that a message names to the service."""
        tier = tier_of(request["delivery_info"]["routing_key"])
        dispatch_numbers = {str(job_id): int(number) for job_id, number in request["kwargs"]["jobs"]}
        if not dispatch_numbers:
            raise ValueError("the message names no job")
        task = Task(
            tier,
            dispatch_numbers,
            on_claimed=lambda: self._soon(lambda: self._on_claimed(message)),
            on_done=lambda: self._on_done(message, task),
        )
        self._messages[message.pid] = (message, task)
        Intake.order.charge(tier, len(dispatch_numbers))
        self._service.take(task)

    def _on_claimed(self, message: _Message) -> None:
        """The jobs are ours in Postgres: only now is the message acknowledged."""
        message.accept(message.pid, time.monotonic())
        if message.is_over:
            return
        for limit_s, callback in (
            (message.soft_limit_s, self._on_soft_limit),
            (message.hard_limit_s, self._on_hard_limit),
        ):
            if limit_s is not None:
                message.timers.append(self._hub.call_later(limit_s, callback, message))

    def _on_soft_limit(self, message: _Message) -> None:
        message.time_out(True, message.soft_limit_s)
        self._fail(message, f"The soft time limit of {message.soft_limit_s} s passed")

    def _on_hard_limit(self, message: _Message) -> None:
        """Celery records this end itself; the trace that follows is of no interest."""
        message.time_out(False, message.hard_limit_s)
        self._fail(message, f"The time limit of {message.hard_limit_s} s passed")
        self._forget(message)

    def _fail(self, message: _Message, why: str) -> None:
        _, task = self._messages[message.pid]
        self._service.fail(task, code=TIME_LIMIT, message=why)

    def terminate_job(self, pid: int, signum: int | None = None) -> None:
        """Cancel the jobs of a message that was revoked with terminate=True; without, it never comes here."""
        if pid in self._messages:
            self._service.cancel(self._messages[pid][1])

    # ---- the end of a message

    def _on_done(self, message: _Message, task: Task) -> None:
        """All its jobs have ended: have Celery's trace run. From any thread."""
        self._finishers.submit(self._finish, message, task)

    def _finish(self, message: _Message, task: Task) -> None:
        """On a finisher's thread."""
        token = DONE_TASK.set(task)
        try:
            returned = message.trace()
        except Exception:
            logger.exception("Celery's trace failed")
            returned = (True, ExceptionInfo(), 0.0)
        finally:
            DONE_TASK.reset(token)
        self._soon(lambda: self._on_finished(message, returned))

    def _on_finished(self, message: _Message, returned: Any) -> None:
        if not message.is_over:
            self._forget(message)
            message.finish(returned)

    def _forget(self, message: _Message) -> None:
        message.is_over = True
        del self._messages[message.pid]
        for timer in message.timers:
            timer.cancel()

    # ---- Celery's callbacks change what the hub's thread iterates, without locks: they are called there alone

    def _soon(self, callback: Callable[[], object]) -> None:
        """Call on the hub's thread. From any thread."""
        self._callbacks.append(callback)
        if self._hub is not None:
            self._hub.call_soon(self._run_callbacks)

    def _on_hub(self, callback: Callback) -> Callback:
        """The callback, to be called from any thread and to run on the hub's."""
        return lambda *args: self._soon(lambda: callback(*args))

    def _run_callbacks(self) -> None:
        while self._callbacks:
            callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                logger.exception("a callback of Celery failed")

    # ---- remote control

    @property
    def num_processes(self) -> int:
        return self._service.slots

    def _get_info(self) -> dict[str, Any]:
        """What `celery inspect stats` shows of the pool."""
        return {**super()._get_info(), **self._service.facts(), "messages": len(self._messages)}

    def grow(self, n: int = 1) -> NoReturn:
        raise NotImplementedError("slots are the engine's: set EVERBATCH_MAX_NUM_SEQS and start the worker again")

    def shrink(self, n: int = 1) -> NoReturn:
        raise NotImplementedError("slots are the engine's: set EVERBATCH_MAX_NUM_SEQS and start the worker again")


def _build(settings: Settings, model: Model) -> Engine:
    return build(
        EngineConfig(
            model_dir=model.directory,
            dtype=settings.dtype,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            policy=settings.policy,
            floors={POLICIES[tier].rank: settings.tiers[tier].floor for tier in Tier},
            max_tenant_seqs={
                POLICIES[tier].rank: slots
                for tier in Tier
                if (slots := settings.tiers[tier].max_tenant_slots) is not None
            },
            prefill=Prefill(settings.prefill),
            preemption=Preemption(settings.preemption),
            step_budget_ms=settings.step_budget_ms,
            kv_swap_gib=settings.kv_swap_gib,
            kv_cache_gib=settings.kv_cache_gib,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            echo_step_ms=settings.echo_step_ms,
        )
    )


def _leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EX_OK)


def _nothing(*_: object) -> None:
    """For callbacks that nobody wants."""
