"""`everbatch submit`: one prompt becomes one job."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from app.cli.connection import json_option, with_client
from app.cli.watch import show
from app.client import Client, Message
from app.tiers import SERVICE_TIERS


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Send the prompt as a chat message instead of text to be continued.")
@click.option("--after", multiple=True, metavar="JOB", help="Start when JOB has succeeded; may be given several times.")
@click.option("--continue", "continues", metavar="JOB", help="Go on behind JOB's prompt and output.")
@click.option("--max-tokens", type=int, help="Tokens to generate at most.")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Names the random stream; the same seed gives the same text.")
@click.option("--tier", type=click.Choice(SERVICE_TIERS), help="flex runs the job as bulk work.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Kept with the job; may be given several times.")
@click.option("--webhook", metavar="URL", help="Is told when the job has ended.")
@click.option("--watch", "is_watched", is_flag=True, help="Show the tokens as they come, until the job ends.")
@json_option
@with_client
def submit(
    client: Client,
    prompt: str | None,
    *,
    chat: bool,
    after: tuple[str, ...],
    continues: str | None,
    tier: str | None,
    metadata: tuple[str, ...],
    webhook: str | None,
    is_watched: bool,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Submit PROMPT, or what stands on standard input where it is left out or "-"; with --continue it may be missing.

    Prints the job's id; with --watch its text, and the exit code is that of `everbatch watch`.
    """
    fields: dict[str, Any] = {
        **sampling,
        "after": after or None,
        "continues": continues,
        "service_tier": tier,
        "metadata": _pairs(metadata) or None,
        "webhook": {"url": webhook} if webhook else None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    text = None if prompt is None and continues else _prompt(prompt)
    messages: list[Message] = [{"role": "user", "content": text or ""}]
    job = client.submit(messages=messages, **given) if chat and text else client.submit(text, **given)
    if is_watched:
        click.echo(f"{job['id']} {job['status']} ({job['tier']})", err=True)
        sys.exit(show(client, job["id"], as_json=as_json, max_tokens=given.get("max_tokens")))
    click.echo(json.dumps(job) if as_json else job["id"])


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("PROMPT is missing: give it, or pipe it in.")
    return sys.stdin.read()


def _pairs(entries: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for entry in entries:
        name, separator, value = entry.partition("=")
        if not separator:
            raise click.BadParameter(f"'{entry}' is not KEY=VALUE", param_hint="--metadata")
        if name in pairs:
            raise click.BadParameter(f"'{name}' is given twice", param_hint="--metadata")
        pairs[name] = value
    return pairs
