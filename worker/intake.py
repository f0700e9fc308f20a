"""Which tier's queue may be read next: fair between tiers by weight, and only what the engine can take.

Celery's Redis transport asks this class before each BRPOP which queues to name. A queue that is left out stays at the
broker, where other workers can have it. Holding back by prefetch limits instead would leave a popped message in the
socket's buffer, and lose it when the process is killed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar

from kombu.utils.scheduling import round_robin_cycle

from app.broker import tier_of
from app.tiers import POLICIES, Tier, TierTable
from engine.request import Stats
from worker.consumer import Consumption
from worker.metrics import of_rank


class FairOrder:
    """Start-time fair queueing over tiers (Goyal et al. 1996): backlogged tiers get jobs in proportion to weight.

    With weights 8 : 4 : 1 and all tiers backlogged, 13 jobs are 8 paid, 4 free and 1 bulk. A tier that was idle does
    not save up its share: it starts at the virtual time of the one served last.
    """

    def __init__(self, tiers: TierTable) -> None:
        self._tiers = tiers
        self._virtual_time = 0.0
        self._finish: dict[Tier, float] = defaultdict(float)

    def sort(self, tiers: Iterable[Tier]) -> list[Tier]:
        """The tiers, the one to be served next first; of equals the one with the lower rank."""
        return sorted(tiers, key=lambda tier: (self._start(tier), POLICIES[tier].rank))

    def charge(self, tier: Tier, jobs: int) -> None:
        """Note that a message with so many jobs of the tier was taken."""
        start = self._start(tier)
        self._virtual_time = start
        self._finish[tier] = start + jobs / self._tiers[tier].weight

    def _start(self, tier: Tier) -> float:
        return max(self._finish[tier], self._virtual_time)


class Intake:
    """kombu's queue_order_strategy. The transport makes one per connection, so what lasts belongs to the class."""

    order: ClassVar[FairOrder] = FairOrder(TierTable())
    """Set by the pool."""
    open_tiers: ClassVar[Callable[[], Collection[Tier]]] = frozenset
    """The tiers that the engine has room for; set by the pool. Until then nothing is read."""

    def __init__(self, queues: Iterable[str] = ()) -> None:
        self._queues = list(queues)

    def update(self, queues: Iterable[str]) -> None:
        """The queues that are consumed from now on."""
        self._queues = list(queues)

    def consume(self, count: int) -> list[str]:
        """The queues that the next BRPOP names, in its order; none, and no BRPOP is sent."""
        Consumption.note_ask()
        by_tier = {tier_of(queue): queue for queue in self._queues}
        return [by_tier[tier] for tier in self.order.sort(by_tier.keys() & Intake.open_tiers())]

    def rotate(self, queue: str) -> str:
        """Called with the queue that a message came from. The pool charges the tier, once it knows the jobs in it."""
        return queue


class Turns(round_robin_cycle):
    """The order of the io worker: one queue after the other, as kombu has it by itself."""

    def consume(self, count: int) -> list[str]:
        Consumption.note_ask()
        queues: list[str] = super().consume(count)  # type: ignore[no-untyped-call]
        return queues


def tiers_with_room(stats: Stats, unsubmitted: Mapping[Tier, int], tiers: TierTable) -> set[Tier]:
    """The tiers of which an engine can take another message.

    Any tier while a slot is free. Beyond the slots a few paid and free jobs, each tier its own number, so that the
    engine knows whom to preempt for; and of any tier as many as its floor is of the slots: a tier of which the engine
    holds nothing is given nothing, and those that wait beyond the slots take every slot that becomes free.

    unsubmitted  jobs of messages that are not in the engine yet, by tier
    """
    if stats.running + stats.waiting + sum(unsubmitted.values()) < stats.slots:
        return set(Tier)
    open_tiers = set()
    for tier in Tier:
        waiting = of_rank(stats.waiting_by_rank, tier) + unsubmitted.get(tier, 0)
        held = of_rank(stats.running_by_rank, tier) + waiting
        if waiting < POLICIES[tier].overcommit or held < tiers[tier].floor * stats.slots:
            open_tiers.add(tier)
    return open_tiers
