"""How a command reaches the service: its options, else the environment, else the file that `up` keeps in the home."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from app import access
from app.client import Client, ClientError, Refused
from app.home import Home
from app.settings import ClientSettings, Settings

home_option = click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="Of the service on this machine [EVERBATCH_HOME]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else.")


def checked_id(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Callback of an argument that is an id: what cannot be one is refused before it becomes part of an address."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        raise click.BadParameter(f"{value!r} is no id")
    return value


def checked_ids(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """The same for an argument of several."""
    return tuple(checked_id(ctx, param, value) for value in values)


def with_client(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --url, --key and --home, and the client that they lead to as its first argument.

    What the service refuses, and a service that does not answer, end it with one line.
    """

    @click.option("--url", help="Address of the service [EVERBATCH_URL, else the home's].")
    @click.option("--key", help="API key [EVERBATCH_API_KEY, else the home's paid one].")
    @home_option
    @functools.wraps(command)
    def connected(*args: Any, url: str | None, key: str | None, home: Path | None, **options: Any) -> Any:
        try:
            with connect(url=url, key=key, home=home) as client:
                return command(client, *args, **options)
        except ClientError as error:
            raise _ended_by(error) from None

    return connected


class _RefusedRequest(click.ClickException):
    """What was asked for is wrong, as the server sees it."""

    exit_code = click.UsageError.exit_code


def connect(*, url: str | None, key: str | None, home: Path | None) -> Client:
    """A client by what was given, else by the environment, else by the home's file.

    Raises SetupError when the home's file is needed and not there, UsageError rather than send a home's key elsewhere.
    """
    known = ClientSettings()
    url = url or known.url
    if key is None and known.api_key is not None:
        key = known.api_key.get_secret_value()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise click.UsageError("--key or EVERBATCH_API_KEY is no key: it holds characters that no key has")
    if url is not None and key is not None:
        return Client(url, key)
    kept = access.read(Home(home or Settings().home))
    if url is not None and url.rstrip("/") != kept.url:
        raise click.UsageError(f"--key or EVERBATCH_API_KEY is missing: the home's key is for {kept.url}, not {url}")
    return Client(url or kept.url, key or kept.paid_key)


def _ended_by(error: ClientError) -> click.ClickException:
    is_wrong = isinstance(error, Refused) and error.status < 500
    return _RefusedRequest(str(error)) if is_wrong else click.ClickException(str(error))
