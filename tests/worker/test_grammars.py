"""Jobs whose texts have a form, in a real worker: kept to, counted, and told where that cannot be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import jsonschema
import pytest

from app import choices
from tests.guiding import regex, schema
from tests.site import Site

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "price": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "price"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    process = site.start_worker()
    yield process
    assert site.stop(process) == 0


def texts(site: Site, job_id: str) -> list[tuple[str, str | None]]:
    with site.db.transaction() as session:
        return [(choice.text, choice.finish_reason) for choice in choices.of_one(session, site.job(job_id))]


@pytest.mark.usefixtures("worker")
def test_each_choice_is_of_the_form(site: Site) -> None:
    (job_id,) = site.run(num_choices=3, max_tokens=400, grammar=schema(ITEM))
    site.wait_until([job_id], "succeeded")
    made = texts(site, job_id)
    for text, finish_reason in made:
        jsonschema.validate(json.loads(text), ITEM)
        assert finish_reason == "stop"
    assert len(set(made)) == 3
    assert site.job(job_id).completion_tokens == len(site.log(job_id).token_ids)


@pytest.mark.usefixtures("worker")
def test_a_text_of_a_form_may_hold_nul_and_parts_of_characters(site: Site) -> None:
    (job_id,) = site.run(max_tokens=40, grammar=regex("a\\x00👩‍👩‍👧🇩🇪\\x00"))
    site.wait_until([job_id], "succeeded")
    assert texts(site, job_id) == [("a\0👩‍👩‍👧🇩🇪\0", "stop")]
    assert site.log(job_id).text.encode() == bytes(site.log(job_id).token_ids)


@pytest.mark.usefixtures("worker")
def test_a_hopeless_form_fails_its_job_alone(site: Site) -> None:
    good, bad = site.run(grammar=regex("[ab]{9}")), site.run(grammar="start: word")
    site.wait_until(bad, "failed")
    site.wait_until(good, "succeeded")
    (error,) = site.errors(bad)
    assert error["message"].startswith("The grammar cannot be compiled")
