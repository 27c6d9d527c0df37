"""Distributions of a generalised linear model: log P(y | x) = (a y - eta(a))/phi + c(y, phi).

The logits a [N, H] of N cases and H outputs are natural parameters, phi is the dispersion, eta the log partition
function and c the base measure. Mean and covariance of y are eta' and phi eta''. The outputs of a case are independent,
except the categorical family's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import describe, fail, one_of


@dataclass(frozen=True)
class Family(ABC):
    """Exponential family with dispersion ``phi``, which is the Gaussian's variance and 1 for the others."""

    phi: float = 1.0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.phi != 1:
            remedy = "Leave phi out, or use Gaussian(phi=...)."
            raise fail(f"the {self.name} family has dispersion 1", f"phi={self.phi}", remedy)

    def check_logits(self, owner: str, logits: Tensor) -> None:
        """Raise unless the outputs [N, H] of ``owner`` can be logits of this family."""
        bad = int((~torch.isfinite(self.mean(logits))).sum())
        if bad:
            rule = f"the outputs of {owner} must be finite logits with finite means of the {self.name} family"
            received = f"{bad} of {logits.numel()} that are not, outputs up to {logits.abs().max().item():.3g}"
            raise fail(rule, received, "Check inputs and parameters for NaN, inf or too large values.")

    @abstractmethod
    def log_prob(self, y: Tensor, logits: Tensor) -> Tensor:
        """Return log P(y | logits) [N], summed over the outputs of a case."""

    @abstractmethod
    def mean(self, logits: Tensor) -> Tensor:
        """Return E[y] [N, H]."""

    @abstractmethod
    def variance(self, logits: Tensor) -> Tensor:
        """Return the variance of each output, [N, H]."""

    @abstractmethod
    def sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one y [N, H] for each case; without ``generator`` from torch's global one."""

    @abstractmethod
    def kl(self, logits: Tensor, other: Tensor) -> Tensor:
        """Return KL(P(. | logits) || P(. | other)) [N]."""

    def weigh(self, logits: Tensor, vectors: Tensor) -> Tensor:
        """Return Cov[y]/phi^2 times vectors [N, H, ...], without forming the matrix."""
        scale = self.variance(logits) / self.phi**2
        return scale.reshape(*scale.shape, *[1] * (vectors.dim() - 2)) * vectors

    def covariance(self, logits: Tensor) -> Tensor:
        """Return Cov[y] [N, H, H]."""
        identity = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        return self.phi**2 * self.weigh(logits, identity.expand(logits.shape[0], -1, -1))


class Gaussian(Family):
    """Independent y ~ N(a, phi) for each output."""

    name = "gaussian"

    def __post_init__(self) -> None:
        if not 0 < self.phi < math.inf:
            rule = "phi is a variance and must be positive and finite"
            raise fail(rule, f"phi={self.phi}", "Pass a positive number.")

    def log_prob(self, y: Tensor, logits: Tensor) -> Tensor:
        return -0.5 * ((y - logits).square() / self.phi + math.log(2 * math.pi * self.phi)).sum(-1)

    def mean(self, logits: Tensor) -> Tensor:
        return logits

    def variance(self, logits: Tensor) -> Tensor:
        return torch.full_like(logits, self.phi)

    def sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
        return logits.detach() + math.sqrt(self.phi) * noise

    def kl(self, logits: Tensor, other: Tensor) -> Tensor:
        return (other - logits).square().sum(-1) / (2 * self.phi)


class Bernoulli(Family):
    """Independent y in {0, 1} for each output; P(y = 1) is the logistic function of a."""

    name = "bernoulli"

    def log_prob(self, y: Tensor, logits: Tensor) -> Tensor:
        return (y * logits - F.softplus(logits)).sum(-1)

    def mean(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)

    def variance(self, logits: Tensor) -> Tensor:
        # p (1 - p), whose second factor would round to 0 where p rounds to 1
        return torch.sigmoid(logits) * torch.sigmoid(-logits)

    def sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(self.mean(logits).detach(), generator=generator)

    def kl(self, logits: Tensor, other: Tensor) -> Tensor:
        pairs = (torch.stack((a, torch.zeros_like(a)), -1) for a in (logits, other))
        return Categorical().kl(*pairs).sum(-1)


