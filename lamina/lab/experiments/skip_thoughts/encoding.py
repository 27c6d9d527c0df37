"""Encoders of sentences from a run: its model, the same model untrained, and the mean of its word vectors.

Sentences are split into words as the books are, in lower case, and read whole, however long they are. A sentence that
is empty, or has only words that the encoder does not know, is an end mark alone. All vectors have length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ....errors import fail
from ...data.book_files import words_of
from ...data.books import BookData
from ...data.formats import Array
from ...data.registry import EMBEDDED
from ...data.text import END, UNKNOWN, Ragged
from ...options import Settings
from ...runs.folder import RunFolder
from ...training.evaluate import config_of, header_of, restored
from .expansion import WordVectors, expanded
from .model import SkipThoughts, build
from .settings import SkipConfig

TOGETHER = 2**13  # words of one batch, padding included
MODEL, UNTRAINED, MEAN = "model", "untrained", "words"
# From embeddings of words, [T, B, word_size], and lengths, [B], to vectors of sentences, [B, D]
Read = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """Encoder of sentences, which are strings.

    ids: of the words that it knows. table: embeddings of all ids, [ids, word_size]. with_end: whether the end mark is
    read behind the last word, as in training. skips_unknown: leave unknown words out instead of reading their mark.
    """

    ids: Mapping[str, int]
    table: Tensor
    read: Read
    with_end: bool = True
    skips_unknown: bool = False

    @torch.no_grad()
    def encode(self, sentences: Sequence[str]) -> Array:
        """Return a vector of length 1 for each sentence, float32 [sentences, D]."""
        numbers = Ragged.of([self.numbers(sentence) for sentence in sentences], torch.long)
        lengths = numbers.offsets.diff()
        order = lengths.argsort(descending=True, stable=True)
        parts = [self._vectors(*numbers.padded(batch)) for batch in _batches(order, lengths)]
        return np.asarray(torch.cat(parts)[order.argsort()].numpy())

    def numbers(self, sentence: str) -> list[int]:
        """Return the ids that are read for a sentence."""
        found = [self.ids.get(word, UNKNOWN) for word in words_of(sentence)]
        known = [number for number in found if number != UNKNOWN]
        if not known:
            return [END]
        return [*(known if self.skips_unknown else found), *([END] if self.with_end else [])]

    def _vectors(self, numbers: Tensor, lengths: Tensor) -> Tensor:
        device = self.table.device
        vectors = self.read(self.table[numbers.T.to(device)], lengths.to(device))
        return F.normalize(vectors.float(), dim=1).cpu()


def _batches(order: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield sentences from the longest on, so many at once that a batch stays within ``TOGETHER`` or has one."""
    start = 0
    while start < len(order):
        stop = start + max(1, TOGETHER // int(lengths[order[start]]))
        yield order[start:stop]
        start = stop


def mean_of_words(embedded: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of the embeddings of each sentence, without padding."""
    inside = torch.arange(len(embedded), device=embedded.device).unsqueeze(1) < lengths
    return (embedded * inside.unsqueeze(2)).sum(0) / lengths.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Opened:
    """Best model of a run, and what its encoders need beside it.

    vectors: word vectors for words that training never saw; every encoder of the run gets an embedding for them.
    """

    model: SkipThoughts
    books: BookData
    config: SkipConfig
    seed: int
    update: int
    vectors: WordVectors | None = None

    @cached_property
    def trained(self) -> SentenceEncoder:
        """Encoder of the run."""
        return self._encoder(self.model)

    @cached_property
    def untrained(self) -> SentenceEncoder:
        """Same architecture with the weights that the run began with."""
        torch.manual_seed(self.seed)
        fresh = build(self.config, self.books).to(self.model.output.weight.device)
        return self._encoder(fresh.eval())

    @cached_property
    def mean(self) -> SentenceEncoder:
        """Mean of the run's vectors of the known words of a sentence."""
        return replace(self.trained, read=mean_of_words, with_end=False, skips_unknown=True)

    @property
    def encoders(self) -> dict[str, SentenceEncoder]:
        """Encoders by name."""
        return {MODEL: self.trained, UNTRAINED: self.untrained, MEAN: self.mean}

    def _encoder(self, model: SkipThoughts) -> SentenceEncoder:
        table, vocabulary = model.words.weight.detach(), self.books.vocabulary
        if self.vectors is None:
            return SentenceEncoder(vocabulary.ids, table, model.read)
        ids, rows = expanded(vocabulary, table.cpu().numpy(), self.vectors)
        return SentenceEncoder(ids, torch.from_numpy(rows).to(table.device), model.read)


def open_run(path: Path, settings: Settings, command: str, vectors: WordVectors | None = None) -> Opened:
    """Restore a run's best checkpoint; a run on the stand-in finds it whatever --data is.

    Args:
        path: folder of the run.
        settings: where the data are, and the device.
        command: for messages.
        vectors: word vectors for words that training never saw.
    """
    header = checked_header(path, command)
    root = EMBEDDED if header["data"].get("kind") == EMBEDDED else settings.root
    with RunFolder.open(path) as folder:
        model, data, checkpoint, _ = restored(folder, header, Settings(root=root, device=settings.device))
    config, seed = cast(SkipConfig, config_of(header)), int(header["seeds"][0])
    return Opened(cast(SkipThoughts, model), data, config, seed, checkpoint.step, vectors)


def checked_header(path: Path, command: str) -> dict[str, Any]:
    """Return the header of a run of skip_thoughts; refuse other experiments by name."""
    header = header_of(path, command)
    if header["experiment"] != "skip_thoughts":
        remedy = "Pass the folder of such a run."
        raise fail(f"{command} needs a run of skip_thoughts", f"{path}, a run of {header['experiment']}", remedy)
    return header


@dataclass(frozen=True)
class Hit:
    """Sentence that was found: its place in the list, from 0 on, and its cosine with the query."""

    place: int
    cosine: float


def nearest(encoder: SentenceEncoder, sentences: Sequence[str], query: str, top: int) -> list[Hit]:
    """Return the sentences nearest to a query by cosine, the nearest first."""
    cosines = encoder.encode(sentences) @ encoder.encode([query])[0]
    order = np.argsort(-cosines, kind="stable")[:top]
    return [Hit(place, float(cosines[place])) for place in order.tolist()]


def unknown_words(encoder: SentenceEncoder, query: str) -> list[str]:
    """Return the words of a query that the encoder does not know; refuse a query with no known word."""
    words = list(dict.fromkeys(words_of(query)))
    unknown = [word for word in words if word not in encoder.ids]
    if not words:
        raise fail("--query must have words", repr(query), "Pass a sentence.")
    if len(unknown) == len(words):
        raise fail("--query must have a word of the vocabulary", repr(query), "Try other words.")
    return unknown
