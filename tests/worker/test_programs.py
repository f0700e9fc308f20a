"""Programs on real processes: io workers die between a parent's end and its children's release, and nothing is lost."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import programs
from app.commands import io_command
from app.jobs import Submission
from app.outlines import Outline, own_ids
from app.prompts import Prompts
from app.tiers import Tier
from tests import submitting
from tests.fault.crashing import Spoiled
from tests.site import Site

pytestmark = pytest.mark.slow

LENGTH = 20
"""Tokens of each output."""


@pytest.fixture(scope="module", autouse=True)
def worker(site: Site) -> Iterator[None]:
    process = site.start_worker()
    yield
    assert site.stop(process) == 0


def submit_child(site: Site, *parent_ids: str, prompt: object = "child", continues: str | None = None) -> str:
    """A job that waits for these, and for whom it quotes or continues."""
    outline = Outline(continues, prompt, None, LENGTH)  # type: ignore[arg-type]
    named = {*parent_ids, *outline.quoted, *([] if continues is None else [continues])}
    num_own = len(own_ids(outline, Prompts(site.model)))
    with site.db.transaction() as session:
        parents = programs.parents_of(session, site.tenant_id, [("after", each) for each in named])
        submission = Submission(
            tier=Tier.PAID,
            model=site.model.name,
            model_revision=site.model.revision,
            prompt_ids=(),
            sampling={"max_tokens": LENGTH, "seed": secrets.randbits(40)},
            deadline_s=600.0,
            metadata={},
            child=programs.child_of(outline, parents, site.model, num_own=num_own),
        )
        job, _ = submitting.submit(session, site.tenant_id, submission, max_queued=1000)
        return job.id


def submit_program(site: Site) -> list[str]:
    """A job, four that quote it, and behind these one that quotes them all, and one that goes on where that stopped."""
    (root,) = site.submit(max_tokens=LENGTH)
    fan = [submit_child(site, prompt=[f"{number} ", {"quote": root}]) for number in range(4)]
    joined = submit_child(site, prompt=[{"quote": job_id} for job_id in fan])
    return [root, *fan, joined, submit_child(site, continues=joined)]


def check(site: Site, program: list[str]) -> None:
    root, *fan, joined, last = program
    for job_id in program:
        site.check_succeeded(job_id)
    assert [site.job(job_id).prompt_tokens for job_id in (root, *fan, joined, last)] == [
        16, *[2 + LENGTH] * 4, 4 * LENGTH, 4 * LENGTH + LENGTH + 5,
    ]  # fmt: skip


def test_a_program_runs_with_two_io_workers(site: Site) -> None:
    io_workers = [site.start_io(), site.start_io()]
    program = submit_program(site)
    site.dispatch()
    site.wait_until(program, "succeeded")
    check(site, program)
    for process in io_workers:
        assert site.stop(process) == 0


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param(Spoiled("kill-before", "app.releases:read"), id="looked at, not read"),
        pytest.param(Spoiled("kill-before", "app.releases:release", 2), id="rendered, not released"),
        pytest.param(Spoiled("kill-after", "app.releases:release", 2), id="released, not committed"),
        pytest.param(Spoiled("kill-before", "app.dispatch:Dispatcher.nudge"), id="committed, not dispatched"),
        pytest.param(Spoiled("kill-before", "app.releases:look_later"), id="what waits not noted"),
    ],
)
def test_an_io_worker_that_dies_loses_no_child(site: Site, spoiled: Spoiled, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dying = site.spawn(spoiled.command(io_command(), mark), "io")
    program = submit_program(site)
    site.dispatch()
    site.wait_for(lambda: dying.poll() is not None)
    assert mark.exists()
    living = site.start_io()
    site.wait_until(program, "succeeded")
    check(site, program)
    assert site.stop(living) == 0


@pytest.mark.parametrize(("action", "count"), [("kill-before", 1), ("kill-after", 1), ("kill-after", 2)])
def test_an_io_worker_that_dies_as_a_program_fails_leaves_none_of_it_behind(
    site: Site, action: str, count: int, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    (root,) = site.submit(max_tokens=LENGTH)
    child = submit_child(site, root)
    grandchildren = [submit_child(site, continues=child) for _ in range(3)]
    site.cancel(root)
    dying = site.spawn(Spoiled(action, "app.releases:fail", count).command(io_command(), mark), "io")
    site.wait_for(lambda: dying.poll() is not None)
    assert mark.exists()
    living = site.start_io()
    site.wait_until([child, *grandchildren], "failed")
    for job_id, parent in ((child, root), *((each, child) for each in grandchildren)):
        assert site.job(job_id).error["parent"] == parent  # type: ignore[index]
        assert site.log(job_id).kinds == ["queued", "failed"]
    assert site.stop(living) == 0
