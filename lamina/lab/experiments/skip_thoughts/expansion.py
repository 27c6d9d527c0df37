"""Vocabulary expansion: words that training never saw get an embedding from a file of word vectors.

A least-squares map with intercept, fitted on the shared words, takes word vectors to embeddings. The model's own words
keep their embeddings.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....errors import fail
from ...data.formats import Array
from ...data.text import MARKS, Vocabulary

GZIP = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words and their vectors, float32 [words, dimensions]."""

    words: tuple[str, ...]
    rows: Array


def read_vectors(path: str | Path, most: int | None = None) -> WordVectors:
    """Read word vectors as text, as word2vec and GloVe write them, packed with gzip or not.

    A line is a word and its numbers, with blanks between them; the first line may be the counts of rows and numbers.
    Phrases, which word2vec joins with "_", are left out. Of a word's several rows the first counts.

    Args:
        path: the file.
        most: how many rows to read, the first ones, which are those of the most frequent words. By default all.
    """
    rows = dict[str, Array]()
    for place, (word, numbers) in _rows(Path(path)):
        if most is not None and len(rows) >= most:
            break
        if "_" not in word and word not in rows:
            rows[word] = _numbers(path, place, numbers)
    if not rows:
        raise fail(f"{path} must have word vectors as text", "no row", "Bring another file.")
    return WordVectors(tuple(rows), np.stack([*rows.values()]))


def _rows(path: Path) -> Iterator[tuple[int, tuple[str, list[str]]]]:
    """Yield the number of each line with its word and numbers; refuse a row that is longer or shorter than others."""
    size = 0
    for place, line in _lines(path):
        word, *numbers = line.split(" ")
        if place == 1 and len(numbers) == 1 and word.isdigit() and numbers[0].isdigit():
            size = int(numbers[0])
            continue
        size = size or len(numbers)
        if not numbers or len(numbers) != size:
            received = f"{len(numbers)} on line {place}, after {line[:20]!r}"
            raise fail(f"each row of {path} must have {size or 'some'} numbers", received, "Correct or delete the row.")
        yield place, (word, numbers)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbers of lines that are not blank, and their text."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == GZIP
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8", newline="\n") as text:
            for place, line in enumerate(text, 1):
                if line := line.strip(" \t\r\n").replace("\t", " "):
                    yield place, line
    except UnicodeDecodeError:
        remedy = "Convert a binary file of word2vec to text first."
        raise fail(f"{path} must be text in UTF-8", "other bytes", remedy) from None
    except (OSError, EOFError, zlib.error) as error:
        remedy = "See that it is whole and that you may read it."
        raise fail(f"{path} must be a readable file", str(error), remedy) from None


def _numbers(path: str | Path, place: int, numbers: list[str]) -> Array:
    try:
        row = np.array(numbers, np.float32)
    except ValueError:
        row = np.array([np.nan])
    if not np.isfinite(row).all():
        received = f"{' '.join(numbers)[:40]!r} on line {place}"
        raise fail(f"each row of {path} must have finite numbers", received, "Correct or delete the row.")
    return row


def expanded(vocabulary: Vocabulary, embedding: Array, vectors: WordVectors) -> tuple[dict[str, int], Array]:
    """Return ids of the vocabulary's words and of the file's others, and embeddings of all ids, [ids, dimensions].

    Args:
        vocabulary: words of training.
        embedding: of its ids, [ids, dimensions].
        vectors: of any words.
    """
    known = [place for place, word in enumerate(vectors.words) if word in vocabulary.ids]
    new = [place for place, word in enumerate(vectors.words) if word not in vocabulary.ids and word not in MARKS]
    needed = vectors.rows.shape[1] + 1
    if len(known) < needed:
        received = f"{len(known)} words in both for {needed} numbers a word, intercept included"
        raise fail("word vectors must share enough words with the vocabulary", received, "Bring vectors of more words.")
    targets = embedding[[vocabulary.ids[vectors.words[place]] for place in known]]
    weights = np.linalg.lstsq(_with_one(vectors.rows[known]), targets.astype(np.float64), rcond=None)[0]
    mapped = (_with_one(vectors.rows[new]) @ weights).astype(embedding.dtype)
    added = {vectors.words[place]: len(vocabulary) + number for number, place in enumerate(new)}
    return vocabulary.ids | added, np.concatenate([embedding, mapped])


def _with_one(rows: Array) -> Array:
    return np.concatenate([rows.astype(np.float64), np.ones((len(rows), 1))], 1)
