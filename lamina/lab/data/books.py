"""Books for training: sentences as numbers, in reading order.

Real books are numbered once and kept in the cache folder, mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import fail, one_of
from . import array_cache, book_files, caption_files, formats, registry, text, topics
from .book_files import SPLITS
from .formats import Array, lines_array, lines_in
from .text import END, MARKS, UNKNOWN, Ragged, Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DATASETS = ("books", "topics")
CACHE = "numbered-books"  # folder in the cache folder, where "books" is the data set


@dataclass(frozen=True, eq=False)
class BookData:
    """Sentences of "train", "valid" and "test" in reading order, and where they are from.

    kind: "real" or "embedded". splits: ids of words, each sentence with the end mark behind it. counts: how often
    training has each id. notes: repairs of single lines, and books that were left out.
    """

    name: str
    kind: str
    label: str
    sha256: dict[str, str]
    splits: Mapping[str, Ragged]
    vocabulary: Vocabulary
    counts: Tensor
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the description of the data that run folders and records store."""
        sizes = {name: len(split) for name, split in self.splits.items()}
        described = {"name": self.name, "kind": self.kind, "label": self.label, "sizes": sizes, "sha256": self.sha256}
        return described | {"vocabulary": len(self.vocabulary), "notes": list(self.notes)}

    def to(self, device: torch.device | str) -> BookData:
        splits = {name: split.to(device) for name, split in self.splits.items()}
        return replace(self, splits=splits, counts=self.counts.to(device))


def load_books(dataset: str, root: str | None = None, vocabulary: int | None = None) -> BookData:
    """Return the sentences of books.

    Args:
        dataset: "books", or "topics" for the embedded stand-in.
        root: as for ``registry.load``.
        vocabulary: number of ids, the two marks included; the most frequent words of training get them. By default
            every word of training has one.
    """
    one_of("a data set of sentences", dataset, DATASETS)
    if vocabulary is not None and vocabulary < len(MARKS):
        raise fail("vocabulary must have room for its two marks", repr(vocabulary), "Pass a larger one.")
    source = registry.lookup("books")
    local = registry.locate(source, registry.EMBEDDED if dataset == "topics" else root)
    if local is None:
        loaded = registry.load(source.name, registry.EMBEDDED)
        title = topics.TITLE if dataset == "topics" else loaded.label
        return _data(dataset, registry.EMBEDDED, title, loaded.sha256, numbered(loaded.arrays, vocabulary))
    arrays, told, sha256 = _real(source, local, vocabulary)
    return _data(dataset, "real", source.title, sha256, arrays, told["notes"])


def _real(
    source: registry.Source, local: registry.LocalFiles, vocabulary: int | None
) -> tuple[dict[str, Array], dict[str, Any], dict[str, str]]:
    """Return the numbered sentences from the cache, or number them and keep them there."""
    with registry.file_errors(source, local):
        (path,) = local.files.values()
        sha256 = {"books": formats.digest(book_files.folder_of(path))}
        code = [Path(module.__file__ or "").read_bytes() for module in (book_files, caption_files, formats, text)]
        code.append(Path(__file__).read_bytes())
        stamp = [sha256, vocabulary, [hashlib.sha256(content).hexdigest() for content in code]]
        folder = registry.default_root() / CACHE / hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]
        if held := array_cache.read(folder):
            return *held, sha256
        raw = local.layout.read(local.contents())
        arrays, told = numbered(raw, vocabulary), {"notes": lines_in(raw["notes"])}
    if array_cache.write(folder, arrays, told) and (held := array_cache.read(folder)):
        return *held, sha256  # mapped: the copy in memory can go
    return arrays, told, sha256


def numbered(raw: Mapping[str, Array], size: int | None = None) -> dict[str, Array]:
    """Return sentences as ids of a vocabulary of training's words, with the end mark behind each."""
    words = lines_in(raw["words"])
    found = np.bincount(raw["train_tokens"], minlength=len(words)).tolist()
    vocabulary = Vocabulary({word: count for word, count in zip(words, found) if count}, size)
    table = np.array([vocabulary.ids.get(word, UNKNOWN) for word in words], np.int32)
    arrays = {"words": lines_array(vocabulary.words[len(MARKS) :])}
    for split in SPLITS:
        arrays |= {f"{split}_{key}": values for key, values in _with_ends(raw, split, table).items()}
    arrays["counts"] = np.bincount(arrays["train_ids"], minlength=len(vocabulary))
    return arrays


def _with_ends(raw: Mapping[str, Array], split: str, table: Array) -> dict[str, Array]:
    offsets = np.concatenate([[0], raw[f"{split}_x"].cumsum(dtype=np.int64)])
    ids = np.insert(table[raw[f"{split}_tokens"]], offsets[1:], END)
    return {"ids": ids, "offsets": offsets + np.arange(len(offsets))}


def _data(
    name: str, kind: str, title: str, sha256: dict[str, str], arrays: Mapping[str, Array], notes: Sequence[str] = ()
) -> BookData:
    import torch

    def tensor(key: str) -> Tensor:
        return torch.from_numpy(arrays[key])

    splits = {split: Ragged(tensor(f"{split}_ids"), tensor(f"{split}_offsets")) for split in SPLITS}
    words, counts = lines_in(arrays["words"]), arrays["counts"]
    vocabulary = Vocabulary(dict(zip(words, counts[len(MARKS) :].tolist())))
    counted = " + ".join(f"{len(splits[split]):,}" for split in SPLITS)
    label = f"{title} (real: {counted} sentences)" if kind == "real" else title
    return BookData(name, kind, label, sha256, splits, vocabulary, tensor("counts"), tuple(notes))
