"""Any history of jobs keeps the promises: random steps on the real database, beside a model of what is right."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_client
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text, update

from app import claims, dispatch, jobs, line, recovery, tables, usage
from app.broker import Broker, queue_name
from app.claims import Claim, Finished
from app.db import Database
from app.errors import Conflict, KeyReused, NotFound, QuotaExceeded
from app.events import TERMINAL, Event
from app.jobs import Idempotency, Submission
from app.line import SUSPECT_DEATHS
from app.moves import Status
from app.tiers import POLICIES, Tier
from engine.echo import echo_token
from tests import submitting

PROMPT_IDS = (104, 105)
SLOTS = 3
QUOTA = 40
"""Tokens per day of the first tenant; the others have none."""
MAX_DEATHS = 3
TENANTS = 3
FEW = 2
"""So many jobs of a history at most are cancelled, and expire, and are deleted: the others are to go on."""
SPECIAL = 256
"""A token without text."""


@dataclass
class Known:
    """A job as the model has it."""

    id: str
    tenant: int
    tier: Tier
    max_tokens: int
    seed: int
    has_webhook: bool
    reserved: int
    status: str = "queued"
    owner: str | None = None
    attempt: int = 0
    kinds: list[str] = field(default_factory=lambda: ["queued"])
    tokens: list[int] = field(default_factory=list)
    deaths: int = 0
    tokens_at_death: int = 0
    handed_back: bool = False
    dispatch_number: int | None = None
    claimed_number: int | None = None
    is_removed: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_in_line(self) -> bool:
        return self.status == "queued" and self.dispatch_number is None

    @property
    def text(self) -> bytes:
        return bytes(token for token in self.tokens if token != SPECIAL)

    @property
    def charge(self) -> int:
        """Tokens: the prompt once an engine had it, and what was persisted."""
        return len(PROMPT_IDS) * (self.attempt > 0) + len(self.tokens)

    def move(self, status: str) -> None:
        self.status = status
        self.kinds.append(status)
        if status != "running":
            self.owner = None
        if status != "queued":
            self.dispatch_number = None if status == "running" else self.dispatch_number

    def hand_back(self) -> None:
        self.handed_back = True
        self.move("queued")


@dataclass
class Run:
    """An attempt in the hands of a worker, which may not know that it is an old one."""

    worker: Any
    claim: Claim
    job: Known
    last_event: int
    made: int = 0
    """Tokens that it made."""

    @property
    def is_current(self) -> bool:
        job = self.job
        now = (job.status, job.owner, job.attempt, job.is_removed)
        return now == ("running", self.worker.id, self.claim.attempt, False)

    def next_tokens(self, count: int) -> list[int]:
        """Up to count more, as many as it may still make."""
        generated = len(self.claim.begun[0].token_ids) + self.made
        places = range(generated, min(generated + count, self.job.max_tokens))
        return [echo_token(self.job.seed, len(PROMPT_IDS) + place) for place in places]


Message = tuple[Tier, dict[str, int]]
"""The jobs that it names, with their dispatch numbers."""

_JOBS = text(
    """
    select id, status, owner, attempt, deaths, handed_back, dispatch_number, claimed_number, output_text,
        completion_tokens,
        (select array_agg(number order by number) from events where job_id = jobs.id) as numbers,
        (select array_agg(kind order by number) from events where job_id = jobs.id) as kinds,
        (select string_agg(text, ''::bytea order by number) from events where job_id = jobs.id) as shown,
        (select array_agg(token_id order by number, place)
            from events, unnest(token_ids) with ordinality as t (token_id, place) where job_id = jobs.id) as tokens,
        (select count(*) from deliveries where job_id = jobs.id) as deliveries
    from jobs where model = :model
    """
)

_DAYS = text("select reserved, used from quota_days where tenant_id = :tenant_id")


class History(RuleBasedStateMachine):
    """Clients, a dispatcher, workers that crash and zombies that go on, and a sweep, one step at a time."""

    def __init__(
        self,
        db: Database,
        redis: redis_client.Redis,
        broker: Broker,
        submission: Submission,
        new_tenant: Callable[[], Any],
        new_worker: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.db, self.redis, self.broker = db, redis, broker
        self.submission, self.make_worker = submission, new_worker
        self.model = f"model-{uuid4().hex}"
        self.tenants = [new_tenant().tenant_id for _ in range(TENANTS)]
        with db.transaction() as session:
            first = update(tables.Tenant).where(tables.Tenant.id == self.tenants[0])
            session.execute(first.values(tokens_per_day=QUOTA))
        self.seeds = itertools.count(1)
        self.jobs: dict[str, Known] = {}
        self.keys: dict[tuple[int, str], tuple[str, bytes]] = {}
        self.unfolded: list[Known] = []
        self.workers: dict[str, Any] = {}
        self.dead: set[str] = set()
        self.queues: dict[Tier, list[Message]] = {tier: [] for tier in Tier}
        self.read: list[Message] = []
        self.runs: list[Run] = []

    @initialize(
        tiers=st.lists(st.sampled_from(Tier), min_size=3, max_size=6),
        deaths=st.lists(st.integers(0, 2), max_size=MAX_DEATHS - 1),
    )
    def begin(self, tiers: list[Tier], deaths: list[int]) -> None:
        """Some jobs run, after workers have died under them: from nothing, few histories would get so far.

        deaths  for each, how many jobs had made progress
        """
        for place, tier in enumerate(tiers):
            self.submit(place % TENANTS, tier, 8, has_webhook=place % 2 == 0, key=None)
        for progressed in deaths:
            self.serve(by_new=True)
            for run in self.runs[:progressed]:
                self.show_of(run, 1)
            self.crash_all()
            self.requeue_orphans()
        self.serve(by_new=True)
        for tenant in range(TENANTS):
            self.submit(tenant, tiers[0], 4, has_webhook=True, key=None)

    # ---- clients

    @rule(
        tenant=st.integers(0, TENANTS - 1),
        tier=st.sampled_from(Tier),
        max_tokens=st.integers(1, 8),
        has_webhook=st.booleans(),
        key=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(self, tenant: int, tier: Tier, max_tokens: int, has_webhook: bool, key: str | None) -> None:
        seed = next(self.seeds)
        wanted = dataclasses.replace(
            self.submission,
            tier=tier,
            model=self.model,
            prompt_ids=PROMPT_IDS,
            sampling={**self.submission.sampling, "max_tokens": max_tokens, "seed": seed},
            webhook_url="https://example.com/" if has_webhook else None,
        )
        body = repr((tier, max_tokens, has_webhook)).encode()

        def send() -> tuple[str, bool]:
            idempotency = None if key is None else Idempotency(key, body)
            with self.db.transaction() as session:
                job, is_new = submitting.submit(
                    session, self.tenants[tenant], wanted, max_queued=1000, idempotency=idempotency
                )
                return job.id, is_new

        if key is not None and (tenant, key) in self.keys:
            job_id, first_body = self.keys[tenant, key]
            if first_body != body:
                with pytest.raises(KeyReused):
                    send()
            elif self.jobs[job_id].is_removed:
                with pytest.raises(Conflict):
                    send()
            else:
                assert send() == (job_id, False)
        elif tenant == 0 and sum(self.day()) + wanted.most_tokens > QUOTA:
            with pytest.raises(QuotaExceeded):
                send()
        else:
            job_id, is_new = send()
            assert is_new
            reserved = wanted.most_tokens if tenant == 0 else 0
            self.jobs[job_id] = Known(job_id, tenant, tier, max_tokens, seed, has_webhook, reserved)
            if key is not None:
                self.keys[tenant, key] = (job_id, body)

    @precondition(lambda self: sum(job.status == "cancelled" for job in self.present) < FEW)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(list(self.jobs.values())))

        def send() -> list[Event]:
            with self.db.transaction() as session:
                return jobs.cancel(session, self.tenants[job.tenant], job.id)[1]

        if job.is_removed:
            with pytest.raises(NotFound):
                send()
        elif job.status == "cancelled":
            assert send() == []
        elif job.has_ended:
            with pytest.raises(Conflict):
                send()
        else:
            assert [event.kind for event in send()] == ["cancelled"]
            self.end(job, "cancelled")

    @precondition(lambda self: self.present and len(self.jobs) - len(self.present) < FEW)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.present))
        with self.db.transaction() as session:
            moved = jobs.remove(session, self.tenants[job.tenant], job.id)
        assert [event.kind for event in moved] == ([] if job.has_ended else ["cancelled"])
        if not job.has_ended:
            self.end(job, "cancelled")
        job.is_removed = True

    # ---- dispatch and the broker

    @rule(by_new=st.booleans())
    def serve(self, by_new: bool) -> None:
        """Dispatch, and one worker takes all that is at the broker: a new one, or the last one that lives."""
        self.dispatch()
        alive = [worker for worker in self.workers.values() if worker.id not in self.dead]
        worker = self.new_worker() if by_new or not alive else alive[-1]
        for queue in self.queues.values():
            self.read += queue
            for message in queue:
                self.claim(worker, message)
            queue.clear()

    @rule()
    def dispatch(self) -> None:
        before = {job.id for job in self.present if job.is_in_line}
        room = {tier: self.room(tier) for tier in Tier}
        sent = dispatch.dispatch(self.db, self.broker, self.model)
        if before:
            self.unfolded.clear()
        messages = [message for tier in Tier for message in self.take_messages(tier)]
        numbers = {job_id: number for _, named in messages for job_id, number in named.items()}
        assert sent == len(numbers) == sum(len(named) for _, named in messages)
        assert numbers.keys() <= before
        for job_id, number in numbers.items():
            self.jobs[job_id].dispatch_number = number
        for tier, named in messages:
            assert {self.jobs[job_id].tier for job_id in named} == {tier}
            self.queues[tier].append((tier, named))
        self.check_order(before, numbers, room)

    def take_messages(self, tier: Tier) -> Iterator[Message]:
        while (raw := self.redis.rpop(queue_name(self.model, tier))) is not None:
            kwargs = json.loads(base64.b64decode(json.loads(raw)["body"]))[1]  # type: ignore[arg-type]
            yield tier, dict(kwargs["jobs"])

    def check_order(self, before: set[str], numbers: dict[str, int], room: dict[Tier, int]) -> None:
        """Suspects one at a time; what ran before, then of each tenant the oldest; no more than there is room."""
        if any(self.jobs[job_id].deaths >= SUSPECT_DEATHS for job_id in numbers):
            assert len(numbers) == 1
            return
        for tier in Tier:
            of_tier = [job for job_id in before if (job := self.jobs[job_id]).tier is tier]
            waited = [job for job in of_tier if job.deaths < SUSPECT_DEATHS]
            left = sorted((job for job in waited if job.id in numbers), key=lambda job: numbers[job.id])
            assert len(left) == min(len(waited), max(0, room[tier])), "all for which there is room, and no more"
            assert [not job.handed_back for job in left] == sorted(not job.handed_back for job in left)
            for tenant in (None, *range(TENANTS)):  # None: of what ran before, all tenants stand in one line
                lined_up = [
                    job.id for job in waited if job.handed_back == (tenant is None) and tenant in (None, job.tenant)
                ]
                chosen = [job.id for job in left if job.id in lined_up]
                assert chosen == sorted(lined_up)[: len(chosen)]

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data())
    def lose_a_message(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from([queue for queue in self.queues.values() if queue]))
        queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    # ---- workers

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data(), is_doubled=st.booleans())
    def read_a_message(self, data: st.DataObject, is_doubled: bool) -> None:
        queue = data.draw(st.sampled_from([queue for queue in self.queues.values() if queue]))
        message = queue[0] if is_doubled else queue.pop(0)
        self.read.append(message)
        self.claim(self.worker(data), message)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def read_it_again(self, data: st.DataObject) -> None:
        self.claim(self.worker(data), data.draw(st.sampled_from(self.read)))

    def worker(self, data: st.DataObject) -> Any:
        """One that is there, a dead one perhaps, or a new one."""
        known = data.draw(st.sampled_from([None, *self.workers]))
        return self.new_worker() if known is None else self.workers[known]

    def new_worker(self) -> Any:
        made = self.make_worker(self.model, SLOTS)
        self.workers[made.id] = made
        return made

    def claim(self, worker: Any, message: Message) -> None:
        _, named = message
        with self.db.transaction() as session:
            claimed = claims.claim(session, worker.id, named)
        waiting = {job_id for job_id in named if self.is_queued(job_id)}
        assert {claim.job_id for claim in claimed} == (set() if worker.id in self.dead else waiting)
        for claim in claimed:
            job = self.jobs[claim.job_id]
            job.attempt += 1
            job.owner = worker.id
            job.claimed_number = named[job.id]
            job.move("running")
            assert (claim.attempt, claim.last_event, claim.prompt_ids) == (job.attempt, len(job.kinds), PROMPT_IDS)
            assert (claim.begun[0].token_ids, claim.tenant_id) == (tuple(job.tokens), self.tenants[job.tenant])
            self.runs.append(Run(worker, claim, job, claim.last_event))

    def is_queued(self, job_id: str) -> bool:
        return self.jobs[job_id].status == "queued" and not self.jobs[job_id].is_removed

    @precondition(lambda self: self.runs)
    @rule(acts=st.lists(st.sampled_from(["show", "show", "show", "finish", "nothing"]), min_size=8, max_size=8))
    def work(self, acts: list[str]) -> None:
        """Workers, zombies too, go on with the attempts that they hold."""
        held = [run for run in self.runs if run.is_current][:5]
        held += [run for run in self.runs if not run.is_current][-3:]
        for run, act in zip(held, acts, strict=False):
            if act == "show":
                self.show_of(run, 1 + run.made % 2)
            elif act == "finish":
                self.finish_run(run, Status.SUCCEEDED, "text")

    def show_of(self, run: Run, count: int) -> None:
        tokens = run.next_tokens(count)
        if not tokens:
            return
        shown = run.worker.write(run.claim, bytes(tokens).decode(), run.last_event + 1)
        assert [event.number for event in shown] == ([run.last_event + 1] if run.is_current else [])
        run.made += len(tokens)
        if shown:
            run.last_event += 1
            run.job.kinds.append("tokens")
            run.job.tokens += tokens

    @precondition(lambda self: self.runs)
    @rule(
        data=st.data(),
        status=st.sampled_from([Status.SUCCEEDED, Status.SUCCEEDED, Status.FAILED, Status.EXPIRED]),
        last=st.sampled_from(["text", "nothing", "special"]),
    )
    def finish(self, data: st.DataObject, status: Status, last: str) -> None:
        self.finish_run(data.draw(st.sampled_from(self.runs)), status, last)

    def finish_run(self, run: Run, status: Status, last: str) -> None:
        tokens = {"text": run.next_tokens(2), "nothing": [], "special": [SPECIAL for _ in run.next_tokens(1)]}[last]
        if tokens:
            text = bytes(tokens).decode() if last == "text" else ""
            moved = run.worker.end(run.claim, text, run.last_event + 1, status, tokens)
        else:
            ended = Finished(run.job.id, run.claim.attempt, status, "stop")
            with self.db.transaction() as session:
                moved = claims.finish(session, run.worker.id, [ended])
        assert [event.kind for event in moved] == ([status.value] if run.is_current else [])
        if moved:
            run.job.kinds += ["tokens"] * bool(tokens)
            run.job.tokens += tokens
            self.end(run.job, status.value)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), is_taken_again=st.booleans())
    def hand_back(self, data: st.DataObject, is_taken_again: bool) -> None:
        run = data.draw(st.sampled_from(self.runs))
        with self.db.transaction() as session:
            moved = claims.hand_back(session, run.worker.id, [run.job.id])
        is_owner = run.job.owner == run.worker.id and not run.job.is_removed
        assert [event.kind for event in moved] == (["queued"] if is_owner else [])
        if is_owner:
            run.job.hand_back()
            if is_taken_again:  # by the same worker, which still holds the old attempt
                self.claim(run.worker, (run.job.tier, {run.job.id: run.job.claimed_number or 1}))

    @precondition(lambda self: self.workers.keys() - self.dead)
    @rule(data=st.data())
    def declare_dead(self, data: st.DataObject) -> None:
        worker = self.workers[data.draw(st.sampled_from([each for each in self.workers if each not in self.dead]))]
        worker.die()
        self.dead.add(worker.id)

    def crash_all(self) -> None:
        for worker_id in self.workers.keys() - self.dead:
            self.workers[worker_id].die()
            self.dead.add(worker_id)

    # ---- the sweep

    @rule()
    def requeue_orphans(self) -> None:
        orphans = [job for job in self.present if job.owner in self.dead]
        with self.db.transaction() as session:
            moved = recovery.requeue_orphans(session, max_deaths=MAX_DEATHS)
        self.blame(orphans)
        expected = {job.id: "failed" if job.deaths >= MAX_DEATHS else "queued" for job in orphans}
        assert {event.job_id: event.kind for event in moved} == expected
        for job in orphans:
            job.handed_back = True
            if expected[job.id] == "failed":
                self.end(job, "failed")
            else:
                job.move("queued")

    def blame(self, orphans: Sequence[Known]) -> None:
        """A death counts where the worker may have been computing the job, and it had shown nothing since the last."""
        progressed = {job.id for job in orphans if len(job.tokens) > job.tokens_at_death}
        for owner in {job.owner for job in orphans}:
            held = [job for job in orphans if job.owner == owner]
            held.sort(key=lambda job: (POLICIES[job.tier].rank, job.id not in progressed, job.claimed_number))
            for place, job in enumerate(held):
                if job.id in progressed:
                    job.deaths = 0
                elif place < SLOTS:
                    job.deaths += 1
        for job in orphans:
            job.tokens_at_death = len(job.tokens)

    @precondition(lambda self: self.unfinished and sum(job.status == "expired" for job in self.present) < FEW)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.unfinished))
        with self.db.transaction() as session:
            session.execute(update(tables.Job).where(tables.Job.id == job.id).values(deadline_at=tables.NOW))
        with self.db.transaction() as session:
            (event,) = recovery.expire(session)
        assert (event.job_id, event.kind) == (job.id, "expired")
        self.end(job, "expired")

    @rule(tier=st.sampled_from(Tier))
    def forget_lost_messages(self, tier: Tier) -> None:
        is_empty = not self.queues[tier]
        of_tier = [job for job in self.present if job.tier is tier]
        last_claimed = max((job.claimed_number or 0 for job in of_tier), default=0)
        lost = [
            job
            for job in of_tier
            if job.status == "queued"
            and job.dispatch_number is not None
            and (is_empty or job.dispatch_number < last_claimed)
        ]
        with self.db.transaction() as session:
            count = recovery.forget_lost_messages(session, self.model, tier, queue_is_empty=is_empty, grace_s=0)
        assert count == len(lost)
        for job in lost:
            job.dispatch_number = None

    @rule()
    def settle(self) -> None:
        dispatch.settle(self.db)
        self.unfolded.clear()

    # ---- what always holds

    @property
    def unfinished(self) -> list[Known]:
        return [job for job in self.present if not job.has_ended]

    @property
    def present(self) -> list[Known]:
        return [job for job in self.jobs.values() if not job.is_removed]

    def end(self, job: Known, status: str) -> None:
        job.move(status)
        self.unfolded.append(job)

    def room(self, tier: Tier) -> int:
        """Messages of a tier that dispatch may add: for free slots of live workers, and a little ahead."""
        free = sum(
            max(0, SLOTS - sum(job.owner == worker_id for job in self.present))
            for worker_id in self.workers.keys() - self.dead
        )
        out = sum(job.tier is tier and job.status == "queued" and not job.is_in_line for job in self.present)
        return free + POLICIES[tier].lookahead - out

    def day(self) -> tuple[int, int]:
        """What the first tenant has reserved and used, as it should be."""
        own = [job for job in self.jobs.values() if job.tenant == 0]
        reserved = sum(job.reserved for job in own if not job.has_ended or job in self.unfolded)
        return reserved, sum(job.charge for job in own if job.has_ended and job not in self.unfolded)

    @invariant()
    def jobs_are_as_they_should_be(self) -> None:
        with self.db.transaction() as session:
            rows = {row.id: row for row in session.execute(_JOBS, {"model": self.model})}
        assert rows.keys() == {job.id for job in self.present}
        for job in self.present:
            row = rows[job.id]
            assert (row.status, row.owner, row.attempt) == (job.status, job.owner, job.attempt)
            assert (row.deaths, row.handed_back, row.claimed_number) == (
                job.deaths,
                job.handed_back,
                job.claimed_number,
            )
            if job.status == "queued":
                assert row.dispatch_number == job.dispatch_number
            assert row.numbers == list(range(1, len(row.kinds) + 1))
            assert row.kinds == job.kinds
            assert [kind for kind in row.kinds if kind in TERMINAL] == [job.status] * job.has_ended
            assert (row.tokens or [], row.shown or b"") == (job.tokens, job.text)
            assert row.deliveries == (job.has_webhook and job.has_ended)
            if job.has_ended:
                assert (row.output_text, row.completion_tokens) == (job.text, len(job.tokens))

    @invariant()
    def tokens_shown_are_those_of_an_undisturbed_run(self) -> None:
        for job in self.jobs.values():
            shown = [token for token in job.tokens if token != SPECIAL]
            assert shown == [echo_token(job.seed, len(PROMPT_IDS) + place) for place in range(len(shown))]

    @invariant()
    def bills_are_what_was_persisted(self) -> None:
        today = datetime.now(UTC).date()
        with self.db.transaction() as session:
            for tenant, tenant_id in enumerate(self.tenants):
                ended = [job for job in self.jobs.values() if job.tenant == tenant and job.has_ended]
                billed = usage.usage(session, tenant_id, today, today)
                assert sum(day.jobs for day in billed) == len(ended)
                assert sum(day.total_tokens for day in billed) == sum(job.charge for job in ended)
            day = session.execute(_DAYS, {"tenant_id": self.tenants[0]}).first()
        assert (0, 0) if day is None else tuple(day) == self.day()
        assert sum(self.day()) <= QUOTA

    @invariant()
    def places_in_line_are_sane(self) -> None:
        lined_up = sorted((job for job in self.present if job.is_in_line), key=lambda job: job.id)
        if not lined_up:
            return
        with self.db.transaction() as session:
            job = lined_up[-1]
            ahead = line.ahead(session, session.get_one(tables.Job, job.id))
        of_tier = [other for other in lined_up[:-1] if other.tier is job.tier]
        back = sum(other.handed_back for other in of_tier)
        if job.handed_back:
            assert ahead == line.Ahead(handed_back=back)
            return
        fresh = Counter(other.tenant == job.tenant for other in of_tier if not other.handed_back)
        assert (ahead.handed_back, ahead.own) == (back, fresh[True])
        assert 0 <= ahead.others <= fresh[False]

    def teardown(self) -> None:
        """However it went, all jobs come to their ends once workers stay alive."""
        self.crash_all()
        rounds = 0
        while self.unfinished:
            rounds += 1
            assert rounds < 100, "some job never ends"
            self.requeue_orphans()
            for tier in Tier:
                self.queues[tier].clear()
                self.forget_lost_messages(tier)
            begun = len(self.runs)
            self.serve(by_new=True)
            for run in self.runs[begun:]:
                self.finish_run(run, Status.SUCCEEDED, "text")
        self.settle()
        for check in (self.jobs_are_as_they_should_be, self.bills_are_what_was_persisted):
            check()
        assert self.day()[0] == 0, "nothing stays reserved"


@pytest.mark.parametrize(
    ("examples", "steps"), [(8, 30), pytest.param(60, 50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_any_history_keeps_the_promises(
    db: Database,
    redis: redis_client.Redis,
    redis_url: str,
    submission: Submission,
    new_tenant: Callable[[], Any],
    new_worker: Callable[..., Any],
    examples: int,
    steps: int,
) -> None:
    broker = Broker(redis_url)
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: History(db, redis, broker, submission, new_tenant, new_worker),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
            ),
        )
    finally:
        broker.close()
