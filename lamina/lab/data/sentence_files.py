"""Files of the sentence tasks: MR, CR, SUBJ and MPQA with one sentence a line, SICK with one pair a line.

A line is read as UTF-8, or else as cp1252, which holds latin-1's letters and the quotation marks and dashes that Pang
and Lee's files have beyond them. Empty lines are skipped. What was skipped or repaired is counted and told in "notes".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from ...errors import InputError, fail
from .caption_files import Repairs
from .formats import Array, lines_array

# Files of label 1 and of label 0. Kiros' and SentEval's code count objective sentences as 1.
CLASSES = {
    "MR": ("rt-polarity.pos", "rt-polarity.neg"),
    "CR": ("custrev.pos", "custrev.neg"),
    "SUBJ": ("subj.objective", "subj.subjective"),
    "MPQA": ("mpqa.pos", "mpqa.neg"),
}
PAIRS = {"train": "SICK_train.txt", "valid": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}
HEADER = "pair_ID"
JUDGMENTS = ("NEUTRAL", "ENTAILMENT", "CONTRADICTION")
LEAST, MOST = 1, 5  # relatedness
Contents = Mapping[str, "bytes | Path"]


def read(files: Contents) -> dict[str, Array]:
    """Read all of the tasks.

    {task}_sentences: text, with the sentences of label 1 first. {task}_labels: uint8. {split}_x: relatedness of SICK's
    pairs, float64. {split}_first and {split}_second: their sentences, text. notes: text.
    """
    contents = {PurePosixPath(name).name: _bytes(content) for name, content in files.items()}
    arrays, repairs = dict[str, Array](), Repairs()
    for task, names in CLASSES.items():
        arrays |= classes(task, *(_sentences(contents[name], name, repairs) for name in names))
    for split, name in PAIRS.items():
        arrays |= pairs(split, _rows(contents[name], name, repairs))
    return arrays | {"notes": lines_array(repairs.told())}


def classes(task: str, ones: list[str], zeros: list[str]) -> dict[str, Array]:
    """Return the arrays of a classification task."""
    labels = np.repeat(np.array([1, 0], np.uint8), [len(ones), len(zeros)])
    return {f"{task}_sentences": lines_array([*ones, *zeros]), f"{task}_labels": labels}


def pairs(split: str, rows: list[tuple[str, str, float]]) -> dict[str, Array]:
    """Return the arrays of pairs with their relatedness."""
    firsts, seconds, scores = zip(*rows)
    texts = {f"{split}_first": lines_array(firsts), f"{split}_second": lines_array(seconds)}
    return {f"{split}_x": np.array(scores, np.float64), **texts}


def _bytes(content: bytes | Path) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _sentences(content: bytes, name: str, repairs: Repairs) -> list[str]:
    sentences = [_spaced(line) for _, line in _lines(content, name, repairs)]
    if not sentences:
        raise fail(f"{name} must hold sentences", "none", "Bring a whole copy.")
    return sentences


def _lines(content: bytes, name: str, repairs: Repairs) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines that hold text."""
    if b"\0" in content:
        raise fail(f"{name} must be UTF-8 or cp1252 text", "NUL bytes, as in UTF-16", "Convert it to UTF-8.")
    encodings = set[str]()
    # Not splitlines: byte 85 is an ellipsis in cp1252 and a line end in Unicode
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n"), start=1):
        text, encoding = _decoded(line)
        case = f"line {number} of {name}"
        encodings.add(encoding)
        if len(encodings - {"ascii"}) > 1:
            repairs.add(f"files with lines of both UTF-8 and cp1252, each line read as its own, {name}", case)
            encodings = {encoding}
        if "\ufffd" in text:
            repairs.add("lines with bytes that neither UTF-8 nor cp1252 has, replaced", case)
        if text.strip():
            yield number, text
        else:
            repairs.add("empty lines, skipped", case)


def _decoded(line: bytes) -> tuple[str, str]:
    """Return the text of a line and its encoding."""
    try:
        encoding = "ascii" if line.isascii() else "utf-8"
        text = line.decode(encoding)
    except UnicodeDecodeError:
        encoding, text = "cp1252", line.decode("cp1252", errors="replace")
    return text, encoding


def _spaced(text: str) -> str:
    """Return a text with single spaces, and none at its ends."""
    return " ".join(text.split())


def _rows(content: bytes, name: str, repairs: Repairs) -> list[tuple[str, str, float]]:
    lines = [(number, [*map(_spaced, line.split("\t"))]) for number, line in _lines(content, name, repairs)]
    if not lines or lines[0][1][0] != HEADER:
        received = repr(lines[0][1][0][:40]) if lines else "an empty file"
        raise fail(f"{name} must begin with the header {HEADER}", received, "Bring a whole copy.")
    rows = [row for number, columns in lines[1:] if (row := _pair(columns, f"line {number} of {name}", repairs))]
    if not rows:
        raise fail(f"{name} must hold pairs", "none", "Bring a whole copy.")
    return rows


def _pair(columns: list[str], case: str, repairs: Repairs) -> tuple[str, str, float] | None:
    """Return sentences and score of a row; None where a sentence is empty."""
    if len(columns) != 5:
        raise fail(f"{case} must have 5 columns", str(len(columns)), "Separate them by tabs, as the published file.")
    _, first, second, score, judgment = columns
    if judgment not in JUDGMENTS:
        raise fail(f"{case} must end in one of {', '.join(JUDGMENTS)}", repr(judgment[:40]), "Correct the line.")
    relatedness = _relatedness(score, case)
    if not first or not second:
        repairs.add("pairs with an empty sentence, skipped", case)
        return None
    return first, second, relatedness


def _relatedness(text: str, case: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST <= value <= MOST:
        raise InputError(f"{case} must have a relatedness from {LEAST} to {MOST}, got {text[:40]!r}. Correct the line.")
    return value
