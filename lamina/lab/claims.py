"""Comparisons of two variants, paired by seed, with a 95 % t interval; a verdict rests on the interval alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from .experiment import MIN_SEEDS, Verdict
from .results import Bounds, Measured

FEW_SEEDS = f"fewer than {MIN_SEEDS} seeds"
MIXED = "runs of one variant differ in their settings"
NOT_FINITE = "a value is not finite"
NOT_REACHED = "no run reached the target"
NEITHER = "in some seed neither reached the target"
GRID_TIE = "tie at the evaluation grid"
NO_SPREAD = "no spread over seeds"


@dataclass(frozen=True)
class Difference:
    """Mean difference over seeds with its interval; ``low`` is NaN where there is no interval, ``reason`` says why."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    reason: str = ""

    def above(self, limit: float = 0.0, shown: str = "0") -> Verdict:
        """Whether the difference exceeds ``limit``; inconclusive unless the whole interval lies on one side."""
        if self.low > limit or self.high < limit:
            return Verdict(self.low > limit, "")
        return Verdict(None, "", self.reason or f"interval contains {shown}")

    def below(self, limit: float, shown: str) -> Verdict:
        """Whether the difference stays under ``limit``."""
        opposite = self.above(limit, shown)
        return Verdict(None if opposite.held is None else not opposite.held, "", opposite.reason)

    def text(self, scale: float = 1.0, digits: str = ",.3g", unit: str = "") -> str:
        """``+0.50 points (95 % interval +0.38 to +0.62, n = 5)``."""
        if math.isnan(self.low):
            return f"no interval ({self.reason})"
        mean, low, high = (f"{scale * value:+{digits}}" for value in (self.mean, self.low, self.high))
        ends = f"{low} to {high}".replace("-inf", "no bound").replace("+inf", "no bound")
        if math.isinf(self.low) and math.isinf(self.high):
            return f"not known (95 % interval {ends}, n = {self.n})"
        least = "at least " if math.isinf(self.high) else "at most " if math.isinf(self.low) else ""
        return f"{least}{mean}{unit and ' ' + unit} (95 % interval {ends}, n = {self.n})"


def difference(ours: Measured, theirs: Measured, factor: float = 1.0) -> Difference:
    """Return ``theirs - factor * ours`` with its t interval, over the seeds that both have.

    The interval covers every value that the bounds allow: an update count is known only up to the evaluation before it.
    """
    seeds = sorted(ours.bounds.keys() & theirs.bounds.keys())
    pairs = [(ours.bounds[seed], theirs.bounds[seed]) for seed in seeds]
    reason = _no_interval(pairs, ours.mixed or theirs.mixed)
    if reason:
        return Difference(n=len(pairs), reason=reason)
    neither = any(math.isinf(a[1]) and math.isinf(b[1]) for a, b in pairs)
    middles = [_middle(b) - factor * _middle(a) for a, b in pairs]
    slack = [_half_width(b) + factor * _half_width(a) for a, b in pairs]
    lows, highs = ([b[k] - factor * a[1 - k] for a, b in pairs] for k in (0, 1))
    n, mean = len(pairs), fmean(middles)
    spread = stdev(middles) + math.sqrt(sum(width**2 for width in slack) / (n - 1))
    if spread == 0:
        return Difference(mean, n=n, reason=NO_SPREAD)  # a t interval of no width claims more than n seeds can tell
    half = _t_quantile(n) * spread / math.sqrt(n)
    tied = any(low < 0 < high for low, high in zip(lows, highs))
    reason = NEITHER if neither else GRID_TIE if tied else ""
    return Difference(mean, fmean(lows) - half, fmean(highs) + half, n, reason)


def _no_interval(pairs: Sequence[tuple[Bounds, Bounds]], mixed: bool) -> str:
    """Return why these pairs have no interval, or nothing."""
    if mixed:
        return MIXED
    if len(pairs) < MIN_SEEDS:
        return FEW_SEEDS
    if not all(math.isfinite(low) for pair in pairs for low, _ in pair):
        return NOT_FINITE
    return NOT_REACHED if all(math.isinf(high) for pair in pairs for _, high in pair) else ""


def _middle(bounds: Bounds) -> float:
    """Middle of the bounds; of a value that is only known to lie above a bound, that bound."""
    return bounds[0] + _half_width(bounds)


def _half_width(bounds: Bounds) -> float:
    return (bounds[1] - bounds[0]) / 2 if math.isfinite(bounds[1]) else 0.0


def _t_quantile(n: int) -> float:
    """97.5 % quantile of Student's t with n - 1 degrees of freedom."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(n - 1, 0.975))


def together(parts: Sequence[Verdict], measured: str) -> Verdict:
    """Verdict on a claim with several parts: held where all held, did not hold where one did not."""
    if any(part.held is False for part in parts):
        return Verdict(False, measured)
    reasons = list(dict.fromkeys(part.reason for part in parts if part.held is None))
    return Verdict(None, measured, "; ".join(reasons)) if reasons or not parts else Verdict(True, measured)


def too_few(**samples: Measured) -> Verdict | None:
    """The verdict "inconclusive" that names the variants which lack seeds; None when all have them."""
    lacking = [name.replace("_", " ") for name, sample in samples.items() if len(sample.bounds) < MIN_SEEDS]
    return Verdict(None, f"needs {MIN_SEEDS} seeds of {', '.join(lacking)}", FEW_SEEDS) if lacking else None


def shown(sample: Measured, scale: float = 1.0, digits: str = ".4g") -> str:
    """Mean of the seeds' values, or in how many seeds the target was not reached."""
    values = [high for _, high in sample.bounds.values()]
    missed = sum(low != high == math.inf for low, high in sample.bounds.values())
    if missed:
        return f"not reached in {missed} of {len(values)} seeds"
    return f"{scale * fmean(values):{digits}}" if values else "no runs"


def updates(samples: Mapping[str, Measured]) -> str:
    """``LN 3,094, BN 3,782``: mean updates of each."""
    return ", ".join(f"{name} {shown(sample, digits=',.0f')}" for name, sample in samples.items())
