"""The model of section 6.1: a GRU reads the caption, a linear map the image, and a score compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....baselines import weight_norm_gain
from ....recurrent import GRU
from ...data.captions import PER_IMAGE, CaptionData, CaptionedImages, load_captions, vocabulary_of
from ...data.text import Ragged, Vocabulary
from ...protocol import Evaluation, Loss
from ...training.batches import ShuffledBatches, generator
from ...training.draws import UPDATE, Draws
from .metrics import RECALLS, averaged, folds, protocol, ranks
from .scores import ranking_loss, scores
from .settings import OrderConfig

CHUNK = 250  # captions that are encoded at once in evaluations


@dataclass(frozen=True)
class Split:
    """Images and their captions as numbers; captions 5 i to 5 i + 4 belong to image i."""

    features: Tensor
    captions: Ragged

    def first(self, images: int | None) -> Split:
        """Return the split's first images; all for None."""
        ends = self.captions.offsets[: None if images is None else PER_IMAGE * images + 1]
        return Split(self.features[:images], Ragged(self.captions.values[: int(ends[-1])], ends))


@dataclass(frozen=True)
class Captions:
    """Captioned images of "train", "valid" and "test", and the vocabulary of the training captions."""

    source: CaptionData
    vocabulary: Vocabulary
    splits: Mapping[str, Split]

    def describe(self) -> dict[str, Any]:
        return {**self.source.describe(), "test protocol": protocol(len(self.splits["test"].features))}

    def to(self, device: torch.device) -> Captions:
        splits = {n: Split(s.features.to(device), s.captions.to(device)) for n, s in self.splits.items()}
        return replace(self, splits=splits)


def load(config: OrderConfig, root: str | None) -> Captions:
    return _load(config.dataset, root)


@lru_cache(maxsize=2)
def _load(dataset: str, root: str | None) -> Captions:
    """Read, check and number the captions once for all runs of a process."""
    source = load_captions(dataset, root)
    vocabulary = vocabulary_of(source.splits["train"])
    return Captions(source, vocabulary, {name: numbered(split, vocabulary) for name, split in source.splits.items()})


def numbered(split: CaptionedImages, vocabulary: Vocabulary) -> Split:
    """Return a split as tensors."""
    captions = Ragged.of([vocabulary.encode(words) for words in split.captions], torch.long)
    return Split(torch.from_numpy(split.features), captions)


