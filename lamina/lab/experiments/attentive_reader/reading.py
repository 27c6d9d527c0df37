"""Reading by hand: a passage and a query for a trained reader, its answers, and where it looked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ....errors import fail, one_of
from ...data.question_files import ENTITY, LONGEST, PLACEHOLDER, SENTENCES, SPLITS, four_sentences, sentences_of
from ...data.questions import MARKS, UNKNOWN, QuestionData, Questions, Words
from ...data.registry import EMBEDDED
from ...data.text import Ragged
from ...options import Settings
from ...runs.folder import RunFolder
from ...training.evaluate import config_of, header_of, restored

PIECES = re.compile(r"@\w+|'\w+|\w+(?:[-.,']\w+)*|[^\w\s]")


class Model(Protocol):
    """A trained reader."""

    def read(self, passages: Tensor, lengths: Tensor, queries: Tensor, query_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of all words, [B, words], and attention, [B, T], for ids [B, T] and lengths."""


@dataclass(frozen=True)
class Guess:
    """An entity, and the probability that it is the answer."""

    entity: str
    probability: float
    right: bool = False


@dataclass(frozen=True)
class Reading:
    """One question, its guesses from the most probable on, and the share of attention of each word of the passage.

    elsewhere: probability of everything that the question does not name. answer: empty where nobody knows it.
    """

    passage: tuple[str, ...]
    attention: tuple[float, ...]
    query: tuple[str, ...]
    guesses: tuple[Guess, ...]
    elsewhere: float
    answer: str
    notes: tuple[str, ...]

    @property
    def marked(self) -> list[tuple[str, float, float]]:
        """Return each word with its attention, and that as a share of the largest."""
        most = max(self.attention) or 1.0
        return [(word, weight, weight / most) for word, weight in zip(self.passage, self.attention)]


