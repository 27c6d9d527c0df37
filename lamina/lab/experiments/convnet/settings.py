"""Convolutional networks (section 6.7): no norm, layer norm with gains by neuron or by channel, batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...experiment import Axis, Config, Figure, Number, Panel, Scale, Sheet, option
from ...results import Metric
from .claims import CLAIMS, LAYERS

NORMS = {
    "none": "no norm",
    "layer": "LN, gain by neuron",
    "layer_channel": "LN, gain by channel",
    "batch": "BN",
}


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig(Config):
    """The paper names neither network nor data: conv 32-32-pool-64-64-pool, fc 256, softmax (see experiments)."""

    norm: str = option(
        "layer", "normalisation of every conv and fc layer but the logits", choices=tuple(NORMS), sweep=True
    )
    dataset: str = option("cifar10", "images", choices=("cifar10", "cifar10_subset", "fashion_mnist", "mnist"))
    epochs: float = option(20.0, "passes over the training data", above=0)
    width: int = option(32, "channels of the first two layers; the next two have twice as many", least=1)
    units: int = option(256, "units of the fully connected layer", least=1)
    statistics: str = option(
        "exact",
        "batch norm is evaluated with those of a pass over the training cases (exact), or with running averages",
        choices=("exact", "running"),
        sweep=True,
    )
    momentum: float = option(0.01, "share of the newest batch in batch norm's running statistics", sweep=True, above=0)
    held_out: int = option(5000, "first training cases kept for validation (a tenth at most)", least=0)
    curve_cases: int = option(0, "training cases behind the curves, test cases once an epoch; 0: all, always", least=0)

    def coupling(self) -> str:
        """Return what couples the cases of a batch."""
        return "batch norm's statistics" if self.norm == "batch" else ""


FIGURES = (
    Figure(
        "convnet",
        "Convolutional network, training and test curves. The paper prints no figure here.",
        (
            Panel("train", "train_nll", "train NLL", log=True),
            Panel("test", "test_error", "test error"),
        ),
    ),
    Figure(
        "border",
        "The paper's reason, measured at the end of training: share of units that are on (ReLU > 0) by distance to "
        "the image border, for each convolution (zero padding).",
        tuple(
            Panel(
                layer, f"{layer}_active", "share of units on", f"{layer}_distance", "distance to border", kind="profile"
            )
            for layer in LAYERS
        ),
    ),
    Figure(
        "statistics",
        "Mean and variance of the summed inputs by distance to the border, in units of the whole layer's: what layer "
        "normalization mixes in one pair of statistics.",
        tuple(
            Panel(
                f"{layer}: {name}", f"{layer}_{name}", label, f"{layer}_distance", "distance to border", kind="profile"
            )
            for layer in ("conv1", "conv4")
            for name, label in (("mean", "(mean - layer mean) / layer sd"), ("var", "variance / layer variance"))
        ),
    ),
)

# Lowest validation NLL in short runs, seed 100, one grid for all: results/tuning-convnet_cifar10_subset_laptop.json.
LAPTOP_STEP_SIZES = (
    {"norm": "none", "lr": 1e-3},
    {"norm": "layer", "lr": 3e-3},
    {"norm": "layer_channel", "lr": 1e-3},
    {"norm": "batch", "lr": 1e-2},
)
SCALES = {
    "smoke": Scale(
        about="5,000 embedded digits, 8 and 16 channels, 6 epochs; a minute on two cores",
        seeds=3,
        settings={
            **{"dataset": "mnist", "width": 8, "units": 64, "epochs": 6.0, "eval_every": 0.5},
            **{"log_every": 50, "checkpoint_every": 500},
        },
        values={"norm": tuple(NORMS)},
    ),
    "laptop": Scale(
        about="a fifth of CIFAR-10, 16 and 32 channels, 10 epochs; 30 minutes on two cores",
        seeds=5,
        settings={
            **{"dataset": "cifar10_subset", "width": 16, "units": 128, "epochs": 10.0, "held_out": 1000},
            **{"eval_every": 0.25, "curve_cases": 1000, "log_every": 50, "checkpoint_every": 500},
        },
        values={"norm": tuple(NORMS)},
        tuned=LAPTOP_STEP_SIZES,
        placebo={"norm": "none"},
    ),
    "paper": Scale(
        about="all of CIFAR-10, 20 epochs; a GPU",
        seeds=3,
        settings={"precision": "tf32", "log_every": 500, "checkpoint_every": 200_000},
        values={"norm": tuple(NORMS)},
    ),
}


def _exploration(about: str, **settings: Any) -> Scale:
    """Return layer norm at laptop scale but for ``settings``, to see when its border units are on less often."""
    return Scale(
        about=about,
        seeds=5,
        settings={**SCALES["laptop"].settings, "lr": 3e-3, **settings},
        values={"norm": ("layer",)},
        explores="border",
    )


EXPLORATIONS = {
    "untrained": _exploration(
        "the network at its start, after one update with a step size of 1e-9", updates=1, lr=1e-9
    ),
    "smaller_steps": _exploration("a tenth of the step size", lr=3e-4),
    "wider": _exploration("32 and 64 channels, 256 units, as on the GPU", width=32, units=256),
    "digits": _exploration("MNIST's digits, whose borders are empty; 2 epochs", dataset="mnist", epochs=2.0),
}

SHEET = Sheet(
    name="convnet",
    title="Convolutional networks",
    section="6.7",
    about="The paper reports preliminary experiments without network, data or numbers. Here: two 3x3 convolutions "
    "of {width} channels, pool, two with twice as many, pool, {units} units, softmax; the norm sits before every ReLU. "
    "Batch norm is evaluated with {statistics} statistics. Exact ones come from a pass over all training cases before "
    "each evaluation; running averages lag behind the weights and make batch norm look worse than it trains.",
    config=ConvnetConfig,
    module="lamina.lab.experiments.convnet.model",
    axes=(Axis("norm", NORMS, "none"),),
    scales=SCALES | EXPLORATIONS,
    datasets=("cifar10", "cifar10_subset", "fashion_mnist", "mnist"),
    figures=FIGURES,
    numbers=(
        Number("train_nll", "final train NLL"),
        Number("test_error", "final test error, %", scale=100),
        Number("test_error", "best test error, %", at="best", scale=100),
    ),
    claims=CLAIMS,
    headline=Metric("valid_nll", "validation NLL"),
)