class Poisson(Family):
    """Independent counts y for each output, with rate exp(a)."""

    name = "poisson"

    def log_prob(self, y: Tensor, logits: Tensor) -> Tensor:
        return (y * logits - logits.exp() - torch.lgamma(y + 1)).sum(-1)

    def mean(self, logits: Tensor) -> Tensor:
        return logits.exp()

    variance = mean

    def sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(self.mean(logits).detach(), generator=generator)

    def kl(self, logits: Tensor, other: Tensor) -> Tensor:
        change = other - logits
        return (logits.exp() * (torch.expm1(change) - change)).sum(-1)


class Categorical(Family):
    """One of H classes: y is a row with a single 1, and its outputs depend on each other."""

    name = "categorical"

    def check_logits(self, owner: str, logits: Tensor) -> None:
        if logits.shape[1] < 2:
            rule = f"the categorical family needs from {owner} one output for each of at least two classes"
            raise fail(rule, describe(logits), "Use family='bernoulli' for a single yes-or-no output.")
        super().check_logits(owner, logits)

    def log_prob(self, y: Tensor, logits: Tensor) -> Tensor:
        """Return log P(y | logits) [N] for ``y`` as one-hot rows [N, H] or as class numbers [N]."""
        rows = F.one_hot(y, logits.shape[-1]) if y.dim() == logits.dim() - 1 else y
        return (rows * F.log_softmax(logits, -1)).sum(-1)

    def mean(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1)

    def variance(self, logits: Tensor) -> Tensor:
        p = self.mean(logits)
        return p * (1 - p)

    def weigh(self, logits: Tensor, vectors: Tensor) -> Tensor:
        p = self.mean(logits)
        p = p.reshape(*p.shape, *[1] * (vectors.dim() - 2))
        # (diag(p) - p p^T) v, centred first: a change shared by all classes must give 0, not a rounding error of p v
        return p * (vectors - (p * vectors).sum(1, keepdim=True))

    def sample(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        classes = torch.multinomial(self.mean(logits).detach(), 1, replacement=True, generator=generator)
        return F.one_hot(classes.squeeze(-1), logits.shape[-1]).to(logits.dtype)

    def kl(self, logits: Tensor, other: Tensor) -> Tensor:
        """Return log sum_k p_k exp(e_k) over the last axis, e = other - logits minus its mean under p.

        The difference of two log partition functions would lose all digits where KL < 1e-16. log1p and expm1 of the
        centred change keep them.
        """
        log_p = F.log_softmax(logits, -1)
        p, change = log_p.exp(), other - logits
        centred = change - (p * change).sum(-1, keepdim=True)
        near = torch.log1p((p * torch.expm1(centred.clamp(-1, 1))).sum(-1))
        far = torch.logsumexp(log_p + centred, -1)
        return torch.where(centred.abs().amax(-1) < 1, near, far)


FAMILIES: dict[str, Family] = {family.name: family for family in (Gaussian(), Bernoulli(), Poisson(), Categorical())}


def family_of(family: str | Family) -> Family:
    """Return the family of this name, or the family itself."""
    if isinstance(family, Family):
        return family
    one_of("family (a name or a Family)", family, FAMILIES)
    return FAMILIES[family]


def as_cases(owner: str, output: object) -> Tensor:
    """Return the (first) output of a model as logits [N, H]; the steps of a sequence count as cases."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor) or first.dim() not in (2, 3) or not first.is_floating_point():
        rule = f"the output of {owner} must be floating-point logits [N, H], or [T, B, H] for sequences"
        raise fail(rule, describe(first), "Wrap the model so that it returns the natural parameters of the family.")
    if not first.numel():
        raise fail(f"{owner} needs at least one case and one output", describe(first), "Pass an input that has cases.")
    return first.reshape(-1, first.shape[-1])
