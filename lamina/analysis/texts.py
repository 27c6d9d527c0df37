"""Tables of words, as markdown and for the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def markdown(head: list[str], cells: list[list[str]]) -> str:
    """Return the table as markdown."""
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def on_screen(title: str, head: list[str], cells: list[list[str]]) -> Table:
    """Return the table as rich prints it."""
    from rich.table import Table  # only the lab installs rich

    table = Table(title=title)
    for name in head:
        table.add_column(name)
    for line in cells:
        table.add_row(*line)
    return table
