"""Convolutional networks (section 6.7): no norm, layer norm with gains by neuron or by channel, batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ...claims import Claim, Inside, Quality, Speed
from ...experiment import Axis, Config, Figure, Number, Panel, Scale, Sheet, option
from ...results import Metric, Run

NORMS = {
    "none": "no norm",
    "layer": "LN, gain by neuron",
    "layer_channel": "LN, gain by channel",
    "batch": "BN",
}
LAYERS = ("conv1", "conv2", "conv3", "conv4")


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig(Config):
    """The paper names neither network nor data: conv 32-32-pool-64-64-pool, fc 256, softmax (see experiments)."""

    norm: str = option(
        "layer", "normalisation of every conv and fc layer but the logits", choices=tuple(NORMS), sweep=True
    )
    dataset: str = option("cifar10", "images", choices=("cifar10", "fashion_mnist", "mnist"))
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


def _border(run: Run) -> tuple[float, float] | None:
    """Return the share of units on at the border and at the centre, mean of the four convolutions."""
    extras = run.get("extras")
    if not extras:
        return None
    border, centre = (fmean(extras[f"{layer}_active"][place] for layer in LAYERS) for place in (0, -1))
    return border, centre


SAYS = (
    'Section 6.7: "layer normalization offers a speedup over the baseline model without normalization, but batch '
    'normalization outperforms the other methods" (no figure, no number)'
)
ACCURACY, TEST = Speed("valid_error"), Quality("test_error", unit="points", scale=100)

CLAIMS = (
    Claim(
        "ln-over-none",
        "Layer norm (gain by neuron) reaches the accuracy of the network without a norm in fewer updates.",
        SAYS,
        ACCURACY,
        ours={"norm": "layer"},
        baseline={"norm": "none"},
        final="valid_error",
    ),
    Claim(
        "channel-over-none",
        "The same for layer norm with gains by channel.",
        SAYS,
        ACCURACY,
        ours={"norm": "layer_channel"},
        baseline={"norm": "none"},
        final="valid_error",
    ),
    Claim(
        "bn-over-ln",
        "Batch norm reaches layer norm's accuracy in fewer updates.",
        SAYS,
        ACCURACY,
        ours={"norm": "batch"},
        baseline={"norm": "layer"},
        final="valid_error",
    ),
    Claim(
        "ln-ends-better",
        "Layer norm ends with a lower test error than no norm.",
        SAYS,
        TEST,
        ours={"norm": "layer"},
        baseline={"norm": "none"},
    ),
    Claim(
        "bn-ends-better",
        "Batch norm ends with a lower test error than layer norm.",
        SAYS,
        TEST,
        ours={"norm": "batch"},
        baseline={"norm": "layer"},
        doubt="Nothing here regularises but batch norm's noise, and the paper names neither network nor data.",
    ),
    Claim(
        "border",
        "Layer-normalised units at the image border are on less often than those at the centre (the paper's reason).",
        'Section 6.7: "hidden units whose receptive fields lie near the boundary of the image are rarely turned on"',
        Inside(_border),
        ours={"norm": "layer"},
        baseline={"norm": "layer"},
        doubt="Zero padding sets border units apart in either direction; which one depends on the learnt filters.",
    ),
)

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

SCALES = {
    "smoke": Scale(
        about="embedded digits, a minute on two cores",
        seeds=3,
        settings={
            **{"dataset": "mnist", "width": 8, "units": 64},
            **{"epochs": 20.0, "log_every": 50, "checkpoint_every": 500},
        },
        values={"norm": tuple(NORMS)},
    ),
    "paper": Scale(
        about="all of CIFAR-10, 20 epochs; a GPU",
        seeds=3,
        settings={"precision": "tf32", "log_every": 500, "checkpoint_every": 200_000},
        values={"norm": tuple(NORMS)},
    ),
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
    scales=SCALES,
    datasets=("cifar10", "fashion_mnist", "mnist"),
    figures=FIGURES,
    numbers=(
        Number("train_nll", "final train NLL"),
        Number("test_error", "final test error, %", scale=100, digits=2),
        Number("test_error", "best test error, %", at="best", scale=100, digits=2),
    ),
    claims=CLAIMS,
    headline=Metric("valid_nll", "validation NLL"),
)
