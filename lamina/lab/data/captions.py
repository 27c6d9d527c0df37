"""Captioned images for training: splits with features of length 1 and five tokenised captions of each image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import one_of
from . import registry, scenes
from .caption_files import PER_IMAGE, SPLITS, words_of
from .formats import lines_in
from .text import Vocabulary

__all__ = ["PER_IMAGE", "SPLITS", "CaptionData", "CaptionedImages", "load_captions", "vocabulary_of", "words_of"]

DATASETS = ("flickr8k", "coco", "scenes")


@dataclass(frozen=True, eq=False)
class CaptionedImages:
    """One split: N images; captions 5 i to 5 i + 4 belong to image i.

    names: names of the images, or their ids. features: float32 [N, F], rows of Euclidean length 1.
    """

    names: tuple[str, ...]
    features: np.ndarray[Any, np.dtype[np.float32]]
    captions: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class CaptionData:
    """Captioned images in "train", "valid" and "test", and where they are from.

    kind: "real" or "embedded". notes: repairs of single lines, counted by kind, for the record.
    """

    name: str
    kind: str
    label: str
    sha256: dict[str, str]
    splits: Mapping[str, CaptionedImages]
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the description of the data that run folders and records store."""
        sizes = {name: len(split.names) for name, split in self.splits.items()}
        described = {"name": self.name, "kind": self.kind, "label": self.label, "sizes": sizes, "sha256": self.sha256}
        return described | {"notes": list(self.notes)}


def load_captions(dataset: str, root: str | None = None) -> CaptionData:
    """Return a set of captioned images, checked to the last line.

    Args:
        dataset: "flickr8k", "coco", or "scenes" for the embedded stand-in of both.
        root: as for ``registry.load``.
    """
    one_of("a data set with captions", dataset, DATASETS)
    if dataset == "scenes":
        loaded = registry.load("flickr8k", registry.EMBEDDED)
        loaded = replace(loaded, name=dataset, label=scenes.TITLE)
    else:
        loaded = registry.load(dataset, root)
    splits = {split: _split(loaded.arrays, split) for split in SPLITS}
    return CaptionData(loaded.name, loaded.kind, loaded.label, loaded.sha256, splits, loaded.notes)


def _split(arrays: Mapping[str, Any], split: str) -> CaptionedImages:
    captions = tuple(tuple(line.split()) for line in lines_in(arrays[f"{split}_captions"]))
    return CaptionedImages(tuple(lines_in(arrays[f"{split}_names"])), arrays[f"{split}_x"], captions)


def vocabulary_of(split: CaptionedImages, size: int | None = None) -> Vocabulary:
    """Return the vocabulary of a split's captions: pass the training split, or test words are no longer unseen."""
    return Vocabulary(Counter(word for caption in split.captions for word in caption), size)
