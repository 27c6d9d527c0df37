"""Nested cross-validation of logistic regression on sentence vectors: MR, CR, SUBJ and MPQA.

"kiros" is the protocol of the authors of skip-thoughts: the sentences are shuffled once, ten contiguous folds are held
out in turn, and for each of them ten contiguous folds of the rest choose C from 2^0 to 2^8. Two things differ: theirs
was scikit-learn's solver of 2015, which penalised the intercept too, and ours is exact.

"senteval" is what SentEval (Conneau and Kiela 2018) does with ``usepytorch=False`` and ``kfold=10``: the sentences in
the order of their lengths, stratified and shuffled folds, C from 2^-2 to 2^3 by rounded accuracies. Not built: its
classifier trained by Adam (``usepytorch=True``), which most published tables show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold

from ...errors import fail, one_of
from ..data.formats import Array
from .logistic import LogisticRegressions
from .tasks import Classification

FOLDS = 10
SEED, SENTEVAL_SEED = 1234, 1111
# From the cases to fit, bool [problems, cases], and each problem's C: log-odds [problems, cases], and how many failed
Fit = Callable[[Array, Array], tuple[Array, int]]


@dataclass(frozen=True)
class Protocol:
    """Order of the sentences, folds to hold out, and the values of C to choose from."""

    costs: tuple[float, ...]
    order: Callable[[Classification], Array]
    folds: Callable[[Array], list[Array]]
    decimals: int | None = None  # of the accuracies in percent that choose C


def _shuffled(task: Classification) -> Array:
    order = np.arange(len(task.sentences))
    np.random.RandomState(SEED).shuffle(order)
    return order


def _by_length(task: Classification) -> Array:
    lengths = np.array([len(sentence.split()) for sentence in task.sentences])
    return np.lexsort((task.labels, lengths))


def contiguous(labels: Array) -> list[Array]:
    """Return the cases of ten contiguous folds; the first ones have a case more."""
    return np.array_split(np.arange(len(labels)), FOLDS)


def stratified(labels: Array) -> list[Array]:
    """Return the cases of ten shuffled folds with the classes in proportion."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SENTEVAL_SEED)
    return [held_out for _, held_out in folds.split(labels, labels)]


PROTOCOLS = {
    "kiros": Protocol(tuple(2.0**n for n in range(9)), _shuffled, contiguous),
    "senteval": Protocol(tuple(2.0**n for n in range(-2, 4)), _by_length, stratified, decimals=2),
}


def protocol_of(name: str) -> Protocol:
    one_of("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def cross_validated(task: Classification, features: Array, protocol: Protocol) -> dict[str, Any]:
    """Return accuracy in percent of vectors [sentences, D], its deviation over the folds, and more."""
    labels = torch.from_numpy(np.ascontiguousarray(task.labels))
    regressions = LogisticRegressions(torch.from_numpy(np.ascontiguousarray(features)), labels)

    def fit(parts: Array, costs: Array) -> tuple[Array, int]:
        solution = regressions.solve(torch.from_numpy(parts), torch.from_numpy(costs))
        return solution.scores.numpy(), solution.unsolved

    return nested(task, fit, protocol)


def nested(task: Classification, fit: Fit, protocol: Protocol) -> dict[str, Any]:
    """Choose C within each training part, refit, and score what was held out."""
    order, costs = protocol.order(task), np.array(protocol.costs)
    _check_size(task, min(np.bincount(task.labels)))
    held_out = _masks(order, task.labels, protocol)
    inner = [_masks(order[~fold[order]], task.labels, protocol) for fold in held_out]
    accuracies, failed = _inner(task, fit, held_out, inner, costs)
    accuracies = accuracies if protocol.decimals is None else np.round(100 * accuracies, protocol.decimals)
    chosen = costs[accuracies.argmax(1)]
    scores, failed_again = fit(~np.stack(held_out), chosen)
    folds = 100 * np.array([_accuracy(score, task.labels, fold) for score, fold in zip(scores, held_out)])
    told = {"folds": folds.round(4).tolist(), "costs": chosen.tolist(), "unsolved": failed + failed_again}
    return {"accuracy": float(folds.mean()), "std": float(folds.std()), **told}


def held_out_folds(task: Classification, protocol: Protocol) -> list[Array]:
    """Return the masks of the cases that the protocol holds out in turn."""
    return _masks(protocol.order(task), task.labels, protocol)


def _check_size(task: Classification, rarest: int) -> None:
    if rarest < 2 * FOLDS:
        rule = f"{task.name} must have {2 * FOLDS} sentences of each label for its nested folds"
        raise fail(rule, str(rarest), "Bring more sentences.")


def _masks(order: Array, labels: Array, protocol: Protocol) -> list[Array]:
    """Return for each fold of the cases in ``order`` a mask over all of the cases."""
    masks = []
    for fold in protocol.folds(labels[order]):
        mask = np.zeros(len(labels), np.bool_)
        mask[order[fold]] = True
        masks.append(mask)
    return masks


def _inner(
    task: Classification, fit: Fit, held_out: Sequence[Array], inner: Sequence[Sequence[Array]], costs: Array
) -> tuple[Array, int]:
    """Return the mean accuracy over the inner folds, [outer folds, values of C]."""
    validated = np.stack([mask for masks in inner for mask in masks])
    parts = ~(validated | np.repeat(np.stack(held_out), FOLDS, 0))
    scores, failed = fit(np.repeat(parts, len(costs), 0), np.tile(costs, len(parts)))
    masks = np.repeat(validated, len(costs), 0)
    accuracies = [_accuracy(score, task.labels, mask) for score, mask in zip(scores, masks)]
    return np.array(accuracies).reshape(len(held_out), FOLDS, len(costs)).mean(1), failed


def _accuracy(scores: Array, labels: Array, mask: Array) -> float:
    return float(((scores[mask] > 0) == (labels[mask] == 1)).mean())
