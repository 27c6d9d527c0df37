"""Effective learning rates of normalised weights, and the metric along the gains.

Everything is measured on a copy of the layer, with the notation of ``geometry``. g are the gains and b the biases, F is
the Fisher matrix, chi = (sigma/g) d logits / d weights, and phi the dispersion of the family.
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
from .geometry import Loss, check_layer, summed_inputs, weight_gradient, working_copy
from .information import fisher, where
from .statistics_checks import check_rows, layer_name

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


@dataclass(frozen=True)
class EffectiveRate:
    """Effects of larger weights; every field but ``angle`` and ``output_change`` is relative to the first scale.

    weights, bias, gain: size of the Fisher blocks F_ww, F_wb, F_wg. other_rows: size of the blocks between the scaled
    row and the others, None when all rows are scaled. gradient: its size. angle: radians that one step turns the
    weights. output_change: largest change of an output. An absent block is None, a block of zeros gives nan.
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
        """Return p in field ~ scale^p, the least-squares slope of the logarithms."""
        one_of("field", field, ("weights", "bias", "gain", "other_rows", "gradient", "angle"))
        values = getattr(self, field)
        if values is None or len(self.scales) < 2:
            raise fail(f"the exponent of {field!r} needs its values at two scales", repr(values), "Pass more scales.")
        x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (self.scales, values))
        return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def effective_rate(
    layer: Linear, x: Tensor, loss: Loss, scales: Sequence[float] = (1.0, 2.0, 4.0), optimiser: str = "sgd",
    lr: float = 1e-3, family: str | Family = "bernoulli", row: int | None = None,
) -> EffectiveRate:  # fmt: skip
    """Measure curvature, gradient and rotation by one step with the weights (or one ``row``) times each scale.

    chi is of degree 0 in the weights and sigma of degree 1. A doubled weight therefore divides F_ww by 4, and F_wb,
    F_wg and the gradient by 2; the printed 1/2 holds for ds, not for ds^2. The angle falls as 1/scale^2 under SGD,
    whose step is proportional to the gradient, and as 1/scale under Adam, whose step size does not depend on it.
    Scaling one row keeps the function under batch and weight norm, not under layer norm.
    """
    _check_rate(layer, scales, row)
    one_of("optimiser", optimiser, OPTIMISERS)
    measured = [_at_scale(layer, x, loss, s, optimiser, lr, family_of(family), row) for s in scales]
    first = measured[0]
    ratios = {
        field: tuple(float(m[field].norm() / first[field].norm()) for m in measured) if field in first else None
        for field in ("weights", "bias", "gain", "other_rows", "gradient")
    }
    changes = tuple(float((m["output"] - first["output"]).abs().max()) for m in measured)
    angles = tuple(float(m["angle"]) for m in measured)
    return EffectiveRate(tuple(map(float, scales)), angle=angles, output_change=changes, **ratios)  # type: ignore[arg-type]


def _check_rate(layer: Linear, scales: Sequence[float], row: int | None) -> None:
    check_layer(layer)
    if layer.norm is None:
        raise fail("a normalised layer is needed", layer_name(layer), "Pass norm='batch', 'weight' or 'layer'.")
    if not scales or not all(0 < s < math.inf for s in scales):
        raise fail("scales must be numbers above 0", repr(scales), "A negative scale flips the normalised inputs.")
    if row is not None and not 0 <= row < layer.out_features:
        raise fail(f"row must be one of the {layer.out_features} units of {layer_name(layer)}", row, "Count from 0.")


