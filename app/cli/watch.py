"""`everbatch watch`: a job's text, from its first token on and then live."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.cli.connection import checked_id, json_option, with_client
from app.client import Client, Event, Job

EXIT_CODES = {"succeeded": 0, "failed": 1, "expired": 1, "cancelled": 3}
"""The exit code says how a job ended."""
_INTERRUPTED = 130
_LOOK_EVERY_S = 0.5
"""How often the bar asks for the number of tokens."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command()
@click.argument("job_id", metavar="JOB", callback=checked_id)
@json_option
@with_client
def watch(client: Client, job_id: str, as_json: bool) -> None:
    """Show a job's text until it ends. Of several choices the first one is shown live, and the others at the end.

    The exit code is 0 when it succeeded, 1 when it failed or expired, 3 when it was cancelled. Ctrl-C leaves the job
    alone. --json prints the job once it has ended.
    """
    sys.exit(show(client, job_id, as_json=as_json))


def show(client: Client, job_id: str, *, as_json: bool, max_tokens: int | None = None) -> int:
    """Follow a job to its end; its text goes to stdout, or the job as JSON. Returns the exit code."""
    try:
        with _progress(client, job_id, max_tokens, hides_text=as_json) as advance:
            for event in client.events(job_id):
                if event.kind == "tokens" and event.data["index"] == 0 and not as_json:
                    _write(event.data["text"])
                advance.on(event)
    except KeyboardInterrupt:
        click.echo(f"\nThe job goes on. See it with: everbatch watch {job_id}", err=True)
        return _INTERRUPTED
    job = client.get(job_id)
    if as_json:
        click.echo(json.dumps(job))
    else:
        tell_end(job)
    return EXIT_CODES[job["status"]]


def _write(text: str) -> None:
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


def printable(text: str) -> str:
    """A model's text without what would steer a terminal; line feeds and tabs stay."""
    return _CONTROLS.sub("\ufffd", text)


def tell_end(job: Job) -> None:
    """End the text's last line on stdout, where the model did not; show further choices; say how the job ended."""
    usage, (choice, *others) = job["usage"], job["output"]["choices"]
    if choice["text"] and not choice["text"].endswith("\n"):
        click.echo()
    for other in others:
        click.echo(f"--- choice {other['index']}", err=True)
        _write(other["text"] if other["text"].endswith("\n") else f"{other['text']}\n")
    reason = job["error"]["message"] if job["error"] else choice["finish_reason"]
    attempts = f", {job['attempt']} attempts" if job["attempt"] > 1 else ""
    click.echo(
        f"{job['id']} {job['status']}{f' ({reason})' if reason else ''}: "
        f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens{attempts}",
        err=True,
    )


class _Bar:
    """Tokens so far, of those that are wanted where that is known."""

    def __init__(self, client: Client, job_id: str, max_tokens: int | None, progress: Progress | None) -> None:
        self._client = client
        self._job_id = job_id
        self._progress = progress
        self._task = progress.add_task("queued", total=max_tokens) if progress else None
        self._looked_at = 0.0

    def on(self, event: Event) -> None:
        if self._progress is None or self._task is None:
            return
        if event.kind != "tokens":
            self._progress.update(self._task, description=event.kind)
        elif time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._progress.update(self._task, completed=self._client.get(self._job_id)["usage"]["completion_tokens"])


@contextmanager
def _progress(client: Client, job_id: str, max_tokens: int | None, *, hides_text: bool) -> Iterator[_Bar]:
    """A bar on stderr, when a person looks at that and does not see the text itself."""
    if not sys.stderr.isatty() or (sys.stdout.isatty() and not hides_text):
        yield _Bar(client, job_id, max_tokens, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(client, job_id, max_tokens, progress)
