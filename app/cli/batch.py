"""`everbatch batch`: a file of requests in, a file of results and a file of errors out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.cli.connection import checked_id, json_option, with_client
from app.client import Batch, Client

_CHAT = "/v1/chat/completions"
_INTERRUPTED = 130


@click.group()
def batch() -> None:
    """Files of requests, run as bulk work."""


_output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Of the results [NAME.output.jsonl]."
)
_errors_option = click.option(
    "-e", "--errors", type=click.Path(path_type=Path, dir_okay=False), help="Of the failed rows [NAME.errors.jsonl]."
)


@batch.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@_output_option
@_errors_option
@json_option
@with_client
def run(client: Client, file: Path, output: Path | None, errors: Path | None, as_json: bool) -> None:
    """Run all requests of FILE, an OpenAI batch file, and write their results and errors.

    Each row of FILE becomes one line of one of the two. A file that is there already, of an earlier run for instance,
    is overwritten; one that would be empty is not written, and the earlier one stays. The exit code is 0 when all rows
    succeeded, 1 when some did not, 3 when the batch was cancelled. Ctrl-C leaves the batch alone: `everbatch batch
    fetch` takes up where this stopped.
    """
    places = _places(file.stem, output, errors)
    if file.resolve() in (places.output.resolve(), places.errors.resolve()):
        raise click.UsageError(f"--output and --errors must not be FILE itself, {file}")
    endpoint = _endpoint(file)
    uploaded = client.upload(file)
    made = client.create_batch(uploaded["id"], endpoint=endpoint)
    _finish(client, made["id"], places, as_json=as_json)


@batch.command()
@click.argument("batch_id", metavar="BATCH", callback=checked_id)
@_output_option
@_errors_option
@json_option
@with_client
def fetch(client: Client, batch_id: str, output: Path | None, errors: Path | None, as_json: bool) -> None:
    """Wait for BATCH to end and write its results and errors, as `run` does."""
    _finish(client, batch_id, _places(batch_id, output, errors), as_json=as_json)


@dataclass(frozen=True)
class _Places:
    """Where results and errors go."""

    output: Path
    errors: Path


def _places(name: str, output: Path | None, errors: Path | None) -> _Places:
    places = _Places(output or Path(f"{name}.output.jsonl"), errors or Path(f"{name}.errors.jsonl"))
    for place in (places.output, places.errors):
        if not place.parent.is_dir():
            raise click.UsageError(f"There is no directory {place.parent}")
    if places.output.resolve() == places.errors.resolve():
        raise click.UsageError(f"--output and --errors must be two files, not both {places.output}")
    return places


def _endpoint(file: Path) -> str:
    """What the first row says; the server checks every row against it."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return str(json.loads(first.decode("utf-8-sig"))["url"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return _CHAT  # a bad row: it comes back in the error file


def _finish(client: Client, batch_id: str, places: _Places, *, as_json: bool) -> None:
    """Follow the batch to its end, bring its files home, tell the counts, and exit."""
    try:
        ended = _follow(client, batch_id)
    except KeyboardInterrupt:
        click.echo(f"The batch goes on. Have its files with: everbatch batch fetch {batch_id}", err=True)
        sys.exit(_INTERRUPTED)
    output = _download(client, ended["output_file_id"], places.output)
    errors = _download(client, ended["error_file_id"], places.errors)
    if as_json:
        click.echo(json.dumps({"batch": ended, "output": output and str(output), "errors": errors and str(errors)}))
    else:
        _tell(ended, output, errors)
    sys.exit(_exit_code(ended))


def _follow(client: Client, batch_id: str) -> Batch:
    with _progress() as progress:
        task = progress.add_task("queued", total=None) if progress else None
        for current in client.batch_progress(batch_id):
            counts = current["request_counts"]
            if progress and task is not None:
                done = counts["completed"] + counts["failed"]
                progress.update(task, description=current["status"], completed=done, total=counts["total"] or None)
    return current


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _download(client: Client, file_id: str | None, place: Path) -> Path | None:
    if file_id is None:
        return None
    client.download(file_id, place)
    return place


def _tell(ended: Batch, output: Path | None, errors: Path | None) -> None:
    counts = ended["request_counts"]
    click.echo(
        f"{ended['id']} {ended['status']}: {counts['total']} rows, "
        f"{counts['completed']} succeeded, {counts['failed']} failed"
    )
    if output:
        click.echo(f"results  {output}")
    if errors:
        click.echo(f"errors   {errors}")
    for problem in (ended["errors"] or {"data": []})["data"]:
        where = f"line {problem['line']}: " if problem.get("line") else ""
        click.echo(f"Error: {where}{problem['message']}", err=True)


def _exit_code(ended: Batch) -> int:
    if ended["status"] == "cancelled":
        return 3
    counts = ended["request_counts"]
    return 0 if ended["status"] == "completed" and counts["completed"] == counts["total"] else 1
