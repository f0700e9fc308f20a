"""The database: connections, transactions, migrations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, func, select
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from app.errors import first_line
from app.tables import NOW

MIGRATIONS = Path(__file__).parent.parent / "migrations"
IDLE_TRANSACTION_S = 5
"""Postgres ends a transaction that waits so long for its process: one that hangs must not hold locks for ever."""
TRUSTED_S = 1.0
"""A connection that lay in the pool for longer is pinged before it is used: its server may have gone."""


class Database:
    """A pool of connections of one process, and transactions on it."""

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.pool: Engine = create_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=5,
            hide_parameters=True,  # they hold prompts, and the text of an error may end in a log
            connect_args={
                "connect_timeout": 5,
                "application_name": "everbatch",
                "options": f"-c idle_in_transaction_session_timeout={IDLE_TRANSACTION_S}s",
            },
        )
        _ping_idle(self.pool)
        self._sessions = sessionmaker(self.pool, expire_on_commit=False, autoflush=False)
        self._autocommitting = self.pool.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One transaction: committed at the end of the block, rolled back by an exception."""
        with self._sessions.begin() as session:
            yield session

    @contextmanager
    def autocommit(self) -> Iterator[Session]:
        """Statements that each stand for themselves: reads and single writes, without the trips of begin and commit.

        Only what is executed is written: an object that was added or changed is not, for no commit flushes it.
        """
        with self._sessions(bind=self._autocommitting) as session:
            yield session

    @contextmanager
    def exclusively(self, kind: int, name: str) -> Iterator[bool]:
        """Hold the advisory lock of that kind and name for as long as the block runs; False where somebody else does.

        It is no transaction, and so may take its time. The lock goes with its connection: where that may break, the
        block's own transactions must see whether somebody else came before them.
        """
        with self._autocommitting.connect() as connection:
            key = (kind, func.hashtext(name))
            is_mine = bool(connection.scalar(select(func.pg_try_advisory_lock(*key))))
            try:
                yield is_mine
            finally:
                try:
                    if is_mine:
                        connection.execute(select(func.pg_advisory_unlock(*key)))
                except SQLAlchemyError:
                    connection.invalidate()

    def close(self) -> None:
        self.pool.dispose()


def _ping_idle(pool: Engine) -> None:
    """Ping a connection on its way out of the pool if it lay there for longer than TRUSTED_S.

    SQLAlchemy's own pre-ping does so every time, which is one trip in three of a short transaction.
    """

    @event.listens_for(pool, "checkin")
    def note(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(pool, "checkout")
    def check(connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        idle_since = record.info.get("idle_since")
        if idle_since is None or time.monotonic() - idle_since < TRUSTED_S:
            return
        try:
            pool.dialect.do_ping(connection)
        except pool.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error  # the pool then makes new ones for all


def now(session: Session) -> datetime:
    """The database's clock: leases and deadlines know no other."""
    moment: datetime = session.execute(select(NOW)).scalar_one()
    return moment


def reason(error: SQLAlchemyError) -> str:
    """What the database, or the way to it, said: one line."""
    return first_line(error.orig if isinstance(error, DBAPIError) and error.orig else error)


def migrate(database_url: str) -> None:
    """Bring the tables to the newest revision. Several processes may call it at once."""
    # Here, not above: few processes migrate, and it takes a third of a second to import.
    import alembic.command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["database_url"] = database_url
    alembic.command.upgrade(config, "head")
