from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from app.client import Client

Everbatch = Callable[..., Result]


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of five good rows, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": number},
        }
        for number in range(1, 6)
    ]
    file = Path("requests.jsonl")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def _ids(file: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in file.read_text().splitlines())


def test_all_rows_come_back(everbatch: Everbatch, requests: Path) -> None:
    ran = everbatch("batch", "run", str(requests))
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert "completed: 5 rows, 5 succeeded, 0 failed" in ran.stdout
    assert _ids(Path("requests.output.jsonl")) == [f"row-{number}" for number in range(1, 6)]
    assert not Path("requests.errors.jsonl").exists()


def test_bad_row_goes_to_the_error_file_and_into_the_exit_code(everbatch: Everbatch, requests: Path) -> None:
    bad = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 0}}
    requests.write_text(requests.read_text() + json.dumps(bad) + "\n")
    ran = everbatch("batch", "run", str(requests), "-o", "good.jsonl", "-e", "bad.jsonl", "--json")
    assert ran.exit_code == 1
    said = json.loads(ran.stdout)
    assert said["batch"]["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    assert (said["output"], said["errors"]) == ("good.jsonl", "bad.jsonl")
    assert len(_ids(Path("good.jsonl"))) == 5
    assert _ids(Path("bad.jsonl")) == ["bad"]


def test_first_row_that_nobody_can_read_goes_to_the_error_file(everbatch: Everbatch, requests: Path) -> None:
    requests.write_text("[" * 200_000 + "\n")
    ran = everbatch("batch", "run", str(requests))
    assert (ran.exit_code, _ids(Path("requests.errors.jsonl"))) == (1, [None])


def test_files_can_be_fetched_again(everbatch: Everbatch, requests: Path) -> None:
    batch_id = everbatch("batch", "run", str(requests)).stdout.split()[0]
    fetched = everbatch("batch", "fetch", batch_id)
    assert fetched.exit_code == 0
    assert Path(f"{batch_id}.output.jsonl").read_text() == Path("requests.output.jsonl").read_text()


def test_cancelled_batch_ends_with_its_own_code(everbatch: Everbatch, client: Client, requests: Path) -> None:
    requests.write_text(requests.read_text().replace('"max_tokens": 5', '"max_tokens": 8000'))
    batch = client.create_batch(client.upload(requests)["id"], endpoint="/v1/completions")
    client.cancel_batch(batch["id"])
    assert everbatch("batch", "fetch", batch["id"]).exit_code == 3


@pytest.mark.parametrize("place", ["-o", "-e"])
def test_place_without_a_directory_is_refused_before_anything_is_sent(
    everbatch: Everbatch, requests: Path, place: str
) -> None:
    refused = everbatch("batch", "run", str(requests), place, "nowhere/file.jsonl")
    assert refused.exit_code == 2
    assert "nowhere" in refused.stderr


def test_unknown_batch_is_named(everbatch: Everbatch) -> None:
    refused = everbatch("batch", "fetch", "batch_nope")
    assert refused.exit_code == 2
    assert "batch_nope" in refused.stderr


def test_two_results_never_go_to_one_file(everbatch: Everbatch, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"custom_id": "a"}')
    for option in ("-o", "-e"):
        over_the_input = everbatch("batch", "run", str(requests), option, str(requests))
        assert over_the_input.exit_code == 2 and "--output" in over_the_input.stderr
    both = everbatch("batch", "run", str(requests), "-o", str(tmp_path / "x"), "-e", str(tmp_path / "x"))
    assert both.exit_code == 2 and "--errors" in both.stderr
    assert requests.read_text() == '{"custom_id": "a"}'
