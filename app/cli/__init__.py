"""`everbatch`: one module per command."""

from __future__ import annotations

from typing import Any

import click
from pydantic import ValidationError

from app.cli.batch import batch
from app.cli.cancel import cancel
from app.cli.demo import demo
from app.cli.doctor import doctor
from app.cli.keys import keys
from app.cli.submit import submit
from app.cli.up import up
from app.cli.watch import watch
from app.errors import SetupError


class _Commands(click.Group):
    """A wrong set-up ends a command with one line, not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SetupError as error:
            raise click.ClickException(str(error)) from None
        except ValidationError as error:
            raise click.ClickException("\n".join(_wrong_settings(error))) from None


def _wrong_settings(error: ValidationError) -> list[str]:
    return [
        f"EVERBATCH_{'_'.join(map(str, each['loc'])).upper()} is {each['input']!r}: {each['msg']}"
        for each in error.errors()
    ]


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Self-hosted LLM generation: jobs in over REST, tokens out live."""


for _command in (up, demo, doctor, submit, watch, cancel, batch, keys):
    main.add_command(_command)
