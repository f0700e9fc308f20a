"""Random faults under load, and what they broke: `python -m tests.fault.storm --seed 7 --minutes 10`.

A seed draws the same faults for the same durations against the same load; what falls between them is the machine's.
The last line of the output is one JSON object; its `broken` is empty, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from app.cli.demo.receiver import receiver
from tests.fault import promises
from tests.fault.load import Load
from tests.fault.service import Member, Service
from tests.site import unfinished

HEAL_S = 60.0
"""A promise: every single fault heals within so long, without hands."""
READY_S = 60.0

Fault = Callable[[Service, random.Random], AbstractContextManager[object]]
"""Hurts on entry, and stops hurting at the end of the block."""


def _any_member(service: Service, rng: random.Random) -> Member:
    return rng.choice(list(service.members.values()))


@contextmanager
def killed_worker(service: Service, rng: random.Random) -> Iterator[None]:
    rng.choice(service.engines).send(signal.SIGKILL)
    yield


@contextmanager
def both_workers_killed(service: Service, rng: random.Random) -> Iterator[None]:
    for engine in service.engines:
        engine.send(signal.SIGKILL)
    yield


@contextmanager
def stopped_worker(service: Service, rng: random.Random) -> Iterator[None]:
    """In good order: it finishes or hands back."""
    rng.choice(service.engines).send(signal.SIGTERM)
    yield


@contextmanager
def frozen_worker(service: Service, rng: random.Random) -> Iterator[None]:
    """A zombie, where the block takes longer than the lease."""
    engine = rng.choice(service.engines)
    engine.send(signal.SIGSTOP)
    yield
    engine.send(signal.SIGCONT)


@contextmanager
def killed_io(service: Service, rng: random.Random) -> Iterator[None]:
    service.members["io"].send(signal.SIGKILL)
    yield


@contextmanager
def frozen_io(service: Service, rng: random.Random) -> Iterator[None]:
    service.members["io"].send(signal.SIGSTOP)
    yield
    service.members["io"].send(signal.SIGCONT)


@contextmanager
def killed_api(service: Service, rng: random.Random) -> Iterator[None]:
    service.members["api"].send(signal.SIGKILL)
    yield


@contextmanager
def frozen_api(service: Service, rng: random.Random) -> Iterator[None]:
    service.members["api"].send(signal.SIGSTOP)
    yield
    service.members["api"].send(signal.SIGCONT)


@contextmanager
def killed_postgres(service: Service, rng: random.Random) -> Iterator[None]:
    service.kill_server("postgres")
    yield


@contextmanager
def killed_redis(service: Service, rng: random.Random) -> Iterator[None]:
    service.kill_server("valkey")
    yield


@contextmanager
def emptied_redis(service: Service, rng: random.Random) -> Iterator[None]:
    def is_emptied() -> bool:
        with suppress(redis.ConnectionError):  # killed by the other fault of the round: once it is back
            return bool(service.redis.flushall())
        return False

    _wait(service, is_emptied, HEAL_S)
    yield


@contextmanager
def partition(service: Service, rng: random.Random) -> Iterator[None]:
    """Between one process and one of its servers; half of the time the old connections are dead afterwards."""
    member = _any_member(service, rng)
    proxy = rng.choice([member.postgres, member.redis])
    proxy.swallow()
    yield
    proxy.heal(forget=rng.random() < 0.5)


@contextmanager
def isolated_worker(service: Service, rng: random.Random) -> Iterator[None]:
    """From both servers."""
    engine = rng.choice(service.engines)
    for proxy in (engine.postgres, engine.redis):
        proxy.swallow()
    yield
    for proxy in (engine.postgres, engine.redis):
        proxy.heal(forget=True)


@contextmanager
def cut_connections(service: Service, rng: random.Random) -> Iterator[None]:
    member = _any_member(service, rng)
    rng.choice([member.postgres, member.redis]).cut()
    yield


@contextmanager
def half_closed_connections(service: Service, rng: random.Random) -> Iterator[None]:
    member = _any_member(service, rng)
    rng.choice([member.postgres, member.redis]).half_close()
    yield


@contextmanager
def slow_network(service: Service, rng: random.Random) -> Iterator[None]:
    member = _any_member(service, rng)
    delay_s = rng.uniform(0.02, 0.2)
    for proxy in (member.postgres, member.redis):
        proxy.delay(delay_s)
    yield
    for proxy in (member.postgres, member.redis):
        proxy.heal()


FAULTS: tuple[Fault, ...] = (
    killed_worker,
    both_workers_killed,
    stopped_worker,
    frozen_worker,
    killed_io,
    frozen_io,
    killed_api,
    frozen_api,
    killed_postgres,
    killed_redis,
    emptied_redis,
    partition,
    isolated_worker,
    cut_connections,
    half_closed_connections,
    slow_network,
)


@dataclass
class Storm:
    """Faults for so many minutes, then peace until all has ended."""

    seed: int
    minutes: float
    say: Callable[[str], None] = lambda line: None
    faults: Counter[str] = field(default_factory=Counter)
    heals_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """The promises that were broken, a line each."""

    @contextmanager
    def blow(self, home: Path) -> Iterator[tuple[Session, Load]]:
        """The database as the storm left it and the clients that went through it, for as long as the block runs."""
        service = Service.start(home)
        try:
            with receiver() as inbox:
                _wait(service, service.is_ready, READY_S)
                load = Load(service, inbox, self.seed)
                load.start()
                try:
                    self._hurt(service, load)
                finally:
                    _stop(service, load)
                with service.database.transaction() as session:
                    session.execute(text("set local idle_in_transaction_session_timeout = 0"))  # to look takes a while
                    if not _wait(service, lambda: unfinished(session) == 0, HEAL_S):
                        self.broken.append(f"{unfinished(session)} jobs, deliveries or settlements never end")
                    self.broken += promises.broken(session, load)
                    yield session, load
                    session.rollback()
        finally:
            service.close()

    def summary(self, load: Load) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "jobs": len(load.orders),
            "followed": sum(order.events is not None for order in load.orders),
            "cancelled": sum(order.cancelled for order in load.orders),
            "webhooks": len(load.webhooks),
            "faults": dict(self.faults),
            "longest_heal_s": round(max(self.heals_s), 1),
            "broken": self.broken,
        }

    def _hurt(self, service: Service, load: Load) -> None:
        """Round after round, each healed before the next."""
        rng = random.Random(self.seed)
        ends_at = time.monotonic() + 60 * self.minutes
        chosen = "the start"
        while True:
            self.heals_s.append(_heal(service, load))
            self.say(f"{chosen}: healed in {self.heals_s[-1]:.1f} s")
            if self.heals_s[-1] > HEAL_S:
                self.broken.append(f"{chosen} took more than {HEAL_S:.0f} s to heal")
                return
            if time.monotonic() > ends_at:
                return
            chosen = _round(service, rng, self.faults)


def _stop(service: Service, load: Load) -> None:
    """Let the clients see their jobs end, for as long as a fault may take to heal."""
    stopping = threading.Thread(target=load.stop)
    stopping.start()
    _wait(service, lambda: not stopping.is_alive(), HEAL_S)
    load.give_up()
    stopping.join()


def _round(service: Service, rng: random.Random, faults: Counter[str]) -> str:
    """One fault, or two at once, for a while; their names."""
    chosen = rng.sample(FAULTS, rng.choice([1, 1, 2]))
    lasts_s = rng.uniform(0.5, 5.0)
    with ExitStack() as stack:
        for fault in chosen:
            faults[fault.__name__] += 1
            stack.enter_context(fault(service, rng))
        _wait(service, lambda: False, lasts_s)
    return " and ".join(fault.__name__ for fault in chosen)


def _heal(service: Service, load: Load) -> float:
    """Seconds until a job that is submitted now has run to its end; HEAL_S and more: it did not."""
    began = time.monotonic()
    has_run = load.probe()
    _wait(service, has_run.is_set, HEAL_S)
    return time.monotonic() - began


def _wait(service: Service, holds: Callable[[], bool], timeout_s: float) -> bool:
    """Keep the service alive until the condition holds; False when it did not within timeout_s."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up:
            return False
        service.tick()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="everbatch-storm-"))
    home.chmod(0o755)
    storm = Storm(asked.seed, asked.minutes, say=lambda line: print(line, flush=True))
    with storm.blow(home) as (_, load):
        told = storm.summary(load)
    if told["broken"]:
        print(f"the logs are in {home}")
    else:
        shutil.rmtree(home)
    print(json.dumps(told))
    return 1 if told["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
