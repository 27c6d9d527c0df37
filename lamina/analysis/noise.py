"""Noise of batch norm's sampled statistics, exact and as a Gaussian model, and the regulariser that follows from it.

A population of summed inputs a has mean mu and standard deviation sigma; a batch of N cases has mutilde and sigmatilde.
abar = g (a - mu)/sigma is normalised by the population and atilde by the batch, with gain g and without biases. A batch
has two errors: its shift xi_mu = (mu - mutilde)/sigma and its spread sigmatilde^2/sigma^2 = 1 + xi_sigma.

Var xi_sigma is 2/N for Gaussian values ("corrected"; the paper prints 1/N) and (kurtosis - 1)/N for others.

Functions that draw take a ``generator``. Without one they draw from a fixed seed and do not touch torch's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import describe, fail, one_of, positive_int
from ..layers import SPREAD_FLOOR
from .statistics_checks import constant_along

VARIANCES = {"corrected": 2.0, "printed": 1.0}  # N Var xi_sigma


def resampled(normalised: Tensor, shift: Tensor, spread: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """Return atilde = (abar + g shift)/sqrt(spread): exact for the errors of a batch, whatever the distribution."""
    return (normalised + gain * shift) * spread.rsqrt()


def batch_errors(
    population: Tensor, cases: int, batches: int = 1000, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return shift and spread, both [batches, H], of random batches of ``cases`` drawn with replacement.

    population: summed inputs [M] or [M, H] of M cases and H units.
    """
    shift, spread = _errors(_batches(population, cases, batches, generator))
    return shift.squeeze(1), spread.squeeze(1)


def _batches(population: Tensor, cases: int, batches: int, generator: torch.Generator | None) -> Tensor:
    """Draw batches [batches, cases, H] of the population, normalised by its own mean and deviation."""
    a, generator = _checked(population, cases), _generator(generator, population)
    var, mean = torch.var_mean(a, 0, correction=0)
    shape = (positive_int("batches", batches), cases)
    indices = torch.randint(len(a), shape, generator=generator, device=generator.device)
    return ((a - mean) / var.sqrt())[indices.to(a.device)]


def _errors(normalised: Tensor) -> tuple[Tensor, Tensor]:
    """Return shift and spread [batches, 1, H] of batches normalised by the population."""
    spread, mean = torch.var_mean(normalised, 1, correction=0, keepdim=True)
    return -mean, spread


