"""Permutation-invariant MNIST (section 6.6): a 784-1000-1000-10 network, batches of 128 and of 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...experiment import Axis, Config, Figure, Number, Panel, Scale, Sheet, option
from ...results import Metric
from .claims import CLAIMS

NORMS = {
    "layer": "LN (hidden layers)",
    "batch": "BN (all layers)",
    "batch_hidden": "BN (hidden layers)",
    "weight": "WN (all layers)",
    "none": "no norm",
}


@dataclass(frozen=True, kw_only=True)
class MnistConfig(Config):
    """The paper states data, layer sizes, Adam and the unbiased variance; the rest follows common practice."""

    norm: str = option("layer", "normalisation", choices=tuple(NORMS), sweep=True)
    dataset: str = option("mnist", "images", choices=("mnist", "fashion_mnist"))
    hidden: int = option(1000, "units in each hidden layer", least=1)
    unbiased: str = option(
        "small",
        "batch norm divides by n-1: never, always, or for batches under 128",
        choices=("never", "small", "always"),
    )
    momentum: float = option(0.01, "share of the newest batch in batch norm's running statistics", sweep=True, above=0)
    held_out: int = option(5000, "first training cases kept for validation (a tenth at most)", least=0)
    curve_cases: int = option(0, "training cases behind the curves, test cases once an epoch; 0: all, always", least=0)

    def coupling(self) -> str:
        """Return what couples the cases of a batch."""
        return "batch norm's statistics" if self.norm in ("batch", "batch_hidden") else ""


def _panel(metric: str, label: str, size: int, log: bool) -> Panel:
    return Panel(f"batch size {size}", metric, label, log=log, where={"batch_size": size})


FIGURES = (
    Figure(
        "mnist",
        "Permutation invariant MNIST, negative log likelihood on the training cases and test error, with layer "
        "normalization and batch normalization; batches of 128 (left) and of 4 (right), as the paper's figure.",
        (
            _panel("train_nll", "train NLL", 128, True),
            _panel("train_nll", "train NLL", 4, True),
            _panel("test_error", "test error", 128, False),
            _panel("test_error", "test error", 4, False),
        ),
    ),
)


def _step_sizes(rows: dict[tuple[str, int], float]) -> tuple[dict[str, Any], ...]:
    return tuple({"norm": norm, "batch_size": size, "lr": lr} for (norm, size), lr in rows.items())


# Lowest validation NLL in short runs, seed 100, one grid for all: results/tuning-mnist_mnist_laptop.json.
LAPTOP_STEP_SIZES = _step_sizes(
    {
        **{("layer", 128): 3e-3, ("batch", 128): 1e-2, ("batch_hidden", 128): 1e-3},
        **{("layer", 4): 3e-4, ("batch", 4): 3e-3},
    }
)
# The same for 1,000 units, on a GPU: results/tuning-mnist_mnist.json.
PAPER_STEP_SIZES = _step_sizes(
    {
        **{("layer", 128): 3e-4, ("batch", 128): 3e-3, ("batch_hidden", 128): 3e-4},
        **{("weight", 128): 3e-3, ("none", 128): 1e-3},
        **{("layer", 4): 3e-5, ("batch", 4): 1e-3, ("batch_hidden", 4): 1e-4, ("weight", 4): 1e-4, ("none", 4): 1e-4},
    }
)
_BOTH_SIZES = {"norm": tuple(NORMS), "batch_size": (128, 4)}
_ONLY_AT_128 = tuple({"norm": norm, "batch_size": 4} for norm in ("batch_hidden", "weight", "none"))
SCALES = {
    "smoke": Scale(
        about="5,000 embedded digits, 256 units, 6 epochs; a minute on two cores",
        seeds=3,
        settings={
            **{"hidden": 256, "epochs": 6.0, "eval_every": 0.2, "momentum": 0.1},
            **{"log_every": 200, "checkpoint_every": 2000},
        },
        values=_BOTH_SIZES,
        without=_ONLY_AT_128,
    ),
    "laptop": Scale(
        about="real MNIST, 400 units in place of 1,000, 3 epochs; 30 minutes on two cores",
        seeds=5,
        settings={
            **{"hidden": 400, "epochs": 3.0, "eval_every": 0.05, "curve_cases": 2000},
            **{"log_every": 500, "checkpoint_every": 5000},
        },
        values={"norm": ("layer", "batch", "batch_hidden"), "batch_size": (128, 4)},
        without=_ONLY_AT_128,
        tuned=LAPTOP_STEP_SIZES,
        placebo={"norm": "batch"},
    ),
    "paper": Scale(
        about="real MNIST, the paper's network, 40 epochs; a GPU",
        seeds=5,
        settings={"epochs": 40.0, "precision": "tf32", "log_every": 20_000, "checkpoint_every": 200_000},
        values=_BOTH_SIZES,
        tuned=PAPER_STEP_SIZES,
    ),
}


def _exploration(about: str, **settings: Any) -> Scale:
    """Return layer norm at both batch sizes, at the paper's size but for ``settings``, to see why it is worse at 4."""
    settings = {"eval_every": 2.0, "log_every": 5000, "checkpoint_every": 20_000, **settings}
    values = {"norm": ("layer",), "batch_size": (128, 4)}
    tuned = tuple(row for row in PAPER_STEP_SIZES if row["norm"] == "layer")
    return Scale(about=about, seeds=3, settings=settings, values=values, tuned=tuned, explores="robust-ln")


EXPLORATIONS = {
    "same_updates": _exploration(
        "as many updates at batch size 4 as at 128, 17,187 in place of 550,000", updates=17_187
    ),
    "fewer_epochs": _exploration("10 epochs in place of 40", epochs=10.0),
    "fewer_units": _exploration("10 epochs, 250 units in place of 1,000", hidden=250, epochs=10.0),
}

SHEET = Sheet(
    name="mnist",
    title="Permutation-invariant MNIST",
    section="6.6",
    about="A fully connected classifier with two hidden layers of {hidden} units. Layer norm sits on the hidden "
    "layers, never on the logits; batch norm is tried on all layers (the paper's) and on the hidden layers.",
    config=MnistConfig,
    module="lamina.lab.experiments.mnist.model",
    axes=(Axis("norm", NORMS, "batch"), Axis("batch_size", {128: "batch size 128", 4: "batch size 4"}, 128)),
    scales=SCALES | EXPLORATIONS,
    datasets=("mnist", "fashion_mnist"),
    figures=FIGURES,
    numbers=(
        Number("train_nll", "final train NLL"),
        Number("test_error", "final test error, %", scale=100),
        Number("test_error", "best test error, %", at="best", scale=100),
    ),
    claims=CLAIMS,
    headline=Metric("valid_nll", "validation NLL"),
)
