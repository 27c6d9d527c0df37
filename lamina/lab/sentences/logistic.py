"""Logistic regressions on parts of one set of features: all folds and all C are solved at once, as matrix products.

Each problem is scikit-learn's: minimise |w|^2 / 2 + C * sum of the log-losses, with an intercept that is not penalised.
The features are centred and rotated once to the axes on which their products X'X are diagonal, with entries s. The
curvature of every problem is then at most C * diag(s) / 4 + 1 (Boehning 1992): no part has more than the whole. This
bound scales the steps of Nesterov's method, restarted for each problem whose last step led uphill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import fail

TOLERANCE = 1e-4  # root mean square by which a plain step changes the log-odds of the cases; free of their scale
LIMIT = 2000  # steps
PRUNE = 10  # steps between the removals of solved problems
KEPT = 1e-12  # smallest share of the largest entry of X'X for an axis to count


@dataclass(frozen=True, eq=False)
class Solution:
    """Log-odds of every case, [problems, cases]; steps; and how many problems were not solved to the tolerance."""

    scores: Tensor
    steps: int
    unsolved: int


class LogisticRegressions:
    """Regressions on parts of the same cases; the features are rotated once."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        """Take features [cases, D], finite, and labels [cases], 0 or 1."""
        if features.dim() != 2 or labels.shape != features.shape[:1]:
            received = f"features {list(features.shape)} and labels {list(labels.shape)}"
            raise fail("features must be [cases, D] and labels [cases]", received, "Pass tensors of the same cases.")
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise fail("labels must be 0 or 1", "another", "Map the two classes to these.")
        self.labels = labels.to(torch.float32)
        self.features, self.entries = _rotated(features)

    def solve(self, parts: Tensor, costs: Tensor, limit: int = LIMIT) -> Solution:
        """Fit one problem for each row of ``parts`` and entry of ``costs``.

        parts: bool [problems, cases], true for the cases to fit. costs: [problems], scikit-learn's C.
        """
        _check(self.labels, parts, costs)
        ones, costs = self.features.new_ones(len(self.features), 1), costs.to(self.features)
        bound = torch.cat([self.entries, self.entries.new_tensor([len(ones)])])  # the last is the intercept's
        return _solve(torch.cat([self.features, ones], 1), bound, self.labels, parts, costs, limit)


def _rotated(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return centred features on the axes of X'X, as float32, and the entries of X'X there."""
    x = features.double()
    x = x - x.mean(0)
    wide = x.shape[1] > x.shape[0]
    entries, axes = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    kept = entries > KEPT * entries[-1].clamp(min=1e-300)
    entries, axes = entries[kept], axes[:, kept]
    return (axes * entries.sqrt() if wide else x @ axes).float(), entries.float()


def _check(labels: Tensor, parts: Tensor, costs: Tensor) -> None:
    if parts.dtype != torch.bool or parts.shape[1:] != labels.shape or costs.shape != parts.shape[:1]:
        received = f"{list(parts.shape)} ({parts.dtype}) and {list(costs.shape)} for {len(labels)} cases"
        raise fail("parts must be bool [problems, cases] and costs [problems]", received, "Pass such tensors.")
    ones = (parts & labels.bool()).sum(1)
    if bool((ones == 0).any()) or bool((ones == parts.sum(1)).any()):
        raise fail("each part must have cases of both labels", "a part with one label", "Take fewer or mixed folds.")
    if not bool((costs > 0).all()):
        raise fail("C must be > 0", str(float(costs.min())), "Pass a positive number.")


def _solve(x: Tensor, bound: Tensor, labels: Tensor, parts: Tensor, costs: Tensor, limit: int) -> Solution:
    state = _State(bound, labels, parts, costs)
    weights, step = x.new_zeros(len(parts), x.shape[1]), 0
    while len(state.numbers) and step < limit:
        step += 1
        state.step(x)
        if step % PRUNE == 0 or step == limit:
            state.prune(weights)
    weights[state.numbers] = state.weights
    return Solution(weights @ x.T, step, len(state.numbers))


class _State:
    """Nesterov's method on the problems that are not solved yet; the loss is divided by C."""

    def __init__(self, bound: Tensor, labels: Tensor, parts: Tensor, costs: Tensor) -> None:
        penalty = costs.reciprocal()[:, None] * torch.cat([torch.ones_like(bound[:-1]), bound.new_zeros(1)])
        self.numbers = torch.arange(len(parts), device=parts.device)
        self.labels, self.parts, self.penalty = labels, parts.to(torch.float32), penalty
        self.rate = 1 / (bound / 4 + penalty)
        self.weights = torch.zeros_like(self.rate)
        self.ahead = self.weights.clone()  # where the gradient is taken
        self.momentum = torch.ones_like(costs)
        self.change = torch.full_like(costs, torch.inf)

    def step(self, x: Tensor) -> None:
        """Take one step of every problem."""
        errors = (self.ahead @ x.T).sigmoid_().sub_(self.labels).mul_(self.parts)
        gradient = torch.addcmul(errors @ x, self.penalty, self.ahead)
        new = torch.addcmul(self.ahead, self.rate, gradient, value=-1)
        moved = new - self.weights
        uphill = (gradient * moved).sum(1) > 0
        momentum = torch.where(uphill, 1.0, self.momentum)
        following = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        beta = torch.where(uphill, 0.0, (momentum - 1) / following)
        self.change = 2 * ((gradient.square() * self.rate).sum(1) / self.parts.sum(1)).sqrt()
        self.ahead = torch.addcmul(new, beta[:, None], moved)
        self.weights, self.momentum = new, following

    def prune(self, solved: Tensor) -> None:
        """Move the weights of solved problems to ``solved`` and go on with the others."""
        done, rest = self.change <= TOLERANCE, self.change > TOLERANCE
        solved[self.numbers[done]] = self.weights[done]
        for name in ("numbers", "parts", "penalty", "rate", "weights", "ahead", "momentum", "change"):
            setattr(self, name, getattr(self, name)[rest])
