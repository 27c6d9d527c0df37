"""Cloze questions for training: passages, queries and answers as numbers, and how far one gets without reading.

Passages of real data are numbered once and kept in the cache folder, mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import fail, one_of
from . import array_cache, facts, formats, question_files, registry
from .formats import Array, lines_array, lines_in
from .question_files import ENTITY, PLACEHOLDER, SPLITS
from .text import Ragged

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DATASETS = ("cnn_qa", "facts")
END, UNKNOWN, NUMBER = 0, 1, 2
MARKS = ("<end>", "<unknown>", "<number>")
NUMERAL = re.compile(r"\d[\d.,]*")
SHARDS = 4  # training files of cnn_qa
CACHE = "questions"  # folder in the cache folder


class Words:
    """Numbered words: three marks, then the words of training by their counts."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self.ids = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of lower-case words; numerals share one."""
        return [NUMBER if NUMERAL.fullmatch(word) else self.ids.get(word, UNKNOWN) for word in words]


@dataclass(frozen=True, eq=False)
class Questions:
    """One split: passages and queries as ids, and the id of each answer, which is an entity's."""

    passages: Ragged
    queries: Ragged
    answers: Tensor

    def __len__(self) -> int:
        return len(self.answers)

    def to(self, device: torch.device | str) -> Questions:
        return Questions(self.passages.to(device), self.queries.to(device), self.answers.to(device))


@dataclass(frozen=True, eq=False)
class QuestionData:
    """Questions in "train", "valid" and "test", and where they are from.

    kind: "real" or "embedded". notes: questions that were skipped or changed, counted by kind. entities: ids of the
    @entityN in the vocabulary, by N. controls: for each split, errors of two guesses that need no reading, and the
    share of questions whose answer is in the passage. relabel: how many labels the entities of a question share; 0
    leaves them as the data have them.
    """

    name: str
    kind: str
    label: str
    sha256: dict[str, str]
    splits: Mapping[str, Questions]
    vocabulary: Words
    entities: Tensor
    controls: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...]
    relabel: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the description of the data that run folders and records store."""
        sizes = {name: len(split) for name, split in self.splits.items()}
        described = {"name": self.name, "kind": self.kind, "label": self.label, "sizes": sizes, "sha256": self.sha256}
        controls = {name: dict(values) for name, values in self.controls.items()}
        return described | {"vocabulary": len(self.vocabulary), "controls": controls, "notes": list(self.notes)}

    def to(self, device: torch.device | str) -> QuestionData:
        splits = {name: split.to(device) for name, split in self.splits.items()}
        return replace(self, splits=splits, entities=self.entities.to(device))


def load_questions(
    dataset: str,
    root: str | None = None,
    vocabulary: int | None = None,
    limit: int | None = None,
    *,
    shards: int | None = None,
    relabel: int = 0,
) -> QuestionData:
    """Return a set of cloze questions, each of them checked.

    Args:
        dataset: "cnn_qa", or "facts" for the embedded stand-in.
        root: as for ``registry.load``.
        vocabulary: number of ids, with marks, entities and the placeholder, which are always among them. By default
            every word that training has at least twice.
        limit: how many of the training questions to read, the first ones.
        shards: how many of the four training files of cnn_qa to read; each is a random quarter. By default all.
        relabel: label the entities of each question @entity0, @entity1 ... by first appearance, with at most so many
            labels. By default entities keep the labels of the data.
    """
    one_of("a data set with questions", dataset, DATASETS)
    for name, value in (("vocabulary", vocabulary), ("limit", limit), ("shards", shards), ("relabel", relabel)):
        _check(name, value, most=SHARDS if name == "shards" else None, least=0 if name == "relabel" else 1)
    asked = registry.EMBEDDED if dataset == "facts" else root
    source = _row(shards)
    local = registry.locate(source, asked)
    options: dict[str, Any] = {"vocabulary": vocabulary, "limit": limit, "relabel": relabel}
    if local is None:
        loaded = registry.load(source.name, registry.EMBEDDED)
        arrays, told = prepared(loaded.arrays, **options)
        label = facts.TITLE if dataset == "facts" else loaded.label
        return _data(dataset, registry.EMBEDDED, label, loaded.sha256, arrays, told, relabel)
    arrays, told = _real(source, local, options)
    counted = " + ".join(f"{len(arrays[f'{split}_answers']):,}" for split in SPLITS)
    part = f", {shards} of {SHARDS} training files" if shards and shards < SHARDS and not local.layout.own else ""
    return _data(dataset, "real", f"{source.title}{part} (real: {counted})", told["sha256"], arrays, told, relabel)


def _check(name: str, value: Any, most: int | None = None, least: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and least <= value <= (value if most is None else most)):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise fail(f"{name} must be a whole number, {bounds}", repr(value), "Leave it out for the default.")


def _row(shards: int | None) -> registry.Source:
    """Return the row of cnn_qa, with the first ``shards`` of its training files."""
    source = registry.lookup("cnn_qa")
    published = source.layouts[0]
    left_out = [file for file in published.files if file.name.startswith("train")][shards if shards else SHARDS :]
    files = tuple(file for file in published.files if file not in left_out)
    return replace(source, layouts=(replace(published, files=files), *source.layouts[1:]))


def _real(
    source: registry.Source, local: registry.LocalFiles, options: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the numbered questions from the cache, or number them and keep them there."""
    with registry.file_errors(source, local):
        contents = local.contents()  # published files are compared with their hashes each time
        prints = _prints(local)
        code = [Path(module.__file__ or "").read_bytes() for module in (question_files, formats)]
        code.append(Path(__file__).read_bytes())
        stamp = [prints, dict(options), [hashlib.sha256(text).hexdigest() for text in code]]
        key = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]
        folder = registry.default_root() / CACHE / key
        if held := array_cache.read(folder):
            return held
        arrays, told = prepared(local.layout.read(contents), **options)
        told["sha256"] = {file.name: file.sha256 or formats.digest(path) for file, path in local.files.items()}
    if array_cache.write(folder, arrays, told):
        return array_cache.read(folder) or (arrays, told)  # mapped: the copy in memory can go
    return arrays, told


