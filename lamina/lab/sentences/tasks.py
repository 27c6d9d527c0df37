"""Tasks of the suite: labelled sentences, and pairs of sentences with their relatedness."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import fail, one_of, show
from ..data import registry
from ..data.formats import Array, lines_in
from ..data.sentence_files import CLASSES, LEAST, MOST
from ..data.sentence_files import PAIRS as SPLITS

DATASET = "sentence_eval"
NAMES = ("SICK", *CLASSES)


@dataclass(frozen=True, eq=False)
class Classification:
    """Sentences and their labels, 0 or 1."""

    name: str
    sentences: tuple[str, ...]
    labels: Array

    def __post_init__(self) -> None:
        _check_sentences(self.name, self.sentences)
        labels = np.asarray(self.labels)
        if labels.shape != (len(self.sentences),):
            received = f"{show(labels)} for {len(self.sentences):,} sentences"
            raise fail(f"{self.name} must have a label for each sentence", received, "Pass a list of as many.")
        found = [*np.unique(labels).tolist()]
        if found != [0, 1]:
            raise fail(f"the labels of {self.name} must be 0 and 1, both of them", str(found[:8]), "Map them to these.")
        object.__setattr__(self, "labels", labels.astype(np.int64))

    def texts(self) -> tuple[str, ...]:
        return self.sentences


@dataclass(frozen=True, eq=False)
class Pairs:
    """First and second sentences, and how much they are related, from 1 to 5."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    scores: Array


@dataclass(frozen=True, eq=False)
class Relatedness:
    """Pairs in "train", "valid" and "test"."""

    name: str
    splits: Mapping[str, Pairs]

    def __post_init__(self) -> None:
        if set(self.splits) != set(SPLITS):
            raise fail(f"{self.name} must have {', '.join(SPLITS)}", str(sorted(self.splits)), "Pass these splits.")
        for split, pairs in self.splits.items():
            _check_pairs(f"{self.name}, {split},", pairs)

    def texts(self) -> tuple[str, ...]:
        return tuple(text for pairs in self.splits.values() for part in (pairs.first, pairs.second) for text in part)


Task = Classification | Relatedness


@dataclass(frozen=True, eq=False)
class TaskData:
    """Tasks by name and where they are from; notes tell which lines were skipped or repaired."""

    tasks: Mapping[str, Task]
    kind: str  # "real", "embedded" or "own"
    label: str
    notes: tuple[str, ...] = ()


def load(root: str | os.PathLike[str] | None = None) -> TaskData:
    """Return the published tasks; ``root`` as for ``registry.load``."""
    loaded = registry.load(DATASET, root)
    tasks = {name: _task(name, loaded.arrays) for name in NAMES}
    return TaskData(tasks, loaded.kind, loaded.label, loaded.notes)


def taken(data: TaskData | Iterable[Task] | str | os.PathLike[str] | None, names: Sequence[str] | None) -> TaskData:
    """Return the named tasks of a folder, of loaded data, or of tasks that the caller made."""
    if data is None or isinstance(data, (str, os.PathLike)):
        data = load(data)
    elif not isinstance(data, TaskData):
        data = _own([*data])
    for name in names or ():
        one_of("a task", name, data.tasks)
    chosen = data.tasks if names is None else {name: data.tasks[name] for name in names}
    return TaskData(chosen, data.kind, data.label, data.notes)


def _own(tasks: Sequence[Task]) -> TaskData:
    by_name = {task.name: task for task in tasks}
    if len(by_name) < len(tasks):
        received = ", ".join(task.name for task in tasks)
        raise fail("tasks must have different names", received, "Rename some of them.")
    return TaskData(by_name, "own", "tasks of your own")


def fingerprint(task: Task) -> str:
    """Return a hash of a task's sentences and of what is to be told about them."""
    scores = [task.labels] if isinstance(task, Classification) else [pairs.scores for pairs in task.splits.values()]
    hashed = hashlib.sha256("\n".join(task.texts()).encode(errors="replace"))
    for values in scores:
        hashed.update(np.asarray(values, np.float64).tobytes())
    return hashed.hexdigest()


def _task(name: str, arrays: Mapping[str, Array]) -> Task:
    if name in CLASSES:
        return Classification(name, tuple(lines_in(arrays[f"{name}_sentences"])), arrays[f"{name}_labels"])
    splits = {split: _pairs(split, arrays) for split in SPLITS}
    return Relatedness(name, splits)


def _pairs(split: str, arrays: Mapping[str, Array]) -> Pairs:
    first, second = (tuple(lines_in(arrays[f"{split}_{part}"])) for part in ("first", "second"))
    return Pairs(first, second, arrays[f"{split}_x"])


def _check_sentences(name: str, sentences: Sequence[str]) -> None:
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str) or not sentence.strip():
            received = f"{show(sentence)} at {number}"
            raise fail(f"each sentence of {name} must be a string that is not blank", received, "Leave it out.")


def _check_pairs(name: str, pairs: Pairs) -> None:
    _check_sentences(name, pairs.first)
    _check_sentences(name, pairs.second)
    scores = np.asarray(pairs.scores, np.float64)
    if not len(pairs.first) == len(pairs.second) == scores.size >= 2:
        received = f"{len(pairs.first)} and {len(pairs.second)} sentences, {scores.size} scores"
        raise fail(f"{name} must have a score for each pair, two pairs or more", received, "Pass lists of one length.")
    wrong = scores[~((scores >= LEAST) & (scores <= MOST))]
    if wrong.size:
        raise fail(f"the scores of {name} must be from {LEAST} to {MOST}", str(wrong[0]), "Rescale them.")
