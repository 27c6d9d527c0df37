"""Search by hand in a model's joint space: images for a text, captions and images for an image."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ....errors import fail, one_of
from ...data.captions import PER_IMAGE, SPLITS, CaptionedImages, words_of
from ...data.registry import EMBEDDED
from ...data.text import Ragged, Vocabulary
from ...options import Settings
from ...runs.folder import RunFolder
from ...training.evaluate import header_of, restored
from .scores import scores

if TYPE_CHECKING:  # search takes any model with these two maps and a score
    from .model import OrderEmbedding

CHUNK = 250  # captions that are encoded at once
MEASURES = {"order": "Penalty (0 is best)", "cosine": "Cosine (1 is best)"}
NEARNESS = "Cosine (1 is best)"  # of two images: neither lies below the other


@dataclass(frozen=True)
class Hit:
    """One image or caption that was found: its image, and how near it is."""

    image: str
    value: float
    caption: str
    own: bool = False  # a caption of the image that was asked for


@dataclass(frozen=True)
class TextResult:
    """Images nearest to a text; unknown: its words that no training caption has, each with similar known words."""

    words: tuple[str, ...]
    unknown: dict[str, tuple[str, ...]]
    images: tuple[Hit, ...]


@dataclass(frozen=True)
class ImageResult:
    """Captions and images nearest to an image; written: its own captions."""

    image: str
    written: tuple[str, ...]
    captions: tuple[Hit, ...]
    images: tuple[Hit, ...]


class Library:
    """Images and captions of a split, placed by a trained model."""

    def __init__(self, model: OrderEmbedding, split: CaptionedImages, vocabulary: Vocabulary) -> None:
        self.model, self.split, self.vocabulary = model, split, vocabulary
        self.device = next(model.parameters()).device
        self.measure = MEASURES[model.score]

    @torch.no_grad()
    def by_text(self, text: str, top: int = 5) -> TextResult:
        """Return the images nearest to a text."""
        words = words_of(text)
        if not words:
            raise fail("a text must have words", repr(text), "Pass a sentence: --text 'two dogs run on the beach'.")
        unknown = {word: self._similar(word) for word in words if word not in self.vocabulary.ids}
        if len(unknown) == len(set(words)):
            rule, near = "a text must have a word of the training captions", [w for ws in unknown.values() for w in ws]
            raise fail(rule, repr(text), f"Try {', '.join(near)}." if near else "Try other words.")
        values = self._shown(scores(self._sentences([words]), self._images(), self.model.score)[0])
        return TextResult(tuple(words), unknown, self._nearest_images(values, top))

    @torch.no_grad()
    def by_image(self, image: str, top: int = 5) -> ImageResult:
        """Return the captions and the other images nearest to an image."""
        number, images = self._number(image), self._images()
        values = self._shown(scores(self._sentences(self.split.captions), images[[number]], self.model.score)[:, 0])
        captions = tuple(self._caption_hit(caption, values, number) for caption in self._order(values)[:top])
        cosines = F.cosine_similarity(images, images[[number]])
        cosines[number] = -torch.inf  # the image itself is no answer
        found = self._nearest_images(cosines, min(top, len(images) - 1), best_is_high=True)
        return ImageResult(
            image, tuple(self._caption(image=number, which=k) for k in range(PER_IMAGE)), captions, found
        )

    def _similar(self, word: str) -> tuple[str, ...]:
        return tuple(difflib.get_close_matches(word, self.vocabulary.ids, n=2, cutoff=0.75))

    def _number(self, image: str) -> int:
        if image in self.split.names:
            return self.split.names.index(image)
        near = difflib.get_close_matches(image, self.split.names, n=30, cutoff=0.3) or [*self.split.names]
        near.sort(key=lambda name: -_shared_start(name, image))
        received = f"{image!r}, which is none of its {len(self.split.names):,} names"
        raise fail("an image must be in the split", received, f"Try {', '.join(near[:3])}, or another --split.")

    def _images(self) -> Tensor:
        return self.model.images(torch.from_numpy(self.split.features).to(self.device))

    def _sentences(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Return sentences in the joint space; those of similar length are encoded together."""
        numbers = Ragged.of([self.vocabulary.encode(words) for words in sentences], torch.long).to(self.device)
        order = numbers.offsets.diff().argsort(stable=True)
        placed = torch.cat([self.model.sentences(*numbers.padded(part)) for part in torch.split(order, CHUNK)])
        return placed[order.argsort()]

    def _shown(self, penalties: Tensor) -> Tensor:
        """Return cosines in place of the negative ones that scores are."""
        return -penalties if self.model.score == "cosine" else penalties

    def _order(self, values: Tensor, best_is_high: bool | None = None) -> list[int]:
        high = self.model.score == "cosine" if best_is_high is None else best_is_high
        return values.argsort(descending=high, stable=True).tolist()

    def _nearest_images(self, values: Tensor, top: int, best_is_high: bool | None = None) -> tuple[Hit, ...]:
        numbers = self._order(values, best_is_high)[:top]
        return tuple(Hit(self.split.names[n], float(values[n]), self._caption(image=n)) for n in numbers)

    def _caption_hit(self, caption: int, values: Tensor, asked: int) -> Hit:
        image, which = divmod(caption, PER_IMAGE)
        return Hit(self.split.names[image], float(values[caption]), self._caption(image, which), own=image == asked)

    def _caption(self, image: int, which: int = 0) -> str:
        return " ".join(self.split.captions[PER_IMAGE * image + which])


def _shared_start(name: str, other: str) -> int:
    """Return how many letters two names begin with together."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(name, other))])


@dataclass(frozen=True)
class Opened:
    """A run's best model over a split of its data, and facts for the page."""

    library: Library
    run: str
    update: int
    data: dict[str, Any]  # as the data describe themselves
    root: str | None


def open_run(path: Path, settings: Settings, split: str) -> Opened:
    """Restore a run's best checkpoint; a run on the stand-in finds it without --data."""
    one_of("--split", split, SPLITS)
    header = header_of(path, "lamina search")
    if header["experiment"] != "order_embeddings":
        rule, remedy = "lamina search needs a run of order_embeddings", "Pass the folder of such a run."
        raise fail(rule, f"{path}, a run of {header['experiment']}", remedy)
    embedded = header["data"].get("kind") == EMBEDDED
    root = EMBEDDED if settings.root is None and embedded else settings.root
    with RunFolder.open(path) as folder:
        model, data, checkpoint, _ = restored(folder, header, Settings(root=root, device=settings.device))
    library = Library(cast("OrderEmbedding", model), data.source.splits[split], data.vocabulary)
    return Opened(library, str(path), checkpoint.step, data.source.describe(), root)
