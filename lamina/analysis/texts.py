"""A table of words as markdown and on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def markdown(head: list[str], cells: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def on_screen(title: str, head: list[str], cells: list[list[str]]) -> Table:
    from rich.table import Table  # the layers do without rich

    table = Table(title=title)
    for name in head:
        table.add_column(name)
    for line in cells:
        table.add_row(*line)
    return table
