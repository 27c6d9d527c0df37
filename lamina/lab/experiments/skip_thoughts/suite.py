"""The sentence evaluation of a run: its encoder beside the untrained one, the mean of its word vectors and controls.

Results are kept in the run's folder, apart for each checkpoint, file of word vectors and encoder: a killed evaluation
resumes, and results of one encoder are never taken for those of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...options import Settings
from ...runs.folder import RunFolder
from ...sentences import evaluate, tasks
from ...sentences.classification import protocol_of
from ...sentences.controls import CONTROLS
from .encoding import MODEL, Opened, SentenceEncoder, checked_header, open_run
from .expansion import WordVectors, read_vectors

COMMAND = "lamina evaluate --suite sentences"
FOLDER = "sentences"  # in the run's folder
Line = dict[str, Any]


@dataclass(frozen=True)
class Suite:
    """Lines of measures, each with its "task" and "row", and facts for the output.

    data: of the tasks. books: of training. folder: of the results.
    """

    lines: tuple[Line, ...]
    update: int
    data: tasks.TaskData
    books: dict[str, Any]
    folder: Path


def evaluated(
    path: Path,
    settings: Settings,
    names: Sequence[str] | None,
    protocol: str,
    vectors: Path | None,
    say: Callable[[str], object],
) -> Suite:
    """Evaluate a run's encoder and its controls, or read the lines that an earlier call measured.

    Args:
        path: folder of the run.
        settings: where the data are, and the device.
        names: of tasks. By default all.
        protocol: "kiros" or "senteval".
        vectors: file of word vectors for words that training never saw.
        say: receives progress.
    """
    checked_header(path, COMMAND)
    protocol_of(protocol)
    data = tasks.taken(settings.root, names)
    opened = open_run(path, settings, COMMAND, None if vectors is None else read_vectors(vectors))
    folder = path / FOLDER / _name(opened.update, opened.vectors)
    with RunFolder.open(path):  # two processes must not append to the same files
        lines = _lines(opened, data, protocol, folder, say)
    return Suite(tuple(lines), opened.update, data, opened.books.describe(), folder)


def _name(update: int, vectors: WordVectors | None) -> str:
    """Return the name of a checkpoint's folder; other word vectors make another encoder."""
    if vectors is None:
        return f"update-{update}"
    hashed = hashlib.sha256("\n".join(vectors.words).encode())
    hashed.update(vectors.rows.tobytes())
    return f"update-{update}-vectors-{hashed.hexdigest()[:12]}"


def _lines(
    opened: Opened, data: tasks.TaskData, protocol: str, folder: Path, say: Callable[[str], object]
) -> list[Line]:
    lines = []
    for row, encoder in opened.encoders.items():
        controls = tuple(CONTROLS) if row == MODEL else ()  # they read no vectors: once is enough
        measure = partial(evaluate, protocol=protocol, controls=controls, say=partial(_told, row, say))
        for part, one in _parts(data, encoder):
            found = measure(one.encode, part, results=folder / f"{row}.jsonl", cache=folder / row)
            lines += [{**line, "row": row if line["row"] == MODEL else line["row"]} for line in found]
    return lines


def _told(row: str, say: Callable[[str], object], text: str) -> None:
    say(f"{row}: {text}")


def _parts(data: tasks.TaskData, encoder: SentenceEncoder) -> list[tuple[tasks.TaskData, SentenceEncoder]]:
    """Return SICK with the encoder that reads the end mark, and the other tasks without it, as the authors do."""
    pairs = {name: task for name, task in data.tasks.items() if isinstance(task, tasks.Relatedness)}
    others = {name: task for name, task in data.tasks.items() if name not in pairs}
    without_end = replace(encoder, with_end=False)
    parts = [(replace(data, tasks=part), one) for part, one in ((pairs, encoder), (others, without_end))]
    return [(part, one) for part, one in parts if part.tasks]
