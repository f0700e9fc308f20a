"""`everbatch keys`: the operator's hand on the database, where tenants and their keys live."""

from __future__ import annotations

import json
from pathlib import Path

import click
from sqlalchemy.orm import Session

from app import tenants
from app.cli.connection import home_option, json_option
from app.cli.operator import printable, settings_of, transaction
from app.tenants import Scope
from app.tiers import Plan
from app.vault import Vault

_MAX_NAME_LENGTH = 100


@click.group()
def keys() -> None:
    """API keys, on the database of EVERBATCH_DATABASE_URL or of the service that runs on the home."""


@keys.command(name="list")
@home_option
@json_option
def list_keys(home: Path | None, as_json: bool) -> None:
    """Show all keys by their prefixes, oldest first. --json prints each as one line."""
    with transaction(settings_of(home)) as session:
        found = tenants.keys(session)
    for key, tenant in found:
        if as_json:
            row = {
                "prefix": key.prefix,
                "tenant": tenant.name,
                "plan": tenant.plan,
                "scope": key.scope,
                "created_at": key.created_at.isoformat(),
                "revoked_at": key.revoked_at and key.revoked_at.isoformat(),
            }
            click.echo(json.dumps(row))
        else:
            state = f"revoked {key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else ""
            made_at = f"{key.created_at:%Y-%m-%d %H:%M}"
            line = f"{key.prefix}  {made_at}  {tenant.plan:4}  {key.scope:5}  {tenant.name}  {state}"
            click.echo(line.rstrip())


@keys.command()
@click.argument("name", callback=printable)
@click.option("--plan", type=click.Choice([plan.value for plan in Plan]), required=True, help="What NAME has bought.")
@click.option(
    "--scope",
    type=click.Choice([scope.value for scope in Scope]),
    default=Scope.JOBS.value,
    help="What the key opens: the tenant's jobs (default), or the operators' view of all tenants.",
)
@home_option
@json_option
def create(name: str, plan: str, scope: str, home: Path | None, as_json: bool) -> None:
    """Make a key for the tenant NAME, who is made too where there is none. It is shown this once."""
    settings = settings_of(home)
    with transaction(settings) as session:
        _refuse_other_plan(session, name, plan)
        made = tenants.provision(session, Vault.open(settings), name=name, plan=Plan(plan), scope=Scope(scope))
    if as_json:
        click.echo(json.dumps({"tenant": name, "plan": plan, "key": made.key, "webhook_secret": made.webhook_secret}))
    else:
        click.echo(f"key             {made.key}\nwebhook secret  {made.webhook_secret}")


@keys.command()
@click.argument("prefix", callback=printable)
@home_option
@json_option
def revoke(prefix: str, home: Path | None, as_json: bool) -> None:
    """End the key with this PREFIX at once; its jobs are kept."""
    with transaction(settings_of(home)) as session:
        tenants.revoke(session, prefix)
    click.echo(json.dumps({"prefix": prefix, "revoked": True}) if as_json else f"{prefix} revoked")


def _refuse_other_plan(session: Session, name: str, plan: str) -> None:
    """A tenant has one plan: a key of another would silently run under the first."""
    bought = {tenant.plan for _, tenant in tenants.keys(session) if tenant.name == name}
    if bought - {plan}:
        raise click.UsageError(f"The tenant '{name}' has the plan {', '.join(bought)}")
