"""Programs go on: children whose parents have ended are released, or fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from sqlalchemy.exc import SQLAlchemyError

from app import events, programs, releases
from app.db import Database
from app.errors import Refusal
from app.events import Event
from app.models import Model
from app.prompts import Prompts
from app.releases import Rendered

logger = logging.getLogger(__name__)

ROUND_S = 5.0
"""A round ends after so long, so that a stop is seen."""
LOOKED_AT_ONCE = 500
"""Children and parents of one look."""
RELEASED_AT_ONCE = 64
"""Children in one transaction; their prompts are held together."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one look brought."""

    events: Sequence[Event]
    """Committed, to be announced."""
    has_released: bool
    has_more: bool
    """Whether another look will find something: it was not the last one, or children failed that have children."""


@dataclass(frozen=True, slots=True)
class Usher:
    """Leads children to the line. There may be several: each child is released by one of them."""

    database: Database
    model: Model
    prompts: Prompts
    max_text_bytes: int
    """Of all texts that one child quotes: no more than a request could have sent."""

    def advance(self) -> Step:
        """Look at children once: release those whose parents have ended, fail those of which one did not succeed.

        What takes long, reading and tokenizing, is done between transactions. A crash loses nothing: what was not
        committed is to be looked at still.
        """
        with self.database.autocommit() as session:
            look = releases.look(session, self.model.name, limit=LOOKED_AT_ONCE)
            programs.forget(session, look.over)
        ready, errors, stuck = look.ready[:RELEASED_AT_ONCE], dict(look.lost), set[str]()
        rendered: list[Rendered] = []
        for job_id in ready:
            match self._rendered(job_id):
                case Rendered() as child:
                    rendered.append(child)
                case Refusal() as refusal:
                    errors[job_id] = releases.error_of(refusal)
                case None:
                    stuck.add(job_id)
        failed: list[Event] = []
        if rendered or errors:
            with self.database.transaction() as session:
                failed = [*releases.release(session, rendered), *releases.fail(session, errors)]
        with self.database.autocommit() as session:
            releases.look_later(session, [each for each in look.seen if each[0] in stuck | look.waiting])
        is_full = len(look.seen) == LOOKED_AT_ONCE or len(look.ready) > len(ready)
        return Step(failed, has_released=bool(rendered), has_more=is_full or bool(failed))

    def _rendered(self, job_id: str) -> Rendered | Refusal | None:
        """The child with its prompt, or why it has none; None where it is to be looked at again.

        Whatever is wrong with one ends neither the process nor the round, which are there for all: it stays where it
        is, and expires in time.
        """
        try:
            with self.database.autocommit() as session:
                ready = releases.read(session, job_id, self.model, max_text_bytes=self.max_text_bytes)
            return None if ready is None else releases.render(ready, self.model, self.prompts)
        except Refusal as refusal:
            return refusal
        except SQLAlchemyError:
            raise
        except Exception:
            logger.exception("%s cannot be rendered, a later round tries again", job_id)
            return None


def advance_programs(usher: Usher, client: redis.Redis, *, nudge: Callable[[], None]) -> None:
    """One round: look at children until all have been looked at. nudge is called when some were released."""
    started = time.monotonic()
    has_more = True
    while has_more and time.monotonic() - started < ROUND_S:
        step = usher.advance()
        events.announce(client, step.events)
        if step.has_released:
            nudge()
        has_more = step.has_more
