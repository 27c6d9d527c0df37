"""Permutation-invariant MNIST: the network of section 6.6. Settings and claims are in ``settings``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor, nn

from ....layers import Linear
from ...protocol import Model, Split
from .. import images
from ..images import batch, initialise, loss, splits
from .settings import MnistConfig

__all__ = ["batch", "build", "evaluate", "inspect", "loss", "splits"]

# norm of the hidden layers, norm of the logits. Layer norm leaves the logits alone: their scale is the prediction's
# confidence. The paper's batch norm is "applied to all layers"; weight norm reparametrises all.
PLACES: dict[str, tuple[str | None, str | None]] = {
    "layer": ("layer", None),
    "batch": ("batch", "batch"),
    "batch_hidden": ("batch", None),
    "weight": ("weight", "weight"),
    "none": (None, None),
}


def build(config: MnistConfig, splits: Mapping[str, Split]) -> nn.Module:
    """pixels -> hidden -> hidden -> classes, ReLU."""
    hidden_norm, logit_norm = PLACES[config.norm]
    unbiased = config.unbiased == "always" or (config.unbiased == "small" and config.batch_size < 128)
    images, labels = splits["train"]
    sizes = (images[0].numel(), config.hidden, config.hidden)
    layers = [
        Linear(a, b, norm=hidden_norm, activation="relu", momentum=config.momentum, unbiased=unbiased)
        for a, b in pairwise(sizes)
    ]
    classes = int(labels.max()) + 1
    logits = Linear(config.hidden, classes, norm=logit_norm, momentum=config.momentum, unbiased=unbiased)
    return initialise(nn.Sequential(nn.Flatten(), *layers, logits))


def evaluate(model: Model, splits: Mapping[str, Split], config: MnistConfig) -> dict[str, Tensor]:
    """NLL and error of each split, in large parts: a GPU waits for the host between them."""
    return images.evaluate(model, splits, config, chunk=20_000)


def inspect(model: nn.Module, splits: Mapping[str, Split], config: MnistConfig) -> dict[str, list[float]]:
    """Nothing beyond the curves."""
    return {}
