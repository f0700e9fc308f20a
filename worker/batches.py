"""Batches: open ones are advanced, in turn, until all of them wait for their jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import redis
from sqlalchemy.exc import SQLAlchemyError

from app import batches, events, files
from app.db import Database
from app.errors import Refusal
from app.rows import Desk
from app.shelf import Shelf

logger = logging.getLogger(__name__)

ROUND_S = 5.0
"""A round ends after so long, so that new batches and a stop are seen."""


def advance_batches(
    database: Database, client: redis.Redis, desk: Desk, shelf: Shelf, *, nudge: Callable[[], None]
) -> None:
    """One round: a step of each open batch, and again while any comes further.

    Several workers may do this at once: a batch is advanced by one of them. nudge is called when jobs were written.
    """
    started = time.monotonic()
    with database.autocommit() as session:
        waiting = batches.open_batches(session)
    while waiting and time.monotonic() - started < ROUND_S:
        waiting = [batch_id for batch_id in waiting if _advance(database, client, desk, shelf, batch_id)]
        nudge()


def _advance(database: Database, client: redis.Redis, desk: Desk, shelf: Shelf, batch_id: str) -> bool:
    """Take one step of a batch; whether another one may follow."""
    try:
        with database.transaction() as session:
            step = batches.advance(session, desk, shelf, batch_id)
    except Refusal as refusal:
        logger.warning("%s cannot be advanced, the next round tries again: %s", batch_id, refusal.message)
        return False
    except SQLAlchemyError:
        raise  # the database is away: for all batches alike
    except Exception:
        # Whatever is wrong with this file or its rows must not end the process, which dispatches and sweeps for all.
        # The batch stays where it is, and expires in time.
        logger.exception("%s cannot be advanced, the next round tries again", batch_id)
        return False
    events.announce(client, step.events)
    return step.moved


def remove_strays(database: Database, shelf: Shelf) -> None:
    """One round, hourly at most: erase what crashes left of files."""
    try:
        with database.transaction() as session:
            number = files.remove_strays(session, shelf)
    except OSError as error:
        logger.warning("stray files cannot be erased, the next round tries again: %s", error)
        return
    if number:
        logger.info("%d stray files were erased", number)