class OrderEmbedding(nn.Module):
    """Maps captions and images into one space, onto the unit sphere; for the order score, into its positive part."""

    def __init__(self, features: int, words: int, config: OrderConfig) -> None:
        super().__init__()
        self.score, self.margin = config.score, config.hinge
        self.words = nn.Embedding(words, config.word_size)
        self.reader = GRU(config.word_size, config.units, norm=None if config.norm == "none" else config.norm)
        self.image = nn.Linear(features, config.units)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw start values as the authors' code does, block by block of the gates."""
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.xavier_uniform_(self.image.weight)
        nn.init.zeros_(self.image.bias)
        for name, parameter in self.reader.named_parameters():
            if name.startswith("weight"):
                for block in parameter.chunk(3):
                    _norm_weight(block)
            elif name.startswith("bias"):
                nn.init.zeros_(parameter)
        if self.reader.norm == "weight":  # begins as the network that it reparametrises
            for side in ("ih_l0", "hh_l0"):
                gain = weight_norm_gain(self.reader.get_parameter(f"weight_{side}"))
                self.reader.get_parameter(f"gain_{side}").copy_(gain)
        if self.reader.norm in (None, "weight"):  # the authors' baseline has no biases on the state's side
            self.reader.get_parameter("bias_hh_l0").requires_grad_(False)

    def images(self, features: Tensor) -> Tensor:
        """Return images in the joint space, [N, units]."""
        return self._placed(self.image(features))

    def sentences(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return captions in the joint space, [B, units]: the state after the last word."""
        return self._placed(self.reader(self.words(words.T), lengths=lengths)[1][0])

    def _placed(self, x: Tensor) -> Tensor:
        unit = F.normalize(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, dim=1)
        return unit.abs() if self.score == "order" else unit


def _norm_weight(block: Tensor) -> None:
    """Draw one gate's weights: orthogonal where square, uniform elsewhere."""
    if block.shape[0] == block.shape[1]:
        nn.init.orthogonal_(block)
    else:
        nn.init.uniform_(block, -0.1, 0.1)


def build(config: OrderConfig, data: Captions) -> OrderEmbedding:
    return OrderEmbedding(data.splits["train"].features.shape[1], len(data.vocabulary), config)


class RandomCaptions(ShuffledBatches):
    """Shuffled images, each with one of its captions: ``at`` returns numbers of captions."""

    def stretch(self, step: int, count: int) -> Tensor:
        images = super().stretch(step, count)
        chosen = [
            torch.randint(PER_IMAGE, (self.batch_size,), generator=generator(self.seed, number, UPDATE))
            for number in range(step, step + count)
        ]
        return PER_IMAGE * images + torch.stack(chosen)


def batches(config: OrderConfig, data: Captions, seed: int) -> RandomCaptions:
    return RandomCaptions(len(data.splits["train"].features), config.batch_size, seed, drop_last=True)


def batch(data: Captions, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, words up to the longest caption of the batch, and lengths."""
    train = data.splits["train"]
    return train.features[(index // PER_IMAGE).to(train.features.device)], *train.captions.padded(index)


def loss(model: OrderEmbedding, batch: tuple[Tensor, Tensor, Tensor], draws: Draws) -> Loss:
    """Return the ranking loss, a sum over the batch."""
    features, words, lengths = batch
    found = scores(model.sentences(words, lengths), model.images(features), model.score)
    return Loss(ranking_loss(found, model.margin), 1)


def evaluations(config: OrderConfig) -> tuple[Evaluation, ...]:
    return Evaluation("validation", validate), Evaluation("test", test, at_best=True)


def validate(model: Any, data: Captions, config: OrderConfig, *_: Any) -> dict[str, Tensor]:
    """Return the metrics of the first validation images, which are one fold."""
    split = data.splits["valid"].first(config.valid_images)
    metrics = _metrics("valid", [ranked(model, split, slice(0, len(split.features)))])
    return {**metrics, "valid_recalls": sum(metrics[f"valid_image_r{k}"] for k in RECALLS)}  # type: ignore[dict-item]


def test(model: Any, data: Captions, config: OrderConfig, *_: Any) -> dict[str, Tensor]:
    """Return the metrics of the test images, and all ranks, image after image."""
    split = data.splits["test"]
    parts = [ranked(model, split, fold) for fold in folds(len(split.features))]
    captions, images = (torch.cat(side) for side in zip(*parts))
    return {**_metrics("test", parts), "test_caption_ranks": captions, "test_image_ranks": images}


def _metrics(split: str, parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    sides = zip(("caption", "image"), zip(*parts))
    return {f"{split}_{side}_{key}": value for side, ranks in sides for key, value in averaged(ranks).items()}


@torch.no_grad()
def ranked(model: OrderEmbedding, split: Split, images: slice) -> tuple[Tensor, Tensor]:
    """Return the ranks of captions and images among those of a fold."""
    numbers = torch.arange(PER_IMAGE * images.start, PER_IMAGE * images.stop)
    parts = (numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK))
    captions = torch.cat([model.sentences(*split.captions.padded(part)) for part in parts])
    return ranks(scores(captions, model.images(split.features[images]), model.score))


def inspect(model: OrderEmbedding, data: Captions, config: OrderConfig) -> dict[str, list[float]]:
    """Return nothing beyond the curves and the test ranks."""
    return {}


def artefacts(model: OrderEmbedding, data: Captions, config: OrderConfig, draws: Draws, folder: Path) -> None:
    """Write nothing: ``lamina search`` shows what the model finds."""
