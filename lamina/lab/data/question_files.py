"""Cloze questions on the disk, in two layouts: articles with their questions as JSON lines, and ``.question`` files.

One bad question is skipped, and counted by its kind in "notes". A file that is damaged as a whole is refused by name.
Words come out as numbers of a table of all words, in arrays that a data set can hold: see ``Collected.arrays``.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import fail
from .caption_files import ALLOWED_BROKEN, Repairs
from .formats import Array, lines_array

SPLITS = ("train", "valid", "test")
PLACEHOLDER = "@placeholder"
ENTITY = re.compile(r"@entity\d{1,9}")
LONGEST = 2000  # tokens of a passage or a query; of CNN's passages the longest has a few hundred
LARGEST = 2**24  # bytes of a .question file
SENTENCES = 4
SENTENCE_ENDS = frozenset(".!?")
_STOP_WORDS = (
    "a about after all also an and any are as at be because been before being but by can could did do does for from "
    "had has have he her here hers him his how i if in into is it its me more most my no not of on one or other our "
    "out over she should so some such than that the their them then there these they this those through to too under "
    "up us very was we were what when where which while who whom why will with would you your 's n't"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
XZ = b"\xfd7zXZ\x00"


class Types(dict[str, int]):
    """Words with their numbers; a new word gets the next one."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


class Collected:
    """Questions of the three splits, checked one by one, with words as numbers."""

    def __init__(self) -> None:
        self.types, self.skipped = Types(), Repairs()
        self._tokens = {split: array("i") for split in SPLITS}
        self._rows = {split: array("i") for split in SPLITS}

    def add(self, split: str, passage: Sequence[str], query: Sequence[str], answer: str, case: str) -> None:
        """Add a question of lower-case tokens, or count why it is skipped; ``case`` says where it is from."""
        if fault := fault_of(passage, query, answer):
            self.skip(fault, case)
            return
        number = self.types.__getitem__
        for tokens in (passage, query):
            self._tokens[split].extend(map(number, tokens))
        self._rows[split].extend((len(passage), len(query), number(answer)))

    def skip(self, fault: str, case: str) -> None:
        self.skipped.add(f"questions skipped for {fault}", case)

    def arrays(self, source: str) -> dict[str, Array]:
        """Return a data set's arrays; refuse a source without questions in one of the splits.

        {split}_x: int32 [N, 3], the lengths of passage and query and the answer's number in the table of words.
        {split}_tokens: passage and query of each question, end to end. words: the table. notes: what was skipped.
        """
        notes = self.skipped.told()
        for split in SPLITS:
            if not self._rows[split]:
                received = f"none for {split}" + "".join(f"; {note}" for note in notes)
                raise fail(f"{source} must have sound questions for each split", received, "Bring a whole copy.")
        arrays = {f"{split}_x": np.frombuffer(rows, np.int32).reshape(-1, 3) for split, rows in self._rows.items()}
        arrays |= {f"{split}_tokens": np.frombuffer(part, np.int32) for split, part in self._tokens.items()}
        words = [word if _in_utf8(word) else f"<unreadable {number}>" for word, number in self.types.items()]
        return arrays | {"words": lines_array(words), "notes": lines_array(notes)}


def fault_of(passage: Sequence[str], query: Sequence[str], answer: str) -> str:
    """Return why a question cannot be asked; empty where it can."""
    if not passage or not query:
        return "an empty passage" if not passage else "an empty query"
    if PLACEHOLDER not in query:
        return f"a query without {PLACEHOLDER}"
    if not ENTITY.fullmatch(answer):
        return "an answer that is no entity"
    if max(len(passage), len(query)) > LONGEST:
        return f"more than {LONGEST:,} tokens in passage or query"
    return ""


def _in_utf8(word: str) -> bool:
    """Return whether UTF-8 can hold a word: JSON can spell half of a surrogate pair."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


# Articles as JSON lines


def read_articles(files: Mapping[str, Any]) -> dict[str, Array]:
    """Read files named train-00.jsonl.xz, valid.jsonl and the like: contents, or paths of the user's own files."""
    collected, ids = Collected(), set[str]()
    for file, content in files.items():
        split = re.split(r"\W", file)[0]
        _articles(split, file, content.read_bytes() if isinstance(content, Path) else content, collected, ids)
    return collected.arrays(", ".join(files))


