"""The geometry of normalised layers: directions without effect, orthogonal gradients, shrinking steps, gain metric.

Everything is measured on a copy of the layer in training mode, so batch norm takes the given cases for the
population and nothing of the caller's changes. Letters: N cases, D inputs, H units, P parameters; a = W x are the
summed inputs, ahat = (a - mu)/sigma the normalised ones. The statements are exact for eps = 0.
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
from .singular import check_statistics, described, products

Loss = Callable[[Tensor], Tensor]


# ---- the layer that is looked at


def label(layer: nn.Module, name: str = "") -> str:
    """How an error names a layer: its place in the model, where there is one, its sizes and its norm."""
    return f"{name!r}, {described(layer)}," if name else described(layer)


def summed_inputs(layer: Linear, x: Tensor) -> Tensor:
    """a = W x of every case, [N, H], before any norm, gain or bias."""
    check_layer(layer)
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != layer.in_features or x.dtype != layer.weight.dtype:
        rule = f"{label(layer)} needs inputs [N, {layer.in_features}] of {layer.weight.dtype}"
        raise fail(rule, describe(x), "Check the last axis and the dtype.")
    with torch.no_grad():
        return products(layer, x)


def check_rows(weight: Tensor, called: str) -> None:
    zero = (weight.flatten(1) == 0).all(1).nonzero().flatten().tolist()
    if zero:
        raise fail(f"{called} needs rows of weights that are not 0", f"row {zero[0]} of zeros", "Draw it afresh.")


def check_layer(layer: object) -> None:
    if not isinstance(layer, Linear):
        raise fail("a lamina.Linear layer is needed", type(layer).__name__, "Pass one layer, not a whole model.")


def check_normalised(layer: Linear) -> None:
    check_layer(layer)
    if layer.norm is None:
        raise fail("a normalised layer is needed", label(layer), "Pass norm='batch', 'weight' or 'layer'.")


def working_copy(layer: Linear, x: Tensor) -> Linear:
    """The layer again, in training mode and able to give every gradient, if its norm can be taken on ``x``."""
    summed_inputs(layer, x)
    made = copy.deepcopy(layer).train().requires_grad_(True)
    check_statistics("", made, x)
    return made


# ---- directions without effect


def null_directions(model: nn.Module) -> Tensor:
    """An orthonormal basis [P, K] of the parameter directions along which normalised layers do not change.

    Batch and weight norm: each row w_i of the weights by itself, K = H. Layer norm: the whole of W, and 1 gamma^T, the
    same gamma added to every row, for every gamma: K = 1 + D (a convolution, whose positions share mu, has W alone).
    No norm: none, K = 0. Rows are ordered as the parameters that require grad; a model's layers are stacked.
    They span the null space of the Fisher matrix on generic data (layer norm: of three units and two inputs or more).
    With eps > 0 the directions along W and w_i hold up to eps/sigma^2.
    """
    layers = list(_normalised_layers(model))
    if not layers and not isinstance(model, NormalisedLayer):
        rule = "a model with a normalised lamina.Linear or lamina.Conv2d is needed"
        raise fail(rule, f"{type(model).__name__} without one", "Build it with norm='batch', 'weight' or 'layer'.")
    slices = where(model)
    like = next(iter(model.parameters())).detach()
    basis = [like.new_zeros(sum(s.stop - s.start for s in slices.values()), 0)]
    for name, layer in layers:
        place = slices.get(f"{name}.weight".lstrip("."))
        if place is not None:
            own = _weight_directions(layer, label(layer, name))
            basis.append(F.pad(own, (0, 0, place.start, basis[0].shape[0] - place.stop)))
    return torch.cat(basis, 1)


def _normalised_layers(model: nn.Module) -> Iterator[tuple[str, NormalisedLayer]]:
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, NormalisedLayer) and module.norm is not None:
            if owners[id(module.weight)] > 1:
                rule = f"{label(module, name)} must own its weights: what is void here matters where else they are used"
                raise fail(rule, "weights shared between layers", "Untie them, or pass the layer by itself.")
            yield name, module


def _weight_directions(layer: NormalisedLayer, called: str) -> Tensor:
    """The directions within vec(W), [numel(W), K]."""
    rows = layer.weight.detach().flatten(1)
    if layer.norm != "layer":
        check_rows(rows, called)
        each_alone = torch.eye(rows.shape[0]).to(rows).unsqueeze(-1) * F.normalize(rows, eps=0.0)
        return each_alone.flatten(1).T.contiguous()
    centred = rows if isinstance(layer, Conv2d) else rows - rows.mean(0)
    if centred.abs().max() <= 16 * torch.finfo(rows.dtype).eps * rows.abs().max():
        rule = f"{called} needs rows of weights that differ: equal rows give constant summed inputs"
        raise fail(rule, f"{rows.shape[0]} equal row(s)", "Draw the weights afresh; layer norm needs two units.")
    scale = F.normalize(centred.flatten(), dim=0, eps=0.0).unsqueeze(1)
    if isinstance(layer, Conv2d):
        return scale
    shifts = torch.eye(rows.shape[1]).to(rows).repeat(rows.shape[0], 1) / math.sqrt(rows.shape[0])
    return torch.cat((scale, shifts), 1)


# ---- gradients are orthogonal to them


@dataclass(frozen=True)
class Orthogonality:
    """How far a gradient G of the weights W is from orthogonal to the directions a norm makes void, each in [-1, 1].

    rows: w_i . g_i / (|w_i| |g_i|) [H]. whole: sum(W * G)/(|W| |G|). columns: column sums of G over sqrt(H) |G| [D].
    """

    norm: str | None
    rows: Tensor
    whole: Tensor
    columns: Tensor

    @property
    def violation(self) -> float:
        """The largest figure that the norm says is 0; without a norm none is, and this is the largest of all."""
        row_wise, shared = (self.rows,), (self.whole.reshape(1), self.columns)
        kept = {"batch": row_wise, "weight": row_wise, "layer": shared}.get(self.norm or "", (*row_wise, *shared))
        return float(torch.cat(kept).abs().max())


def orthogonality(layer: Linear, x: Tensor, loss: Loss) -> Orthogonality:
    """The gradient of ``loss(layer(x))`` against the directions that each norm makes void."""
    working = working_copy(layer, x)
    weight, gradient = working.weight.detach(), weight_gradient(working, x, loss)
    rows = (weight * gradient).sum(1) / _nonzero(weight.norm(dim=1) * gradient.norm(dim=1))
    whole = (weight * gradient).sum() / _nonzero(weight.norm() * gradient.norm())
    columns = gradient.sum(0) / _nonzero(math.sqrt(weight.shape[0]) * gradient.norm())
    return Orthogonality(layer.norm, rows, whole, columns)


def _nonzero(scale: Tensor) -> Tensor:
    """A gradient of 0 is orthogonal to everything: 0/1, not 0/0."""
    return torch.where(scale == 0, 1.0, scale)


def weight_gradient(layer: Linear, x: Tensor, loss: Loss) -> Tensor:
    value = loss(layer(x))
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        rule = "loss must map the layer's output to one number that depends on it"
        raise fail(rule, describe(value), "Return for example output.square().mean().")
    return torch.autograd.grad(value.reshape(()), layer.weight)[0]
