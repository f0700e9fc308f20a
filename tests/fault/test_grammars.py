"""A job whose text has a form, and whose worker is killed in the middle: the text is what it would have been."""

from __future__ import annotations

import json

import jsonschema

from tests.guiding import schema
from tests.site import Site

NAMES = {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 5, "maxItems": 5}


def test_a_killed_worker_leaves_a_text_that_another_one_completes(site: Site) -> None:
    io = site.start_io()
    first = site.start_worker(1, echo_step_ms=10.0)
    fields = {"max_tokens": 4000, "seed": 5, "grammar": schema(NAMES)}
    (killed,) = site.run(**fields)
    site.wait_for(lambda: len(site.log(killed).token_ids) > 20)
    first.kill()
    first.wait()
    shown = site.log(killed).text
    second = site.start_worker(2, echo_step_ms=1.0)
    (undisturbed,) = site.run(**fields)
    site.wait_until([killed, undisturbed], "succeeded")
    for process in (io, second):
        site.stop(process)

    job, log = site.job(killed), site.log(killed)
    assert (job.attempt, job.finish_reason) == (2, "stop")
    jsonschema.validate(json.loads(log.text), NAMES)
    assert log.text == site.log(undisturbed).text
    assert log.text.startswith(shown) and len(shown) < len(log.text)
    assert job.completion_tokens == len(log.token_ids)
