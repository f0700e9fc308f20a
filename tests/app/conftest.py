"""What the tests of the domain and of the API share: the echo model, tenants, and a worker played by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis as redis_client
from sqlalchemy import update

from app import claims, events, models, moves, tenants
from app.children import wait_until
from app.claims import Claim, Finished
from app.db import Database
from app.events import Delta, Event
from app.ids import new_id
from app.jobs import Submission
from app.models import Model
from app.moves import Status
from app.settings import Settings
from app.tables import NOW, Job, Worker
from app.tiers import Plan, Tier
from app.vault import Vault
from engine.echo import write_model
from tests import submitting


@pytest.fixture(scope="session")
def echo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "echo"
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def settings(database: str, redis_url: str, echo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A service on the module's own database, with the echo model."""
    home = tmp_path_factory.mktemp("home")
    return Settings(home=home, database_url=database, redis_url=redis_url, model=str(echo_dir))


@pytest.fixture(scope="module")
def model(settings: Settings) -> Model:
    return models.describe(settings)


@pytest.fixture(scope="module")
def db(database: str) -> Iterator[Database]:
    opened = Database(database, pool_size=24)
    yield opened
    opened.close()


@pytest.fixture
def redis(redis_url: str) -> Iterator[redis_client.Redis]:
    with redis_client.Redis.from_url(redis_url) as client:
        yield client


@dataclass(frozen=True)
class Owner:
    """A tenant and a key of his."""

    tenant_id: str
    key: str
    webhook_secret: str


@pytest.fixture
def new_tenant(db: Database, settings: Settings) -> Callable[..., Owner]:
    """Makes tenants: each test has its own, so that tests see only their own jobs."""

    def make(plan: Plan = Plan.PAID) -> Owner:
        with db.transaction() as session:
            made = tenants.provision(session, Vault.open(settings), name=new_id("name"), plan=plan)
        return Owner(made.tenant_id, made.key, made.webhook_secret)

    return make


@pytest.fixture
def owner(new_tenant: Callable[..., Owner]) -> Owner:
    return new_tenant()


@pytest.fixture(scope="session")
def submission() -> Submission:
    return Submission(
        tier=Tier.PAID,
        model="echo",
        model_revision="0123456789ab",
        prompt_ids=(104, 105),
        sampling={
            "max_tokens": 8,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "seed": 7,
            "stop": [],
            "ignore_eos": False,
        },
        deadline_s=3600.0,
        metadata={},
    )


@pytest.fixture
def submit(db: Database, owner: Owner, submission: Submission) -> Callable[..., str]:
    """Writes a job of the test's tenant, with fields of Submission changed, and returns its id."""

    def write(**changes: object) -> str:
        with db.transaction() as session:
            changed = dataclasses.replace(submission, **changes)  # type: ignore[arg-type]
            job, _ = submitting.submit(session, owner.tenant_id, changed, max_queued=1000)
            return job.id

    return write


@dataclass
class HandWorker:
    """One worker incarnation, played by hand: it claims, writes and finishes as a real one does, and announces it."""

    db: Database
    redis: redis_client.Redis
    model: str = "echo"
    slots: int = 4
    id: str = field(default_factory=lambda: new_id("worker"))

    def __post_init__(self) -> None:
        with self.db.transaction() as session:
            session.add(Worker(id=self.id, model=self.model, host="here", pid=1, slots=self.slots))

    def claim(self, *job_ids: str, number: int = 1) -> list[Claim]:
        with self.db.transaction() as session:
            claimed = claims.claim(session, self.id, dict.fromkeys(job_ids, number))
        events.announce(self.redis, claims.started_events(claimed))
        return claimed

    def take(self, job_id: str) -> Claim:
        """Claim one job that nobody else wants, as soon as the dispatcher that a submission nudged has let go of it."""
        claimed: list[Claim] = []
        assert wait_until(lambda: bool(claimed.extend(self.claim(job_id)) or claimed), 10)
        return claimed[0]

    def write(self, claim: Claim, text: str, number: int) -> list[Event]:
        """One event of as many tokens as text has bytes, to be stored as event number."""
        delta = Delta(claim.job_id, claim.attempt, number, text, tuple(text.encode()))
        with self.db.transaction() as session:
            accepted = events.append_tokens(session, self.id, [delta])
        events.announce(self.redis, accepted)
        return accepted

    def finish(
        self, claim: Claim, status: Status = Status.SUCCEEDED, finish_reason: str | None = "stop"
    ) -> list[Event]:
        end = Finished(claim.job_id, claim.attempt, status, finish_reason)
        with self.db.transaction() as session:
            moved = claims.finish(session, self.id, [end])
        events.announce(self.redis, moved)
        return moved

    def end(
        self,
        claim: Claim,
        text: str,
        number: int,
        status: Status = Status.SUCCEEDED,
        token_ids: Sequence[int] | None = None,
    ) -> list[Event]:
        """The last text and the end of a job in one transaction, as the progress writer has it."""
        ids = tuple(text.encode() if token_ids is None else token_ids)
        delta = Delta(claim.job_id, claim.attempt, number, text, ids)
        end = Finished(claim.job_id, claim.attempt, status, "stop")
        with self.db.transaction() as session:
            moves.lock(session, [claim.job_id])
            shown = events.append_tokens(session, self.id, [delta])
            moved = claims.finish(session, self.id, [end] if shown else [])
        events.announce(self.redis, [*shown, *moved])
        return moved

    def run(self, job_id: str, *texts: str) -> None:
        """Run a job from claim to success, one event per text."""
        claim = self.take(job_id)
        for number, text in enumerate(texts, claim.last_event + 1):
            self.write(claim, text, number)
        self.finish(claim)

    def stop_taking(self) -> None:
        """Live on, and not be ready."""
        with self.db.transaction() as session:
            session.execute(update(Worker).where(Worker.id == self.id).values(ready=False))

    def die(self) -> None:
        with self.db.transaction() as session:
            session.execute(update(Worker).where(Worker.id == self.id).values(dead=True))


@pytest.fixture
def new_worker(db: Database, redis: redis_client.Redis) -> Callable[..., HandWorker]:
    """Makes workers; their model and slots may be given."""
    return lambda model="echo", slots=4: HandWorker(db, redis, model, slots)


@pytest.fixture
def worker(new_worker: Callable[..., HandWorker]) -> HandWorker:
    return new_worker()


@pytest.fixture
def expire_now(db: Database) -> Callable[[str], None]:
    """Moves a job's deadline into the past."""

    def change(job_id: str) -> None:
        with db.transaction() as session:
            session.execute(update(Job).where(Job.id == job_id).values(deadline_at=NOW))

    return change
