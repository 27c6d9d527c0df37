"""The paper's claims on order embeddings (section 6.1), each as a comparison of two variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Claim, Quality, Speed, SpeedToBest
from ...results import Run

PAPER = 1 / 0.6  # "60% of the time"
HEADLINE = "valid_recalls"
SHOTS = (1, 5, 10)


def _variant(norm: str, score: str = "order") -> dict[str, Any]:
    return {"norm": norm, "score": score}


def _hits(run: Run, name: str) -> list[float] | None:
    """Return the mean of R@1, R@5 and R@10 of each rank, in percent."""
    ranks: Sequence[int] = (run.get("extras") or {}).get(name) or ()
    return [100 * sum(rank < k for k in SHOTS) / len(SHOTS) for rank in ranks] or None


def _captions_found(run: Run) -> list[float] | None:
    """Return the recall of each test image's captions."""
    return _hits(run, "test_caption_ranks")


def _images_found(run: Run) -> list[float] | None:
    """Return the recall of each test image, mean of its five captions."""
    hits = _hits(run, "test_image_ranks")
    return None if hits is None else [sum(hits[i : i + 5]) / 5 for i in range(0, len(hits), 5)]


SAYS = 'Section 6.1: layer norm offers "a per-iteration speedup across all metrics" (figure 1, no number)'
TABLE = "Table 2: {} of R@1, R@5 and R@10 on MSCOCO, five folds of 1,000 test images"
CAPTIONS = Quality("test_caption_recall", unit="points", items=_captions_found)
IMAGES = Quality("test_image_recall", unit="points", items=_images_found)
NOT_CLAIMED = "Not claimed: the paper ran the order score alone"

CLAIMS = (
    Claim(
        "best-sooner",
        "With layer norm the model reaches its best validation recall in 0.60 of the baseline's updates.",
        'Section 6.1: layer norm "converges to its best validation model in 60% of the time"',
        SpeedToBest(HEADLINE),
        ours=_variant("layer"),
        baseline=_variant("none"),
        expected=PAPER,
        final=HEADLINE,
        doubt="A run that improves to the end is at its best there, however fast it was. Where a noisy curve is flat, "
        "its highest point is chance.",
    ),
    Claim(
        "faster",
        "With layer norm the model reaches the baseline's best validation recall in fewer updates.",
        SAYS,
        Speed(HEADLINE),
        ours=_variant("layer"),
        baseline=_variant("none"),
        final=HEADLINE,
    ),
    Claim(
        "captions",
        "With layer norm more captions of a test image are found.",
        TABLE.format("73.0 against 71.7, mean"),
        CAPTIONS,
        ours=_variant("layer"),
        baseline=_variant("none"),
    ),
    Claim(
        "images",
        "With layer norm more images of a test caption are found.",
        TABLE.format("66.5 against 65.7, mean"),
        IMAGES,
        ours=_variant("layer"),
        baseline=_variant("none"),
    ),
    Claim(
        "faster-cosine",
        "With the cosine score, too, layer norm reaches the baseline's best validation recall in fewer updates.",
        NOT_CLAIMED,
        Speed(HEADLINE),
        ours=_variant("layer", "cosine"),
        baseline=_variant("none", "cosine"),
        final=HEADLINE,
        claimed=False,
    ),
    Claim(
        "captions-cosine",
        "With the cosine score, too, layer norm finds more captions of a test image.",
        NOT_CLAIMED,
        CAPTIONS,
        ours=_variant("layer", "cosine"),
        baseline=_variant("none", "cosine"),
        claimed=False,
    ),
    Claim(
        "images-cosine",
        "With the cosine score, too, layer norm finds more images of a test caption.",
        NOT_CLAIMED,
        IMAGES,
        ours=_variant("layer", "cosine"),
        baseline=_variant("none", "cosine"),
        claimed=False,
    ),
)
