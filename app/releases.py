"""Children are released: when their parents have ended, they get their prompts and take their places in line.

If a parent did not succeed, or is gone, the child fails. A child is looked at when one of its parents ends, and besides
now and then, ever more rarely: one that was submitted while its parent ended may have been missed. Any process may do
all this, several at once: the child's row is locked before anything comes of it, and awaits_parents says whether
somebody else came first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import func, select, text, update
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from app import limits, settlements, tables
from app.errors import PromptTooLong, QuotaExceeded, Refusal
from app.events import TOKENS, Event
from app.models import Model
from app.moves import Move, Status, is_among, lock_where, move
from app.outlines import Outline, prompt_ids
from app.programs import another_model, forget
from app.prompts import Prompts
from app.tables import Job

Seen = tuple[str, str, datetime]
"""A child, one of its parents, and for when the look at them was noted."""

_DUE = text(
    """
    select job_id, parent_id, look_at from parents join jobs on jobs.id = job_id
    where look_at <= statement_timestamp() and model = :model
    order by look_at limit :limit
    """
)

_STAND = text(
    """
    select child.id, child.status = 'queued' and child.awaits_parents as is_child,
        coalesce(bool_or(parent.status in ('queued', 'running')), false) as has_open_parents,
        jsonb_object_agg(parent_id, coalesce(parent.status, 'deleted')) as statuses
    from parents join jobs as child on child.id = job_id left join jobs as parent on parent.id = parent_id
    where job_id = any(:job_ids)
    group by child.id order by child.id
    """
)
"""One statement: all parents of a child as they stood at one moment."""

_LOOK_LATER = text(
    """
    with unchanged as materialized (
        select parents.job_id, parents.parent_id, clock_timestamp() - created_at as age
        from unnest(cast(:job_ids as text[]), cast(:parent_ids as text[]), cast(:moments as timestamptz[]))
            as seen (job_id, parent_id, moment)
        join parents on parents.job_id = seen.job_id and parents.parent_id = seen.parent_id and look_at = moment
        join jobs on jobs.id = seen.job_id
        for update of parents skip locked
    )
    update parents set look_at = clock_timestamp() + greatest(least(age, interval '1 minute'), interval '1 second')
    from unchanged where parents.job_id = unchanged.job_id and parents.parent_id = unchanged.parent_id
    """
)
"""Where look_at is another one by now, or locked, a parent ends or has ended. A child is looked at after as long again
as it is old: who ended its parent while it was submitted may have missed it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at children found."""

    seen: Sequence[Seen]
    waiting: frozenset[str]
    """Children of which a parent has not ended."""
    ready: Sequence[str]
    """Children whose parents have all succeeded."""
    lost: Mapping[str, Mapping[str, str]]
    """Children of which a parent did not succeed, or is gone, each with its error."""
    over: Sequence[str]
    """Jobs that wait no more: cancelled or expired."""


def look(session: Session, model: str, *, limit: int) -> Look:
    """Look at up to limit children and parents that are to be looked at."""
    seen = [tuple(row) for row in session.execute(_DUE, {"model": model, "limit": limit})]
    rows = session.execute(_STAND, {"job_ids": list({job_id for job_id, _, _ in seen})}).all() if seen else []
    children = [row for row in rows if row.is_child]
    lost = {row.id: error for row in children if (error := _parent_failed(row.statuses)) is not None}
    open_ = {row.id for row in children if row.has_open_parents}
    return Look(
        seen=seen,
        waiting=frozenset(open_ - lost.keys()),
        ready=[row.id for row in children if row.id not in open_ | lost.keys()],
        lost=lost,
        over=[row.id for row in rows if not row.is_child],
    )


_BECAME = {"failed": "failed", "cancelled": "was cancelled", "expired": "expired", "deleted": "was deleted"}


def _parent_failed(statuses: Mapping[str, str]) -> dict[str, str] | None:
    """The error of a child whose parents stand so; None while all of them succeeded or may yet."""
    for parent_id, status in sorted(statuses.items()):
        if status in _BECAME:
            message = f"Its parent '{parent_id}' {_BECAME[status]}"
            return {"code": "parent_failed", "message": message, "parent": parent_id}
    return None


def look_later(session: Session, seen: Sequence[Seen]) -> None:
    """Note that these were looked at, but for those of which a parent has ended since."""
    if seen:
        job_ids, parent_ids, moments = zip(*seen, strict=True)
        session.execute(
            _LOOK_LATER, {"job_ids": list(job_ids), "parent_ids": list(parent_ids), "moments": list(moments)}
        )


@dataclass(frozen=True, slots=True)
class Continued:
    """The job that a child continues."""

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    """Of its first choice."""
    text: str
    """Of its first choice."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A child whose parents have ended, with what it needs of them."""

    job_id: str
    outline: Outline
    most_prompt_tokens: int
    min_tokens: int
    max_tokens: int
    """As the submission had it: what was asked for, or the default."""
    texts: Mapping[str, str]
    """Of the jobs that it quotes."""
    continued: Continued | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A child with its prompt."""

    job_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    more_tokens: int
    """By how many the prompt has more than was reserved for it; at most 0, but where a text takes more tokens than it
    was generated with."""


def read(session: Session, job_id: str, model: Model, *, max_text_bytes: int) -> Ready | None:
    """A child with what it needs of its parents; None where it waits no more, or a parent was deleted just now.

    Raises PromptTooLong when all that it quotes has more bytes than that, and InvalidRequest when it continues a job
    of another model.
    """
    row = session.execute(
        select(tables.Outline.outline, tables.Outline.most_prompt_tokens, Job.sampling)
        .join(Job, Job.id == tables.Outline.job_id)
        .where(tables.Outline.job_id == job_id)
    ).first()
    if row is None:
        return None
    outline = Outline(**row.outline)
    try:
        texts = _texts(session, outline.quoted, max_bytes=max_text_bytes)
        continued = None if outline.continues is None else _continued(session, outline.continues, model)
    except NoResultFound:
        return None
    return Ready(
        job_id=job_id,
        outline=outline,
        most_prompt_tokens=row.most_prompt_tokens,
        min_tokens=row.sampling.get("min_tokens", 0),
        max_tokens=row.sampling["max_tokens"],
        texts=texts,
        continued=continued,
    )


def _texts(session: Session, quoted: Sequence[str], *, max_bytes: int) -> dict[str, str]:
    """The outputs of jobs, by id. Raises PromptTooLong, and NoResultFound for one that is gone."""
    size = func.coalesce(func.octet_length(Job.output_text), 0)
    sizes = {row.id: row.size for row in session.execute(select(Job.id, size.label("size")).where(is_among(quoted)))}
    if sum(sizes.get(job_id, 0) for job_id in quoted) > max_bytes:
        raise PromptTooLong(f"The texts that it quotes have more than {max_bytes} bytes together")
    texts = {row.id: row.output_text or "" for row in session.execute(_OUTPUTS.where(is_among(quoted)))}
    if texts.keys() != set(quoted):
        raise NoResultFound
    return texts


_OUTPUTS = select(Job.id, Job.output_text)


def _continued(session: Session, job_id: str, model: Model) -> Continued:
    """Raises NoResultFound where it is gone."""
    asked = select(Job.model, Job.model_revision, Job.prompt_ids, Job.output_text).where(Job.id == job_id)
    row = session.execute(asked).one()
    if (row.model, row.model_revision) != (model.name, model.revision):
        raise another_model()
    event = tables.Event
    pieces = session.scalars(
        select(event.token_ids)
        .where(event.job_id == job_id, event.kind == TOKENS, event.choice == 0)
        .order_by(event.number)
    )
    return Continued(
        prompt_ids=tuple(row.prompt_ids),
        generated_ids=tuple(token_id for piece in pieces for token_id in piece or ()),
        text=row.output_text or "",
    )


def render(ready: Ready, model: Model, prompts: Prompts) -> Rendered:
    """The child's prompt. Raises PromptTooLong where it does not fit, InvalidRequest where it cannot be rendered."""
    before: tuple[int, ...] = ()
    if (job := ready.continued) is not None:
        before = (*job.prompt_ids, *prompts.of_output(job.generated_ids, job.text))
    ids = prompt_ids(ready.outline, ready.texts, before, prompts)
    room, needed = model.context_length - len(ids), ready.outline.max_tokens or max(1, ready.min_tokens)
    if room < needed:
        raise PromptTooLong(
            f"The prompt has {len(ids)} tokens with its parents' texts, and {needed} are to follow;"
            f" the model's context is {model.context_length}"
        )
    return Rendered(
        job_id=ready.job_id,
        prompt_ids=ids,
        max_tokens=min(ready.max_tokens, room),
        more_tokens=len(ids) - ready.most_prompt_tokens,
    )