class Reader:
    """A trained model with the data of its training.

    company: how many questions of the data are read beside each one, for a model whose cases share statistics.
    """

    def __init__(self, model: Model, data: QuestionData, company: int = 0) -> None:
        self.model, self.data, self.company = model, data, company

    def of_text(self, passage: str, query: str) -> Reading:
        """Read a passage and a query of the user's own. Entities are written @entity1, @entity2 and so on."""
        words = self.data.vocabulary
        story, asked = tokenised(passage, words), tokenised(query, words)
        check(story, asked)
        notes = list[str]()
        if (count := len(sentences_of(story))) > SENTENCES:
            story = four_sentences(story, asked)
            shared = f"Read are the {SENTENCES} that share most words with the query, as in training."
            notes.append(f"The passage has {count} sentences. {shared}")
        check(story, asked)
        labels = self._labels(story, asked)
        sides = [words.encode(labels.get(word, word) for word in side) for side in (story, asked)]
        unknown = [word for side in zip((story, asked), sides) for word, number in zip(*side) if number == UNKNOWN]
        if unknown:
            notes.append(f"Read as unknown words: {', '.join(dict.fromkeys(unknown))}.")
        return self._read(sides[0], sides[1], {label: word for word, label in labels.items()}, notes, (story, asked))

    def of_data(self, split: str, number: int) -> Reading:
        """Read question ``number`` of a split, the first is 1."""
        questions = self.data.splits[split]
        if not 1 <= number <= len(questions):
            received = f"{number}, and the {split} split has {len(questions):,} questions"
            raise fail("--question must be the number of a question", received, f"Pass 1 to {len(questions):,}.")
        passage, query = (_row(ragged, number - 1) for ragged in (questions.passages, questions.queries))
        return self._read(passage, query, {}, [], None, self._word(int(questions.answers[number - 1])))

    def _word(self, number: int) -> str:
        return self.data.vocabulary.words[number]

    def _labels(self, story: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
        """Return the reader's label of each entity, as in training: by first appearance, or its own if it is known."""
        own = dict.fromkeys(word for word in (*story, *asked) if ENTITY.fullmatch(word))
        known = [self._word(number) for number in self.data.entities.tolist()]
        if len(own) > len(known):
            rule = f"a passage and its query may have {len(known)} entities, as many as the reader has labels"
            raise fail(rule, f"{len(own)}", "Take a shorter passage.")
        if self.data.relabel:
            return dict(zip(own, known))
        free = iter([label for label in known if label not in own])
        return {word: word if word in known else next(free) for word in own}

    def _read(
        self,
        passage: Sequence[int],
        query: Sequence[int],
        names: Mapping[str, str],
        notes: Sequence[str],
        texts: tuple[Sequence[str], Sequence[str]] | None,
        answer: str = "",
    ) -> Reading:
        """Ask the model. ``names``: the user's own, by label; ``texts``: words in place of those of the ids."""
        chances, attention = self._answered(passage, query)
        entities = set(self.data.entities.tolist())
        named = [number for number in dict.fromkeys([*passage, *query]) if number in entities]
        ranked = sorted(named, key=lambda number: -chances[number])
        guesses = [
            Guess(names.get(word, word), chances[number], word == answer)
            for word, number in ((self._word(number), number) for number in ranked)
        ]
        elsewhere = max(0.0, 1 - sum(guess.probability for guess in guesses))
        story, asked = texts or ([self._word(n) for n in passage], [self._word(n) for n in query])
        return Reading(tuple(story), tuple(attention), tuple(asked), tuple(guesses), elsewhere, answer, tuple(notes))

    def _answered(self, passage: Sequence[int], query: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the probabilities of all words, and the attention to the passage's."""
        valid: Questions = self.data.splits["valid"]
        others = range(min(self.company, len(valid)))
        sides = []
        for own, ragged in ((passage, valid.passages), (query, valid.queries)):
            rows = [list(own), *(_row(ragged, number) for number in others)]
            sides.append(Ragged.of(rows, torch.long).to(self.data.entities.device).padded(torch.arange(len(rows))))
        (passages, lengths), (queries, query_lengths) = sides
        with torch.no_grad():
            found, attention = self.model.read(passages, lengths, queries, query_lengths)
        return found[0].double().exp().tolist(), attention[0, : len(passage)].tolist()


def _row(ragged: Ragged, number: int) -> list[int]:
    first, last = ragged.offsets[number : number + 2].tolist()
    ids: list[int] = ragged.values[first:last].tolist()
    return ids


def tokenised(text: str, words: Words) -> list[str]:
    """Return lower-case tokens as the data have them: punctuation apart, but for words that training has with it."""
    parts = (
        PIECES.findall(part) if part not in words.ids or part in MARKS else [part] for part in text.lower().split()
    )
    return [token for tokens in parts for token in tokens]


def check(passage: Sequence[str], query: Sequence[str]) -> None:
    """Refuse a passage or query that no reader can answer."""
    if not passage:
        raise fail("a passage must have words", "none", "Write sentences with entities as @entity1, @entity2.")
    if PLACEHOLDER not in query:
        raise fail(f"a query must have {PLACEHOLDER} where the answer goes", repr(" ".join(query)), "Put it there.")
    if not any(ENTITY.fullmatch(word) for word in passage):
        remedy = "Write names as @entity1, @entity2: readers know no others."
        raise fail("a passage must have an entity", f"{len(passage):,} words and none", remedy)
    if len(passage) > LONGEST and len(sentences_of(passage)) <= SENTENCES:
        rule = f"{SENTENCES} sentences may have {LONGEST:,} words, points included"
        raise fail(rule, f"{len(passage):,}", "Take a shorter passage.")


@dataclass(frozen=True)
class Opened:
    """A run's best model, ready to read, and facts for the page."""

    reader: Reader
    run: str
    update: int
    data: dict[str, Any]  # as the data describe themselves


def open_run(path: Path, settings: Settings, split: str) -> Opened:
    """Restore a run's best checkpoint; a run on the stand-in finds it without --data."""
    one_of("--split", split, SPLITS)
    header = header_of(path, "lamina read")
    if header["experiment"] != "attentive_reader":
        rule, remedy = "lamina read needs a run of attentive_reader", "Pass the folder of such a run."
        raise fail(rule, f"{path}, a run of {header['experiment']}", remedy)
    embedded = header["data"].get("kind") == EMBEDDED
    root = EMBEDDED if settings.root is None and embedded else settings.root
    with RunFolder.open(path) as folder:
        model, data, checkpoint, _ = restored(folder, header, Settings(root=root, device=settings.device))
    config = config_of(header)
    company = config.batch_size - 1 if config.coupling() else 0
    reader = Reader(cast(Model, model), getattr(data, "source", data), company)
    return Opened(reader, str(path), checkpoint.step, reader.data.describe())
