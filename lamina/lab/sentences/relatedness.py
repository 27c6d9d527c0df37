"""SICK: softmax regression from two sentence vectors to a distribution over the scores 1 to 5 (Tai et al. 2015).

The authors' code in a Keras whose ``fit`` took 100 epochs of batches of 128: one shuffle, then blocks of 100 epochs
until one does not raise the correlation on the trial pairs. The best block's weights are tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...optim import Adam
from ..data.formats import Array
from .tasks import Relatedness

CLASSES = 5
SEED = 1234
EPOCHS, BATCH, RATE = 100, 128, 1e-3
MOST_BLOCKS = 100
Features = Callable[[str], Array]  # of a split's pairs, [pairs, D]


def pair_features(first: Array, second: Array) -> Array:
    """Return [|u - v|; u * v]."""
    return np.concatenate([np.abs(first - second), first * second], 1)


def targets(scores: Array) -> Array:
    """Return probabilities of 1 to 5 whose mean is the score: two neighbours share them."""
    shares = 1 - np.abs(np.asarray(scores, np.float64)[:, None] - np.arange(1, CLASSES + 1))
    return np.asarray(np.maximum(shares, 0), np.float32)


def regressed(task: Relatedness, features: Features) -> dict[str, Any]:
    """Train on "train", stop by "valid"; return Pearson's and Spearman's correlation and the error on "test"."""
    train, valid = _training(task, features), torch.from_numpy(features("valid"))
    model, blocks = _trained(*train, valid, task.splits["valid"].scores)
    predictions = _predicted(model, torch.from_numpy(features("test")))
    return measured(predictions, task.splits["test"].scores) | {"blocks": blocks}


def measured(predictions: Array, scores: Array) -> dict[str, float]:
    """Return the three measures of SemEval 2014; correlations with a constant are NaN."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    error = float(np.mean((predictions - scores) ** 2))
    spearman = pearson(rankdata(predictions), rankdata(scores))
    return {"pearson": pearson(predictions, scores), "spearman": spearman, "mse": error}


def pearson(a: Array, b: Array) -> float:
    """Return the correlation; NaN if one of the two is constant but for rounding."""
    a, b = (np.asarray(values, np.float64) - np.mean(values, dtype=np.float64) for values in (a, b))
    lengths = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return float(a @ b) / math.prod(lengths) if min(lengths) > 1e-6 * math.sqrt(len(a)) else math.nan


def _training(task: Relatedness, features: Features) -> tuple[Tensor, Tensor]:
    order = np.arange(len(task.splits["train"].scores))
    np.random.RandomState(SEED).shuffle(order)
    wanted = targets(task.splits["train"].scores)
    return torch.from_numpy(features("train")[order]), torch.from_numpy(wanted[order])


def _trained(x: Tensor, wanted: Tensor, valid: Tensor, scores: Array) -> tuple[nn.Linear, int]:
    """Return the best block's model and the number of blocks."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        model = nn.Linear(x.shape[1], CLASSES)
        nn.init.xavier_uniform_(model.weight)  # as Keras begins
        nn.init.zeros_(model.bias)
    optimizer, best, kept, block = Adam(model.parameters(), RATE), -math.inf, model.state_dict(), 0
    while block < MOST_BLOCKS:
        block += 1
        _train_block(model, optimizer, x, wanted)
        correlation = pearson(_predicted(model, valid), scores)
        if not (-1 if math.isnan(correlation) else correlation) > best:
            break
        best = -1 if math.isnan(correlation) else correlation
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(kept)
    return model, block


def _train_block(model: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor, wanted: Tensor) -> None:
    for _ in range(EPOCHS):
        for batch, distribution in zip(torch.split(x, BATCH), torch.split(wanted, BATCH)):
            optimizer.zero_grad()
            F.cross_entropy(model(batch), distribution).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _predicted(model: nn.Linear, x: Tensor) -> Array:
    with torch.no_grad():
        predictions: Tensor = model(x).softmax(1) @ torch.arange(1.0, CLASSES + 1)
    return np.asarray(predictions, np.float64)
