"""A job's choices: its outputs, each sampled by itself, as its events tell them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.logprobs import TokenLogprob, unpack
from app.tables import Job


@dataclass(frozen=True, slots=True)
class Choice:
    """One output of a job, so far."""

    index: int
    text: str = ""
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each of its tokens, also of those without text; None where nobody wants them."""


_READ = text(
    """
    select job_id, choice, string_agg(text, ''::bytea order by number) as text,
        max(data->>'finish_reason') as finish_reason,
        array_agg(logprobs order by number) filter (where logprobs is not null and :with_logprobs) as logprobs
    from events where job_id = any(:job_ids) and kind = 'tokens'
    group by job_id, choice
    """
)


def of(session: Session, jobs: Sequence[Job], *, with_logprobs: bool = True) -> dict[str, list[Choice]]:
    """The choices of each job by its id, in the order of their indices. The jobs' output_text must be loaded.

    Events are read of those jobs alone whose rows do not tell all: of several choices, or of logprobs that are wanted.
    """
    apart = [job.id for job in jobs if job.num_choices > 1 or (job.has_logprobs and with_logprobs)]
    told = _read(session, apart, with_logprobs=with_logprobs)
    return {job.id: [_choice(job, index, told, with_logprobs) for index in range(job.num_choices)] for job in jobs}


def of_one(session: Session, job: Job) -> list[Choice]:
    return of(session, [job])[job.id]


_Told = Mapping[tuple[str, int], Choice]


def _read(session: Session, job_ids: Collection[str], *, with_logprobs: bool) -> _Told:
    if not job_ids:
        return {}
    rows = session.execute(_READ, {"job_ids": list(job_ids), "with_logprobs": with_logprobs})
    return {
        (row.job_id, row.choice): Choice(
            index=row.choice,
            text=bytes(row.text or b"").decode(),
            finish_reason=row.finish_reason,
            logprobs=tuple(entry for packed in row.logprobs or () for entry in unpack(packed)),
        )
        for row in rows
    }


def _choice(job: Job, index: int, told: _Told, with_logprobs: bool) -> Choice:
    """What the row tells of the first choice, and the events of all."""
    is_first = index == 0
    choice = told.get((job.id, index), Choice(index, (job.output_text or "") if is_first else ""))
    return Choice(
        index=index,
        text=choice.text,
        finish_reason=(job.finish_reason if is_first else None) or choice.finish_reason,
        logprobs=(choice.logprobs or ()) if job.has_logprobs and with_logprobs else None,
    )
