"""The stock client in an environment of its own: made once, and kept beside the installed packages."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

_HERE = Path(__file__).parent


def python_with(major: int) -> Path:
    """The interpreter of an environment that has what requirements-{major}.txt pins, from pip's configured index."""
    requirements = _HERE / f"requirements-{major}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    home = Path(sys.prefix, "everbatch-clients")
    home.mkdir(exist_ok=True)
    environment = home / f"openai-{major}-{digest}"
    python, is_whole = environment / "bin" / "python", environment / "is-whole"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole.exists():
            venv.create(environment, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
            is_whole.touch()
    return python
