"""The paper's claims on convolutional networks (section 6.7), each as a comparison of two variants."""

from __future__ import annotations

from statistics import fmean

from ...claims import Claim, Inside, Quality, Speed
from ...results import Run

LAYERS = ("conv1", "conv2", "conv3", "conv4")


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
        "Layer norm (gain by channel) reaches the accuracy of the network without a norm in fewer updates.",
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
        doubt="Zero padding sets border units apart in either direction, and training decides which. With a tenth of "
        "the step size they are on less often, as the paper says.",
    ),
)
