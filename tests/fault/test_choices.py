"""Jobs with several choices and logprobs, whose worker is killed in the middle: resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app import choices
from app.choices import Choice
from app.db import migrate
from app.logprobs import TokenLogprob
from tests.site import Site, echo_site
from tests.smollm2 import convert_once
from tests.stopping import lengths, seed_with


def result(site: Site, job_id: str) -> list[Choice]:
    with site.db.transaction() as session:
        return choices.of_one(session, site.job(job_id))


def certain(token_id: int) -> TokenLogprob:
    """The echo model knows no other."""
    return TokenLogprob(bytes([token_id]), 0.0, ((bytes([token_id]), 0.0),))


def test_a_killed_worker_leaves_each_choice_where_another_one_goes_on(site: Site) -> None:
    """Of three choices one has ended before the kill; all tokens have their logprobs, shown once."""
    seed = seed_with("q", (80, 200), (2, 8), (60, 200))
    io = site.start_io()
    first = site.start_worker(1, echo_step_ms=25.0)
    (job_id,) = site.run(num_choices=3, max_tokens=150, seed=seed, stop=["q"], top_logprobs=2)
    site.wait_for(lambda: len(site.log(job_id).token_ids) > 60)
    first.kill()
    first.wait()
    before = {choice: site.log(job_id, choice).token_ids for choice in range(3)}
    second = site.start_worker(2, echo_step_ms=2.0)
    site.wait_until([job_id], "succeeded")
    for process in (io, second):
        site.stop(process)

    job, log = site.job(job_id), site.log(job_id)
    assert job.attempt == 2 and log.numbers == list(range(1, len(log.numbers) + 1))
    assert job.completion_tokens == sum(min(150, n) for n in lengths(seed, "q", 3))
    for choice, whole in zip(result(site, job_id), [site.expected(job_id, each) for each in range(3)], strict=True):
        own = site.log(job_id, choice.index)
        assert own.token_ids == whole[: lengths(seed, "q", 3)[choice.index]]
        assert before[choice.index] and own.token_ids[: len(before[choice.index])] == before[choice.index]
        assert (choice.text, choice.finish_reason) == (
            (bytes(own.token_ids[:-1]).decode(), "stop")
            if own.token_ids[-1] == ord("q")
            else (bytes(own.token_ids).decode(), "length")
        )
        assert choice.logprobs == tuple(certain(token_id) for token_id in own.token_ids)


@pytest.fixture
def real_site(empty_database: str, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    """With the real model, in single precision."""
    migrate(empty_database)
    site = echo_site(tmp_path, empty_database, redis_url, model=str(convert_once()), dtype="float32", lease_s=6.0)
    site.redis.flushall()
    yield site
    site.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_models_choices_go_on_as_if_nothing_had_happened(real_site: Site) -> None:
    site = real_site
    fields = {"num_choices": 3, "max_tokens": 60, "seed": 11, "temperature": 1.0, "ignore_eos": True, "top_logprobs": 3}
    io = site.start_io()
    first = site.spawn_worker(1)
    (undisturbed,) = site.run(**fields)
    site.wait_until([undisturbed], "succeeded", timeout_s=120)
    (killed,) = site.run(**fields)
    site.wait_for(lambda: all(len(site.log(killed, choice).token_ids) > 10 for choice in range(3)), timeout_s=120)
    first.kill()
    first.wait()
    assert site.job(killed).status == "running"
    second = site.spawn_worker(2)
    site.wait_until([killed], "succeeded", timeout_s=120)
    for process in (io, second):
        site.stop(process)

    assert site.job(killed).attempt == 2
    texts = set()
    for whole, resumed in zip(result(site, undisturbed), result(site, killed), strict=True):
        tokens = site.log(killed, resumed.index).token_ids
        assert tokens == site.log(undisturbed, whole.index).token_ids and len(tokens) == 60
        assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)
        assert whole.logprobs is not None and resumed.logprobs is not None
        assert [each.token for each in resumed.logprobs] == [each.token for each in whole.logprobs]
        for one, other in zip(whole.logprobs, resumed.logprobs, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=2e-3)
            assert [its for _, its in other.top] == pytest.approx([its for _, its in one.top], abs=2e-3)
            assert len(other.top) == 3 and other.top[0][1] >= other.logprob
        texts.add(resumed.text)
    assert len(texts) == 3, "each choice has a random stream of its own"
