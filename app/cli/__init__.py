"""`everbatch`: one module per command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from app.errors import SetupError
from app.settings import complaint

_COMMANDS = ("batch", "cancel", "convert", "demo", "doctor", "keys", "submit", "tenants", "up", "watch")
"""Each is the module of this package that holds the command of the same name."""


class _Commands(click.Group):
    """Imports a command when it is asked for: a client's need not wait for the database library of `up`.

    A wrong set-up ends a command with one line, not with a traceback, and so does an output that cannot be written.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            click.echo(f"Error: {error}", err=True)
            _forget_output()
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SetupError, ValidationError) as error:
            raise click.ClickException(complaint(error)) from None


def _forget_output() -> None:
    """Let what is still to be written to stdout go nowhere, or Python complains of it once more at its exit."""
    with suppress(OSError), Path(os.devnull).open("w") as nowhere:  # a test's stdout is no file
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Self-hosted LLM generation: jobs in over REST, tokens out live."""
