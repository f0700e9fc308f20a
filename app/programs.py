"""Programs of generations: a job may wait for others, its parents, and be made of their outputs.

A child is a durable job in state queued that stands in no line and has an outline in the place of its prompt. When the
last parent has ended it is released: see app.releases. Whoever ends a job notes in the same transaction that its
children are to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app import tables
from app.bodies import Body
from app.errors import InvalidRequest, NotFound
from app.ids import is_id
from app.models import Model
from app.moves import Status, is_among
from app.outlines import Named, Outline
from app.tables import Job

MAX_PARENTS = 64
"""Of one job."""
MAX_DEPTH = 64
"""Jobs, one behind the other, for which a job may wait."""


class ProgramFields(Body):
    """As a job names its parents, beside the quotes in its prompt or messages."""

    after: Annotated[list[str], Field(max_length=MAX_PARENTS)] | None = None
    """Jobs that are to succeed before it starts."""
    continues: Annotated[str | None, Field(alias="continue")] = None
    """The job with whose prompt and output, its first choice, its own prompt begins."""


@dataclass(frozen=True, slots=True)
class Child:
    """What a submission has that names parents."""

    outline: Outline
    parent_ids: tuple[str, ...]
    most_prompt_tokens: int
    depth: int


@dataclass(frozen=True, slots=True)
class Parent:
    """A job that another one names, as it stands at the submission."""

    id: str
    model: str
    model_revision: str
    depth: int
    """Jobs, one behind the other, that are to end before its children may run; 0 once it has ended itself."""
    most_prompt_tokens: int
    most_generated: int
    """Tokens of its first choice."""


def parents_of(session: Session, tenant_id: str, named: Named) -> dict[str, Parent]:
    """The jobs that a request names, by id.

    Raises InvalidRequest for too many or too deep, and NotFound for what is no job of the tenant; both name the field.
    """
    fields: dict[str, str] = {}
    for field, job_id in named:
        fields.setdefault(job_id, field)
    if len(fields) > MAX_PARENTS:
        field = list(fields.values())[MAX_PARENTS]
        raise InvalidRequest(f"{field}: a job may have up to {MAX_PARENTS} parents", param=field)
    found = _find(session, tenant_id, [job_id for job_id in fields if is_id("job", job_id)])
    for job_id, field in fields.items():
        if job_id not in found:
            raise NotFound(f"{field}: there is no job '{job_id[:64]}'", param=field)
        if found[job_id].depth > MAX_DEPTH:
            raise InvalidRequest(f"{field}: {MAX_DEPTH} jobs wait one for the other; let some end first", param=field)
    return found


def _find(session: Session, tenant_id: str, job_ids: Collection[str]) -> dict[str, Parent]:
    rows = session.execute(
        select(
            *(Job.id, Job.model, Job.model_revision, Job.status, Job.depth, Job.num_choices, Job.completion_tokens),
            func.coalesce(Job.sampling["max_tokens"].as_integer(), 0).label("max_tokens"),
            func.coalesce(tables.Outline.most_prompt_tokens, Job.prompt_tokens).label("most_prompt_tokens"),
        )
        .outerjoin(tables.Outline, tables.Outline.job_id == Job.id)
        .where(is_among(job_ids), Job.tenant_id == tenant_id)
    ).all()
    ended = {row.id for row in rows if Status(row.status).is_terminal}
    return {
        row.id: Parent(
            id=row.id,
            model=row.model,
            model_revision=row.model_revision,
            depth=0 if row.id in ended else row.depth + 1,
            most_prompt_tokens=row.most_prompt_tokens,
            most_generated=row.completion_tokens if row.id in ended and row.num_choices == 1 else row.max_tokens,
        )
        for row in rows
    }


def child_of(outline: Outline, parents: Mapping[str, Parent], model: Model, *, num_own: int) -> Child:
    """What a submission has that names these parents, with so many tokens of its own.

    Raises InvalidRequest where it continues another model's job.
    """
    most = num_own + sum(parents[job_id].most_generated for job_id in outline.quoted)
    if outline.continues is not None:
        parent = parents[outline.continues]
        if (parent.model, parent.model_revision) != (model.name, model.revision):
            raise another_model()
        most += parent.most_prompt_tokens + parent.most_generated
    return Child(
        outline=outline,
        parent_ids=tuple(sorted(parents)),
        most_prompt_tokens=min(most, model.context_length - (outline.max_tokens or 1)),
        depth=max(parent.depth for parent in parents.values()),
    )


_WRITE = text(
    """
    with asked as materialized (
        select * from json_to_recordset(cast(:children as json)) as asked (
            id text, outline jsonb, most_prompt_tokens int, parent_ids json
        )
    ), outlined as (
        insert into outlines (job_id, outline, most_prompt_tokens) select id, outline, most_prompt_tokens from asked
    )
    insert into parents (job_id, parent_id)
    select id, parent_id from asked cross join json_array_elements_text(parent_ids) as named (parent_id)
    """
)


def write(session: Session, children: Mapping[str, Child]) -> None:
    """Write what the jobs that were just written, by id, wait for. They are to be looked at at once."""
    if children:
        rows = [{"id": job_id, **asdict(child)} for job_id, child in children.items()]
        session.execute(_WRITE, {"children": json.dumps(rows)})


def look_now(session: Session, parent_id: str) -> None:
    """Note that the children of a job are to be looked at."""
    session.execute(update(tables.Parent).where(tables.Parent.parent_id == parent_id).values(look_at=tables.NOW))


_FORGET = text(
    """
    with outlined as (delete from outlines where job_id = any(:job_ids))
    delete from parents where (job_id, parent_id) in (
        select job_id, parent_id from parents where job_id = any(:job_ids)
        for update skip locked
    )
    """
)


def forget(session: Session, job_ids: Collection[str]) -> None:
    """Drop what jobs waited for; a look finds what was passed over, because a parent ends at this moment."""
    if job_ids:
        session.execute(_FORGET, {"job_ids": list(job_ids)})


def another_model() -> InvalidRequest:
    """Why a job cannot be continued: its tokens mean nothing here."""
    return InvalidRequest("continue: that job was of another model", param="continue")
