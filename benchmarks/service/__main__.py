"""The figures of the service, one after another.

    python -m benchmarks.service [--only NAME ...] [--rounds N] [--quick]

Each figure runs on a service of its own: gunicorn, Celery, the embedded Postgres (with fsync) and Valkey, and the echo
engine where nothing else is said. Prints a line per figure, then one JSON object as its last line: of each quantity
the median over the rounds with its spread, its bar, and whether the bar was met.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

FIGURES = ("submit", "bulk", "noop", "start", "lease", "streams", "overhead", "share", "steady")
"""Modules beside this one; each is imported when it is its turn, for one of them takes torch."""
LONG = frozenset({"steady"})
"""Takes more than five minutes, and runs only when it is named."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke test: one short round of each")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    found: dict[str, object] = {}
    for name in options.only or [name for name in FIGURES if name not in LONG]:
        quantities = import_module(f"benchmarks.service.{name}").measure(options)
        found[name] = {what: quantity.shown for what, quantity in quantities.items()}
        print(json.dumps({name: found[name]}), flush=True)
    print(json.dumps({"benchmark": "service", "rounds": options.rounds, "figures": found}))


if __name__ == "__main__":
    main()
