"""How fast normalised weights turn, and the metric along the gains.

Everything is measured on a copy of the layer, as in ``geometry``, whose letters these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..baselines import weight_norm_gain
from ..checks import fail, one_of
from ..layers import Linear
from .families import Family, family_of
from .geometry import (  # fmt: skip
    Loss,
    check_normalised,
    check_rows,
    label,
    summed_inputs,
    weight_gradient,
    working_copy,
)
from .information import fisher, where

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


# ---- steps shrink as weights grow


@dataclass(frozen=True)
class EffectiveRate:
    """What a larger weight does at each scale; all but ``angle`` and ``output_change`` relative to the first scale.

    weights, bias, gain: size of the Fisher blocks F_ww, F_wb, F_wg. other_rows: of the blocks between the scaled row
    and the others, None when all rows are scaled. gradient: its size. angle: radians that one step turns the weights.
    output_change: largest change of an output. A block that is absent is None, one that is 0 gives nan.
    """

    scales: tuple[float, ...]
    weights: tuple[float, ...]
    bias: tuple[float, ...] | None
    gain: tuple[float, ...]
    other_rows: tuple[float, ...] | None
    gradient: tuple[float, ...]
    angle: tuple[float, ...]
    output_change: tuple[float, ...]

    def exponent(self, field: str) -> float:
        """p in field ~ scale^p, the least-squares slope of the logarithms."""
        one_of("field", field, ("weights", "bias", "gain", "other_rows", "gradient", "angle"))
        found = getattr(self, field)
        if found is None or len(self.scales) < 2:
            raise fail(f"the exponent of {field!r} needs its values at two scales", repr(found), "Pass more scales.")
        x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (self.scales, found))
        return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def effective_rate(
    layer: Linear,
    x: Tensor,
    loss: Loss,
    scales: Sequence[float] = (1.0, 2.0, 4.0),
    optimiser: str = "sgd",
    lr: float = 1e-3,
    family: str | Family = "bernoulli",
    row: int | None = None,
) -> EffectiveRate:
    """Curvature, gradient and rotation by one step with the weights (or one ``row`` of them) times each scale.

    chi is of degree 0 in the weights and sigma of degree 1, so a doubled weight divides F_ww by 4, F_wb, F_wg and the
    gradient by 2; the printed 1/2 holds for ds, not for ds^2. The angle falls as 1/scale^2 under SGD, whose step is the
    gradient, and as 1/scale under Adam, whose step has a size of its own. One row alone leaves the function as it is
    under batch and weight norm, not under layer norm.
    """
    check_normalised(layer)
    one_of("optimiser", optimiser, OPTIMISERS)
    _check_scales(scales, row, layer)
    measured = [_at_scale(layer, x, loss, s, optimiser, lr, family_of(family), row) for s in scales]
    first = measured[0]
    ratios = {
        field: tuple(float(m[field].norm() / first[field].norm()) for m in measured) if field in first else None
        for field in ("weights", "bias", "gain", "other_rows", "gradient")
    }
    changes = tuple(float((m["output"] - first["output"]).abs().max()) for m in measured)
    angles = tuple(float(m["angle"]) for m in measured)
    return EffectiveRate(tuple(map(float, scales)), angle=angles, output_change=changes, **ratios)  # type: ignore[arg-type]


def _check_scales(scales: Sequence[float], row: int | None, layer: Linear) -> None:
    if not scales or not all(0 < s < math.inf for s in scales):
        raise fail("scales must be numbers above 0", repr(scales), "A negative scale flips the normalised inputs.")
    if row is not None and not 0 <= row < layer.out_features:
        raise fail(f"row must be one of the {layer.out_features} units of {label(layer)}", row, "Count from 0.")


def _at_scale(
    layer: Linear, x: Tensor, loss: Loss, scale: float, optimiser: str, lr: float, family: Family, row: int | None
) -> dict[str, Tensor]:
    """Output, Fisher blocks, gradient and rotation of a copy whose weights are scaled."""
    scaled, rows = working_copy(layer, x), slice(None) if row is None else slice(row, row + 1)
    with torch.no_grad():
        scaled.weight[rows] *= scale
        output = scaled(x)
    gradient = weight_gradient(scaled, x, loss)
    found = {"output": output, "gradient": gradient[rows], **_blocks(scaled, x, family, row)}
    before = scaled.weight.detach().clone()
    scaled.weight.grad = gradient
    OPTIMISERS[optimiser]([scaled.weight], lr=lr).step()
    return {**found, "angle": angle_between(before[rows], scaled.weight.detach()[rows])}


def _blocks(layer: Linear, x: Tensor, family: Family, row: int | None) -> dict[str, Tensor]:
    """F_ww, F_wb, F_wg for all weights or for one row, and then F_{w_i w_j} for the others."""
    matrix, slices, width = fisher(layer, x, family), where(layer), layer.in_features
    weights = range(matrix.shape[0])[slices["weight"]]
    own = weights if row is None else weights[row * width : (row + 1) * width]
    against = matrix[list(own)]
    found = {"weights": against[:, list(own)]}
    found |= {name: against[:, slices[name]] for name in ("bias", "gain") if name in slices}
    if row is not None:
        found["other_rows"] = against[:, [i for i in weights if i not in own]]
    return found


def angle_between(before: Tensor, after: Tensor) -> Tensor:
    """Radians between two tensors as vectors, in float64; Kahan's form, accurate where acos of the cosine is not."""
    u, v = before.detach().double().flatten(), after.detach().double().flatten()
    left, right = u * v.norm(), v * u.norm()
    return 2 * torch.atan2((left - right).norm(), (left + right).norm())


