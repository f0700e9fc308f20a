"""What a tenant may ask for: requests in a minute, and tokens in a day.

The day's tokens are kept in Postgres: a job reserves the most that it may use as it is submitted, and its settlement
puts what it did use in the place of that. Requests of a minute are counted in Redis; while that is away, each process
counts for itself.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import date

from limits import RateLimitItemPerMinute
from limits.errors import StorageError
from limits.storage import MemoryStorage, storage_from_string
from limits.strategies import RateLimiter, SlidingWindowCounterRateLimiter
from sqlalchemy import text
from sqlalchemy.orm import Session

from app.errors import QuotaExceeded

logger = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 0.5
_NAMESPACE = "everbatch:rates"

_RESERVE = text(
    """
    with quota as (
        select tokens_per_day from tenants where id = :tenant_id and tokens_per_day is not null
    ), reserved as (
        insert into quota_days (tenant_id, day, reserved, used)
        select :tenant_id, :day, :tokens, 0 from quota where :tokens <= tokens_per_day
        on conflict (tenant_id, day) do update set reserved = quota_days.reserved + excluded.reserved
        where quota_days.used + quota_days.reserved + excluded.reserved <= (select tokens_per_day from quota)
        returning 1
    )
    select (select tokens_per_day from quota) as tokens_per_day, exists (select from reserved) as is_reserved
    """
)
"""The row's lock makes submissions of one tenant take turns, from here to their commits: reserved + used is exact."""

_ROOM = text(
    """
    select tokens_per_day, tokens_per_day - coalesce(used + reserved, 0) as left_today
    from tenants left join quota_days on quota_days.tenant_id = tenants.id and day = :day
    where tenants.id = :tenant_id and tokens_per_day is not null
    """
)


@dataclass(frozen=True, slots=True)
class Room:
    """What a tenant with a quota may still reserve."""

    tokens_per_day: int
    left_today: int


def reserve(session: Session, tenant_id: str, day: date, tokens: int) -> bool:
    """Reserve tokens of the tenant's quota for that day; False where it has none, and nothing is to be reserved.

    Raises QuotaExceeded when they do not fit.
    """
    row = session.execute(_RESERVE, {"tenant_id": tenant_id, "day": day, "tokens": tokens}).one()
    if row.tokens_per_day is None:
        return False
    if not row.is_reserved:
        raise QuotaExceeded(
            f"The job may use {tokens} tokens, and of the {row.tokens_per_day} of today not so many are left",
            retry_after_s=_seconds_to_midnight(),
        )
    return True


def room(session: Session, tenant_id: str, day: date) -> Room | None:
    """What is left of the tenant's quota for that day, at a look; None where it has none."""
    row = session.execute(_ROOM, {"tenant_id": tenant_id, "day": day}).first()
    return None if row is None else Room(int(row.tokens_per_day), int(row.left_today))


def _seconds_to_midnight() -> int:
    """Until the next day begins, in UTC."""
    return 86_400 - int(time.time()) % 86_400


@dataclass(frozen=True, slots=True)
class Rate:
    """Where a tenant stands in this minute, its present request included."""

    limit: int
    remaining: int
    reset_s: int
    """When the window has moved on, in whole seconds."""
    is_exceeded: bool


class Rates:
    """Requests per minute, by tenant. From any thread."""

    def __init__(self, redis_url: str) -> None:
        storage = storage_from_string(
            redis_url,
            wrap_exceptions=True,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
        )
        self._shared = SlidingWindowCounterRateLimiter(storage)
        self._own = SlidingWindowCounterRateLimiter(MemoryStorage())

    def hit(self, tenant_id: str, per_minute: int) -> Rate:
        """Count a request of the tenant; one beyond the limit is not counted."""
        try:
            return _hit(self._shared, tenant_id, per_minute)
        except StorageError as error:
            logger.warning("requests are counted by each process for itself: %s", error)
            return _hit(self._own, tenant_id, per_minute)


def _hit(limiter: RateLimiter, tenant_id: str, per_minute: int) -> Rate:
    item = RateLimitItemPerMinute(per_minute, namespace=_NAMESPACE)
    is_exceeded = not limiter.hit(item, tenant_id)
    stats = limiter.get_window_stats(item, tenant_id)
    reset_s = max(1, round(stats.reset_time - time.time()))
    return Rate(per_minute, max(0, stats.remaining), reset_s, is_exceeded)
