"""Embedded stand-in for the books: the language reference that comes with Python as the text of ``help()``.

Its wording differs between versions of Python; a record holds the SHA-256 of what was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...errors import fail
from .book_files import Collected
from .formats import Array

TITLE = "Python's language reference (embedded)"
STAND_IN = TITLE.replace("embedded", "embedded stand-in for {}")
HELD_OUT = 6
NO_PROSE = re.compile(r"::=|>>>|\*\*\*|===|---|\|")  # grammar, sessions, headings and tables
SENTENCE_START = re.compile(r"(?<=[.!?])[\"”)]*\s+(?=[A-Z\"“(])")
SENTENCE_END = re.compile(r"[.!?:]\W*$")


def arrays() -> dict[str, Array]:
    """Return the sentences of the three splits, as ``Collected.arrays`` holds them; a topic counts as a book."""
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions package it apart
        rule = "the embedded sentences are those of Python's help()"
        raise fail(rule, "a Python without pydoc_data", "Pass a folder of books with --data.") from None
    collected = Collected()
    for name, sentences in sentences_by_topic(topics.topics):
        collected.add(name, sentences)
    return collected.arrays("Python's language reference", HELD_OUT)


def sentences_by_topic(topics: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of topics with their sentences.

    Topics share sections. A paragraph that stood in an earlier topic is left out, or test text would be in training.
    """
    seen = set[str]()
    for name in sorted(topics):
        told = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", topics[name])]
        new = [text.removeprefix("* ") for text in told if text not in seen]
        seen.update(told)
        if sentences := [one for text in new if _is_prose(text) for one in SENTENCE_START.split(text)]:
            yield name, sentences


def _is_prose(text: str) -> bool:
    return text[:1].isupper() and not NO_PROSE.search(text) and bool(SENTENCE_END.search(text))
