"""``lamina nearest``: the sentences of a text file that are nearest to a query, by the vectors of a trained encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import fail
from ..options import Settings, whole
from .files import text_of
from .jobs import DeviceOption
from .screen import KINDS, say, table

MOST = 100_000  # sentences of a file


def nearest(
    run: Annotated[str, typer.Argument(help="folder of one run of skip_thoughts")],
    text: Annotated[str, typer.Option(help="text file with one sentence a line")],
    query: Annotated[str, typer.Option(help='sentence to compare them with: --query "he closed the door"')],
    top: Annotated[int, whole("how many to show", 1, 1000, panel=None)] = 5,
    data: Annotated[str | None, typer.Option(help="folder of data sets, as in training")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Show the sentences of a text that are nearest to a query by the cosine of their skip-thought vectors."""
    lines = _sentences(text)
    if not query.strip():
        raise fail("--query must not be empty", repr(query), "Pass a sentence.")
    from ..experiments.skip_thoughts import encoding

    opened = encoding.open_run(Path(run), Settings(root=data, device=device), "lamina nearest")
    if unknown := encoding.unknown_words(opened.trained, query):
        say(f"Read as unknown words: {', '.join(unknown)}.")
    places, sentences = [*lines], [*lines.values()]
    found = encoding.nearest(opened.trained, sentences, query, top)
    described = opened.books.describe()
    trained = f"{KINDS[described['kind']]}: {described['label']}"
    say(f"{trained}; {len(sentences):,} sentences; checkpoint at update {opened.update:,}")
    rows = [
        [str(rank), f"{hit.cosine:.4f}", str(places[hit.place]), sentences[hit.place]]
        for rank, hit in enumerate(found, 1)
    ]
    table(f"Sentences nearest to: {query.strip()}", ["", "Cosine (1 is best)", "Line", "Sentence"], rows)


def _sentences(path: str) -> dict[int, str]:
    """Return the sentences of a file by the number of their line; blank lines are left out."""
    numbered = enumerate(text_of(Path(path), "--text", "one sentence a line").split("\n"), 1)
    lines = {place: line.strip() for place, line in numbered if line.strip()}
    if not lines:
        raise fail("--text must have sentences, one a line", f"{path}, which is empty", "Pass another file.")
    if len(lines) > MOST:
        raise fail(f"--text may have {MOST:,} sentences", f"{len(lines):,}", "Pass a part of them.")
    return lines
