"""Books on the disk: plain text, packed with gzip or not, one sentence a line, in reading order.

Blank lines are skipped. One bad line is repaired, and the repair is counted in "notes". A book that is damaged as a
whole, in another encoding or without one sentence a line is refused by name.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import fail
from .caption_files import Repairs, lines_of
from .formats import Array, lines_array
from .question_files import Types

SPLITS = ("train", "valid", "test")
INDEX = "INDEX.tsv"
BOOKS = "*.txt or *.txt.gz, one sentence a line"
SUFFIXES = (".txt", ".txt.gz")
GZIP = b"\x1f\x8b"
# Of the 100 novels these two are under copyright in the United States until the end of 2028 and 2032, and the third was
# until the end of 2025. A model can be made to print its training text, so none may depend on them by accident.
LEFT_OUT = frozenset({"Bennet_Imperial_1930", "Galsworthy_River_1933", "Woolf_Years_1937"})
LONGEST = 1000  # words of a sentence that are kept; no triple can hold a longer one
MEDIAN = 100  # words: half of the lines of a book with one paragraph a line, or with no line breaks, are longer
FEW = 10  # books: of fewer, none is held out as a whole
FEWEST = 3  # sentences of a split: one triple
HELD_OUT = 25  # of so many books one is valid and one test
BY_SENTENCE = 20  # of a few books, the last twentieth of each is test, the one before it valid
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
# As the Penn Treebank's tokeniser splits: do n't, I 'm; a hyphenated word is one
WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|m|d|re|ve|ll)\b|\.\.+|--+|\w+(?:-\w+)*|[^\w\s]")


def words_of(sentence: str) -> list[str]:
    """Return the words and punctuation marks of a sentence, in lower case."""
    return WORD.findall(sentence.translate(QUOTES).lower())


class Collected:
    """Books as numbers of a table of words, checked one by one."""

    def __init__(self) -> None:
        self.types, self.repairs = Types(), Repairs()
        self._books: list[tuple[Array, Array]] = []  # lengths of sentences, and their words end to end

    def add(self, name: str, lines: Iterable[str]) -> None:
        """Add a book's sentences; refuse one that has none, or none that ends."""
        lengths, tokens, number = array("i"), array("i"), self.types.__getitem__
        for place, line in enumerate(lines, 1):
            words = words_of(line)
            if len(words) > LONGEST:
                kind = f"sentences of more than {LONGEST:,} words, cut there; no triple of sentences holds them"
                self.repairs.add(kind, f"line {place} of {Path(name).name}")
            if words:
                lengths.append(min(len(words), LONGEST))
                tokens.extend(map(number, words[:LONGEST]))
        book = np.array(lengths, np.int32), np.array(tokens, np.int32)
        _check_sentences(name, book[0])
        self._books.append(book)

    def arrays(self, source: str, held_out: int) -> dict[str, Array]:
        """Return a data set's arrays.

        {split}_x: int32 [N], words of each sentence. {split}_tokens: their numbers in the table, end to end. words: the
        table. notes: repairs. One book of ``held_out`` goes to "valid", and one to "test".
        """
        arrays = {"words": lines_array(self.types), "notes": lines_array(self.repairs.told())}
        for split, books in self._split(held_out).items():
            lengths, tokens = (np.concatenate(parts) for parts in zip(*books))
            if len(lengths) < FEWEST:
                received = f"{len(lengths)} sentences for {split}"
                raise fail(f"{source} must hold {FEWEST} sentences or more in each split", received, "Bring more text.")
            arrays |= {f"{split}_x": lengths, f"{split}_tokens": tokens}
        return arrays

    def _split(self, held_out: int) -> dict[str, list[tuple[Array, Array]]]:
        """Hold out whole books, the same for the same number of books; of a few books, the end of each."""
        count = len(self._books)
        if count < FEW:
            cut = [_cut(*book) for book in self._books]
            return {split: [book[part] for book in cut] for part, split in enumerate(SPLITS)}
        order = np.random.RandomState(0).permutation(count)  # a legacy generator: its numbers are frozen
        each = max(1, count // held_out)
        chosen = {"valid": order[:each], "test": order[each : 2 * each], "train": order[2 * each :]}
        return {split: [self._books[at] for at in sorted(chosen[split].tolist())] for split in SPLITS}


def _check_sentences(name: str, lengths: Array) -> None:
    if not len(lengths):
        raise fail(f"{name} must hold sentences, one a line", "none", "Delete it, or bring the book.")
    if (median := float(np.median(lengths))) > MEDIAN:
        received = f"{len(lengths):,} lines, half of them of more than {median:,.0f} words"
        raise fail(f"{name} must hold one sentence a line", received, "Split it into sentences first.")


def _cut(lengths: Array, tokens: Array) -> list[tuple[Array, Array]]:
    """Return the beginning of a book, the part behind it, and its end."""
    each = -(-len(lengths) // BY_SENTENCE)
    at = [max(0, len(lengths) - 2 * each), max(0, len(lengths) - each)]
    ends = np.concatenate([[0], lengths.cumsum()])[at]
    return list(zip(np.split(lengths, at), np.split(tokens, ends)))


# Folders of books


def read_folder(paths: Mapping[str, Path]) -> dict[str, Array]:
    """Read a folder of books, or the one that an index of them lies in."""
    (path,) = paths.values()
    folder = folder_of(path)
    collected = Collected()
    for book in books_in(folder):
        if (name := name_of(book)) in LEFT_OUT:
            collected.repairs.add("books left out for their copyright", name)
        else:
            collected.add(str(book), lines_of(_unpacked(book), str(book), collected.repairs))
    return collected.arrays(str(folder), HELD_OUT)


def folder_of(path: Path) -> Path:
    """Return the folder of books that a layout's only file stands for."""
    return path if path.is_dir() else path.parent


def name_of(path: Path) -> str:
    """Return the name of a book without the suffix of its file."""
    return path.name.removesuffix(".gz").removesuffix(".txt")


def books_in(folder: Path) -> Sequence[Path]:
    """Return the books of a folder by name; refuse a folder that lacks one of its index."""
    books = sorted(one for one in folder.iterdir() if one.name.endswith(SUFFIXES) and one.is_file())
    names = [name_of(book) for book in books]
    twice = [name for name, following in pairwise(names) if name == following]
    missing = [name for name in _indexed(folder / INDEX) if name not in names]
    if missing:
        received = f"no {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise fail(f"{folder} must hold every book of its {INDEX}", received, f"Bring them, or delete {INDEX}.")
    if twice:
        raise fail(f"{folder} must hold each book once", f"{twice[0]} packed and unpacked", "Delete one of them.")
    if not books:
        raise fail(f"{folder} must hold books: {BOOKS}", "none", "Bring some.")
    return books


def _indexed(path: Path) -> list[str]:
    lines = lines_of(path.read_bytes(), str(path), Repairs())[1:] if path.is_file() else []
    return [line.split("\t")[0] for line in lines if line.strip()]


def _unpacked(path: Path) -> bytes:
    """Return a book's text; whether it is packed is told by its content, for browsers unpack but keep the name."""
    content = path.read_bytes()
    try:
        return gzip.decompress(content) if content.startswith(GZIP) else content
    except (EOFError, OSError, zlib.error) as error:
        fault: Any = "its data ends too early" if isinstance(error, EOFError) else error
        raise fail(f"{path} must be a whole gzip file", f"a damaged one ({fault})", "Fetch it again.") from None
