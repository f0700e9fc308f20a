"""`everbatch up`: the whole service in the foreground."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from app.settings import Settings
from app.supervisor import Ready, Supervisor


@click.command()
@click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="Data, models and keys [EVERBATCH_HOME]."
)
@click.option("--port", type=click.IntRange(0, 65535), help="Of the API; 0 takes a free one [EVERBATCH_PORT, 8000].")
@click.option("--model", help="A local Hugging Face directory or a built-in name [EVERBATCH_MODEL].")
@click.option("--engine", type=click.Choice(["echo"]), help="echo runs without a model, for trials and drills.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Engine workers.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line once ready, and nothing else, on stdout.")
def up(home: Path | None, port: int | None, model: str | None, engine: str | None, workers: int, as_json: bool) -> None:
    """Run database, broker, API and workers until Ctrl-C.

    Without EVERBATCH_DATABASE_URL and EVERBATCH_REDIS_URL it brings its own Postgres and Valkey. What dies is started
    again. A second Ctrl-C does not wait for running jobs.
    """
    if model and engine:
        raise click.UsageError("--model and --engine exclude each other.")
    asked: dict[str, Any] = {"home": home, "port": port, "model": model or engine}
    settings = Settings(**{name: value for name, value in asked.items() if value is not None})
    supervisor = Supervisor(settings, workers=workers, report=lambda line: click.echo(line, err=True))
    supervisor.run(_print_json if as_json else _print_welcome)


def _print_json(ready: Ready) -> None:
    click.echo(json.dumps({**asdict(ready.access), "worker_pids": ready.worker_pids}))


def _print_welcome(ready: Ready) -> None:
    access = ready.access
    click.echo(
        f"""
Everbatch serves {ready.model} at {access.url}

  paid key   {access.paid_key}
  free key   {access.free_key}

Try it:

  curl {access.url}/v1/jobs \\
    -H 'Authorization: Bearer {access.paid_key}' \\
    -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}'

  curl -N {access.url}/v1/jobs/THE_ID/events -H 'Authorization: Bearer {access.paid_key}'

Ctrl-C ends it.
"""
    )
