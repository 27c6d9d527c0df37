"""Pictures of attention: words of passages on a background that is the darker the more the reader looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LINE, LETTER = 960, 22, 7.3  # pixels: of the picture, from line to line, of a letter of 12 pixels
MARGIN = 12
FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


class Reading(NamedTuple):
    """One question, and what the reader made of it."""

    passage: Sequence[str]
    attention: Sequence[float]
    query: Sequence[str]
    answer: str
    guess: str


def drawn(readings: Iterable[Reading]) -> str:
    """Return the readings one below the other, as SVG."""
    marks: list[str] = []
    line = 0
    for reading in readings:
        text = f"{' '.join(reading.query)}  answer: {reading.answer}, reader: {reading.guess}"
        marks.append(_text(0, line, text, "bold"))
        line += 1
        for number, column, word, weight in _laid_out(reading):
            marks += _word(column, line + number, word, weight)
            last = line + number
        line = last + 2
    high = line * LINE + MARGIN
    body = "".join(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}" '
        f'font-family="{FONT}" font-size="12"><rect width="{WIDTH}" height="{high}" fill="#ffffff"/>{body}</svg>'
    )


def _laid_out(reading: Reading) -> Iterator[tuple[int, int, str, float]]:
    """Yield line, column, word and the share of the largest attention."""
    columns, most = int((WIDTH - 2 * MARGIN) / LETTER), max(reading.attention)
    line = column = 0
    for word, weight in zip(reading.passage, reading.attention, strict=True):
        if column and column + len(word) > columns:
            line, column = line + 1, 0
        yield line, column, word, weight / most
        column += len(word) + 1


def _word(column: int, line: int, word: str, share: float) -> list[str]:
    left, top = MARGIN + column * LETTER, MARGIN + line * LINE
    wide = (len(word) + 0.6) * LETTER
    box = f'<rect x="{left - 2:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{LINE - 4}" rx="3" fill="#f28e2b" '
    return [f'{box}fill-opacity="{share:.3f}"/>', _text(column, line, word)]


def _text(column: int, line: int, text: str, weight: str = "normal") -> str:
    left, bottom = MARGIN + column * LETTER, MARGIN + line * LINE + 13
    long = f'textLength="{len(text) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{left:.1f}" y="{bottom:.1f}" font-weight="{weight}" {long} fill="#1b1b1b">{escape(text)}</text>'