def _prints(local: registry.LocalFiles) -> list[Any]:
    """Return hashes of the files; for folders, names, sizes and times of theirs, because reading takes minutes."""
    prints = list[Any]()
    for file, path in local.files.items():
        if path.is_dir():
            states = [(one.name, one.stat()) for one in question_files.question_files(path)]
            prints.append([file.name, str(path), [(name, at.st_size, at.st_mtime_ns) for name, at in states]])
        else:
            prints.append([file.name, file.sha256 or formats.digest(path)])
    return prints


def _data(
    name: str,
    kind: str,
    label: str,
    sha256: dict[str, str],
    arrays: Mapping[str, Array],
    told: Mapping[str, Any],
    relabel: int,
) -> QuestionData:
    import torch

    def tensor(key: str) -> Tensor:
        return torch.from_numpy(arrays[key])

    def ragged(key: str) -> Ragged:
        return Ragged(tensor(key), tensor(f"{key}_offsets"))

    splits = {
        split: Questions(ragged(f"{split}_passages"), ragged(f"{split}_queries"), tensor(f"{split}_answers"))
        for split in SPLITS
    }
    words, notes = Words(lines_in(arrays["words"])), tuple(told["notes"])
    return QuestionData(name, kind, label, sha256, splits, words, tensor("entities"), told["controls"], notes, relabel)


# From numbers in the table of all words to ids of the vocabulary


@dataclass(frozen=True, eq=False)
class Rows:
    """One split in numbers of the table of words: tokens hold passage and query of each question, end to end."""

    lengths: Array  # [N, 2]: of passage and query
    answers: Array  # [N]
    tokens: Array

    @property
    def ends(self) -> Array:
        ends: Array = self.lengths.sum(1).cumsum()
        return ends

    def where(self, keep: Array) -> Rows:
        """Return the questions that a mask names."""
        if keep.all():
            return self
        return Rows(self.lengths[keep], self.answers[keep], self.tokens[np.repeat(keep, self.lengths.sum(1))])

    def mentions(self, is_entity: Array) -> tuple[Array, Array, Array]:
        """Return places of entities among the tokens, their questions, and whether they are in the passage."""
        places, ends = np.flatnonzero(is_entity[self.tokens]), self.ends
        questions = np.searchsorted(ends, places, side="right")
        starts = ends - self.lengths.sum(1)
        return places, questions, places - starts[questions] < self.lengths[questions, 0]

    def with_entities(self, places: Array, tokens: Array, answers: Array) -> Rows:
        changed = self.tokens.copy()
        changed[places] = tokens
        return Rows(self.lengths, answers, changed)


