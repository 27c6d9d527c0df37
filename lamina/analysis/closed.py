"""Jacobians of one normalised linear layer, written out: d logits / d parameters for every norm.

With a = W x, ahat = (a - mu)/sigma and logits g ahat + b, the derivative for the rows of W is

    batch:   d ahat_k / d w_i = (x - E[x] - ahat_k d sigma_k / d w_k)/sigma_k      for k = i, else 0
    weight:  d ahat_k / d w_i = (x - ahat_k w_k/||w_k||)/||w_k||                   for k = i, else 0
    layer:   d ahat_k / d w_i = [delta_ki - 1/H - ahat_k ahat_i/H] x/sigma         for all k and i

The paper's block formula has the terms k = i only. That is right for batch and weight norm; under layer norm every
row moves mu and sigma of all units, and the formula misses the terms k != i.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import fail
from ..layers import Linear
from ..reference import ACTIVATIONS, inverse
from .singular import check_statistics, title


def closed_jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    """d logits / d parameters [N, H, P] of a single ``lamina.Linear`` in closed form.

    Batch norm's statistics are those of ``x``. Rows of P are the parameters that require grad, in their own order.
    """
    return _jacobian(_checked(layer), x, cross_terms=True)


def printed_jacobian(layer: nn.Module, x: Tensor) -> Tensor:
    """As the paper's block formula has it: under layer norm without the derivatives across units, hence wrong."""
    return _jacobian(_checked(layer), x, cross_terms=False)


@torch.no_grad()
def _jacobian(layer: Linear, x: Tensor, cross_terms: bool) -> Tensor:
    check_statistics("", layer, x)
    cases = x.reshape(-1, layer.in_features)
    ahat, slopes = _normalised(layer, cases)
    unit = torch.eye(layer.out_features, dtype=cases.dtype, device=cases.device)
    if not cross_terms:
        slopes = slopes * unit.unsqueeze(-1)
    gain = torch.ones_like(ahat[0]) if layer.gain is None else layer.gain
    parts = {
        "weight": gain.reshape(1, -1, 1, 1) * slopes,
        "gain": unit * ahat.unsqueeze(-1),
        "bias": unit.expand(cases.shape[0], -1, -1),
    }
    names = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    return torch.cat([parts[name].flatten(2) for name in names], -1)


def _normalised(layer: Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """ahat [N, H] and its derivative for every row of W, [N, H (unit k), H (row i), D]."""
    a = x @ layer.weight.T
    unit = torch.eye(layer.out_features, dtype=x.dtype, device=x.device)
    if layer.norm == "layer":
        return _layer_slopes(layer, a, x)
    if layer.norm == "batch":
        ahat, own = _batch_slopes(layer, a, x)
    elif layer.norm == "weight":
        norms = torch.linalg.vector_norm(layer.weight, dim=1, keepdim=True)
        ahat = a / norms.T
        own = (x.unsqueeze(1) - ahat.unsqueeze(-1) * layer.weight / norms) / norms
    else:
        ahat, own = a, x.unsqueeze(1).expand(-1, layer.out_features, -1)
    return ahat, unit.unsqueeze(-1) * own.unsqueeze(2)


def _layer_slopes(layer: Linear, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    units = layer.out_features
    centred = a - a.mean(1, keepdim=True)
    sigma, rate = _deviation(centred.square().mean(1, keepdim=True), layer)
    ahat = centred / sigma
    unit = torch.eye(units, dtype=x.dtype, device=x.device)
    # d sigma/d a_i = rate * 2 (a_i - mu)/H, which is ahat_i/H for sigma = sqrt(var + eps)
    sigma_slope = 2 * rate * centred / units
    across = (unit - 1 / units - ahat.unsqueeze(-1) * sigma_slope.unsqueeze(1)) / sigma.unsqueeze(-1)
    return ahat, across.unsqueeze(-1) * x[:, None, None, :]


def _batch_slopes(layer: Linear, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    cases = x.shape[0]
    centred, moved = a - a.mean(0), x - x.mean(0)
    degrees = cases - 1 if layer.statistics is not None and layer.statistics.unbiased else cases
    sigma, rate = _deviation(centred.square().sum(0) / degrees, layer)
    ahat = centred / sigma
    # d sigma_k/d w_k, which is E[ahat_k (x - E x)] for sigma = sqrt(var + eps)
    sigma_slope = 2 * rate.unsqueeze(-1) * (centred.T @ moved) / degrees
    own = (moved.unsqueeze(1) - ahat.unsqueeze(-1) * sigma_slope) / sigma.unsqueeze(-1)
    return ahat, own


def _deviation(var: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
    """sigma and d sigma/d var for the layer's eps."""
    if layer.eps_mode == "var":
        sigma = (var + layer.eps).sqrt()
        return sigma, 0.5 / sigma
    return var.sqrt() + layer.eps, 0.5 * inverse(var.sqrt())


def _checked(layer: nn.Module) -> Linear:
    if not isinstance(layer, Linear):
        raise fail(
            "closed forms exist for a single lamina.Linear",
            f"a {type(layer).__name__}",
            "Use method='jacobian', which takes any model.",
        )
    if layer.activation not in (None, "identity", ACTIVATIONS["identity"]):
        raise fail(
            f"the closed form of {title('', layer)} needs the identity as its activation",
            f"activation={layer.activation!r}",
            "Let the family's own mean function follow the logits, or use method='jacobian'.",
        )
    if layer.norm == "batch" and not layer.training:
        raise fail(
            f"the closed form of {title('', layer)} is that of training, where the batch gives the statistics",
            "a layer in evaluation mode",
            "Call .train(), or use method='jacobian', which takes the running statistics as constants.",
        )
    return layer
