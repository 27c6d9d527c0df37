"""The sentence evaluation of skip-thoughts, for any encoder: SICK, MR, CR, SUBJ and MPQA beside control rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import fail, one_of
from ..data.formats import Array
from ..runs.files import Metrics, disk_errors, make_folder, plain
from . import relatedness
from .classification import Protocol, cross_validated, protocol_of
from .controls import CONTROLS, mean_of
from .encodings import Encode, Encoder, Say, same_encoder
from .tasks import Classification, Task, TaskData, fingerprint, taken

FILE = "sentence_eval.jsonl"  # in a folder of results
MODEL, VECTORS = "model", "vectors"
Line = dict[str, Any]
Place = str | os.PathLike[str]


def evaluate(
    encode: Encode,
    data: TaskData | Iterable[Task] | Place | None = None,
    tasks: Sequence[str] | None = None,
    protocol: str = "kiros",
    results: Place | None = None,
    cache: Place | None = None,
    *,
    controls: Sequence[str] = tuple(CONTROLS),
    vectors: Mapping[str, Array] | None = None,
    say: Say | None = None,
) -> list[Line]:
    """Return one line of measures for each task and row: the model, then the controls.

    Args:
        encode: from a list of strings to an array or tensor [strings, D]. A sentence must have the same vector
            whatever the others of the list are.
        data: folder with the published files, as for ``registry.load``; or tasks, loaded or made by you.
        tasks: names of some of them. The authors' vectors for SICK have a step for the end of the sentence and the
            others do not: evaluate such an encoder in two calls.
        protocol: of the classification tasks, "kiros" or "senteval"; see ``classification``.
        results: JSON-lines file, or a folder for one. Each line is appended when it is measured, and lines that are
            there are not measured again, so a killed evaluation resumes.
        cache: folder for the vectors of each task.
        controls: which of "majority" and "tfidf" to show.
        vectors: word vectors by word, for another control row: their mean over a sentence's words.
        say: receives progress as short texts.

    Every line holds "task", "row", "protocol", "data" and the measures: "accuracy" and "std" in percent, or "pearson",
    "spearman" and "mse". A correlation with constant predictions is None.
    """
    for name in controls:
        one_of("a control row", name, CONTROLS)
    chosen, held, say = taken(data, tasks), _Results(results), say or _silent
    rows = _rows(encode, controls, vectors, None if cache is None else Path(cache), say)
    lines, run = [], _Run(protocol, protocol_of(protocol), held, say)
    for note in chosen.notes:
        say(note)
    for task in chosen.tasks.values():
        lines += [run.line(task, name, row, chosen.kind) for name, row in rows.items()]
    return lines


def _silent(text: str) -> None:
    """Show no progress."""


class _Results:
    """Lines of a file that may not exist yet, or of no file at all."""

    def __init__(self, place: Place | None) -> None:
        self._file: Metrics | None = None
        self.lines = list[Line]()
        if place is not None:
            path = Path(place)
            path = path / FILE if path.is_dir() or not path.suffix else path
            make_folder(path.parent)
            self._file = Metrics(path)
            self.lines = self._file.read()

    def append(self, line: Line) -> None:
        self.lines.append(line)
        if self._file:
            with disk_errors(self._file.path):
                self._file.append([line])
                self._file.sync()


class _Control:
    """Row that needs no encoder."""

    def __init__(self, measure: Callable[[Task, Protocol], Line]) -> None:
        self.measure = measure

    def probe(self, task: Task) -> list[float]:
        return []

    def measured(self, task: Task, protocol: Protocol, probe: Sequence[float]) -> Line:
        return self.measure(task, protocol)


class _Model:
    """Row of an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.probe = encoder, encoder.probe

    def measured(self, task: Task, protocol: Protocol, probe: Sequence[float]) -> Line:
        vectors = self.encoder.vectors(task, probe)
        if isinstance(task, Classification):
            return cross_validated(task, _stacked(vectors, task.sentences), protocol)
        return relatedness.regressed(task, lambda split: _pair_features(vectors, *_sides(task, split)))


Row = _Control | _Model


def _rows(
    encode: Encode, controls: Sequence[str], vectors: Mapping[str, Array] | None, cache: Path | None, say: Say
) -> dict[str, Row]:
    kept = (lambda name: None) if cache is None else partial(Path, cache)
    rows: dict[str, Row] = {MODEL: _Model(Encoder(encode, kept(MODEL), say))}
    rows |= {name: _Control(CONTROLS[name]) for name in controls}
    if vectors is not None:
        rows[VECTORS] = _Model(Encoder(mean_of(vectors), kept(VECTORS), say))
    return rows


class _Run:
    """Lines of one evaluation, measured or found in the results."""

    def __init__(self, name: str, protocol: Protocol, results: _Results, say: Say) -> None:
        self.name, self.protocol, self.results, self.say = name, protocol, results, say

    def line(self, task: Task, name: str, row: Row, kind: str) -> Line:
        protocol = self.name if isinstance(task, Classification) else "kiros"  # SentEval's head for SICK is not built
        key = {"task": task.name, "row": name, "protocol": protocol, "data": kind, "sha256": fingerprint(task)}
        probe = row.probe(task)
        held = next((line for line in self.results.lines if key.items() <= line.items()), None)
        if held is None:
            held = plain({**key, "probe": probe, **row.measured(task, self.protocol, probe)})
            self.results.append(held)
        elif not same_encoder(held.get("probe", ()), probe):
            received = f"{task.name}, {name}, of another encoder"
            raise fail("the file of results must be of this encoder", received, "Pass another file as results.")
        self.say(f"{task.name}, {name}: {_figures(held)}")
        return held


def _figures(line: Line) -> str:
    shown = ("accuracy", "std", "pearson", "spearman", "mse")
    return ", ".join(f"{name} {line[name]:.4g}" for name in shown if line.get(name) is not None)


def _sides(task: Any, split: str) -> tuple[Sequence[str], Sequence[str]]:
    return task.splits[split].first, task.splits[split].second


def _stacked(vectors: Mapping[str, Array], sentences: Sequence[str]) -> Array:
    return np.stack([vectors[sentence] for sentence in sentences])


def _pair_features(vectors: Mapping[str, Array], first: Sequence[str], second: Sequence[str]) -> Array:
    return relatedness.pair_features(_stacked(vectors, first), _stacked(vectors, second))
