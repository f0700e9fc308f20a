"""`python -m app.cli` is `everbatch`."""

from app.cli import main

main(prog_name="everbatch")
