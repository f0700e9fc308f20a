from __future__ import annotations

from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError

from app import db as db_module
from app.db import Database
from app.tables import Base

_PID = text("select pg_backend_pid()")


@pytest.fixture
def single(database: str) -> Iterator[Database]:
    """A pool of one connection."""
    opened = Database(database, pool_size=1)
    yield opened
    opened.close()


def _break(single: Database, db: Database) -> int:
    """Have the server end the pool's connection while it lies idle; its process id there."""
    with single.transaction() as session:
        pid: int = session.execute(_PID).scalar_one()
    with db.transaction() as session:
        assert session.execute(text("select pg_terminate_backend(:pid, 5000)"), {"pid": pid}).scalar_one()
    return pid


def test_a_connection_that_broke_while_it_lay_idle_is_replaced(
    single: Database, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = _break(single, db)
    monkeypatch.setattr(db_module, "TRUSTED_S", 0.0)
    with single.transaction() as session:
        assert session.execute(_PID).scalar_one() != pid


def test_one_that_broke_just_now_fails_once(single: Database, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = _break(single, db)
    monkeypatch.setattr(db_module, "TRUSTED_S", 3600.0)
    with pytest.raises(OperationalError), single.transaction() as session:
        session.execute(_PID)
    with single.transaction() as session:
        assert session.execute(_PID).scalar_one() != pid


def test_autocommitted_statements_stand_even_if_what_follows_them_fails(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.autocommit() as session:
        session.execute(text("create table kept (number int)"))
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), db.transaction() as session:
        session.execute(text("drop table kept"))  # the connection is back in its usual mode: this is rolled back
        raise ZeroDivisionError
    with db.transaction() as session:
        session.execute(text("drop table kept"))


def test_a_process_that_hangs_in_a_transaction_does_not_hold_its_locks(
    database: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with db.transaction() as session:
        session.execute(text("create table held (number int)"))
    monkeypatch.setattr(db_module, "IDLE_TRANSACTION_S", 1)
    hanging = Database(database)
    with pytest.raises(DBAPIError), hanging.transaction() as session:
        session.execute(text("lock table held"))
        with db.transaction() as other:
            other.execute(text("drop table held"))  # as soon as the hanging one has been ended
        session.execute(_PID)
    hanging.close()


def test_the_migrations_make_the_very_tables_of_the_code(db: Database) -> None:
    with db.pool.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
