"""Tables of words, as markdown and for the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Texts:
    """A result that prints as a table: ``_texts`` returns its title, its columns and the text of its cells."""

    def _texts(self) -> tuple[str, list[str], list[list[str]]]:
        raise NotImplementedError

    def markdown(self) -> str:
        """Return the table as markdown."""
        _, head, cells = self._texts()
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *cells])

    def rich(self) -> Table:
        """Return the table as rich prints it."""
        from rich.table import Table  # only the lab installs rich

        title, head, cells = self._texts()
        table = Table(*head, title=title)
        for line in cells:
            table.add_row(*line)
        return table
