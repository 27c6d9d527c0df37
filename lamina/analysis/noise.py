"""The noise of batch norm's sampled statistics, exact and as a Gaussian model, and the regulariser it amounts to.

A population of summed inputs a has mean mu and deviation sigma; a mini-batch of N cases has mutilde and sigmatilde.
abar = g (a - mu)/sigma is normalised by the population, atilde by the batch; biases are left out. The errors of a batch
are its shift (mu - mutilde)/sigma and its spread sigmatilde^2/sigma^2 = 1 + xi_sigma.

Var xi_sigma of N Gaussian values is 2/N ("corrected"; the paper prints 1/N); of others (kurtosis - 1)/N.

Functions that draw take a ``generator``; without one they draw from a fixed seed and leave torch's own alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import describe, fail, one_of, positive_int
from ..layers import SPREAD_FLOOR

VARIANCES = {"corrected": 2.0, "printed": 1.0}  # N Var xi_sigma


def resampled(
    normalised: Tensor,
    mean: Tensor,
    deviation: Tensor,
    batch_mean: Tensor,
    batch_deviation: Tensor,
    gain: Tensor | float = 1.0,
) -> Tensor:
    """atilde = [abar + (g/sigma)(mu - mutilde)] sigma/sigmatilde: exact, whatever the distribution."""
    return (normalised + gain / deviation * (mean - batch_mean)) * (deviation / batch_deviation)


def batch_errors(
    population: Tensor, cases: int, batches: int = 1000, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Shift and spread, both [batches, H], of random batches of ``cases`` drawn with replacement.

    population: summed inputs [M] or [M, H].
    """
    a, indices = _checked(population, cases), _indices(population, cases, batches, generator)
    var, mean = torch.var_mean(a, 0, correction=0)
    batch_var, batch_mean = torch.var_mean(a[indices], 1, correction=0)
    return (mean - batch_mean) / var.sqrt(), batch_var / var


