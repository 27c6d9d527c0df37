"""Permutation-invariant MNIST: the network of section 6.6. Settings and claims are in ``settings``."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from ....layers import Linear
from ...protocol import Evaluation
from .. import images
from ..images import Images, artefacts, batch, batches, initialise, load, loss
from .settings import MnistConfig

__all__ = ["artefacts", "batch", "batches", "build", "evaluations", "inspect", "load", "loss"]

# norm of the hidden layers, norm of the logits. Layer norm leaves the logits alone: their scale is the prediction's
# confidence. The paper's batch norm is "applied to all layers"; weight norm reparametrises all.
PLACES: dict[str, tuple[str | None, str | None]] = {
    "layer": ("layer", None),
    "batch": ("batch", "batch"),
    "batch_hidden": ("batch", None),
    "weight": ("weight", "weight"),
    "none": (None, None),
}


def build(config: MnistConfig, data: Images) -> nn.Module:
    """Return the network: pixels -> hidden -> hidden -> classes, ReLU."""
    hidden_norm, logit_norm = PLACES[config.norm]
    unbiased = config.unbiased == "always" or (config.unbiased == "small" and config.batch_size < 128)
    images, labels = data.splits["train"]
    sizes = (images[0].numel(), config.hidden, config.hidden)
    layers = [
        Linear(a, b, norm=hidden_norm, activation="relu", momentum=config.momentum, unbiased=unbiased)
        for a, b in pairwise(sizes)
    ]
    classes = int(labels.max()) + 1
    logits = Linear(config.hidden, classes, norm=logit_norm, momentum=config.momentum, unbiased=unbiased)
    return initialise(nn.Sequential(nn.Flatten(), *layers, logits))


def evaluations(config: MnistConfig) -> tuple[Evaluation, ...]:
    """Measure in large parts: a GPU waits for the host between them."""
    return images.evaluations(config, chunk=20_000)


def inspect(model: nn.Module, data: Images, config: MnistConfig) -> dict[str, list[float]]:
    """Return nothing beyond the curves."""
    return {}
