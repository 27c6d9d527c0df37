"""What the image classifiers share: splits, batches, loss, evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...baselines import weight_norm_gain
from ...layers import NormalisedLayer
from ..data.registry import Dataset
from ..protocol import Model, Split

CHUNK = 2000  # cases in one forward pass without gradients; convolutions keep some 100 kB of each


def splits(dataset: Dataset, config: Any) -> dict[str, Split]:
    """The first ``held_out`` training cases are the validation set, as in TensorFlow's MNIST tutorial."""
    train, test = (
        (torch.from_numpy(dataset.arrays[f"{part}_x"]), torch.from_numpy(dataset.arrays[f"{part}_y"]).long())
        for part in ("train", "test")
    )
    held = min(config.held_out, len(train[0]) // 10)  # small stand-ins keep most of their cases
    return {"train": tuple(t[held:] for t in train), "valid": tuple(t[:held] for t in train), "test": test}


def batch(split: Split, index: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and labels."""
    images, labels = split
    index = index.to(images.device)
    return images[index].float() / 255, labels[index]


def loss(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Negative log likelihood of the labels."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


@torch.no_grad()
def evaluate(model: Model, splits: Mapping[str, Split], config: Any, chunk: int = CHUNK) -> dict[str, Tensor]:
    """NLL and error of each split; of a stack [members] each."""
    found: dict[str, Tensor] = {}
    for name, split in splits.items():
        if len(split[0]):
            nll, wrong = (sum(parts) / len(split[0]) for parts in zip(*_sums(model, split, chunk)))
            found |= {f"{name}_nll": nll, f"{name}_error": wrong}
    return found


def parts(split: Split, chunk: int = CHUNK) -> Iterator[Tensor]:
    """The cases of a split in order, ``chunk`` at a time."""
    for first in range(0, len(split[0]), chunk):
        yield torch.arange(first, min(first + chunk, len(split[0])), device=split[0].device)


def _sums(model: Model, split: Split, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Summed NLL and number of errors of each part of a split."""
    for index in parts(split, chunk):
        images, labels = batch(split, index)
        log_probability = F.log_softmax(model(images).float(), -1)  # [..., cases, classes]
        picked = log_probability.gather(-1, labels.expand(log_probability.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        yield -picked.sum(-1), (log_probability.argmax(-1) != labels).sum(-1).float()


@torch.no_grad()
def initialise(model: nn.Module) -> nn.Module:
    """He's start values for every variant alike; weight norm begins as the network it reparametrises."""
    for layer in model.modules():
        if isinstance(layer, NormalisedLayer):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            if layer.norm == "weight" and layer.gain is not None:
                layer.gain.copy_(weight_norm_gain(layer.weight))
    return model
