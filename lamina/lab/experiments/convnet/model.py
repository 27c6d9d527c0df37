"""The convolutional network of section 6.7 and the border statistics given as its reason. See ``settings``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....layers import Conv2d, Linear
from ....population_statistics import population_statistics
from ...protocol import Evaluation
from .. import images
from ..images import Images, artefacts, batch, batches, initialise, load, loss, parts, picked
from .claims import LAYERS
from .settings import ConvnetConfig

__all__ = ["artefacts", "batch", "batches", "build", "evaluations", "inspect", "load", "loss"]

INSPECTED = 1000  # test cases behind the border statistics
# norm and gain_shape of the convolutions; the fully connected layer has one unit a position in any case
NORMS: dict[str, tuple[str | None, str]] = {
    "none": (None, "channel"),
    "layer": ("layer", "neuron"),
    "layer_channel": ("layer", "channel"),
    "batch": ("batch", "channel"),
}


class ConvNet(nn.Module):
    """conv-conv-pool, conv-conv-pool, fc, softmax; images [N, H, W] or [N, C, H, W]."""

    def __init__(self, config: ConvnetConfig, image: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image if len(image) == 3 else (1, *image)
        norm, gain_shape = NORMS[config.norm]
        sizes = (channels, config.width, config.width, 2 * config.width, 2 * config.width)
        places = ((height, width), (height, width), (height // 2, width // 2), (height // 2, width // 2))
        for name, a, b, place in zip(LAYERS, sizes, sizes[1:], places):
            options: dict[str, Any] = {"norm": norm, "gain_shape": gain_shape, "input_size": place}
            self.add_module(name, Conv2d(a, b, 3, padding=1, activation="relu", momentum=config.momentum, **options))
        flat = 2 * config.width * (height // 4) * (width // 4)
        self.fc = Linear(flat, config.units, norm=norm, activation="relu", momentum=config.momentum)
        self.logits = Linear(config.units, classes, norm=None)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        x = images if images.dim() == 4 else images.unsqueeze(1)
        for first, second in (LAYERS[:2], LAYERS[2:]):
            x = self.pool(self.get_submodule(second)(self.get_submodule(first)(x)))
        return self.logits(self.fc(x.flatten(1)))  # type: ignore[no-any-return]


def build(config: ConvnetConfig, data: Images) -> nn.Module:
    """Return the network for the images and classes at hand."""
    images, labels = data.splits["train"]
    return initialise(ConvNet(config, tuple(images.shape[1:]), int(labels.max()) + 1))


def evaluations(config: ConvnetConfig) -> tuple[Evaluation, ...]:
    return images.evaluations(config, settle)


def settle(model: nn.Module, data: Images, config: ConvnetConfig) -> None:
    """Give batch norm the statistics of a pass over the training cases that curves are measured on."""
    if config.norm == "batch" and config.statistics == "exact":
        train = images.shown(data, config).splits["train"]
        population_statistics(model, (picked(train, index) for index in parts(train)))


@torch.no_grad()
def inspect(model: nn.Module, data: Images, config: ConvnetConfig) -> dict[str, list[float]]:
    """Return, by distance to the border, each convolution's share of units on, and mean and variance of its sums."""
    test = data.splits["test"]
    images, _ = picked(test, torch.arange(min(INSPECTED, len(test[0]))))
    statistics: dict[str, list[float]] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, args, _, name=name: statistics.update(_border(name, layer, args[0])))
        for name, layer in model.named_modules()
        if isinstance(layer, Conv2d)
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics


def _border(name: str, layer: Conv2d, x: Tensor) -> dict[str, list[float]]:
    """Return statistics of one layer for the input ``x``; mean and variance relative to the whole layer's."""
    summed = layer._conv_forward(x, *layer._operands()).float()
    on = (layer._normalise(summed) > 0).float()
    rings = _distance(*summed.shape[-2:]).to(summed.device)
    numbers = range(int(rings.max()) + 1)
    mean, var = summed.mean(), summed.var()
    return {
        f"{name}_distance": [float(d) for d in numbers],
        f"{name}_active": [on[..., rings == d].mean().item() for d in numbers],
        f"{name}_mean": [((summed[..., rings == d].mean() - mean) / var.sqrt()).item() for d in numbers],
        f"{name}_var": [(summed[..., rings == d].var() / var).item() for d in numbers],
    }


def _distance(height: int, width: int) -> Tensor:
    """Return the number of rows or columns between each position and the nearest border."""
    rows, columns = (torch.minimum(torch.arange(n), n - 1 - torch.arange(n)) for n in (height, width))
    return torch.minimum(rows.unsqueeze(1), columns.unsqueeze(0))
