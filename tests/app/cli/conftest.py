"""Commands of the command line, run against a whole running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.client import Client
from app.supervisor import Ready

Everbatch = Callable[..., Result]


@pytest.fixture
def everbatch(service: Ready, service_home: Path) -> Everbatch:
    """Runs a command as a shell with only EVERBATCH_HOME set would; an unexpected exception fails the test."""
    shell = dict.fromkeys(("EVERBATCH_URL", "EVERBATCH_API_KEY", "EVERBATCH_DATABASE_URL"))

    def run(*arguments: str, stdin: str = "", **variables: str) -> Result:
        environment = {**shell, "EVERBATCH_HOME": str(service_home), **variables}
        result = CliRunner().invoke(main, arguments, input=stdin, env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def client(service: Ready) -> Iterator[Client]:
    with Client(service.access.url, service.access.paid_key) as client:
        yield client
