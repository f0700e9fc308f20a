"""`everbatch demo`: the whole job of the service on real parts, on this machine."""

from __future__ import annotations

import json
import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

import click

from app.cli.connection import json_option
from app.cli.demo.narrator import Failed, Narrator
from app.cli.demo.receiver import receiver
from app.cli.demo.service import service
from app.cli.demo.story import SLOTS, Story
from app.client import ClientError
from app.errors import SetupError
from app.settings import Settings


@click.command()
@click.option("--model", help="A local Hugging Face directory or a built-in name [EVERBATCH_MODEL].")
@json_option
def demo(model: str | None, as_json: bool) -> None:
    """Show the service at work, in a minute or two.

    It runs on a home of its own, which is removed at the end; only the converted model is kept. The exit code is 1 when
    something does not hold. --json prints the figures of the summary; the story goes to stderr then.
    """
    # An echo as slow as a small model on a CPU: there must be a middle to kill it in.
    asked: dict[str, Any] = {"echo_step_ms": 50.0} | ({} if model is None else {"model": model})
    narrator = Narrator(to_stderr=as_json)
    started_at = time.monotonic()
    before = signal.signal(signal.SIGTERM, _end_in_good_order)
    try:
        narrator.section("The service")
        narrator.line("Starting; the first start on a machine also converts the model.")
        with receiver() as webhooks, service(Settings(**asked), slots=SLOTS) as running:
            figures = Story(running, webhooks, narrator).tell()
    except (Failed, SetupError, ClientError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    figures["The whole demo"] = f"{time.monotonic() - started_at:.0f} s, everything stopped"
    narrator.section("Summary")
    narrator.table(figures)
    if as_json:
        click.echo(json.dumps(figures))


def _end_in_good_order(number: int, frame: FrameType | None) -> NoReturn:
    """Unwinds, so that the service stops and its home is removed."""
    sys.exit(128 + number)
