"""Data, batches, loss and evaluations that the image classifiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...baselines import weight_norm_gain
from ...layers import NormalisedLayer
from ..data import registry
from ..experiment import Every
from ..protocol import Evaluation, Loss
from ..training.batches import ShuffledBatches
from ..training.draws import Draws

Split = tuple[Tensor, Tensor]  # images and labels
Ready = Callable[[nn.Module, Any, Any], None]
CHUNK = 2000  # cases in one forward pass without gradients; convolutions keep some 100 kB of each


def nothing(model: nn.Module, data: Images, config: Any) -> None:
    """Leave a model as it is."""


@dataclass(frozen=True)
class Images:
    """Images and labels of "train", "valid" and "test"."""

    dataset: registry.Dataset
    splits: Mapping[str, Split]

    def describe(self) -> dict[str, Any]:
        return self.dataset.describe()

    def to(self, device: torch.device) -> Images:
        return replace(self, splits={name: (x.to(device), y.to(device)) for name, (x, y) in self.splits.items()})


def load(config: Any, root: str | None) -> Images:
    """Hold out the first ``held_out`` training cases for validation, as TensorFlow's MNIST tutorial does."""
    return split(_read(config.dataset, root), config)


@lru_cache(maxsize=4)
def _read(name: str, root: str | None) -> registry.Dataset:
    """Read and check the files once for all runs of a process."""
    return registry.load(name, root)


def split(dataset: registry.Dataset, config: Any) -> Images:
    """Hold out validation cases, at most a tenth of the training cases, so that small stand-ins keep most of theirs."""
    train, test = (
        (torch.from_numpy(dataset.arrays[f"{part}_x"]), torch.from_numpy(dataset.arrays[f"{part}_y"]).long())
        for part in ("train", "test")
    )
    held_out = min(config.held_out, len(train[0]) // 10)
    rest, valid = ((train[0][part], train[1][part]) for part in (slice(held_out, None), slice(held_out)))
    return Images(dataset, {"train": rest, "valid": valid, "test": test})


def batches(config: Any, data: Images, seed: int) -> ShuffledBatches:
    return ShuffledBatches(len(data.splits["train"][0]), config.batch_size, seed)


def batch(data: Images, index: Tensor) -> Split:
    """Return pixels in [0, 1] and labels."""
    return picked(data.splits["train"], index)


def picked(split: Split, index: Tensor) -> Split:
    images, labels = split
    index = index.to(images.device)
    return images[index].float() / 255, labels[index]


def loss(model: nn.Module, batch: Split, draws: Draws) -> Loss:
    """Return the negative log likelihood of the labels."""
    images, labels = batch
    return Loss(F.cross_entropy(model(images).float(), labels, reduction="sum"), len(labels))


def evaluations(config: Any, ready: Ready = nothing, chunk: int = CHUNK) -> tuple[Evaluation, ...]:
    """Return one evaluation of all cases, or the curves' on few cases and test cases once an epoch.

    ready: called with model, data and settings before each evaluation, to prepare the model.
    """

    def measure(*names: str) -> Callable[..., Mapping[str, Tensor]]:
        def run(model: nn.Module, data: Images, config: Any, *_: Any) -> dict[str, Tensor]:
            ready(model, data, config)
            return measured(model, shown(data, config), names, chunk)

        return run

    if not config.curve_cases:
        return (Evaluation("classification", measure("train", "valid", "test")),)
    curves, test = measure("train", "valid"), measure("test")
    return Evaluation("curves", curves), Evaluation("test", test, every=Every(epochs=1))


def shown(data: Images, config: Any) -> Images:
    """Return the data with the training cases that curves are measured on."""
    images, labels = (part[: config.curve_cases or None] for part in data.splits["train"])
    return replace(data, splits={**data.splits, "train": (images, labels)})


@torch.no_grad()
def measured(model: nn.Module, data: Images, names: Sequence[str], chunk: int = CHUNK) -> dict[str, Tensor]:
    """Return NLL and error of the named splits."""
    metrics: dict[str, Tensor] = {}
    for name in names:
        split = data.splits[name]
        if len(split[0]):
            nll, wrong = (sum(parts) / len(split[0]) for parts in zip(*_sums(model, split, chunk)))
            metrics |= {f"{name}_nll": nll, f"{name}_error": wrong}
    return metrics


def parts(split: Split, chunk: int = CHUNK) -> Iterator[Tensor]:
    """Yield the cases of a split in order, ``chunk`` at a time."""
    for first in range(0, len(split[0]), chunk):
        yield torch.arange(first, min(first + chunk, len(split[0])), device=split[0].device)


def _sums(model: nn.Module, split: Split, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the summed NLL and the number of errors of each part of a split."""
    for index in parts(split, chunk):
        images, labels = picked(split, index)
        log_probability = F.log_softmax(model(images).float(), -1)
        wanted = log_probability.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        yield -wanted.sum(), (log_probability.argmax(-1) != labels).sum().float()


def artefacts(model: nn.Module, data: Images, config: Any, draws: Draws, folder: Path) -> None:
    """Write nothing: the curves are the only result."""


@torch.no_grad()
def initialise(model: nn.Module) -> nn.Module:
    """Give every variant He's start values; weight norm begins as the network it reparametrises."""
    for layer in model.modules():
        if isinstance(layer, NormalisedLayer):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            if layer.norm == "weight" and layer.gain is not None:
                layer.gain.copy_(weight_norm_gain(layer.weight))
    return model
