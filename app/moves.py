"""A job's states and the moves between them. Every change of a status goes through move().

    queued ──────▶ running ──────▶ succeeded | failed | cancelled | expired
       ▲  └────────────┼─────────▶ failed | cancelled | expired
       └───────────────┘ handed back, or the owner was lost

Rows are locked in the order of their ids, by a statement of its own before they are changed: a statement that waits
for a lock would otherwise number its event by an old snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Text, TextClause, any_, literal, select, text
from sqlalchemy.orm import Session

from app import notices, settlements
from app.events import Event
from app.tables import Job


class Status(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


DEADLINE_EXCEEDED = {"code": "deadline_exceeded", "message": "The job's deadline passed before it ended"}
"""The error of a job that expired."""
TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.FAILED, Status.CANCELLED, Status.EXPIRED}),
    Status.RUNNING: TERMINAL | {Status.QUEUED},
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Move:
    """A locked job that is to change its status, and the facts that change with it."""

    id: str
    owner: str | None = None
    """The worker that runs it from now on."""
    claimed_number: int | None = None
    """The dispatch number of the message by which it is claimed; None leaves it, as below."""
    deaths: int | None = None
    tokens_at_death: int | None = None
    finish_reason: str | None = None
    error: Mapping[str, Any] | None = None


def move(session: Session, moves: Sequence[Move], to: Status, *, reason: str | None = None) -> list[Event]:
    """Move locked jobs to a status, each with its next event; at a terminal one also with its settlement and
    its webhooks' deliveries.

    Returns the events in the order of the moves, to be announced after the commit. Raises AssertionError for a
    transition that the table does not allow.
    """
    if not moves:
        return []
    rows = session.execute(
        _MOVES[to],
        {
            "moves": json.dumps([asdict(each) for each in moves]),
            "to": to.value,
            "allowed_from": [status.value for status, allowed in TRANSITIONS.items() if to in allowed],
            "reason": reason,
        },
    )
    moved = {row.id: row for row in rows}
    assert len(moved) == len(moves), f"{[each.id for each in moves if each.id not in moved]} cannot become {to}"
    if to.is_terminal:
        settlements.settle(session, list(moved))
        notices.tell_of_jobs(session, [row.id for row in moved.values() if row.is_awaited])
    return [Event(each.id, moved[each.id].number, to.value, moved[each.id].facts) for each in moves]


def _move_statement(changes: str, facts: str, is_awaited: str = "false", *, beside: str = "") -> TextClause:
    """The statement of a move: what it changes beside the status, what its event says of the changed row, and whether
    somebody is to be told.

    beside are further changes, each ", name as (…)".

    clock is the time by the database's clock; log the job's events, summed up.
    """
    return text(
        f"""
        with asked as materialized (
            select * from json_to_recordset(cast(:moves as json)) as asked (
                id text, owner text, claimed_number bigint, deaths int, tokens_at_death int, finish_reason text,
                error jsonb
            )
        ), moved as (
            update jobs set status = :to, owner = asked.owner, {changes}
            from asked cross join lateral (
                select coalesce(max(number), 0) as last_number,
                    string_agg(text, ''::bytea order by number) filter (where choice = 0) as text,
                    coalesce(sum(cardinality(token_ids)), 0) as tokens
                from events where job_id = asked.id
            ) as log cross join clock_timestamp() as clock
            where jobs.id = asked.id and jobs.status = any(:allowed_from)
            returning jobs.id, log.last_number + 1 as number, {facts} as facts, {is_awaited} as is_awaited
        ), told as (
            insert into events (job_id, number, kind, data) select id, number, :to, facts from moved
        ){beside}
        select id, number, facts, is_awaited from moved
        """
    )


_END = _move_statement(
    """
    finished_at = clock, output_text = coalesce(log.text, ''::bytea), completion_tokens = log.tokens,
    finish_reason = asked.finish_reason, error = asked.error, deaths = coalesce(asked.deaths, jobs.deaths),
    tokens_at_death = coalesce(asked.tokens_at_death, jobs.tokens_at_death)
    """,
    f"""
    jsonb_build_object(
        'status', status, 'finish_reason', jobs.finish_reason, 'error', jobs.error, 'usage', jsonb_build_object(
            'prompt_tokens', {settlements.CHARGED_PROMPT}, 'completion_tokens', completion_tokens,
            'total_tokens', {settlements.CHARGED_PROMPT} + completion_tokens
        )
    )
    """,
    """
    (
        webhook_url is not null or batch_id is null and exists (
            select from webhook_endpoints where webhook_endpoints.tenant_id = jobs.tenant_id and enabled
        )
    )
    """,
    beside=""", noted as materialized (
        select job_id, parent_id from parents join moved on moved.id = parent_id
        order by job_id, parent_id
        for update of parents
    ), told_children as (
        update parents set look_at = clock_timestamp() from noted
        where parents.job_id = noted.job_id and parents.parent_id = noted.parent_id
    )""",
)
"""Children of what ends are to be looked at: see app.programs. The order is that in which a child's deletion takes the
same rows; whoever else changes them passes over what is locked."""
_MOVES: dict[Status, TextClause] = {
    Status.QUEUED: _move_statement(
        """
        handed_back = true, deaths = coalesce(asked.deaths, jobs.deaths),
        tokens_at_death = coalesce(asked.tokens_at_death, jobs.tokens_at_death)
        """,
        "jsonb_strip_nulls(jsonb_build_object('status', status, 'reason', cast(:reason as text)))",
    ),
    Status.RUNNING: _move_statement(
        """
        attempt = attempt + 1, claimed_number = asked.claimed_number, dispatch_number = null, dispatched_at = null,
        started_at = coalesce(started_at, clock)
        """,
        "jsonb_build_object('status', status, 'attempt', attempt)",
    ),
    **dict.fromkeys(TERMINAL, _END),
}


@dataclass(frozen=True, slots=True)
class Log:
    """A job's events, summed up."""

    output_text: str
    """The texts of the first choice, joined: the result is what was shown, by construction."""
    completion_tokens: int


