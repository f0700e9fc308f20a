"""The examples of docs/programs.md run, and what they say holds in a whole service."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from app.client import Client, quote
from app.supervisor import Ready
from tests.test_service import metrics_url, paid_client

DOCUMENT = (Path(__file__).parent.parent / "docs" / "programs.md").read_text()
EXAMPLES = dict(re.findall(r"^## (A [\w-]+)$.*?^```python$(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))


def test_the_document_has_its_examples() -> None:
    assert list(EXAMPLES) == ["A chain", "A fan-out", "A join"]


@pytest.mark.parametrize("title", list(EXAMPLES))
def test_an_example_of_the_document_runs(service: Ready, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = (
        EXAMPLES[title].replace("http://127.0.0.1:8000", service.access.url).replace("eb_…", service.access.paid_key)
    )
    exec(compile(example, title, "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == (3 if title == "A fan-out" else 1)


def test_a_chain_keeps_to_the_prefix_cache(service: Ready, service_home: Path) -> None:
    url = metrics_url(service_home)
    with paid_client(service) as client:
        job = client.submit("A long beginning, " * 20, max_tokens=100)
        text = client.wait(job["id"])["output"]["choices"][0]["text"]
        before = cached_tokens(url)
        child = client.wait(client.submit(" and on", continues=job["id"], max_tokens=1)["id"])
        assert child["usage"]["prompt_tokens"] == 360 + len(text) + len(" and on")
        assert cached_tokens(url) - before >= 448  # 28 blocks of 16: all but the last token of the output lies there


def cached_tokens(url: str) -> int:
    found = re.search(r"^everbatch_cached_tokens_total (\S+)$", httpx.get(url, trust_env=False).text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def test_a_program_is_sent_at_once_and_told_by_its_events(service: Ready) -> None:
    with paid_client(service) as client:
        root = client.submit("root", max_tokens=50)
        leaves = [client.submit([f"{number}: ", quote(root["id"])], max_tokens=4) for number in range(10)]
        joined = client.submit(
            messages=[{"role": "user", "content": [quote(leaf["id"]) for leaf in leaves]}],
            after=[root["id"]],
            max_tokens=4,
        )
        kinds = [event.kind for event in client.events(joined["id"])]
        assert (kinds[:2], kinds[-1]) == (["queued", "running"], "succeeded")
        assert [client.get(leaf["id"])["usage"]["prompt_tokens"] for leaf in leaves] == [3 + 50] * 10


def test_a_cancelled_parent_takes_the_whole_program_with_it(service: Ready) -> None:
    with paid_client(service) as client:
        root = client.submit("root", max_tokens=8000)
        child = client.submit("child", after=[root["id"]])
        grandchild = client.submit(continues=child["id"])
        client.cancel(root["id"])
        assert parent_of(client, grandchild["id"]) == child["id"]
        assert parent_of(client, child["id"]) == root["id"]


def parent_of(client: Client, job_id: str) -> str | None:
    error = client.wait(job_id)["error"]
    assert error is not None and error["code"] == "parent_failed"
    return error.get("parent")
