"""Grammars are tried in a process that may be killed: no request makes the service compute for as long as it likes.

    python -m app.trials DIRECTORY VOCAB_SIZE

answers lines on stdin, a grammar as a JSON string, with lines on stdout, null or why it cannot be used. It forks for
each one, so that a limit of the system on time and memory ends what llguidance's own limits do not: they bound most
steps of a compilation, but not, for instance, the intersection of many patterns. The process loads the tokenizer once
(1 s under load, all of it with the interpreter's lock, which would stop the other threads of a server).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from app.errors import Unavailable

CPU_S = 1
"""What a trial may compute, in seconds; schemas as people write them take some milliseconds."""
_WALL_S = 20.0
"""What a trial may take on a busy machine."""
_MEMORY_BYTES = 512 << 20
_START_S = 60.0
"""What the process may take to load the tokenizer."""
_QUEUE_S = 10.0
"""How long a request waits for others' trials."""
_TOKENS = 24
"""A trial also generates so many, drawn at random: what compiles may still have no text, or take long at each token."""
_TOKEN_MS = 5.0
"""What one in two of them may take: all rows of an engine's step wait for the slowest. JSON takes 0.05 ms."""
_MAX_VERDICTS = 4096
_MAX_PROBLEM = 300
"""Characters of what llguidance says that are passed on."""
_TOO_MUCH = f"it takes more than {CPU_S} s or {_MEMORY_BYTES >> 20} MiB to compile"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""All that the process sees of ours: it reads what strangers wrote."""


class Trials:
    """Asks such a process, one grammar at a time, and remembers its verdicts. It starts with the first question."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", "app.trials", str(directory), str(vocab_size)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def problem_of(self, grammar: str) -> str | None:
        """Why the engine cannot keep to this grammar, or None. Raises Unavailable while others are tried for long."""
        name = hashlib.sha256(grammar.encode()).digest()
        try:
            return self._verdicts[name]
        except KeyError:
            pass
        if not self._lock.acquire(timeout=_QUEUE_S):
            raise Unavailable("Too many schemas and grammars are being checked at the moment")
        try:
            if name not in self._verdicts:
                self._verdicts[name] = self._asked(grammar)
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            return self._verdicts[name]
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process. May be called twice."""
        with self._lock:
            self._end()

    def _asked(self, grammar: str) -> str | None:
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            verdict: str | None = _line(process, _WALL_S + 5)
        except (OSError, ValueError) as error:
            self._end()
            raise Unavailable("Schemas and grammars cannot be checked at the moment") from error
        return verdict

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server; the process ends with its stdin
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
            _line(self._process, _START_S)
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        with self._process:
            self._process.kill()
        self._process = None


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> Any:
    """What the process says next. Raises OSError and ValueError when that is nothing, or comes too late."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    if not ready:
        raise TimeoutError(f"a trial took more than {timeout_s} s")
    return json.loads(process.stdout.readline())


def main(directory: Path, vocab_size: int) -> None:
    os.nice(10)
    tokenizer, problem = None, ""
    try:
        tokenizer = LLTokenizer(str(directory / "tokenizer.json"), n_vocab=vocab_size)
    except ValueError as error:
        problem = f"the model's tokenizer cannot be used with grammars: {error}"[:_MAX_PROBLEM]
    _say("ready")
    for line in sys.stdin:
        _say(problem if tokenizer is None else _tried(tokenizer, json.loads(line)))


def _say(value: str | None) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _tried(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """What a process of its own says of the grammar within the limits."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        _limit()
        os.write(writer, json.dumps(problem_of(tokenizer, grammar)).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], _WALL_S)
    said = os.read(reader, 1 << 16) if ready else b""  # a verdict is written at once
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(said) if said else _TOO_MUCH


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


def problem_of(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Compile a grammar and generate a few tokens: what went wrong, or None."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    dice, taken_ms = random.Random(0), [0.0]
    for _ in range(_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        began = time.process_time()
        matcher.consume_token(_drawn(matcher.compute_bitmask(), dice))
        taken_ms.append(1000 * (time.process_time() - began))
    if matcher.is_error():
        return _told(matcher.get_error())
    return f"each of its tokens takes more than {_TOKEN_MS:g} ms" if statistics.median(taken_ms) > _TOKEN_MS else None


def _drawn(mask: bytes, dice: random.Random) -> int:
    """One of the tokens that may come: the first behind a random one; 0 where none may."""
    bits = int.from_bytes(mask, "little")
    behind = bits & (-1 << dice.randrange(8 * len(mask)))
    chosen = behind or bits
    return max((chosen & -chosen).bit_length() - 1, 0)


def _told(error: str) -> str:
    """What llguidance says, without the grammar that it quotes."""
    if "NoExtension" in error:
        return "no text fits it"
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")[:_MAX_PROBLEM]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
