from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from app.cli.watch import printable
from app.client import Client
from app.supervisor import Ready

Everbatch = Callable[..., Result]


def test_prints_the_id_of_a_job_and_nothing_else(everbatch: Everbatch, client: Client) -> None:
    submitted = everbatch("submit", "Once upon a time", "--max-tokens", "3")
    assert (submitted.exit_code, submitted.stderr) == (0, "")
    assert client.wait(submitted.stdout.strip())["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("prompt", [("-",), ()], ids=["dash", "left out"])
def test_reads_the_prompt_from_standard_input(everbatch: Everbatch, client: Client, prompt: tuple[str, ...]) -> None:
    submitted = everbatch("submit", *prompt, "--max-tokens", "1", stdin="Once\nupon")
    assert client.get(submitted.stdout.strip())["usage"]["prompt_tokens"] == len("Once\nupon")


def test_watched_text_on_stdout_is_the_result_and_a_newline(everbatch: Everbatch, client: Client) -> None:
    watched = everbatch("submit", "x", "--max-tokens", "40", "--watch")
    assert watched.exit_code == 0
    queued, ended = watched.stderr.splitlines()
    job_id = queued.split()[0]
    assert watched.stdout == client.get(job_id)["output"]["choices"][0]["text"] + "\n"
    assert ended == f"{job_id} succeeded (length): 1 + 40 tokens"


def test_options_reach_the_service(everbatch: Everbatch, client: Client) -> None:
    plain = everbatch("submit", "x", "--max-tokens", "8", "--seed", "7", "--watch", "--json")
    options = ("--max-tokens", "8", "--seed", "7", "--temperature", "0.5", "--tier", "flex", "--metadata", "a=b=c")
    job = json.loads(everbatch("submit", "x", *options, "--metadata", "d=", "--watch", "--json").stdout)
    assert (job["tier"], job["metadata"], job["status"]) == ("bulk", {"a": "b=c", "d": ""}, "succeeded")
    assert job["output"] == json.loads(plain.stdout)["output"]  # the same seed
    chat = json.loads(everbatch("submit", "x", "--chat", "--max-tokens", "1", "--json").stdout)
    assert client.get(chat["id"])["usage"]["prompt_tokens"] > 1


def test_a_job_waits_for_others_and_goes_on_where_one_stopped(everbatch: Everbatch, client: Client) -> None:
    first = everbatch("submit", "one", "--max-tokens", "4").stdout.strip()
    second = everbatch("submit", "two", "--after", first, "--continue", first, "--max-tokens", "4").stdout.strip()
    third = everbatch("submit", "--continue", second, "--max-tokens", "4").stdout.strip()
    assert client.wait(third)["usage"]["prompt_tokens"] == 3 + 4 + 3 + 4
    refused = everbatch("submit", "x", "--after", "job_x")
    assert (refused.exit_code, refused.stdout) != (0, "")
    assert "after[0]" in refused.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-tokens", "0"), "max_tokens"),
        (("--temperature", "nan"), "temperature"),
        (("--webhook", "ftp://x"), "webhook.url"),
        (("--metadata", "x"), "--metadata"),
        (("--tier", "gold"), "--tier"),
    ],
)
def test_wrong_value_ends_with_a_line_that_names_it(everbatch: Everbatch, options: tuple[str, ...], says: str) -> None:
    refused = everbatch("submit", "x", *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert says in refused.stderr.splitlines()[-1]


def test_bar_on_a_terminal_leaves_the_redirected_text_alone(service: Ready, service_home: Path, tmp_path: Path) -> None:
    """stdout goes to a file, stderr to a terminal: then there is a bar to look at."""
    ours, theirs = pty.openpty()
    text = tmp_path / "text"
    with text.open("wb") as stdout:
        command = [sys.executable, "-m", "app.cli", "submit", "x", "--max-tokens", "300", "--watch"]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=theirs, env=_shell(service_home)
        )
    os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    os.close(ours)
    assert child.wait() == 0
    assert b"tokens" in shown and b"running" in shown
    assert len(text.read_bytes()) == 300 + len("\n")


def test_output_that_cannot_be_written_ends_with_one_line(service: Ready, service_home: Path) -> None:
    command = [sys.executable, "-m", "app.cli", "submit", "x", "--max-tokens", "3", "--watch"]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=_shell(service_home), text=True)
    assert ended.returncode == 1
    queued, error = ended.stderr.splitlines()
    assert "queued" in queued
    assert error == "Error: [Errno 28] No space left on device"


def _shell(home: Path) -> dict[str, str]:
    return {**os.environ, "EVERBATCH_HOME": str(home), "TERM": "xterm", "COLUMNS": "100"}


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # its other end is closed
        return b""


def test_text_of_a_model_does_not_steer_the_terminal() -> None:
    assert printable("a\tb\nc\x1b[2J\x07\x9b1m\r\x7f 🦆é") == "a\tb\nc�[2J��1m�� 🦆é"