def prepared(
    raw: Mapping[str, Array], vocabulary: int | None = None, limit: int | None = None, relabel: int = 0
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return a data set's questions as ids, and facts for the record: controls and notes."""
    words, splits = lines_in(raw["words"]), {split: _rows(raw, split) for split in SPLITS}
    splits["train"] = splits["train"].where(np.arange(len(splits["train"].answers)) < (limit or np.inf))
    notes = lines_in(raw["notes"]) if "notes" in raw else []
    if relabel:
        words, splits = _all_relabelled(words, splits, relabel, notes)
    else:
        splits = _all_known(words, splits, notes)
    table, chosen, entities = _vocabulary(words, splits["train"], vocabulary, relabel)
    arrays = {"words": lines_array(chosen), "entities": entities}
    for split, rows in splits.items():
        arrays |= {f"{split}_{key}": values for key, values in _numbered(rows, table).items()}
    is_entity = _entities(words)
    controls = {split: controls_of(rows, is_entity) for split, rows in splits.items()}
    return arrays, {"controls": controls, "notes": notes}


def _rows(raw: Mapping[str, Array], split: str) -> Rows:
    numbers = raw[f"{split}_x"].astype(np.int64)
    return Rows(numbers[:, :2], numbers[:, 2], raw[f"{split}_tokens"])


def _entities(words: Sequence[str]) -> Array:
    return np.array([ENTITY.fullmatch(word) is not None for word in words])


def _all_relabelled(
    words: list[str], splits: Mapping[str, Rows], labels: int, notes: list[str]
) -> tuple[list[str], dict[str, Rows]]:
    is_entity, known = _entities(words), {word: number for number, word in enumerate(words)}
    names = [f"@entity{number}" for number in range(labels)]
    added = [name for name in names if name not in known]
    known |= {name: len(words) + number for number, name in enumerate(added)}
    numbers, changed = np.array([known[name] for name in names]), dict[str, Rows]()
    for split, rows in splits.items():
        changed[split] = relabelled(rows, is_entity, numbers)
        dropped = len(rows.answers) - len(changed[split].answers)
        if dropped:
            notes.append(f"{split} questions skipped for more than {labels} entities: {dropped:,}")
        if dropped == len(rows.answers):
            received = f"relabel={labels}, fewer than each of the {split} questions needs"
            raise fail("relabel must leave questions in each split", received, "Pass a larger one.")
    return [*words, *added], changed


def relabelled(rows: Rows, is_entity: Array, labels: Array) -> Rows:
    """Label the entities of each question by first appearance in passage and query, then in the answer.

    Questions with more entities than labels are left out.

    Args:
        rows: questions.
        is_entity: for each word of the table, whether it is an entity.
        labels: numbers of the new labels in the table.
    """
    places, questions, _ = rows.mentions(is_entity)
    total, size = len(rows.answers), len(is_entity)
    owners = np.concatenate([questions, np.arange(total)])
    pairs, first, which = np.unique(
        owners * size + np.concatenate([rows.tokens[places], rows.answers]), return_index=True, return_inverse=True
    )
    owner = pairs // size
    ranks = np.empty(len(pairs), np.int64)
    ranks[np.lexsort((first, owner))] = np.arange(len(pairs)) - np.searchsorted(owner, owner)
    new = labels[np.minimum(ranks, len(labels) - 1)][which]
    changed = rows.with_entities(places, new[: len(places)], new[len(places) :])
    return changed.where(np.bincount(owner, minlength=total) <= len(labels))


def _all_known(words: Sequence[str], splits: Mapping[str, Rows], notes: list[str]) -> dict[str, Rows]:
    """Give entities that training never saw the label of another that their question does not have."""
    is_entity, train = _entities(words), splits["train"]
    seen = np.zeros(len(words), bool)
    seen[train.tokens], seen[train.answers] = True, True
    spare, changed = np.flatnonzero(seen & is_entity).tolist(), {"train": train}
    for split in SPLITS[1:]:
        changed[split], renamed, dropped = _known(splits[split], is_entity, seen, spare)
        if renamed:
            rule = "entities that training never saw take labels that their question does not have"
            notes.append(f"{split} questions whose {rule}: {renamed:,}")
        if dropped:
            notes.append(f"{split} questions skipped for more entities than training has: {dropped:,}")
        if not len(changed[split].answers):
            received = f"{len(spare)} entities in training, fewer than each {split} question has"
            raise fail("training must have as many entities as a question", received, "Take more training questions.")
    return changed


def _known(rows: Rows, is_entity: Array, seen: Array, spare: Sequence[int]) -> tuple[Rows, int, int]:
    places, questions, _ = rows.mentions(is_entity)
    new, answers, keep = rows.tokens[places].copy(), rows.answers.copy(), np.ones(len(rows.answers), bool)
    affected = np.union1d(questions[~seen[new]], np.flatnonzero(~seen[answers])).tolist()
    for question in affected:
        part = slice(*np.searchsorted(questions, (question, question + 1)))
        own = dict.fromkeys([*new[part].tolist(), int(answers[question])])
        free = [label for label in spare if label not in own]
        unseen = [entity for entity in own if not seen[entity]]
        keep[question] = len(unseen) <= len(free)
        names = {entity: entity for entity in own} | dict(zip(unseen, free))
        new[part] = [names[entity] for entity in new[part].tolist()]
        answers[question] = names[int(answers[question])]
    dropped = int((~keep).sum())
    return rows.with_entities(places, new, answers).where(keep), len(affected) - dropped, dropped


def _vocabulary(words: Sequence[str], train: Rows, size: int | None, relabel: int) -> tuple[Array, list[str], Array]:
    """Return the id of each word of the table, the vocabulary, and the ids of the entities by their numbers."""
    counts, is_entity = np.bincount(train.tokens, minlength=len(words)), _entities(words)
    kept = counts > 0
    kept[train.answers] = True
    if relabel:  # every label, for the other splits may have more entities in a question
        kept |= is_entity & np.array([word in {f"@entity{n}" for n in range(relabel)} for word in words])
    numerals = np.array([NUMERAL.fullmatch(word) is not None for word in words])
    always = [n for n in np.flatnonzero(kept).tolist() if is_entity[n] or words[n] == PLACEHOLDER]
    ordinary = (counts > 1) & ~is_entity & ~numerals
    others = [n for n in np.flatnonzero(ordinary).tolist() if words[n] != PLACEHOLDER and words[n] not in MARKS]
    room = len(others) if size is None else size - len(MARKS) - len(always)
    if room < 0:
        received = f"vocabulary={size} for {len(MARKS)} marks, {len(always) - 1} entities and {PLACEHOLDER}"
        raise fail("vocabulary must have room for marks, entities and the placeholder", received, "Pass more.")

    def rank(number: int) -> tuple[int, str]:
        return -int(counts[number]), words[number]

    chosen = sorted([*always, *sorted(others, key=rank)[:room]], key=rank)
    table = np.where(numerals, NUMBER, UNKNOWN).astype(np.int64)
    table[chosen] = np.arange(len(MARKS), len(MARKS) + len(chosen))
    entities = sorted((n for n in chosen if is_entity[n]), key=lambda n: (int(words[n][len("@entity") :]), words[n]))
    return table, [*MARKS, *(words[n] for n in chosen)], table[entities]


def _numbered(rows: Rows, table: Array) -> dict[str, Array]:
    """Return passages, queries and answers as ids, end to end, with offsets."""
    in_passage = np.repeat(np.tile([True, False], len(rows.answers)), rows.lengths.ravel())
    arrays = {"answers": table[rows.answers]}
    for key, mask, lengths in zip(("passages", "queries"), (in_passage, ~in_passage), rows.lengths.T):
        arrays |= {key: table[rows.tokens[mask]], f"{key}_offsets": np.concatenate([[0], lengths.cumsum()])}
    return arrays


# Answers without reading


def controls_of(rows: Rows, is_entity: Array) -> dict[str, float]:
    """Return the errors of two guesses, the passage's most frequent entity and the most frequent one that is not in
    the query, and the share of questions whose answer is in the passage. Of equally frequent entities the first wins.
    """
    places, questions, in_passage = rows.mentions(is_entity)
    size = len(is_entity)
    keys = questions * size + rows.tokens[places]
    pairs, first, counts = np.unique(keys[in_passage], return_index=True, return_counts=True)
    answers = np.arange(len(rows.answers)) * size + rows.answers
    order = np.lexsort((first, -counts, pairs // size))
    asked = np.isin(pairs, keys[~in_passage])[order]
    return {
        "most_frequent": _error(pairs[order], answers, size),
        "most_frequent_not_in_query": _error(pairs[order][~asked], answers, size),
        "answer_present": float(np.isin(answers, pairs).mean()),
    }


def _error(ranked: Array, answers: Array, size: int) -> float:
    """Return the error of guessing the first pair of each question; a question without a pair is wrong."""
    _, firsts = np.unique(ranked // size, return_index=True)
    return 1 - float(np.isin(answers, ranked[firsts]).mean())