def _articles(split: str, file: str, content: bytes, collected: Collected, ids: set[str]) -> None:
    lines, broken = _unpacked(file, content).split(b"\n"), list[str]()
    for number, line in enumerate(lines, 1):
        case = f"line {number} of {file}"
        if not line.strip():
            continue
        try:
            article = json.loads(line.decode())
            name, questions = str(article["id"]), list(article["questions"])
            sentences = [sentence.lower().split() for sentence in article["sentences"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            broken.append(f"{case} ({'not UTF-8' if isinstance(error, UnicodeDecodeError) else 'no article'})")
            continue
        if name in ids:
            collected.skip("an article whose id came before", case)
            continue
        ids.add(name)
        for place, question in enumerate(questions, 1):
            _question(split, question, sentences, f"question {place} in {case}", collected)
    _judge(file, broken, len(lines), collected)


def _unpacked(file: str, content: bytes) -> bytes:
    try:
        return lzma.decompress(content) if content.startswith(XZ) else content
    except (lzma.LZMAError, EOFError) as error:
        raise fail(f"{file} must be a sound xz file", str(error), "Download it again.") from None


def _question(split: str, question: Any, sentences: list[list[str]], case: str, collected: Collected) -> None:
    try:
        query, answer, chosen = question["query"].lower().split(), question["answer"].lower(), question["passage"]
        if not all(type(number) is int and 0 <= number < len(sentences) for number in chosen):
            raise ValueError("no sentence of that number")
    except (ValueError, KeyError, TypeError, AttributeError):
        collected.skip("missing or wrong parts", case)
        return
    collected.add(split, [word for number in chosen for word in sentences[number]], query, answer, case)


def _judge(source: str, broken: Sequence[str], total: int, collected: Collected) -> None:
    """Count broken lines or files; refuse the source if they are more than single ones."""
    if len(broken) > max(ALLOWED_BROKEN, total // 10):
        received = f"{len(broken):,} broken of {total:,}, the first is {broken[0]}"
        raise fail(f"{source} must have sound articles or questions", received, "Bring a whole copy.")
    for case in broken:
        collected.skip("a broken line or file", case)


# Folders of .question files


def read_question_folders(paths: Mapping[str, Path]) -> dict[str, Array]:
    """Read the folders training, validation and test of rc-data; a passage is cut to its four best sentences.

    A file holds URL, passage, query, answer and the entities' names, with blank lines between them.
    """
    collected, names = Collected(), set[str]()
    for split, folder in zip(SPLITS, paths.values()):
        if not folder.is_dir():
            raise fail(f"{folder} must be a folder of .question files", "a file", "Unpack the archive.")
        broken, total = list[str](), 0
        for path in question_files(folder):
            total, case = total + 1, f"{folder.name}/{path.name}"
            if path.name in names:
                collected.skip("a file whose name came before", case)
                continue
            names.add(path.name)
            parts = _parts(path)
            if isinstance(parts, str):
                broken.append(f"{case} ({parts})")
                continue
            passage, query, answer = parts
            collected.add(split, four_sentences(passage, query), query, " ".join(answer), case)
        _judge(folder.name, broken, total, collected)
    return collected.arrays(", ".join(path.name for path in paths.values()))


def question_files(folder: Path) -> list[Path]:
    """Return the .question files of a folder in the order of their names."""
    return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith(".question"))


def _parts(path: Path) -> tuple[list[str], list[str], list[str]] | str:
    """Return the tokens of passage, query and answer, or why the file is broken."""
    if not path.is_file():  # opening a pipe would wait for ever
        return "no plain file"
    if path.stat().st_size > LARGEST:
        return f"more than {LARGEST:,} bytes"
    try:
        lines = [line.strip().lower() for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError:
        return "not UTF-8"
    if len(lines) < 7 or any(lines[number] for number in (1, 3, 5)):
        return "no URL, passage, query and answer with blank lines between them"
    passage, query, answer = (line.split() for line in lines[2:7:2])
    return passage, query, answer


def four_sentences(passage: Sequence[str], query: Sequence[str]) -> list[str]:
    """Return the four sentences of a passage that hold most of the query's tokens, in their own order.

    A sentence ends with . ! or ?. It counts each different token of the query that it holds; entities count, stop
    words, punctuation and the placeholder do not. Of sentences that hold as many, the earlier ones are kept. This
    follows the "top4" data of the paper, whose own rule was not published.
    """
    sentences = sentences_of(passage)
    wanted = {token for token in query if token not in STOP_WORDS and re.search(r"\w", token)} - {PLACEHOLDER}
    ranked = sorted(range(len(sentences)), key=lambda number: (-len(wanted.intersection(sentences[number])), number))
    return [token for number in sorted(ranked[:SENTENCES]) for token in sentences[number]]


def sentences_of(passage: Sequence[str]) -> list[Sequence[str]]:
    """Cut a passage behind each of . ! ? tokens."""
    ends = [number + 1 for number, token in enumerate(passage) if token in SENTENCE_ENDS]
    cuts = [0, *ends, *[len(passage)][: not ends or ends[-1] < len(passage)]]
    return [passage[first:last] for first, last in pairwise(cuts) if first < last]
