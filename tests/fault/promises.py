"""What must hold after any faults: reads the database, what followers saw, and what the receiver of webhooks got."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date

from sqlalchemy import select
from sqlalchemy.orm import Session, undefer

from app import choices, tables, usage
from app.choices import Choice
from app.events import shown
from app.moves import TERMINAL
from app.settlements import usage_of
from app.tables import Job
from engine.echo import echo_token
from tests.fault.load import Load, Order

_ALL_DAYS = (date(2000, 1, 1), date(2999, 12, 31))
_ENDED = frozenset(status.value for status in TERMINAL)


def broken(session: Session, load: Load) -> list[str]:
    """The promises that were broken to the load's accounts, a line each, once all jobs have ended."""
    accounts = [account.tenant_id for account in load.service.accounts]
    found = session.scalars(
        select(Job).where(Job.tenant_id.in_(accounts)).options(undefer(Job.output_text), undefer(Job.sampling))
    )
    jobs = {job.id: job for job in found}
    rows: dict[str, list[tables.Event]] = defaultdict(list)
    for row in session.scalars(select(tables.Event).order_by(tables.Event.job_id, tables.Event.number)):
        rows[row.job_id].append(row)
    told = choices.of(session, list(jobs.values()))
    return [
        *load.complaints,
        *_lost_or_invented(load, jobs),
        *(line for order in load.orders if order.job_id in jobs for line in _job(order, jobs[order.job_id])),
        *(line for job in jobs.values() for line in _log(job, rows[job.id])),
        *(line for job in jobs.values() for choice in told[job.id] for line in _choice(job, choice, rows[job.id])),
        *(line for order in load.orders for line in _followed(order, rows[order.job_id])),
        *_bills(session, load, jobs),
        *_webhooks(session, load, jobs),
    ]


def _lost_or_invented(load: Load, jobs: dict[str, Job]) -> Iterator[str]:
    accepted = Counter(order.job_id for order in load.orders)
    yield from (f"{job_id} was accepted and is lost" for job_id in accepted if job_id not in jobs)
    yield from (f"{job_id} is in the database, and no client was told" for job_id in jobs if job_id not in accepted)
    yield from (f"{job_id} was given to {count} clients" for job_id, count in accepted.items() if count > 1)


def _job(order: Order, job: Job) -> Iterator[str]:
    """No innocent job failed; what was answered holds."""
    if job.status not in ("succeeded", "cancelled"):
        yield f"{job.id} is {job.status}: {job.error}"
    if order.cancelled and job.status != "cancelled":
        yield f"{job.id} was cancelled and is {job.status}"
    if job.status == "cancelled" and not order.cancelled:
        yield f"{job.id} is cancelled, and nobody asked for it"
    if job.status == "succeeded" and job.completion_tokens != order.num_choices * order.max_tokens:
        yield f"{job.id} has {job.completion_tokens} tokens of {order.num_choices} × {order.max_tokens}"


def _log(job: Job, rows: list[tables.Event]) -> Iterator[str]:
    """Numbered 1..n, one terminal event and that the last, and as many tokens as it says."""
    if [row.number for row in rows] != list(range(1, len(rows) + 1)):
        yield f"{job.id} has events {[row.number for row in rows]}"
    kinds = [row.kind for row in rows]
    if [kind for kind in kinds if kind in _ENDED] != [job.status] or kinds[-1] != job.status:
        yield f"{job.id} is {job.status} and its events are {kinds}"
    attempts = [row.data["attempt"] for row in rows if row.kind == "running" and row.data]
    if attempts != list(range(1, job.attempt + 1)):
        yield f"{job.id} has attempt {job.attempt} and began attempts {attempts}"
    num_tokens = sum(len(row.token_ids or ()) for row in rows)
    if num_tokens != job.completion_tokens:
        yield f"{job.id} has {num_tokens} tokens and says {job.completion_tokens}"


