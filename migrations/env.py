"""Alembic's entry: one connection, one transaction, one migrator at a time."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text

from app.settings import get_settings
from app.tables import Base

MIGRATION_LOCK = 0x45764261  # "EvBa"

url = context.config.attributes.get("database_url") or get_settings().database_url
if url is None:
    raise SystemExit("EVERBATCH_DATABASE_URL is not set: name the database to migrate")

database = create_engine(url)
with database.begin() as connection:
    connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()
database.dispose()
