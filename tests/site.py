"""A service without its API, for tests that run real workers."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import select
from sqlalchemy import text as sql
from sqlalchemy.orm import Session, undefer

from app import choices, events, jobs, models, tables, tenants, usage
from app.broker import Broker
from app.children import spawn
from app.commands import PROJECT, engine_command, io_command
from app.db import Database
from app.dispatch import dispatch
from app.jobs import Submission
from app.moves import TERMINAL
from app.settings import Settings, environment
from app.settlements import usage_of
from app.tenants import Provisioned
from app.tiers import Plan, Tier
from app.vault import Vault
from engine.echo import echo_token, write_model
from tests import submitting


def unfinished(session: Session) -> int:
    """Jobs that have not ended, and deliveries and settlements that are still on their way."""
    count: int = session.execute(
        sql(
            "select (select count(*) from jobs where status in ('queued', 'running'))"
            " + (select count(*) from deliveries where status in ('pending', 'sending'))"
            " + (select count(*) from settlements)"
        )
    ).scalar_one()
    return count


@dataclass(frozen=True)
class Log:
    """A job's events as they are stored."""

    numbers: list[int]
    kinds: list[str]
    text: str
    """Joined deltas."""
    token_ids: list[int]


class Site:
    """A service without its API: a database, a broker, a tenant, and worker processes for a test to start and stop."""

    def __init__(self, settings: Settings) -> None:
        assert settings.database_url and settings.redis_url
        self.settings = settings
        self.model = models.describe(settings)
        self.db = Database(settings.database_url, pool_size=16)
        self.redis = redis.Redis.from_url(settings.redis_url)
        self.broker = Broker(settings.redis_url)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.tenant_id = self.new_tenant("somebody").tenant_id

    def new_tenant(self, name: str, *, tokens_per_day: int | None = None) -> Provisioned:
        with self.db.transaction() as session:
            made = tenants.provision(session, Vault.open(self.settings), name=name, plan=Plan.PAID)
            tenants.set_limits(session, name, tokens_per_day=tokens_per_day)
        return made

    def submit(
        self,
        count: int = 1,
        *,
        tier: Tier = Tier.PAID,
        tenant_id: str | None = None,
        webhook_url: str | None = None,
        deadline_s: float = 600.0,
        num_choices: int = 1,
        **sampling: Any,
    ) -> list[str]:
        """Write jobs, each with a seed of its own, without dispatching them; their ids."""
        with self.db.transaction() as session:
            submitted = [
                submitting.submit(
                    session,
                    tenant_id or self.tenant_id,
                    Submission(
                        tier=tier,
                        model=self.model.name,
                        model_revision=self.model.revision,
                        prompt_ids=tuple(b"Once upon a time"),
                        sampling={"max_tokens": 20, "seed": secrets.randbits(40)} | sampling,
                        deadline_s=deadline_s,
                        metadata={},
                        num_choices=num_choices,
                        webhook_url=webhook_url,
                    ),
                    max_queued=1_000_000,
                )
                for _ in range(count)
            ]
        return [job.id for job, _ in submitted]

    def dispatch(self) -> int:
        return dispatch(self.db, self.broker, self.model.name)

    def run(self, count: int = 1, **submission: Any) -> list[str]:
        """Submit jobs and dispatch them; their ids."""
        job_ids = self.submit(count, **submission)
        self.dispatch()
        return job_ids

    def cancel(self, job_id: str, tenant_id: str | None = None) -> None:
        with self.db.transaction() as session:
            _, moved = jobs.cancel(session, tenant_id or self.tenant_id, job_id)
        events.announce(self.redis, moved)

    def job(self, job_id: str) -> tables.Job:
        with self.db.transaction() as session:
            found = select(tables.Job).where(tables.Job.id == job_id).options(undefer(tables.Job.output_text))
            return session.scalars(found).one()

    def statuses(self, job_ids: Collection[str]) -> Counter[str]:
        with self.db.transaction() as session:
            return Counter(session.scalars(select(tables.Job.status).where(tables.Job.id.in_(job_ids))))

    def errors(self, job_ids: Collection[str]) -> list[dict[str, Any]]:
        with self.db.transaction() as session:
            failed = select(tables.Job.error).where(tables.Job.id.in_(job_ids), tables.Job.status == "failed")
            return [error for error in session.scalars(failed) if error is not None]

    def log(self, job_id: str, choice: int | None = None) -> Log:
        """The job's events, or those alone that tell the tokens of one choice."""
        with self.db.transaction() as session:
            rows = session.scalars(
                select(tables.Event).where(tables.Event.job_id == job_id).order_by(tables.Event.number)
            ).all()
        if choice is not None:
            rows = [row for row in rows if row.kind == "tokens" and row.choice == choice]
        return Log(
            numbers=[row.number for row in rows],
            kinds=[row.kind for row in rows],
            text="".join(row.text or "" for row in rows),
            token_ids=[token_id for row in rows for token_id in row.token_ids or ()],
        )

    def texts(self, job_ids: Collection[str]) -> dict[str, str]:
        """What has been shown of each job so far."""
        # Joined by the server: tests that look often should not keep the workers from the processor.
        query = sql(
            "select job_id, string_agg(text, ''::bytea order by number) as shown from events"
            " where kind = 'tokens' and job_id = any(:job_ids) group by job_id"
        )
        with self.db.transaction() as session:
            shown = {row.job_id: row.shown.decode() for row in session.execute(query, {"job_ids": list(job_ids)})}
        return {job_id: shown.get(job_id, "") for job_id in job_ids}

    def expected(self, job_id: str, choice: int = 0) -> list[int]:
        """The tokens that the echo model makes of a job's choice when nothing disturbs it."""
        with self.db.transaction() as session:
            row = session.execute(
                select(tables.Job.prompt_tokens, tables.Job.sampling).where(tables.Job.id == job_id)
            ).one()
        start = row.prompt_tokens
        places = range(start, start + row.sampling["max_tokens"])
        return [echo_token(row.sampling["seed"], place, choice=choice) for place in places]

    def check_succeeded(self, job_id: str) -> None:
        """Once, whole, with its events numbered 1..n and their texts equal to the result."""
        job, log = self.job(job_id), self.log(job_id)
        with self.db.transaction() as session:
            result = choices.of_one(session, job)
        assert (job.status, job.finish_reason, job.error) == ("succeeded", "length", None)
        assert log.numbers == list(range(1, len(log.numbers) + 1))
        assert log.kinds[0] == "queued" and log.kinds[-1] == "succeeded" and log.kinds.count("succeeded") == 1
        for choice in result:
            own = self.log(job_id, choice.index)
            assert own.token_ids == self.expected(job_id, choice.index)
            assert own.text == choice.text == bytes(own.token_ids).decode()
            assert choice.finish_reason == "length"
        assert len(result) == job.num_choices
        assert job.completion_tokens == len(log.token_ids)

    def wait_until_settled(self) -> None:
        """Until nothing is on its way any more: no job, no settlement, no delivery."""

        def nothing_is_left() -> bool:
            with self.db.transaction() as session:
                return unfinished(session) == 0

        self.wait_for(nothing_is_left)

    def check_bill(self, tenant_id: str, job_ids: Collection[str]) -> int:
        """Each of a tenant's jobs was charged once, and what it says; the tokens of all."""
        tokens = sum(usage_of(self.job(job_id))["total_tokens"] for job_id in job_ids)
        with self.db.transaction() as session:
            days = usage.usage(session, tenant_id, date(2000, 1, 1), date(2999, 12, 31))
        assert sum(day.jobs for day in days) == len(job_ids)
        assert sum(day.total_tokens for day in days) == tokens
        return tokens

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.tails()
            time.sleep(0.05)

    def wait_until(self, job_ids: Collection[str], status: str, *, timeout_s: float = 30.0) -> None:
        """Until all jobs have this status; fails at once when one ended otherwise."""

        def have_it() -> bool:
            statuses = self.statuses(job_ids)
            otherwise = TERMINAL - {status}
            assert not statuses.keys() & otherwise, f"{statuses}\n{self.errors(job_ids)}\n{self.tails()}"
            return statuses[status] == len(job_ids)

        self.wait_for(have_it, timeout_s=timeout_s)

    def start_worker(self, number: int = 1, **settings: Any) -> subprocess.Popen[bytes]:
        """An engine worker, once it is alive in the database."""
        process = self.spawn_worker(number, **settings)
        self.wait_for(lambda: process.poll() is not None or self.worker_of(process) is not None)
        assert process.poll() is None, self.tails()
        return process

    def spawn_worker(self, number: int = 1, **settings: Any) -> subprocess.Popen[bytes]:
        """An engine worker, without waiting for it."""
        return self.spawn(engine_command(number), f"engine{number}", **settings)

    def start_io(self, **settings: Any) -> subprocess.Popen[bytes]:
        return self.spawn(io_command(), "io", **settings)

    def spawn(self, command: list[str], name: str, **settings: Any) -> subprocess.Popen[bytes]:
        variables = environment(self.settings.model_copy(update=settings))
        process = spawn(command, environment=variables, cwd=PROJECT, log=self.settings.home / f"{name}.log")
        self._processes.append(process)
        return process

    def worker_of(self, process: subprocess.Popen[bytes]) -> tables.Worker | None:
        """The living incarnation of a worker process."""
        with self.db.transaction() as session:
            return session.scalar(
                select(tables.Worker).where(tables.Worker.pid == process.pid, tables.Worker.dead.is_(False))
            )

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """Ask it to stop; its exit code."""
        process.terminate()
        return process.wait(30)

    def tails(self) -> str:
        """The ends of all logs, to say why a test failed."""
        return "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in self.settings.home.glob("*.log"))

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
        self.broker.close()
        self.redis.close()
        self.db.close()


def echo_site(home: Path, database_url: str, redis_url: str, **settings: Any) -> Site:
    """A site with short leases and a fast echo engine of 16 slots."""
    write_model(home / "models" / "echo")
    usual = {
        "model": "echo",
        "max_num_seqs": 16,
        "echo_step_ms": 2.0,
        "lease_s": 1.5,
        "heartbeat_s": 0.2,
        "sweep_interval_s": 0.2,
        "drain_s": 1.0,
    }
    return Site(Settings(home=home, database_url=database_url, redis_url=redis_url, **usual | settings))


@pytest.fixture(scope="module")
def site(database: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For one test module: an echo site on an empty broker and database."""
    site = echo_site(tmp_path_factory.mktemp("site"), database, redis_url)
    site.redis.flushall()
    yield site
    site.close()