# ---- the metric along the gains


def normalised_inputs(layer: Linear, x: Tensor) -> Tensor:
    """ahat [N, H]: (a - mu)/sigma under batch and layer norm, a_i/||w_i|| under weight norm and without a norm."""
    plain = working_copy(layer, x)
    if layer.norm is None:
        check_rows(layer.weight.detach(), label(layer))
        return summed_inputs(layer, x) / weight_norm_gain(layer.weight)
    plain.activation = None
    with torch.no_grad():
        nn.init.ones_(plain.get_parameter("gain"))
        if plain.bias is not None:
            nn.init.zeros_(plain.bias)
        found: Tensor = plain(x)
    return found.reshape(-1, layer.out_features)


def gain_metric(layer: Linear, x: Tensor, family: str | Family = "gaussian", printed: bool = False) -> Tensor:
    """M [H, H] in ds^2 = 1/2 delta_g^T M delta_g: M_ij = E[Cov(y_i, y_j)/phi^2 ahat_i ahat_j].

    Without a norm, which has no gains, the direction of unit i is w_i/||w_i||, and M equals weight norm's. ``printed``
    gives batch norm's formula as the paper has it, without ahat_i ahat_j: right only where Cov does not depend on
    ahat. For layer and weight norm the paper's formula is this one.
    """
    values, chosen = normalised_inputs(layer, x), family_of(family)
    if printed and layer.norm is None:
        rule = "the paper prints a gain metric for the normalised models only in a form that can be evaluated"
        raise fail(rule, label(layer), "Pass printed=False, or a layer with a norm.")
    if layer.activation not in (None, "identity"):
        rule = f"{label(layer)} must have no activation: its outputs are natural parameters"
        raise fail(rule, f"activation={layer.activation!r}", "Build it with activation=None.")
    with torch.no_grad():
        logits = working_copy(layer, x)(x).reshape(-1, layer.out_features)
        weights = chosen.covariance(logits) / chosen.phi**2
    if not (printed and layer.norm == "batch"):
        weights = weights * values.unsqueeze(1) * values.unsqueeze(2)
    return weights.mean(0)
