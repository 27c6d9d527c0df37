"""The paper's claims on the attentive reader (section 6.2), each as a comparison of two variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Claim, Quality, Speed
from ...results import Run

SPEED = Speed("valid_error")
BEST = Quality("valid_error", "best", unit="points", scale=100)
SAYS = (
    'Section 6.2: layer norm "trains faster and converges to a better validation result over both the baseline and BN '
    'variants" (figure 2, no number)'
)
GAIN = 'Section 6.2: gains of 1.0 "significantly better" than of 0.1 (no number)'
NOT_CLAIMED = "Not claimed: the paper does not separate the norm from the scale of the first weights"
SMALL_START = "The baseline's matrices start at 0.05 of an orthogonal one, and layer norm undoes that at once."


def _variant(norm: str) -> dict[str, Any]:
    return {"norm": norm}


def _right(run: Run) -> Sequence[float] | None:
    """Return for each test question 1 if it was answered, else 0."""
    return (run.get("extras") or {}).get("test_correct") or None


def _faster_and_lower(name: str, ours: str, baseline: str, words: tuple[str, str], **more: Any) -> tuple[Claim, Claim]:
    """Return the claims that ours is at the other's best error sooner, and that its own best is lower."""
    sides: dict[str, Any] = {"ours": _variant(ours), "baseline": _variant(baseline), **more}
    mine, other = words
    sooner, lower = (
        f"{mine} the reader reaches the best validation error of {other} in fewer updates.",
        f"{mine} the reader's best validation error is lower than that of {other}.",
    )
    return (
        Claim(f"faster{name}", sooner, measure=SPEED, final="valid_error", **sides),
        Claim(f"lower{name}", lower, measure=BEST, **sides),
    )


LN = "With layer norm"
CLAIMS = (
    *_faster_and_lower("", "layer", "none", (LN, "the baseline"), paper=SAYS),
    *_faster_and_lower("-batch", "layer", "batch", (LN, "recurrent batch norm"), paper=SAYS),
    *_faster_and_lower("-everywhere", "layer", "batch_everywhere", (LN, "batch norm everywhere"), paper=SAYS),
    *_faster_and_lower("-gain", "layer", "layer01", ("With gains of 1", "layer norm with gains of 0.1"), paper=GAIN),
    Claim(
        "test",
        "With layer norm the reader answers more test questions than the baseline.",
        "Not claimed: the paper has no test errors",
        Quality("test_error", unit="points", scale=100, items=_right),
        ours=_variant("layer"),
        baseline=_variant("none"),
        claimed=False,
    ),
    *_faster_and_lower(
        "-scale",
        "none_scaled",
        "none",
        ("With orthogonal matrices at full scale and no norm", "the baseline"),
        paper=NOT_CLAIMED,
        claimed=False,
        doubt=SMALL_START,
    ),
    *_faster_and_lower(
        "-scaled",
        "layer",
        "none_scaled",
        (LN, "the baseline with matrices at full scale"),
        paper=NOT_CLAIMED,
        claimed=False,
        doubt=SMALL_START,
    ),
)
