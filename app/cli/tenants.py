"""`everbatch tenants`: what each may use, and its share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from app import tenants as own
from app.cli.connection import home_option, json_option
from app.cli.operator import printable, settings_of, transaction
from app.tables import Tenant


@click.group()
def tenants() -> None:
    """Tenants, on the database of EVERBATCH_DATABASE_URL or of the service that runs on the home."""


@tenants.command(name="list")
@home_option
@json_option
def list_tenants(home: Path | None, as_json: bool) -> None:
    """Show all tenants with their limits, oldest first. --json prints each as one line."""
    with transaction(settings_of(home)) as session:
        found = [_shown(tenant) for tenant in own.tenants(session)]
    for tenant in found:
        click.echo(json.dumps(tenant) if as_json else _line(tenant))


@tenants.command(name="set")
@click.argument("name", callback=printable)
@click.option("--weight", type=click.FloatRange(0.001, 1000), help="Share beside other tenants of a tier; 1 at first.")
@click.option("--tokens-per-day", type=click.IntRange(0, 2**62), help="Quota; 0 lifts it.")
@click.option("--requests-per-minute", type=click.IntRange(0, 2**30), help="POST requests; 0 lifts the limit.")
@home_option
@json_option
def set_limits(
    name: str,
    weight: float | None,
    tokens_per_day: int | None,
    requests_per_minute: int | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """Change what the tenant NAME may use; what is not named stays."""
    with transaction(settings_of(home)) as session:
        tenant = own.set_limits(
            session,
            name,
            weight=weight,
            tokens_per_day=tokens_per_day,
            requests_per_minute=requests_per_minute,
        )
        shown = _shown(tenant)
    click.echo(json.dumps(shown) if as_json else _line(shown))


def _shown(tenant: Tenant) -> dict[str, Any]:
    names = ("name", "plan", "weight", "tokens_per_day", "requests_per_minute")
    return {name: getattr(tenant, name) for name in names}


def _line(tenant: dict[str, Any]) -> str:
    tokens, requests = tenant["tokens_per_day"], tenant["requests_per_minute"]
    quota = "no quota" if tokens is None else f"{tokens} tokens a day"
    rate = "no rate limit" if requests is None else f"{requests} requests a minute"
    return f"{tenant['plan']:4}  weight {tenant['weight']:g}  {quota}  {rate}  {tenant['name']}"
