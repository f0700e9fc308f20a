"""The operator's hand on the database: what `everbatch keys` and `everbatch tenants` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import embedded
from app.db import Database, reason
from app.errors import Refusal
from app.settings import Settings

_MAX_NAME_LENGTH = 100


def printable(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Callback of an argument that a line of a list is to show."""
    if not (0 < len(value) <= _MAX_NAME_LENGTH and value.isprintable() and value.strip() == value):
        raise click.BadParameter(f"{value!r} is not 1 to {_MAX_NAME_LENGTH} printable characters")
    return value


def settings_of(home: Path | None) -> Settings:
    asked: dict[str, Any] = {} if home is None else {"home": home}
    return Settings(**asked)


@contextmanager
def transaction(settings: Settings) -> Iterator[Session]:
    """One transaction on the service's database; what goes wrong there ends the command with one line."""
    database = Database(embedded.running_database_url(settings))
    try:
        with database.transaction() as session:
            yield session
    except Refusal as error:
        raise click.ClickException(error.message) from None
    except SQLAlchemyError as error:
        raise click.ClickException(f"The database does not do this: {reason(error)}") from None
    finally:
        database.close()