_LOGS = text(
    """
    select id, coalesce(
            string_agg(text, ''::bytea order by number) filter (where :with_output and choice = 0), ''::bytea
        ) as output_text, coalesce(sum(cardinality(token_ids)), 0) as completion_tokens
    from unnest(cast(:ids as text[])) as asked (id) left join events on events.job_id = asked.id
    group by id
    """
)


def logs_of(session: Session, job_ids: Collection[str], *, with_output: bool = True) -> dict[str, Log]:
    """The log of each job; without its output's text, if that is not wanted."""
    if not job_ids:
        return {}
    rows = session.execute(_LOGS, {"ids": list(job_ids), "with_output": with_output})
    return {row.id: Log(bytes(row.output_text).decode(), int(row.completion_tokens)) for row in rows}


@dataclass(frozen=True, slots=True)
class Locked:
    """What moves look at of a job that they locked."""

    id: str
    tier: str
    status: str
    attempt: int
    owner: str | None
    claimed_number: int | None
    deaths: int
    tokens_at_death: int


_LOCKED = [getattr(Job, field.name) for field in fields(Locked)]


def lock_where(
    session: Session, *conditions: ColumnElement[bool], skip_locked: bool = False, limit: int | None = None
) -> list[Locked]:
    """Lock the jobs, up to limit, for which all conditions hold; with skip_locked without those that others hold."""
    rows = session.execute(
        select(*_LOCKED).where(*conditions).order_by(Job.id).limit(limit).with_for_update(skip_locked=skip_locked)
    )
    return [Locked(*row) for row in rows]


def is_among(job_ids: Collection[str]) -> ColumnElement[bool]:
    """One parameter, however many they are: the statement stays the same, and is prepared once."""
    return Job.id == any_(literal(list(job_ids), ARRAY(Text)))


def lock(session: Session, job_ids: Collection[str]) -> None:
    """Lock jobs ahead of several writes to them, so that the order of ids holds over all of these together."""
    session.execute(select(Job.id).where(is_among(job_ids)).order_by(Job.id).with_for_update())