_RELEASE = text(
    """
    update jobs set awaits_parents = false, prompt_ids = rendered.prompt_ids,
        prompt_tokens = cardinality(rendered.prompt_ids),
        sampling = sampling || jsonb_build_object('max_tokens', rendered.max_tokens)
    from json_to_recordset(cast(:rendered as json)) as rendered (job_id text, prompt_ids int[], max_tokens int)
    where jobs.id = rendered.job_id
    """
)


def release(session: Session, rendered: Sequence[Rendered]) -> list[Event]:
    """Put children in line, those that still wait. Returns the events of those that fail: their quota is used up."""
    if not rendered:
        return []
    waiting = _lock(session, [each.job_id for each in rendered])
    released = [each for each in rendered if each.job_id in waiting]
    errors: dict[str, Mapping[str, str]] = {}
    for each in released:
        if each.more_tokens > 0 and (refusal := _reserve_more(session, each)) is not None:
            errors[each.job_id] = error_of(refusal)
    released = [each for each in released if each.job_id not in errors]
    session.execute(_RELEASE, {"rendered": json.dumps([asdict(each) for each in released])})
    forget(session, [each.job_id for each in released])
    return fail(session, errors)


def _reserve_more(session: Session, child: Rendered) -> QuotaExceeded | None:
    """Reserve what the prompt has more than was foreseen, if its tenant has a quota."""
    job = session.execute(
        select(Job.tenant_id, Job.created_at, Job.reserved_tokens).where(Job.id == child.job_id)
    ).one()
    if not job.reserved_tokens:
        return None
    try:
        limits.reserve(session, job.tenant_id, settlements.day_of(job.created_at), child.more_tokens)
    except QuotaExceeded as refusal:
        return refusal
    more = Job.reserved_tokens + child.more_tokens
    session.execute(update(Job).where(Job.id == child.job_id).values(reserved_tokens=more))
    return None


def fail(session: Session, errors: Mapping[str, Mapping[str, str]]) -> list[Event]:
    """End children that still wait, each with its error."""
    waiting = _lock(session, errors)
    moved = move(session, [Move(job_id, error=errors[job_id]) for job_id in sorted(waiting)], Status.FAILED)
    forget(session, waiting)
    return moved


def error_of(refusal: Refusal) -> dict[str, str]:
    """The error of a job that fails for what it asks."""
    error = {"code": refusal.code, "message": refusal.message}
    return error if refusal.param is None else {**error, "param": refusal.param}


def _lock(session: Session, job_ids: Collection[str]) -> set[str]:
    """Lock children that still wait: those among the ids that nobody else holds. The others stay to be looked at."""
    if not job_ids:
        return set()
    locked = lock_where(
        session, is_among(job_ids), Job.status == "queued", Job.awaits_parents.is_(True), skip_locked=True
    )
    return {job.id for job in locked}