def model_errors(
    normalised: Tensor,
    cases: int,
    variance: str = "corrected",
    noise_shape: str = "case",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw shift and spread from Gaussians: Var xi_mu = 1/N, Var xi_sigma = 2/N, or the printed 1/N.

    noise_shape: "case" draws for each case and unit of ``normalised`` [..., N, H], as in the model; "unit" once for
        each unit, as in a batch. ``resampled`` applies the errors.
    |1 + xi_sigma| is kept above the floor of ``lamina.NoisyLayerNorm``: below N of about 16 draws near 0 would
    otherwise outweigh all others.
    """
    one_of("variance", variance, VARIANCES)
    one_of("noise_shape", noise_shape, ("case", "unit"))
    shape = normalised.shape if noise_shape == "case" else (*normalised.shape[:-2], 1, normalised.shape[-1])
    generator = _generator(generator, normalised)
    drawn = torch.randn((2, *shape), generator=generator, dtype=normalised.dtype, device=generator.device)
    shift, xi = drawn.to(normalised.device)
    spread = (1 + xi * math.sqrt(VARIANCES[variance] / positive_int("cases", cases))).abs().clamp(min=SPREAD_FLOOR)
    return shift / math.sqrt(cases), spread


@dataclass(frozen=True)
class Noise:
    """Statistics of the noise at one batch size and gain 1, from ``measured_noise`` or ``model_noise``.

    cases: N. shift_sd: standard deviation (sd) of (mu - mutilde)/sigma. scale_sd: sd of sigma/sigmatilde.
    spread_variance: N Var xi_sigma. squared_error: mean of (atilde - abar)^2, which ``regulariser`` predicts.
    second_moment: mean of atilde^2. second_moment_spread: largest distance of a batch's mean of atilde^2 from 1.
    unshared: fraction of atilde's variance that no line in abar explains within a batch; 0 when all cases of a
        batch have the same noise.
    """

    cases: int
    shift_sd: float
    scale_sd: float
    spread_variance: float
    squared_error: float
    second_moment: float
    second_moment_spread: float
    unshared: float

    @property
    def expected_shift_sd(self) -> float:
        """1/sqrt(N)."""
        return 1 / math.sqrt(self.cases)

    def expected_scale_sd(self, variance: str = "corrected") -> float:
        """Return the sd of 1/sqrt(1 + xi_sigma) to first order: sqrt(1/(2N)), or sqrt(1/(4N)) from the printed 1/N."""
        one_of("variance", variance, VARIANCES)
        return math.sqrt(VARIANCES[variance] / (4 * self.cases))

    @property
    def gaussian_scale_sd(self) -> float:
        """Exact sd of sigma/sigmatilde for Gaussian summed inputs, far above first order in small batches.

        N (1 + xi_sigma) ~ chi^2_{N-1} gives E[1/(1 + xi)] = N/(N-3), infinite up to N = 3, and
        E[(1 + xi)^(-1/2)] = sqrt(N/2) Gamma(N/2 - 1)/Gamma((N-1)/2).
        """
        n = self.cases
        if n <= 3:
            return math.inf
        mean = math.sqrt(n / 2) * math.exp(math.lgamma(n / 2 - 1) - math.lgamma((n - 1) / 2))
        return math.sqrt(n / (n - 3) - mean**2)


def measured_noise(
    population: Tensor, cases: int, batches: int = 1000, generator: torch.Generator | None = None
) -> Noise:
    """Measure the noise that real batches of ``cases`` from a population [M] or [M, H] cause in batch norm."""
    normalised = _batches(population, cases, batches, generator)
    if constant_along(normalised, (1,)).any():
        rule = "the summed inputs of every batch must vary: batch norm divides by their deviation"
        raise fail(rule, f"a batch of {cases} equal cases", "Pass larger batches, or a population with fewer repeats.")
    return _statistics(normalised, *_errors(normalised))


def model_noise(
    population: Tensor,
    cases: int,
    batches: int = 1000,
    variance: str = "corrected",
    noise_shape: str = "case",
    generator: torch.Generator | None = None,
) -> Noise:
    """Measure the same statistics for the Gaussian model of ``model_errors``."""
    generator = _generator(generator, population)
    normalised = _batches(population, cases, batches, generator)
    return _statistics(normalised, *model_errors(normalised, cases, variance, noise_shape, generator))


def regulariser(
    normalised: Tensor, gain: Tensor | float, cases: int, target: Tensor | None = None, variance: str = "corrected"
) -> Tensor:
    """Return E(atilde - t)^2 - (abar - t)^2 of each value, to first order in 1/N, for independent xi_mu and xi_sigma.

    t is the target and v = Var xi_sigma. (1 + xi)^(-1/2) has mean 1 + 3v/8 and second moment 1 + v, so the increase is
        g^2/N + (v/4) abar^2 + (3v/4) abar (abar - t):
    a penalty on the gain, one on the activation (abar^2/(2N) for v = 2/N) and the inflated mean, which target=None
    (t = abar) leaves out. Averaged over the cases the first two hold for real batch norm too.
    """
    one_of("variance", variance, VARIANCES)
    v = VARIANCES[variance] / positive_int("cases", cases)
    penalty = torch.as_tensor(gain).to(normalised).square() / cases + v / 4 * normalised.square()
    return penalty if target is None else penalty + 0.75 * v * normalised * (normalised - target)


def _statistics(normalised: Tensor, shift: Tensor, spread: Tensor) -> Noise:
    cases, sampled = normalised.shape[1], resampled(normalised, shift, spread)
    moments = sampled.square().mean(1)
    return Noise(
        cases,
        shift_sd=_pooled_sd(shift),
        scale_sd=_pooled_sd(spread.rsqrt()),
        spread_variance=cases * _pooled_sd(spread) ** 2,
        squared_error=float((sampled - normalised).square().mean()),
        second_moment=float(moments.mean()),
        second_moment_spread=float((moments - 1).abs().max()),
        unshared=_unshared(normalised, sampled),
    )


def _pooled_sd(draws: Tensor) -> float:
    """Return the standard deviation over the draws [..., H], pooled over the units."""
    return float(draws.flatten(0, 1).var(0).mean().sqrt())


def _unshared(normalised: Tensor, sampled: Tensor) -> float:
    """Return the residual of the least-squares line through the cases of each batch, relative to the variance."""
    x, y = (t - t.mean(1, keepdim=True) for t in (normalised, sampled))
    slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True)
    return float((y - slope * x).square().sum() / y.square().sum())


def _checked(population: Tensor, cases: int) -> Tensor:
    """Return the population as [M, H]; raise unless batches of it can be normalised."""
    if not isinstance(population, Tensor) or population.dim() not in (1, 2) or not population.is_floating_point():
        rule = "population must hold summed inputs [M] or [M, H]"
        raise fail(rule, describe(population), "Pass lamina.analysis.geometry.summed_inputs(layer, x).")
    if positive_int("cases", cases) < 2:
        raise fail("a batch needs at least two cases to have a deviation", f"cases={cases}", "Pass cases=2 or more.")
    a = population.detach().reshape(population.shape[0], -1)
    if len(a) < 2 or not a.isfinite().all():
        raise fail("population must hold two or more finite cases", describe(population), "Check the inputs.")
    constant_units = constant_along(a, (0,)).nonzero()
    if len(constant_units):
        rule = "the summed inputs of every unit must vary over the population"
        raise fail(rule, f"constant summed inputs (unit {int(constant_units[0])})", "Pass inputs that vary.")
    return a


def _generator(generator: torch.Generator | None, like: Tensor) -> torch.Generator:
    """Return the caller's generator, or one with a fixed seed, so that torch's global one is not touched."""
    return torch.Generator(like.device).manual_seed(0) if generator is None else generator
