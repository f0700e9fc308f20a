"""The database: connections, transactions, migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from app.tables import NOW

MIGRATIONS = Path(__file__).parent.parent / "migrations"


class Database:
    """A pool of connections of one process, and transactions on it."""

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.pool: Engine = create_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=5,
            pool_pre_ping=True,
            hide_parameters=True,  # they hold prompts, and the text of an error may end in a log
            connect_args={"connect_timeout": 5, "application_name": "everbatch"},
        )
        self._sessions = sessionmaker(self.pool, expire_on_commit=False, autoflush=False)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One transaction: committed at the end of the block, rolled back by an exception."""
        with self._sessions.begin() as session:
            yield session

    def close(self) -> None:
        self.pool.dispose()


def now(session: Session) -> datetime:
    """The database's clock: leases and deadlines know no other."""
    moment: datetime = session.execute(select(NOW)).scalar_one()
    return moment


def reason(error: SQLAlchemyError) -> str:
    """What the database, or the way to it, said: one line."""
    return str(error.orig if isinstance(error, DBAPIError) else error).strip().splitlines()[0]


def migrate(database_url: str) -> None:
    """Bring the tables to the newest revision. Several processes may call it at once."""
    # Here, not above: few processes migrate, and it takes a third of a second to import.
    import alembic.command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["database_url"] = database_url
    alembic.command.upgrade(config, "head")
