"""Geometry of normalised layers: directions without effect, and gradients orthogonal to them.

Everything is measured on a copy of the layer in training mode: batch norm takes its statistics from the given cases,
and the caller's layer does not change. N counts cases x, D inputs, H units and P parameters. a = W x are the summed
inputs, mu and sigma their mean and standard deviation, ahat = (a - mu)/sigma. All statements are exact for eps = 0.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import describe, fail
from ..layers import Conv2d, Linear, NormalisedLayer
from .information import where
from .statistics_checks import check_rows, check_statistics, layer_name, weight_products

Loss = Callable[[Tensor], Tensor]


def summed_inputs(layer: Linear, x: Tensor) -> Tensor:
    """Return a = W x of every case, [N, H], before any norm, gain or bias."""
    check_layer(layer)
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != layer.in_features or x.dtype != layer.weight.dtype:
        rule = f"{layer_name(layer)} needs inputs [N, {layer.in_features}] of {layer.weight.dtype}"
        raise fail(rule, describe(x), "Check the last axis and the dtype.")
    with torch.no_grad():
        return weight_products(layer, x)


def check_layer(layer: object) -> None:
    if not isinstance(layer, Linear):
        raise fail("a lamina.Linear layer is needed", type(layer).__name__, "Pass one layer, not a whole model.")


def working_copy(layer: Linear, x: Tensor) -> Linear:
    """Copy the layer, in training mode and with every gradient enabled; raise if its norm cannot be taken on ``x``."""
    summed_inputs(layer, x)
    working = copy.deepcopy(layer).train().requires_grad_(True)
    check_statistics("", working, x)
    return working


def null_directions(model: nn.Module) -> Tensor:
    """Return an orthonormal basis [P, K] of the parameter directions that do not change normalised layers.

    Batch and weight norm: each row w_i of the weights separately, K = H. Layer norm: the whole of W, and 1 gamma^T, the
    same gamma added to every row, for every gamma: K = 1 + D (a convolution, whose positions share mu, has W alone).
    No norm: none, K = 0. Rows are ordered as the parameters that require grad; a model's layers are stacked.
    The basis spans the null space of the Fisher matrix on generic data, under layer norm from three units and two
    inputs. With eps > 0 the directions along W and w_i hold up to eps/sigma^2.
    """
    layers = list(_normalised_layers(model))
    if not layers and not isinstance(model, NormalisedLayer):
        rule = "a model with a normalised lamina.Linear or lamina.Conv2d is needed"
        raise fail(rule, f"{type(model).__name__} without one", "Build it with norm='batch', 'weight' or 'layer'.")
    slices = where(model)
    count = max(part.stop for part in slices.values())
    basis = [next(iter(model.parameters())).detach().new_zeros(count, 0)]
    for name, layer in layers:
        part = slices.get(f"{name}.weight".lstrip("."))
        if part is not None:
            directions = _weight_directions(layer, layer_name(layer, name))
            basis.append(F.pad(directions, (0, 0, part.start, count - part.stop)))
    return torch.cat(basis, 1)


def _normalised_layers(model: nn.Module) -> Iterator[tuple[str, NormalisedLayer]]:
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, NormalisedLayer) and module.norm is not None:
            if owners[id(module.weight)] > 1:
                rule = f"{layer_name(module, name)} must own its weights: another layer reacts to its null directions"
                raise fail(rule, "weights shared between layers", "Untie them, or pass the layer by itself.")
            yield name, module


def _weight_directions(layer: NormalisedLayer, name: str) -> Tensor:
    """Return the directions within vec(W), [numel(W), K]."""
    rows = layer.weight.detach().flatten(1)
    if layer.norm != "layer":
        check_rows(name, rows)
        separate_rows = torch.eye(rows.shape[0]).to(rows).unsqueeze(-1) * F.normalize(rows, eps=0.0)
        return separate_rows.flatten(1).T.contiguous()
    centred = rows if isinstance(layer, Conv2d) else rows - rows.mean(0)
    if centred.abs().max() <= 16 * torch.finfo(rows.dtype).eps * rows.abs().max():
        rule = f"{name} needs rows of weights that differ: equal rows give constant summed inputs"
        raise fail(rule, f"{rows.shape[0]} equal row(s)", "Draw the weights afresh; layer norm needs two units.")
    scale = F.normalize(centred.flatten(), dim=0, eps=0.0).unsqueeze(1)
    if isinstance(layer, Conv2d):
        return scale
    shifts = torch.eye(rows.shape[1]).to(rows).repeat(rows.shape[0], 1) / math.sqrt(rows.shape[0])
    return torch.cat((scale, shifts), 1)


@dataclass(frozen=True)
class Orthogonality:
    """Cosines between the gradient G of the weights W and the null directions of the norms, each in [-1, 1].

    rows: w_i . g_i / (|w_i| |g_i|) [H]. whole: sum(W * G)/(|W| |G|). columns: column sums of G over sqrt(H) |G| [D].
    """

    norm: str | None
    rows: Tensor
    whole: Tensor
    columns: Tensor

    @property
    def violation(self) -> float:
        """The largest cosine that should be 0 under this norm; without a norm the largest of all."""
        row_wise, shared = [self.rows], [self.whole.reshape(1), self.columns]
        zero = {"batch": row_wise, "weight": row_wise, "layer": shared}.get(self.norm or "", row_wise + shared)
        return float(torch.cat(zero).abs().max())


def orthogonality(layer: Linear, x: Tensor, loss: Loss) -> Orthogonality:
    """Compare the gradient of ``loss(layer(x))`` with the null directions of every norm."""
    working = working_copy(layer, x)
    weight, gradient = working.weight.detach(), weight_gradient(working, x, loss)
    rows = (weight * gradient).sum(1) / _nonzero(weight.norm(dim=1) * gradient.norm(dim=1))
    whole = (weight * gradient).sum() / _nonzero(weight.norm() * gradient.norm())
    columns = gradient.sum(0) / _nonzero(math.sqrt(weight.shape[0]) * gradient.norm())
    return Orthogonality(layer.norm, rows, whole, columns)


def _nonzero(scale: Tensor) -> Tensor:
    """Replace 0 by 1: a gradient of 0 is orthogonal to everything, 0/1 instead of 0/0."""
    return torch.where(scale == 0, 1.0, scale)


def weight_gradient(layer: Linear, x: Tensor, loss: Loss) -> Tensor:
    value = loss(layer(x))
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        rule = "loss must map the layer's output to one number that depends on it"
        raise fail(rule, describe(value), "Return for example output.square().mean().")
    return torch.autograd.grad(value.reshape(()), layer.weight)[0]
