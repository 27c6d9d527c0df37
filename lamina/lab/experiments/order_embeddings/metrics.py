"""Retrieval metrics: ranks of captions and images, recalls, mean and median rank.

A tie counts against the model: a wrong item whose score is no worse than the right one's ranks before it. A model that
gives all items one score thus ranks last, and so does one whose scores are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...data.captions import PER_IMAGE

RECALLS = (1, 5, 10)
FOLD = 1000  # images that compete with one another where a split has several times as many
FOLDS = 5
ROWS = 1000  # captions that are ranked at once: bounds the temporaries


def ranks(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return ranks from 0: of each image's best caption among all captions, and of each caption's image among images.

    scores: [5 N, N], lower is better; captions 5 i to 5 i + 4 belong to image i.
    """
    captions, images = scores.shape
    image_of = torch.arange(captions, device=scores.device) // PER_IMAGE
    own = scores.gather(1, image_of.unsqueeze(1))
    best = own.reshape(images, PER_IMAGE).amin(1)
    caption_ranks, image_ranks = image_of.new_zeros(images), image_of.new_zeros(captions)
    for first in range(0, captions, ROWS):
        rows = slice(first, first + ROWS)
        wrong = image_of[rows].unsqueeze(1) != torch.arange(images, device=scores.device)
        image_ranks[rows] = (wrong & ~(scores[rows] > own[rows])).sum(1)  # not "<=", which is false for NaN
        caption_ranks += (wrong & ~(scores[rows] > best)).sum(0)
    return caption_ranks, image_ranks


def folds(images: int) -> Iterator[slice]:
    """Yield the images that compete: five times 1,000 where there are as many, else all."""
    if images < FOLDS * FOLD:
        yield slice(0, images)
        return
    for number in range(FOLDS):
        yield slice(number * FOLD, (number + 1) * FOLD)


def protocol(images: int) -> str:
    """Return how a split of so many images is ranked, in words."""
    count = len(list(folds(images)))
    return f"mean of {count} folds of {FOLD:,} images" if count > 1 else f"one fold of {images:,} images"


def summary(ranks: Tensor) -> dict[str, Tensor]:
    """Return R@1, R@5, R@10 and their mean in percent, and mean and median rank from 1.

    The median of an even number of ranks is the mean of the middle two, rounded down, as in the authors' code.
    """
    numbers = ranks.double()
    recalls = {f"r{k}": 100 * (numbers < k).double().mean() for k in RECALLS}
    recalls["recall"] = torch.stack([*recalls.values()]).mean()
    return {**recalls, "mean": numbers.mean() + 1, "median": numbers.quantile(0.5).floor() + 1}


def averaged(folds: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the summaries' mean over folds."""
    summaries = [summary(ranks) for ranks in folds]
    return {key: torch.stack([one[key] for one in summaries]).mean() for key in summaries[0]}
