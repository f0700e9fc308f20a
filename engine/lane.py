"""A lane: a process that computes its part of each step, over weights and a cache that it shares with the others.

    python -m engine.lane PARENT FD …

Started by engine.lanes, in the process PARENT, with a socket for each lane. The first loads the model and, on a CPU,
forks the others. What comes in is an EngineConfig, then StepPlans and Moves; each is answered once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from engine.errors import ModelError
from engine.lanes import LaneError, Model
from engine.runner import ModelRunner, choose_device
from engine.step import Moves, Sampled, StepPlan

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def main(parent: int, connections: Sequence[Connection]) -> None:
    # The end comes with the socket's: Ctrl-C and SIGTERM are for the process that started us, which may still drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    _die_with(parent)  # a load that hangs hears nothing else
    if choose_device().type == "cuda":
        connections = _keep(connections[:1], of=connections)
    try:
        runner = ModelRunner(connections[0].recv(), is_shared=len(connections) > 1)
    except ModelError as error:
        connections[0].send(error)
        return
    _prctl(_PR_SET_PDEATHSIG, 0)  # it comes when a mere thread of it ends; from here on the socket's end is the end
    own, children = _fork(connections)
    if own is connections[0]:
        own.send(_describe(runner, num_lanes=len(connections)))
    _serve(own, runner)
    for pid in children:
        os.waitpid(pid, 0)


def _describe(runner: ModelRunner, *, num_lanes: int) -> Model:
    return Model(
        num_lanes=num_lanes,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_host_blocks=runner.num_host_blocks,
        context_length=runner.context_length,
        vocab_size=runner.vocab_size,
        eos_ids=runner.eos_ids,
    )


def _fork(connections: Sequence[Connection]) -> tuple[Connection, list[int]]:
    """A process for each further lane. Returns, in each, its own connection, the only one left open, and its children.

    A process with a single thread can be forked: no lock is held by somebody who is not in the copy.
    """
    parent, children = os.getpid(), list[int]()
    own = connections[0]
    for connection in connections[1:]:
        if not (pid := os.fork()):
            _die_with(parent)
            own, children = connection, []
            break
        children.append(pid)
    _keep([own], of=connections)
    return own, children


def _die_with(parent: int) -> None:
    """Be killed when the thread of the parent ends that made this process."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before: the signal will never come
        os._exit(1)


def _keep(kept: Sequence[Connection], *, of: Sequence[Connection]) -> Sequence[Connection]:
    """Close the others."""
    for connection in of:
        if connection not in kept:
            connection.close()
    return kept


def _serve(own: Connection, runner: ModelRunner) -> None:
    """Answer until the other end is closed, or gone with its process."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            own.send(_answer(runner, own.recv()))


def _answer(runner: ModelRunner, work: StepPlan | Moves) -> Sampled | LaneError | None:
    try:
        if isinstance(work, StepPlan):
            return runner.execute(work)
        runner.move(work)
    except Exception as error:
        traceback.print_exc()
        return LaneError(f"{type(error).__name__}: {error}")
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), [Connection(int(descriptor)) for descriptor in sys.argv[2:]])
