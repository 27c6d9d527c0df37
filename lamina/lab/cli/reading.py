"""``lamina read``: questions for a trained attentive reader, its answers, and where it looked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import fail
from ..options import Settings, whole
from .files import page_of, text_of
from .jobs import DeviceOption
from .screen import KINDS, say, say_marked, table

if TYPE_CHECKING:  # torch takes seconds to import
    from ..experiments.attentive_reader.reading import Opened, Reading

PAGE = "reading.html"
MOST = 100  # questions on one page
LOOKED = 5  # words that the reader looked at most, told in words


def read(
    run: Annotated[str, typer.Argument(help="folder of one run of attentive_reader")],
    passage: Annotated[str | None, typer.Option(help="text file with names as @entity1, @entity2")] = None,
    query: Annotated[str | None, typer.Option(help='with a blank: --query "@placeholder met @entity2"')] = None,
    question: Annotated[str | None, typer.Option(help="questions of the data, by number: 1, or 1-10")] = None,
    split: Annotated[str, typer.Option(help="train, valid or test: where --question is")] = "valid",
    top: Annotated[int, whole("how many entities to show", 1, 1000, panel=None)] = 5,
    page: Annotated[str | None, typer.Option(help="HTML file (default: reading.html in RUN)")] = None,
    data: Annotated[str | None, typer.Option(help="folder of data sets, as in training")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Let a trained reader fill the blank of a query, and show which words of the passage it looked at."""
    text, numbers = _checked(passage, query, question), _numbers(question)
    target = page_of(run, page, PAGE)
    from ..experiments.attentive_reader import reading as reader

    opened = reader.open_run(Path(run), Settings(root=data, device=device), split)
    asked = opened.reader
    found = [asked.of_data(split, number) for number in numbers] or [asked.of_text(text, query or "")]
    where = f"; question {question} of the {split} split" if question else ""
    say(f"{KINDS[opened.data['kind']]}: {opened.data['label']}{where}; checkpoint at update {opened.update:,}")
    for one in found:
        _show(one, top)
    say(f"page: {_write(target, found, opened, where, top)}")


def _numbers(question: str | None) -> range:
    """Return the numbers that --question names; none without it."""
    if question is None:
        return range(0)
    named = re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?", question.strip())
    first, last = (int(named[1]), int(named[2] or named[1])) if named else (1, 0)
    if not first <= last < first + MOST:
        rule = f"--question must be the number of a question, from 1 on, or a range of at most {MOST}"
        raise fail(rule, repr(question), "Pass 3, or 1-10.")
    return range(first, last + 1)


def _checked(passage: str | None, query: str | None, question: str | None) -> str:
    """Return the text of --passage; empty for --question. Only files and options that can be read pass."""
    if (question is None) == (passage is None and query is None):
        received = "neither" if question is None else "both"
        raise fail("lamina read needs --passage and --query, or --question", received, "Pass one of them.")
    if question is not None:
        return ""
    if passage is None or query is None:
        missing = "--passage" if passage is None else "--query"
        raise fail("--passage and --query go together", f"no {missing}", "Pass both.")
    if not re.search(r"@placeholder\b", query.lower()):
        raise fail("--query must have @placeholder where the answer goes", repr(query), "Put it there.")
    return text_of(Path(passage), "--passage", "a few sentences")


def _show(found: Reading, top: int) -> None:
    for note in found.notes:
        say(note)
    say_marked([(word, share) for word, _, share in found.marked])
    most = sorted(found.marked, key=lambda one: -one[1])[:LOOKED]
    say(f"looked at most: {', '.join(f'{word} ({weight:.1%})' for word, weight, _ in most)}")
    say(f"query: {' '.join(found.query)}" + (f"  answer: {found.answer}" if found.answer else ""))
    columns = ["", "Entity", "Probability", *(["Right"] if found.answer else [])]
    rows = [
        [str(rank), guess.entity, f"{guess.probability:.1%}", *(["yes" if guess.right else ""] if found.answer else [])]
        for rank, guess in enumerate(found.guesses[:top], 1)
    ]
    table("Entities by probability", columns, rows)
    say(f"everything that the question does not name: {found.elsewhere:.1%}")


def _write(path: Path, found: Sequence[Reading], opened: Opened, where: str, top: int) -> Path:
    from ..data.registry import SOURCES
    from ..reports.page import rendered
    from ..runs.files import make_folder, write_atomically

    source = SOURCES.get(opened.data["name"])
    licence = source.licence if source and where and opened.data["kind"] == "real" else ""
    shown = {"found": found, "opened": opened, "where": where, "licence": licence, "kinds": KINDS, "top": top}
    html = rendered("reading.html.j2", **shown)
    make_folder(path.parent)
    write_atomically(path, html.encode(errors="replace"))
    return path
