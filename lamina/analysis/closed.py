"""Jacobians of one normalised linear layer in closed form: d logits / d parameters for every norm.

N cases x of D inputs; H units with weights W [H, D] of rows w_i, gains g and biases b. The summed inputs are a = W x,
their mean and standard deviation mu and sigma, ahat = (a - mu)/sigma, and the logits g ahat + b. delta_ki is 1 for
k = i and 0 otherwise. The derivatives with respect to the rows of W are

    batch:   d ahat_k / d w_i = (x - E[x] - ahat_k d sigma_k / d w_k)/sigma_k      for k = i, else 0
    weight:  d ahat_k / d w_i = (x - ahat_k w_k/||w_k||)/||w_k||                   for k = i, else 0
    layer:   d ahat_k / d w_i = [delta_ki - 1/H - ahat_k ahat_i/H] x/sigma         for all k and i

The paper's block formula has only the terms k = i. That is right for batch and weight norm. Under layer norm every
row changes mu and sigma of all units, and the formula misses the terms k != i.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import fail
from ..layers import Linear
from ..reference import ACTIVATIONS, inverse
from .statistics_checks import check_statistics, layer_name


def closed_jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    """Return d logits / d parameters [N, H, P] of a single ``lamina.Linear`` in closed form.

    Batch norm takes its statistics from ``x``. P counts the parameters that require grad, in their own order.
    """
    return _jacobian(_checked(layer), x, cross_terms=True)


def printed_jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the Jacobian by the paper's block formula, which under layer norm misses the terms across units."""
    return _jacobian(_checked(layer), x, cross_terms=False)


@torch.no_grad()
def _jacobian(layer: Linear, x: Tensor, cross_terms: bool) -> Tensor:
    check_statistics("", layer, x)
    cases = x.reshape(-1, layer.in_features)
    ahat, slopes = _normalised(layer, cases)
    identity = torch.eye(layer.out_features, dtype=cases.dtype, device=cases.device)
    if not cross_terms:
        slopes = slopes * identity.unsqueeze(-1)
    gain = torch.ones_like(ahat[0]) if layer.gain is None else layer.gain
    parts = {
        "weight": gain.reshape(1, -1, 1, 1) * slopes,
        "gain": identity * ahat.unsqueeze(-1),
        "bias": identity.expand(cases.shape[0], -1, -1),
    }
    names = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    return torch.cat([parts[name].flatten(2) for name in names], -1)


def _normalised(layer: Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ahat [N, H] and its derivatives with respect to every row of W, [N, H (unit k), H (row i), D]."""
    a = x @ layer.weight.T
    identity = torch.eye(layer.out_features, dtype=x.dtype, device=x.device)
    if layer.norm == "layer":
        return _layer_slopes(layer, a, x)
    if layer.norm == "batch":
        ahat, own_row = _batch_slopes(layer, a, x)
    elif layer.norm == "weight":
        norms = torch.linalg.vector_norm(layer.weight, dim=1, keepdim=True)
        ahat = a / norms.T
        own_row = (x.unsqueeze(1) - ahat.unsqueeze(-1) * layer.weight / norms) / norms
    else:
        ahat, own_row = a, x.unsqueeze(1).expand(-1, layer.out_features, -1)
    return ahat, identity.unsqueeze(-1) * own_row.unsqueeze(2)


def _layer_slopes(layer: Linear, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    units = layer.out_features
    centred = a - a.mean(1, keepdim=True)
    sigma, sigma_by_var = _deviation(centred.square().mean(1, keepdim=True), layer)
    ahat = centred / sigma
    identity = torch.eye(units, dtype=x.dtype, device=x.device)
    # d sigma/d a_i = d sigma/d var * 2 (a_i - mu)/H, which is ahat_i/H for sigma = sqrt(var + eps)
    sigma_slope = 2 * sigma_by_var * centred / units
    across = (identity - 1 / units - ahat.unsqueeze(-1) * sigma_slope.unsqueeze(1)) / sigma.unsqueeze(-1)
    return ahat, across.unsqueeze(-1) * x[:, None, None, :]


def _batch_slopes(layer: Linear, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    cases = x.shape[0]
    centred, centred_x = a - a.mean(0), x - x.mean(0)
    divisor = cases - 1 if layer.statistics is not None and layer.statistics.unbiased else cases
    sigma, sigma_by_var = _deviation(centred.square().sum(0) / divisor, layer)
    ahat = centred / sigma
    # d sigma_k/d w_k, which is E[ahat_k (x - E x)] for sigma = sqrt(var + eps)
    sigma_slope = 2 * sigma_by_var.unsqueeze(-1) * (centred.T @ centred_x) / divisor
    return ahat, (centred_x.unsqueeze(1) - ahat.unsqueeze(-1) * sigma_slope) / sigma.unsqueeze(-1)


def _deviation(var: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
    """Return sigma and d sigma/d var for the layer's eps."""
    if layer.eps_mode == "var":
        sigma = (var + layer.eps).sqrt()
        return sigma, 0.5 / sigma
    return var.sqrt() + layer.eps, 0.5 * inverse(var.sqrt())


def _checked(layer: nn.Module) -> Linear:
    if not isinstance(layer, Linear):
        remedy = "Use method='jacobian', which takes any model."
        raise fail("closed forms exist for a single lamina.Linear", f"a {type(layer).__name__}", remedy)
    closed_form = f"the closed form of {layer_name(layer)}"
    if layer.activation not in (None, "identity", ACTIVATIONS["identity"]):
        remedy = "Let the family's mean function follow the logits, or use method='jacobian'."
        raise fail(f"{closed_form} needs the identity as its activation", f"activation={layer.activation!r}", remedy)
    if layer.norm == "batch" and not layer.training:
        rule = f"{closed_form} is that of training mode, where the batch gives the statistics"
        remedy = "Call .train(), or use method='jacobian', which takes the running statistics as constants."
        raise fail(rule, "a layer in evaluation mode", remedy)
    return layer
