"""docker-compose.yml: no container engine runs here, so its text is checked, and its commands against those we run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from sqlalchemy import create_engine, inspect

from app.commands import PROJECT, api_command, engine_command, io_command, migrate_command
from app.settings import Settings, environment

Service = dict[str, Any]

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
DURATION = {"type": "string", "pattern": r"^(\d+(us|ms|s|m|h))+$"}
HEALTHCHECK = {
    "type": "object",
    "properties": {
        "test": {"type": "array", "items": TEXT, "minItems": 2, "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
        "interval": DURATION,
        "timeout": DURATION,
        "start_period": DURATION,
        "retries": {"type": "integer", "minimum": 1},
    },
    "required": ["test"],
    "additionalProperties": False,
}
DEVICE = {
    "type": "object",
    "properties": {"driver": TEXT, "count": {"type": ["integer", "string"]}, "capabilities": TEXTS},
    "required": ["capabilities"],
    "additionalProperties": False,
}
SERVICE = {
    "type": "object",
    "properties": {
        "image": TEXT,
        "build": {
            "type": "object",
            "properties": {
                "context": TEXT,
                "dockerfile": TEXT,
                "args": {"type": "object", "additionalProperties": TEXT},
            },
            "additionalProperties": False,
        },
        "cap_drop": TEXTS,
        "command": TEXTS,
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "condition": {"enum": ["service_started", "service_healthy", "service_completed_successfully"]}
                },
                "required": ["condition"],
                "additionalProperties": False,
            },
        },
        "deploy": {
            "type": "object",
            "properties": {
                "resources": {
                    "type": "object",
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "properties": {"devices": {"type": "array", "items": DEVICE}},
                            "additionalProperties": False,
                        }
                    },
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
        # Numbers and booleans would be read by YAML's rules: a value of the environment is text.
        "environment": {"type": "object", "additionalProperties": TEXT},
        "healthcheck": HEALTHCHECK,
        "init": {"type": "boolean"},
        "logging": {"type": "object", "properties": {"driver": TEXT}, "additionalProperties": False},
        "networks": TEXTS,
        "ports": TEXTS,
        "read_only": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "security_opt": TEXTS,
        "shm_size": TEXT,
        "stop_grace_period": DURATION,
        "stop_signal": TEXT,
        "tmpfs": TEXTS,
        "user": TEXT,
        "volumes": TEXTS,
    },
    "required": ["image"],
    "additionalProperties": False,
}
COMPOSE = {
    "type": "object",
    "properties": {
        "services": {"type": "object", "additionalProperties": SERVICE},
        "networks": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": {"internal": {"type": "boolean"}},
                "additionalProperties": False,
            },
        },
        "volumes": {"type": "object", "additionalProperties": {"type": "object", "maxProperties": 0}},
    },
    "patternProperties": {"^x-": {}},
    "required": ["services"],
    "additionalProperties": False,
}

OURS = ("api", "worker", "io", "migrate")
SERVICES = (*OURS, "postgres", "redis")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
    return parsed


@pytest.fixture(scope="module", params=SERVICES)
def service(request: pytest.FixtureRequest, compose: dict[str, Any]) -> Service:
    found: Service = compose["services"][request.param]
    return found


def test_file_is_valid_compose(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, COMPOSE, cls=jsonschema.Draft202012Validator)
    assert set(compose["services"]) == set(SERVICES)


def test_networks_and_volumes_that_services_name_exist(compose: dict[str, Any], service: Service) -> None:
    assert set(service["networks"]) <= set(compose["networks"])
    for volume in service.get("volumes", ()):
        assert volume.partition(":")[0] in compose["volumes"]


def test_service_has_least_rights(service: Service) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


def test_no_service_runs_as_root(service: Service) -> None:
    if service["image"] == "everbatch":
        dockerfile = (PROJECT / "deploy/Dockerfile").read_text()
        assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)[-1] == "10001:10001"
    else:
        assert service["user"] != "root"


def test_only_the_api_is_published_and_only_on_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert ports == {"api": ["127.0.0.1:8000:8000"]}
    assert compose["networks"]["back"]["internal"] is True
    for name in ("postgres", "redis"):
        assert compose["services"][name]["networks"] == ["back"]


def test_every_lasting_service_has_a_healthcheck(compose: dict[str, Any]) -> None:
    with_check = {name for name, service in compose["services"].items() if "healthcheck" in service}
    assert with_check == set(SERVICES) - {"migrate"}


def test_secrets_come_from_the_environment_and_have_no_default() -> None:
    text = (PROJECT / "docker-compose.yml").read_text()
    for secret in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "EVERBATCH_SECRET_KEY"):
        uses = re.findall(rf"(?<!\$)\$\{{{secret}(.*?)\}}", text)
        assert uses, secret
        assert all(use.startswith(":?") for use in uses), secret


def test_gpu_is_reserved_for_the_worker_alone(compose: dict[str, Any]) -> None:
    with_gpu = {name for name, service in compose["services"].items() if "deploy" in service}
    assert with_gpu == {"worker"}
    devices = compose["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_variables_are_settings_that_exist(compose: dict[str, Any]) -> None:
    for name in OURS:
        for variable in compose["services"][name]["environment"]:
            assert variable.removeprefix("EVERBATCH_").lower() in Settings.model_fields, variable


def test_commands_are_those_that_everbatch_up_runs(compose: dict[str, Any]) -> None:
    settings = Settings(host="0.0.0.0", port=8000, api_threads=256)
    ours = {
        "api": api_command(settings),
        "worker": engine_command(),
        "io": io_command(),
        "migrate": migrate_command(),
    }
    for name, command in ours.items():
        assert command[0] == sys.executable
        assert compose["services"][name]["command"] == ["python", *command[1:]], name


def test_migrate_runs_as_a_plain_process(empty_database: str, home: Path) -> None:
    settings = Settings(home=home, database_url=empty_database)
    done = subprocess.run(
        migrate_command(), cwd=PROJECT, env=environment(settings), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    database = create_engine(empty_database)
    assert inspect(database).has_table("jobs")
    database.dispose()


def test_redis_takes_its_settings_from_the_command(compose: dict[str, Any], tmp_path: Path) -> None:
    """The shell line, run with a stand-in for the server, writes what a server would read."""
    line = compose["services"]["redis"]["command"][-1].replace("$$", "$").replace("/tmp/", f"{tmp_path}/")
    server = tmp_path / "valkey-server"
    server.write_text('#!/bin/sh\ncat "$1"\n')
    server.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": "s3cret"}
    done = subprocess.run(["sh", "-c", line], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == 'requirepass s3cret\nappendonly yes\nsave ""\nmaxmemory-policy noeviction\n'
    assert (tmp_path / "valkey.conf").stat().st_mode & 0o777 == 0o600


def test_everything_that_the_image_copies_is_there() -> None:
    dockerfile = (PROJECT / "deploy/Dockerfile").read_text()
    copied = [
        place for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE) for place in line.split()
    ]
    let_in = (PROJECT / ".dockerignore").read_text().splitlines()
    for place in copied:
        assert (PROJECT / place).exists(), place
        assert f"!{place}" in let_in, place
