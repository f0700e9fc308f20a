"""Runs a process of the service with one function of its code spoiled:

    python -m tests.fault.crashing MARK kill-before app.broker:Broker.send_jobs 1 -- -m celery -A worker.celery_app:io …

The code of the service itself knows nothing of this. Once it has happened there is a file MARK, and where that is,
nothing happens: a child that a process forks anew is well.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spoiled:
    """A function, and what happens at its call."""

    action: str
    """kill-before, kill-after: the process kills itself with -9; hang: the call never ends; skip: this call and all
    later ones do nothing."""
    target: str
    """module:function or module:Class.method, optionally with ?kind: only calls with an event of that kind count."""
    count: int = 1
    """At which call."""

    def command(self, command: list[str], mark: Path) -> list[str]:
        """The command of a process, so that it runs with this."""
        python, *rest = command
        return [python, "-m", "tests.fault.crashing", str(mark), self.action, self.target, str(self.count), "--", *rest]


def spoil(spoiled: Spoiled, mark: Path) -> None:
    """Wrap the function, for this process and those that it forks."""
    place, _, kind = spoiled.target.partition("?")
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    plain: Callable[..., Any] = getattr(owner, name)
    lock = threading.Lock()
    calls = 0

    def is_the_one(arguments: tuple[object, ...]) -> bool:
        nonlocal calls
        if kind and not any(getattr(event, "kind", None) == kind for event in _elements(arguments)):
            return False
        with lock:
            calls += 1
            return calls == spoiled.count and not mark.exists()

    @functools.wraps(plain)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal plain
        if not is_the_one(arguments):
            return plain(*arguments, **named)
        if spoiled.action == "kill-after":
            plain(*arguments, **named)
        mark.touch()
        if spoiled.action.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if spoiled.action == "hang":
            threading.Event().wait()
        plain = _do_nothing
        return None

    setattr(owner, name, wrapped)


def _elements(arguments: Iterable[object]) -> Iterable[object]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument


def _do_nothing(*_: object, **__: object) -> None:
    """Instead of a function that was skipped."""


def main() -> None:
    own, _, rest = sys.argv[1:], sys.argv.index("--"), sys.argv[sys.argv.index("--") + 1 :]
    mark, action, target, count = own[:4]
    spoil(Spoiled(action, target, int(count)), Path(mark))
    assert rest[0] == "-m"
    sys.argv = rest[1:]
    runpy.run_module(rest[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
