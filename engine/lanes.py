"""Computes steps in lanes: processes of their own, over one KV cache. A GPU has one, a CPU one for each core.

The sequences of a step have nothing to do with each other, so the lanes of a CPU compute theirs with a single thread
and meet only at the step's end; threads inside each operation would meet a thousand times a step, at 70 μs each (2
cores of a Xeon with AMX, OpenMP passive). They are processes, not threads: a step of a small model is 1600 short
operations a lane, and between them threads wait for each other's turn at the interpreter, and for everybody else's:
521 tokens/s there instead of 586. And the process that serves jobs needs no torch, which takes seconds to import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.request import TokenLogprob
from engine.step import Sampled, StepPlan

MIN_LANE_TOKENS = 4
"""A further lane is used from so many tokens on for each: with fewer, reading the weights is all that a lane does."""
_CLOSE_TIMEOUT_S = 10.0
"""How long close() waits for the step that is being computed."""


class LaneError(RuntimeError):
    """A lane failed, or its process ended."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the lanes have loaded, in the words of step.Runner."""

    num_lanes: int
    """So many of the lanes that were asked for are there."""
    block_size: int
    num_blocks: int
    num_host_blocks: int
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]


class Lanes:
    """A step.Runner over a ModelRunner in each of several processes."""

    def __init__(self, config: EngineConfig, *, count: int) -> None:
        """Start `count` lanes on a CPU, one on a GPU, and load the model. Raises ModelError if that fails."""
        pairs = [socket.socketpair() for _ in range(count)]
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self._process = _start([theirs for _, theirs in pairs])
        try:
            self._connections[0].send(config)
            model: Model = self._receive(0)
        except LaneError as error:
            self.close()
            raise ModelError(f"{config.model_dir} was not loaded: {error}") from error
        except BaseException:  # nobody waits for the model any more
            self._kill()
            self.close()
            raise
        while len(self._connections) > model.num_lanes:
            self._connections.pop().close()
        self.block_size = model.block_size
        self.num_blocks = model.num_blocks
        self.num_host_blocks = model.num_host_blocks
        self.context_length = model.context_length
        self.vocab_size = model.vocab_size
        self.eos_ids = model.eos_ids

    def execute(self, plan: StepPlan) -> Sampled:
        """Move blocks, compute the step, and sample behind each chunk that does.

        Raises LaneError; no step can be computed after that.
        """
        if plan.moves:
            # Done before anybody computes: what a lane reads may be what another moved.
            self._send(0, plan.moves)
            self._receive(0)
        shares = share(plan, len(self._connections))
        for lane, indices in enumerate(shares):
            self._send(lane, plan.take(indices))
        place_of = {chunk: place for place, chunk in enumerate(plan.sampling_chunks)}
        token_ids = [0] * len(place_of)
        logprobs, errors = dict[int, TokenLogprob](), dict[int, str]()
        for lane, indices in enumerate(shares):
            places = [place_of[index] for index in indices if index in place_of]
            part: Sampled = self._receive(lane)
            for place, token_id in zip(places, part.token_ids, strict=True):
                token_ids[place] = token_id
            logprobs |= {places[own]: logprob for own, logprob in part.logprobs.items()}
            errors |= {places[own]: error for own, error in part.errors.items()}
        return Sampled(token_ids, logprobs, errors)

    def close(self) -> None:
        """End the lanes, in the middle of a step after 10 s at most. May be called twice."""
        if self._connections[0].closed:
            return
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT_S)
        if self._process.returncode != 0:  # it waits for the others, unless it was killed itself
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, lane: int, work: object) -> None:
        try:
            self._connections[lane].send(work)
        except OSError as error:
            raise self._loss(lane) from error

    def _receive(self, lane: int) -> Any:
        """A lane's answer; what it raised is raised here."""
        try:
            answer = self._connections[lane].recv()
        except (EOFError, OSError) as error:
            raise self._loss(lane) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _loss(self, lane: int) -> LaneError:
        return LaneError(f"the process of lane {lane} has ended: the system may have killed it for its memory")


def _start(sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """The process of the first lane, which forks the others into its group. Its ends of the sockets are closed here."""
    descriptors = [theirs.fileno() for theirs in sockets]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.lane", str(os.getpid()), *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for theirs in sockets:
        theirs.close()
    return process


def num_cores() -> int:
    """Lanes for a CPU: OMP_NUM_THREADS, as torch has it, or the cores that this process may use."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        physical = psutil.cpu_count(logical=False) or 1
        return max(1, min(physical, len(os.sched_getaffinity(0))))


def share(plan: StepPlan, lanes: int) -> list[list[int]]:
    """Indices of the chunks that each lane computes, in the plan's order; as equal in cost as whole chunks allow.

    The dearest chunk first goes to the lane that has least. A token through the linear layers costs as much as
    attention over 20 positions (135 M parameters, bf16, one core of a Xeon with AMX: 140 μs and 7 μs).
    """
    costs = (21 * plan.counts + plan.starts).tolist()
    lanes = max(1, min(lanes, len(plan.token_ids) // MIN_LANE_TOKENS))
    loads = [0] * lanes
    shares: list[list[int]] = [[] for _ in range(lanes)]
    for index in np.argsort([-cost for cost in costs], kind="stable").tolist():
        lane = loads.index(min(loads))
        loads[lane] += costs[index]
        shares[lane].append(index)
    return [sorted(indices) for indices in shares if indices]