def _at_scale(
    layer: Linear, x: Tensor, loss: Loss, scale: float, optimiser: str, lr: float, family: Family, row: int | None
) -> dict[str, Tensor]:
    """Return output, Fisher blocks, gradient and rotation of a copy with scaled weights."""
    scaled, rows = working_copy(layer, x), slice(None) if row is None else slice(row, row + 1)
    with torch.no_grad():
        scaled.weight[rows] *= scale
        output = scaled(x)
    gradient = weight_gradient(scaled, x, loss)
    fisher_blocks = _blocks(scaled, x, family, row)
    before = scaled.weight.detach().clone()
    scaled.weight.grad = gradient
    OPTIMISERS[optimiser]([scaled.weight], lr=lr).step()
    angle = angle_between(before[rows], scaled.weight.detach()[rows])
    return {"output": output, "gradient": gradient[rows], "angle": angle, **fisher_blocks}


def _blocks(layer: Linear, x: Tensor, family: Family, row: int | None) -> dict[str, Tensor]:
    """Return F_ww, F_wb, F_wg for all weights; for one row also its blocks F_{w_i w_j} with the other rows."""
    matrix, slices, width = fisher(layer, x, family), where(layer), layer.in_features
    weights = list(range(len(matrix))[slices["weight"]])
    scaled = weights if row is None else weights[row * width : (row + 1) * width]
    scaled_rows = matrix[scaled]
    fisher_blocks = {"weights": scaled_rows[:, scaled]}
    fisher_blocks |= {name: scaled_rows[:, slices[name]] for name in ("bias", "gain") if name in slices}
    if row is not None:
        fisher_blocks["other_rows"] = scaled_rows[:, [i for i in weights if i not in scaled]]
    return fisher_blocks


def angle_between(before: Tensor, after: Tensor) -> Tensor:
    """Return the radians between two tensors as vectors, in float64.

    Kahan's form stays accurate for tiny angles, where acos of the cosine does not.
    """
    u, v = before.detach().double().flatten(), after.detach().double().flatten()
    left, right = u * v.norm(), v * u.norm()
    return 2 * torch.atan2((left - right).norm(), (left + right).norm())


def normalised_inputs(layer: Linear, x: Tensor) -> Tensor:
    """Return ahat [N, H]: (a - mu)/sigma under batch and layer norm, a_i/||w_i|| under weight norm and without one."""
    plain = working_copy(layer, x)
    if layer.norm is None:
        check_rows(layer_name(layer), layer.weight)
        return summed_inputs(layer, x) / weight_norm_gain(layer.weight)
    plain.activation = None
    with torch.no_grad():
        nn.init.ones_(plain.get_parameter("gain"))
        if plain.bias is not None:
            nn.init.zeros_(plain.bias)
        ahat: Tensor = plain(x)
    return ahat.reshape(-1, layer.out_features)


def gain_metric(layer: Linear, x: Tensor, family: str | Family = "gaussian", printed: bool = False) -> Tensor:
    """Return M [H, H] in ds^2 = 1/2 delta_g^T M delta_g: M_ij = E[Cov(y_i, y_j)/phi^2 ahat_i ahat_j].

    Without a norm there are no gains: the direction of unit i is w_i/||w_i||, and M equals weight norm's.
    printed: use the paper's formula for batch norm, which lacks ahat_i ahat_j and is right only where Cov does not
        depend on ahat. For layer and weight norm the paper's formula is this one.
    """
    ahat, chosen = normalised_inputs(layer, x), family_of(family)
    if printed and layer.norm is None:
        rule = "the paper prints a gain metric that can be evaluated for normalised models only"
        raise fail(rule, layer_name(layer), "Pass printed=False, or a layer with a norm.")
    if layer.activation not in (None, "identity"):
        rule = f"{layer_name(layer)} must have no activation: its outputs are natural parameters"
        raise fail(rule, f"activation={layer.activation!r}", "Build it with activation=None.")
    with torch.no_grad():
        logits = working_copy(layer, x)(x).reshape(-1, layer.out_features)
        summands = chosen.covariance(logits) / chosen.phi**2
    if not (printed and layer.norm == "batch"):
        summands = summands * ahat.unsqueeze(1) * ahat.unsqueeze(2)
    return summands.mean(0)
