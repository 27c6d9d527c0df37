"""The paper's claims on MNIST (section 6.6), each as a comparison of two variants."""

from __future__ import annotations

import math
from typing import Any

from ...claims import Claim, Quality, Speed

POINTS = 0.3  # percentage points of test error by which LN at batch size 4 may exceed LN at 128
FAR = 2.0  # "far below": less than 1/FAR of the rival's training NLL


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
        "At batch size 128 layer norm reaches the loss of batch norm on the hidden layers alone in fewer updates.",
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
        doubt="After 10 epochs the batch sizes do not differ. In the next 30 only batches of 128 go on improving: at a "
        "constant step size batches of 4 keep their noise. The other norms lose 0.1 to 0.3 points there too, and batch "
        "norm on all layers more than 2.",
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
