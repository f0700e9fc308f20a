"""`everbatch cancel`: end jobs early; what they have written so far is kept."""

from __future__ import annotations

import json
import sys

import click

from app.cli.connection import checked_ids, json_option, with_client
from app.client import Client, Refused


@click.command()
@click.argument("job_ids", metavar="JOB...", callback=checked_ids, nargs=-1, required=True)
@json_option
@with_client
def cancel(client: Client, job_ids: tuple[str, ...], as_json: bool) -> None:
    """Cancel jobs. --json prints each as one line.

    The exit code is 1 when one of them could not be cancelled: there is none of that name, or it had ended.
    """
    refused = False
    for job_id in job_ids:
        try:
            job = client.cancel(job_id)
        except Refused as error:
            if error.status not in (404, 409):
                raise
            click.echo(f"Error: {error}", err=True)
            refused = True
            continue
        click.echo(json.dumps(job) if as_json else f"{job_id} {job['status']}")
    sys.exit(1 if refused else 0)
