from __future__ import annotations

import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from deploy.install import (
    LOCK,
    ROOT,
    UNLOCKED,
    newest_cpu_build,
    parse_pip_settings,
    torch_requirement,
    uv_environment,
    uv_flags,
)

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    requirement
    for line in [*_PROJECT["dependencies"], *_PROJECT["optional-dependencies"]["dev"]]
    if (requirement := Requirement(line)).marker is None or requirement.marker.evaluate()
]

LISTED = """\
:env:.find-links='/wheels /more'
global.cert='/etc/ssl/of-all.pem'
global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'
global.find-links='/of-all'
install.find-links='/of-install'
global.index-url='https://main.example/simple'
"""


def test_variables_override_the_install_section_and_that_the_global_one() -> None:
    assert parse_pip_settings(LISTED)["find-links"] == "/wheels /more"
    without_variable = "\n".join(line for line in LISTED.splitlines() if not line.startswith(":env:"))
    assert parse_pip_settings(without_variable)["find-links"] == "/of-install"


def test_pip_settings_become_flags_of_uv() -> None:
    assert uv_flags(parse_pip_settings(LISTED), {}) == [
        *["--index-url", "https://main.example/simple"],
        *["--extra-index-url", "https://one.example/simple"],
        *["--extra-index-url", "https://two.example/simple"],
        *["--find-links", "/wheels", "--find-links", "/more"],
        *["--index-strategy", "unsafe-best-match"],
    ]


@pytest.mark.parametrize(
    ("variable", "flag"),
    [
        ("UV_INDEX_URL", "--index-url"),
        ("UV_DEFAULT_INDEX", "--index-url"),
        ("UV_EXTRA_INDEX_URL", "--extra-index-url"),
        ("UV_INDEX", "--extra-index-url"),
        ("UV_FIND_LINKS", "--find-links"),
        ("UV_INDEX_STRATEGY", "--index-strategy"),
    ],
)
def test_variables_of_uv_win_over_the_settings_of_pip(variable: str, flag: str) -> None:
    settings = parse_pip_settings(LISTED)
    assert flag in uv_flags(settings, {})
    assert flag not in uv_flags(settings, {variable: "of the caller"})


def test_certificates_of_pip_hold_for_uv_unless_the_caller_names_others() -> None:
    settings = parse_pip_settings(LISTED)
    assert uv_environment(settings, {})["SSL_CERT_FILE"] == "/etc/ssl/of-all.pem"
    assert uv_environment(settings, {"SSL_CERT_FILE": "/mine"})["SSL_CERT_FILE"] == "/mine"


@pytest.mark.parametrize(
    ("available", "chosen"),
    [
        ("2.15.0, 2.14.1+cpu, 2.13.1, 2.13.0+cpu, 2.12.0+cpu", "2.13.0+cpu"),  # 2.14 is above the range
        ("2.13.0+cu130, 2.13.0", None),
        ("2.10.0+cpu", None),
        ("2.13.0.dev20260101+cpu, 2.11.2+cpu", "2.11.2+cpu"),
    ],
)
def test_newest_cpu_build_within_the_range_is_chosen(available: str, chosen: str | None) -> None:
    listed = f"torch (2.15.0)\nAvailable versions: {available}\n  INSTALLED: 2.13.0\n"
    assert newest_cpu_build(listed, "torch>=2.11,<2.14") == chosen


def test_no_cpu_build_is_chosen_when_no_source_answers() -> None:
    assert newest_cpu_build("", torch_requirement()) is None


def test_lock_is_plain_versions_of_every_dependency_but_those_that_depend_on_the_machine() -> None:
    locked = LOCK.read_text().splitlines()
    names = {line.partition("==")[0] for line in locked}
    assert all(line == f"{line.partition('==')[0]}=={line.partition('==')[2]}" and "/" not in line for line in locked)
    assert not [line for line in locked if UNLOCKED.match(line)]
    for requirement in REQUIREMENTS:
        assert requirement.name in names or UNLOCKED.match(f"{requirement.name}=="), f"{requirement}: run `make lock`"


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_installed_and_what_is_locked_is_within_the_range(requirement: Requirement) -> None:
    locked = dict(line.split("==") for line in LOCK.read_text().splitlines())
    for version in (metadata.version(requirement.name), locked.get(requirement.name)):
        assert version is None or requirement.specifier.contains(version, prereleases=True), version


def test_kombu_wakes_its_poller_from_other_threads() -> None:
    """From 5.7 on; the engine's pool calls Celery back that way."""
    (kombu,) = [requirement for requirement in REQUIREMENTS if requirement.name == "kombu"]
    assert not kombu.specifier.contains("5.6.9") and kombu.specifier.contains("5.7.0")
    assert not kombu.specifier.contains("5.8.0"), "the next one is tried before it is allowed"
