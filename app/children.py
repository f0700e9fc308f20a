"""Child processes that never outlive their parent."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import SetupError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Account:
    """A user that a child runs as, in subprocess's terms; None leaves things as they are."""

    user: int | None = None
    group: int | None = None
    extra_groups: tuple[int, ...] | None = None


OURS = Account()
"""The account that we run under ourselves."""


def spawn(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    log: Path,
    death_signal: signal.Signals = signal.SIGTERM,
    account: Account = OURS,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, so that Ctrl-C reaches only the parent, which ends it in good order.

    It gets death_signal when the parent dies, however that happens. Output is appended to log,
    that on stdout only where none is given.
    The kernel ties that signal to the *thread* that forks, so only the main thread may call this.
    """
    assert threading.current_thread() is threading.main_thread(), "a child would die with the thread that started it"
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(part) for part in command],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output if stdout is None else stdout,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid(), death_signal),
            user=account.user,
            group=account.group,
            extra_groups=account.extra_groups,
        )


def end(process: subprocess.Popen[bytes], *, by: signal.Signals, timeout_s: float) -> None:
    """Ask a child to end, and kill it when it has not after timeout_s. A child that has ended already is fine."""
    if process.poll() is None:
        process.send_signal(by)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Look until the condition holds; False when it did not within timeout_s."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def wait_until_empty(directory: Path, timeout_s: float = 15.0) -> None:
    """Wait for the processes of an earlier life that still work in a directory.

    After `kill -9` of a server its children write on for a moment; after `kill -9` of the parent the servers shut down
    by themselves. A second server on the same data would destroy it. Raises SetupError when they do not go.
    """
    if not wait_until(lambda: not _processes_in(directory), timeout_s):
        pids = ", ".join(map(str, _processes_in(directory)))
        raise SetupError(f"Processes of an earlier start still work in {directory}: end {pids} and start again")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on.

    Taken from below the kernel's ephemeral range (32768 and up): a client that knocks on a closed port of that range
    may be given the very same port as its own, connect to itself, and keep the server from coming back.
    """
    for port in random.sample(range(15_000, 32_000), 200):
        if is_free(port, host):
            return port
    raise SetupError(f"No free port was found on {host}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def last_line(log: Path) -> str:
    """The last line of a log that says something, or the empty string."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _die_with(parent: int, death_signal: signal.Signals) -> Callable[[], None]:
    def ask_for_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it died between fork and prctl: the signal will never come
            os._exit(1)

    return ask_for_signal


def _processes_in(directory: Path) -> list[int]:
    """Running processes whose working directory this is; a zombie that nobody reaped has none."""
    place = directory.resolve()
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _cwd(entry) == place]


def _cwd(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:  # it ended, is a zombie, or belongs to somebody else
        return None
