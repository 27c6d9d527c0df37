"""The paper's claims on skip-thoughts (section 6.3), each as a comparison of two variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Claim, Quality, Speed
from ...results import Run

HEADLINE = "valid_nll"
SAYS = (
    'Section 6.3: layer norm gives "speedup over the baseline as well as better final results" on the downstream tasks '
    "(figure 3 and table 3). Here the likelihood of held-out text stands for them"
)
SIDES: dict[str, Any] = {"ours": {"norm": "layer"}, "baseline": {"norm": "none"}, "paper": SAYS}


def _likelihoods(run: Run) -> Sequence[float] | None:
    """Return the log-likelihood of each test triple per mean number of words, in nats."""
    losses: Sequence[float] = (run.get("extras") or {}).get("test_losses") or ()
    return [-loss for loss in losses] or None


CLAIMS = (
    Claim(
        "faster",
        "With layer norm the model reaches the baseline's best held-out likelihood in fewer updates.",
        measure=Speed(HEADLINE),
        final=HEADLINE,
        **SIDES,
    ),
    Claim(
        "lower",
        "With layer norm the loss on held-out text is lower after the last update.",
        measure=Quality(HEADLINE, unit="nats a word"),
        **SIDES,
    ),
    Claim(
        "test",
        "With layer norm the best checkpoint predicts the neighbours of test sentences better.",
        measure=Quality("test_nll", unit="nats a word", items=_likelihoods),
        **SIDES,
    ),
)
