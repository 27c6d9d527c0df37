"""Permutation-invariant MNIST (section 6.6): a 784-1000-1000-10 network, batches of 128 and of 4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...claims import Claim, Quality, Speed
from ...experiment import Axis, Config, Figure, Number, Panel, Scale, Sheet, option
from ...results import Metric

NORMS = {
    "layer": "LN (hidden layers)",
    "batch": "BN (all layers)",
    "batch_hidden": "BN (hidden layers)",
    "weight": "WN (all layers)",
    "none": "no norm",
}
POINTS = 0.3  # percentage points of test error by which LN at batch size 4 may exceed LN at 128
FAR = 2.0  # "far below": less than 1/FAR of the rival's training NLL


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


def _variant(norm: str, size: int) -> dict[str, Any]:
    return {"norm": norm, "batch_size": size}


SAYS = (
    'Section 6.6: LN "exhibits a faster training convergence comparing to batch normalization that is applied to '
    'all layers" (figure only, no number)'
)
RIGHT = "Section 6.6, right panel (figure only, no number)"
TRAINING, TEST = Speed("train_nll"), Quality("test_error", unit="points", scale=100)

CLAIMS = (
    Claim(
        "faster-128",
        "At batch size 128 layer norm reaches the training loss of batch norm on all layers in fewer updates.",
        SAYS,
        TRAINING,
        ours=_variant("layer", 128),
        baseline=_variant("batch", 128),
    ),
    Claim(
        "faster-4",
        "At batch size 4 layer norm reaches the training loss of batch norm on all layers in fewer updates.",
        RIGHT,
        TRAINING,
        ours=_variant("layer", 4),
        baseline=_variant("batch", 4),
    ),
    Claim(
        "faster-128-hidden",
        "The same at batch size 128 against batch norm on the hidden layers alone.",
        "Not claimed: the paper ran batch norm on all layers",
        TRAINING,
        ours=_variant("layer", 128),
        baseline=_variant("batch_hidden", 128),
        claimed=False,
        doubt="Batch norm on the logits is what slows the paper's rival: it fixes the scale of the predictions.",
    ),
    Claim(
        "lower-128",
        "At batch size 128 layer norm ends with a lower training NLL than batch norm on all layers.",
        "Section 6.6, left panel (figure only, no number)",
        Quality("train_nll", ratio=True),
        ours=_variant("layer", 128),
        baseline=_variant("batch", 128),
    ),
    Claim(
        "lower-4",
        f"At batch size 4 layer norm's final training NLL is far below batch norm's (less than 1/{FAR:g}).",
        RIGHT,
        Quality("train_nll", ratio=True),
        ours=_variant("layer", 4),
        baseline=_variant("batch", 4),
        margin=math.log(FAR),
    ),
    Claim(
        "robust-ln",
        f"Layer norm's test error at batch size 4 is at most {POINTS} points above that at 128.",
        'Section 6.6: "layer normalization is robust to the batch-sizes"',
        TEST,
        ours=_variant("layer", 4),
        baseline=_variant("layer", 128),
        margin=-POINTS / 100,
        doubt="An epoch at batch size 4 has 32 times the updates: the network overfits sooner, with any norm.",
    ),
    Claim(
        "degrades-bn",
        "Batch norm on all layers has a higher test error at batch size 4 than at 128.",
        RIGHT,
        TEST,
        ours=_variant("batch", 128),
        baseline=_variant("batch", 4),
    ),
)


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

_BOTH_SIZES = {"norm": tuple(NORMS), "batch_size": (128, 4)}
SCALES = {
    "smoke": Scale(
        about="embedded digits, a minute on two cores",
        seeds=3,
        settings={"hidden": 256, "epochs": 20.0, "momentum": 0.1, "log_every": 200, "checkpoint_every": 2000},
        values=_BOTH_SIZES,
    ),
    "paper": Scale(
        about="real MNIST, the paper's network, 40 epochs; a GPU",
        seeds=5,
        settings={"epochs": 40.0, "precision": "tf32", "log_every": 20_000, "checkpoint_every": 200_000},
        values=_BOTH_SIZES,
    ),
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
    scales=SCALES,
    datasets=("mnist", "fashion_mnist"),
    figures=FIGURES,
    numbers=(
        Number("train_nll", "final train NLL"),
        Number("test_error", "final test error, %", scale=100, digits=2),
        Number("test_error", "best test error, %", at="best", scale=100, digits=2),
    ),
    claims=CLAIMS,
    headline=Metric("valid_nll", "validation NLL"),
)