def model_errors(
    shape: tuple[int, ...] | torch.Size,
    cases: int,
    variance: str = "corrected",
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gaussian draws of shift and spread: Var xi_mu = 1/N, Var xi_sigma = 2/N, or the printed 1/N.

    |1 + xi_sigma| is kept above the floor of ``lamina.NoisyLayerNorm``: below N of about 16 draws near 0 would
    otherwise outweigh all others.
    """
    one_of("variance", variance, VARIANCES)
    positive_int("cases", cases)
    generator = _generator(generator)
    device = generator.device
    shift, xi = (torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(2))
    spread = (1 + xi * math.sqrt(VARIANCES[variance] / cases)).abs().clamp(min=SPREAD_FLOOR)
    return shift / math.sqrt(cases), spread


def approximated(
    normalised: Tensor,
    cases: int,
    gain: Tensor | float = 1.0,
    variance: str = "corrected",
    noise_shape: str = "case",
    generator: torch.Generator | None = None,
) -> Tensor:
    """A draw of atilde ~ [abar + g xi_mu]/sqrt|1 + xi_sigma| for abar [N, H].

    noise_shape: "case" draws for each case and unit, as the model has it; "unit" once for each unit, as in a batch.
    """
    one_of("noise_shape", noise_shape, ("case", "unit"))
    shape = normalised.shape if noise_shape == "case" else normalised.shape[-1:]
    drawn = model_errors(shape, cases, variance, generator, normalised.dtype)
    shift, spread = (t.to(normalised.device) for t in drawn)
    return (normalised + gain * shift) * spread.rsqrt()


@dataclass(frozen=True)
class Noise:
    """Figures of the noise at one batch size, gain 1; ``measured_noise`` and ``model_noise`` give the same ones.

    cases: N. shift_sd: of (mu - mutilde)/sigma. scale_sd: of sigma/sigmatilde. spread_variance: N Var xi_sigma.
    squared_error: mean of (atilde - abar)^2, what ``regulariser`` predicts. second_moment: mean of atilde^2.
    second_moment_spread: largest distance of one batch's mean of atilde^2 from 1.
    unshared: share of atilde's variance that no line in abar explains within a batch; 0 when all cases of a
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
        """sd of 1/sqrt(1 + xi) to first order: sqrt(1/(2N)), and sqrt(1/(4N)) from the printed variance."""
        one_of("variance", variance, VARIANCES)
        return math.sqrt(VARIANCES[variance] / (4 * self.cases))


def measured_noise(
    population: Tensor, cases: int, batches: int = 1000, generator: torch.Generator | None = None
) -> Noise:
    """The noise that real batches of ``cases`` from a population [M] or [M, H] give batch norm."""
    a, indices = _checked(population, cases), _indices(population, cases, batches, generator)
    var, mean = torch.var_mean(a, 0, correction=0)
    batch = a[indices]  # [batches, cases, H]
    batch_var, batch_mean = torch.var_mean(batch, 1, correction=0, keepdim=True)
    if not (batch_var > 0).all():
        rule = "the summed inputs of every batch must vary: batch norm divides by their deviation"
        raise fail(rule, f"a batch of {cases} equal cases", "Pass larger batches, or a population with fewer repeats.")
    normalised = (batch - mean) / var.sqrt()
    sampled = (batch - batch_mean) / batch_var.sqrt()
    shift, spread = (mean - batch_mean) / var.sqrt(), batch_var / var
    return _figures(cases, normalised, sampled, shift.squeeze(1), spread.squeeze(1))


def model_noise(
    population: Tensor,
    cases: int,
    batches: int = 1000,
    variance: str = "corrected",
    noise_shape: str = "case",
    generator: torch.Generator | None = None,
) -> Noise:
    """The same figures for the Gaussian model, with draws for each case or one for each batch ("unit")."""
    one_of("noise_shape", noise_shape, ("case", "unit"))
    generator = _generator(generator, population)
    a, indices = _checked(population, cases), _indices(population, cases, batches, generator)
    var, mean = torch.var_mean(a, 0, correction=0)
    normalised = ((a - mean) / var.sqrt())[indices]
    shape = normalised.shape if noise_shape == "case" else normalised[:, :1].shape
    drawn = model_errors(shape, cases, variance, generator, a.dtype)
    shift, spread = (t.to(a.device) for t in drawn)
    sampled = (normalised + shift) * spread.rsqrt()
    return _figures(cases, normalised, sampled, shift.flatten(0, 1), spread.flatten(0, 1))


def regulariser(
    normalised: Tensor,
    gain: Tensor | float,
    cases: int,
    target: Tensor | None = None,
    variance: str = "corrected",
) -> Tensor:
    """E(atilde - t)^2 - (abar - t)^2 of each value to first order in 1/N, of independent xi_mu and xi_sigma.

    With v = Var xi_sigma, (1 + xi)^(-1/2) has mean 1 + 3v/8 and second moment 1 + v, so the increase is
        g^2/N + (v/4) abar^2 + (3v/4) abar (abar - t):
    a penalty on the gain, one on the activation (abar^2/(2N) for v = 2/N) and the inflated mean, which a target of
    None (t = abar) leaves out. Averaged over the cases the first two are real batch norm's too.
    """
    one_of("variance", variance, VARIANCES)
    v = VARIANCES[variance] / positive_int("cases", cases)
    penalty = torch.as_tensor(gain).to(normalised).square() / cases + v / 4 * normalised.square()
    return penalty if target is None else penalty + 0.75 * v * normalised * (normalised - target)


def _figures(cases: int, normalised: Tensor, sampled: Tensor, shift: Tensor, spread: Tensor) -> Noise:
    moments = sampled.square().mean(1)
    return Noise(
        cases,
        shift_sd=_deviation(shift),
        scale_sd=_deviation(spread.rsqrt()),
        spread_variance=cases * _deviation(spread) ** 2,
        squared_error=float((sampled - normalised).square().mean()),
        second_moment=float(moments.mean()),
        second_moment_spread=float((moments - 1).abs().max()),
        unshared=_unshared(normalised, sampled),
    )


def _deviation(draws: Tensor) -> float:
    """Over draws [K, H], pooled over the units."""
    return float(draws.var(0).mean().sqrt())


def _unshared(normalised: Tensor, sampled: Tensor) -> float:
    """Residual of the least-squares line through the cases of each batch, as a share of the variance."""
    x, y = (t - t.mean(1, keepdim=True) for t in (normalised, sampled))
    slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True)
    return float((y - slope * x).square().sum() / y.square().sum())


def _checked(population: Tensor, cases: int) -> Tensor:
    """The population as [M, H], if batches of it can be normalised."""
    if not isinstance(population, Tensor) or population.dim() not in (1, 2) or not population.is_floating_point():
        rule = "population must hold summed inputs [M] or [M, H]"
        raise fail(rule, describe(population), "Pass lamina.analysis.geometry.summed_inputs(layer, x).")
    if positive_int("cases", cases) < 2:
        raise fail("a batch needs at least two cases to have a deviation", f"cases={cases}", "Pass cases=2 or more.")
    a = population.detach().reshape(population.shape[0], -1)
    if len(a) < 2 or not a.isfinite().all():
        raise fail("population must hold two or more finite cases", describe(population), "Check the inputs.")
    constant = ((a - a[0]).abs().amax(0) <= 16 * torch.finfo(a.dtype).eps * a.abs().amax(0)).nonzero()
    if len(constant):
        rule = "the summed inputs of every unit must vary over the population"
        raise fail(rule, f"constant summed inputs (unit {int(constant[0])})", "Pass inputs that vary.")
    return a


def _indices(population: Tensor, cases: int, batches: int, generator: torch.Generator | None) -> Tensor:
    generator = _generator(generator, population)
    shape = (positive_int("batches", batches), cases)
    return torch.randint(len(population), shape, generator=generator, device=generator.device).to(population.device)


def _generator(generator: torch.Generator | None, like: Tensor | None = None) -> torch.Generator:
    """The caller's, or one of a fixed seed, so that the global one stays as it is."""
    if generator is not None:
        return generator
    return torch.Generator(like.device if like is not None else "cpu").manual_seed(0)