def _choice(job: Job, choice: Choice, rows: list[tables.Event]) -> Iterator[str]:
    """Deltas that join to the result, tokens that are right, each with its logprob where these are wanted."""
    own = [row for row in rows if row.kind == "tokens" and row.choice == choice.index]
    tokens = [token_id for row in own for token_id in row.token_ids or ()]
    text = "".join(row.text or "" for row in own)
    if (text, text) != (choice.text, bytes(tokens).decode()) or (choice.index == 0 and text != job.output_text):
        yield f"{job.id}: the deltas of choice {choice.index} joined are not its result"
    places = range(job.prompt_tokens, job.prompt_tokens + len(tokens))
    if tokens != [echo_token(job.sampling["seed"], place, choice=choice.index) for place in places]:
        yield f"{job.id} has tokens of choice {choice.index} that no undisturbed run would have"
    finish_reasons = [row.data["finish_reason"] for row in own if row.data]
    if finish_reasons != ["length"] * (len(tokens) == job.sampling["max_tokens"]):
        yield f"{job.id}: choice {choice.index} has {len(tokens)} tokens and ended by {finish_reasons}"
    if choice.logprobs is not None and [ord(each.token) for each in choice.logprobs] != tokens:
        yield f"{job.id}: choice {choice.index} has {len(choice.logprobs)} logprobs for {len(tokens)} tokens"


def _followed(order: Order, rows: list[tables.Event]) -> Iterator[str]:
    """A follower got every event once, in order, with the very text that is stored."""
    if order.events is None:
        return
    seen = [(event.number, event.kind, event.data) for event in order.events]
    if seen != [(row.number, row.kind, shown(row).data) for row in rows]:
        yield f"the follower of {order.job_id} got {seen}"


def _bills(session: Session, load: Load, jobs: dict[str, Job]) -> Iterator[str]:
    """What tenants are charged is the sum of what their jobs say."""
    for account in load.service.accounts:
        days = usage.usage(session, account.tenant_id, *_ALL_DAYS)
        billed = (sum(day.jobs for day in days), sum(day.total_tokens for day in days))
        own = [job for job in jobs.values() if job.tenant_id == account.tenant_id]
        if billed != (len(own), sum(usage_of(job)["total_tokens"] for job in own)):
            yield f"{account.tenant_id} is charged {billed}, and its jobs say otherwise"


def _webhooks(session: Session, load: Load, jobs: dict[str, Job]) -> Iterator[str]:
    """One delivery for each end that wants one; at least one POST of it, signed; none of anything else."""
    wanted = {order.job_id: order for order in load.orders if order.has_webhook}
    accounts = [account.tenant_id for account in load.service.accounts]
    own = select(tables.Delivery).where(tables.Delivery.tenant_id.in_(accounts))
    deliveries = {row.id: row for row in session.scalars(own)}
    counts = Counter(row.job_id for row in deliveries.values())
    yield from (f"{job_id} has {counts[job_id]} deliveries" for job_id in wanted if counts[job_id] != 1)
    yield from (f"{job_id} has a delivery that nobody wanted" for job_id in counts if job_id not in wanted)
    yield from (f"delivery {row.id} is {row.status}" for row in deliveries.values() if row.status != "delivered")
    posted = set()
    for delivery_id, event in load.webhooks:
        delivery = deliveries.get(delivery_id)
        if delivery is None:
            yield f"a webhook came with id {delivery_id}, which is none of ours"
            continue
        posted.add(delivery.id)
        job = jobs.get(delivery.job_id)
        if event is None or event["data"]["id"] != delivery.job_id:
            yield f"the webhook of {delivery.job_id} cannot be verified"
        elif job is None:
            yield f"{delivery.job_id} has a webhook and is lost"
        elif event["type"] != f"job.{job.status}":
            yield f"the webhook of {job.id} says {event['type']}, and it is {job.status}"
        elif event["data"]["usage"] != usage_of(job):
            yield f"the webhook of {delivery.job_id} says {event['data']['usage']}"
    yield from (f"the webhook of {row.job_id} never came" for row in deliveries.values() if row.id not in posted)
