from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from app.broker import queue_name
from app.tiers import Tier, TierTable
from engine.request import Stats
from worker.intake import FairOrder, Intake, tiers_with_room


def serve(order: FairOrder, tiers: list[Tier], messages: int, *, jobs: int = 1) -> Counter[Tier]:
    """Take messages from backlogged tiers, always from the one whose turn it is."""
    served: Counter[Tier] = Counter()
    for _ in range(messages):
        tier = order.sort(tiers)[0]
        order.charge(tier, jobs)
        served[tier] += 1
    return served


def test_backlogged_tiers_are_served_by_weight() -> None:
    assert serve(FairOrder(TierTable()), list(Tier), 13 * 20) == {Tier.PAID: 8 * 20, Tier.FREE: 4 * 20, Tier.BULK: 20}


def test_a_message_of_many_jobs_counts_as_many() -> None:
    order = FairOrder(TierTable())
    order.charge(Tier.BULK, 64)
    # 64 bulk jobs at weight 1 are worth 64 × 4 free jobs at weight 4.
    assert serve(order, [Tier.FREE, Tier.BULK], 64 * 4) == {Tier.FREE: 64 * 4}
    assert order.sort([Tier.FREE, Tier.BULK])[0] is Tier.FREE, "of equals the lower rank"


def test_an_idle_tier_saves_up_no_share() -> None:
    order = FairOrder(TierTable())
    serve(order, [Tier.BULK], 1000)
    assert serve(order, [Tier.FREE, Tier.BULK], 5 * 10) == pytest.approx({Tier.FREE: 40, Tier.BULK: 10}, abs=1)


def test_of_equals_the_paid_tier_goes_first() -> None:
    assert FairOrder(TierTable()).sort([Tier.BULK, Tier.FREE, Tier.PAID]) == [Tier.PAID, Tier.FREE, Tier.BULK]


QUEUES = [queue_name("m.1", tier) for tier in Tier]


@pytest.fixture
def intake(monkeypatch: pytest.MonkeyPatch) -> Intake:
    monkeypatch.setattr(Intake, "order", FairOrder(TierTable()))
    intake = Intake()
    intake.update(QUEUES)
    return intake


def test_nothing_is_read_before_the_engine_is_there(intake: Intake) -> None:
    assert intake.consume(3) == []


def test_only_tiers_that_the_engine_has_room_for_are_read(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "open_tiers", lambda: {Tier.PAID, Tier.BULK})
    assert intake.consume(3) == ["paid.m.1", "bulk.m.1"]
    Intake.order.charge(Tier.PAID, 1)
    assert intake.consume(3) == ["bulk.m.1", "paid.m.1"]


def test_a_new_connection_goes_on_in_the_same_order(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "open_tiers", lambda: set(Tier))
    Intake.order.charge(Tier.PAID, 1)
    assert Intake(QUEUES).consume(3) == intake.consume(3) == ["free.m.1", "bulk.m.1", "paid.m.1"]


def held(**tiers: tuple[int, int]) -> Stats:
    """An engine of 40 slots that holds (running, waiting) jobs of tiers."""
    running, waiting = zip(*(tiers.get(tier.value, (0, 0)) for tier in Tier), strict=True)
    counts = {field.name: 0 for field in fields(Stats)} | {"running": sum(running), "waiting": sum(waiting)}
    return Stats(**counts | {"slots": 40, "running_by_rank": running, "waiting_by_rank": waiting})


@pytest.mark.parametrize(
    ("stats", "unsubmitted", "has_room"),
    [
        (held(free=(39, 0)), {}, set(Tier)),
        (held(free=(39, 0)), {Tier.FREE: 1}, set(Tier)),
        (held(free=(39, 1), bulk=(1, 0)), {}, set(Tier)),  # 5 % of 40 slots are two
        (held(free=(38, 0), bulk=(2, 0)), {}, {Tier.PAID, Tier.FREE}),
        (held(free=(38, 3), bulk=(1, 0)), {Tier.BULK: 1}, {Tier.PAID, Tier.FREE}),
        (held(paid=(38, 8), bulk=(2, 0)), {}, {Tier.FREE}),
        (held(paid=(30, 8), free=(8, 4), bulk=(2, 0)), {}, set()),
    ],
)
def test_beyond_the_slots_a_tier_has_its_own_number_and_its_floor(
    stats: Stats, unsubmitted: dict[Tier, int], has_room: set[Tier]
) -> None:
    assert tiers_with_room(stats, unsubmitted, TierTable()) == has_room
