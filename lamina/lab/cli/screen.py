"""What the commands print: lines and tables of results on standard output, notes on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from ..reports.page import Report

KINDS = {"real": "REAL data", "embedded": "EMBEDDED STAND-IN for the real data"}


class Screen(Console):
    """Standard output, as wide as the terminal; lines of any length if it is not one."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        if not self.is_terminal:
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def say(text: str) -> None:
    """Print a line of results, never cut."""
    Screen().print(text, markup=False, soft_wrap=True)


def say_marked(words: Sequence[tuple[str, float]]) -> None:
    """Print words on a background that is the stronger the larger their share, of 0 to 1, is."""
    text = Text()
    for number, (word, share) in enumerate(words):
        red, green, blue = (round(255 + share * (full - 255)) for full in (242, 142, 43))
        text.append(" " * (number > 0)).append(word, f"black on #{red:02x}{green:02x}{blue:02x}")
    Screen().print(text, soft_wrap=not Screen().is_terminal)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a title and the names of their columns."""
    say(title)
    drawn = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        drawn.add_row(*map(Text, row))  # brackets in a cell are no markup
    Screen().print(drawn)


def show_notes(notes: Sequence[str]) -> None:
    """Print notes on standard error, apart from the results."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def show_report(built: Report) -> None:
    """Print the verdict on every claim, and where the page is."""
    show_notes(built.notes)
    for section in (section for section in built.sections if section.claims):
        rows = [[claim["text"], claim["word"], claim["measured"], claim["reason"]] for claim in section.claims]
        title = f"{section.heading}, {section.badge}: {section.data}"
        table(title, ["Claim", "Verdict", "Measured", "Why"], rows)
    if any(built.stand_in):
        say(f"claims on stand-in data, which say nothing about the real data: {built.stand_in}")
    if any(built.real) or not any(built.stand_in):
        say(f"claims on real data: {built.real}")
    say(f"report: {built.html}")
    say(f"text:   {built.markdown}")
