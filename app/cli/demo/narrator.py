"""How the demo speaks: numbered sections, one plain line after the other, on a terminal or not."""

from __future__ import annotations

import click

from app.cli.watch import printable


class Failed(Exception):
    """A claim did not hold; the message says which, in a plain sentence."""


class Narrator:
    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr
        self._sections = 0

    def section(self, title: str) -> None:
        self._sections += 1
        click.echo(f"\n{click.style(f'{self._sections}. {title}', bold=True)}", err=self._to_stderr)

    def line(self, sentence: str) -> None:
        click.echo(f"   {sentence}", err=self._to_stderr)

    def live(self, text: str) -> None:
        """A piece of a model's text, at once."""
        click.echo(printable(text), nl=False, err=self._to_stderr)

    def claim(self, sentence: str, holds: bool) -> None:
        """Tell what was shown. Raises Failed when it does not hold."""
        if not holds:
            raise Failed(f"This was to be shown and does not hold: {sentence}")
        click.echo(f"   {click.style('✓', fg='green')} {sentence}", err=self._to_stderr)

    def table(self, figures: dict[str, str]) -> None:
        width = max(map(len, figures))
        for name, value in figures.items():
            self.line(f"{name:{width}}  {value}")
