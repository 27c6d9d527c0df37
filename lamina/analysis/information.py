"""Fisher information of a model's conditional distribution P(y | x), and the KL divergence it approximates.

F = E_x[ J^T Cov[y | x]/phi^2 J ], J = d logits / d parameters, the mean taken over the given cases. A model is any
module whose (first) output [N, H], or [T, B, H] with T * B cases, holds the logits of a family. It is taken in the
mode it is in: batch norm in training has the statistics of the given batch, so each case's logits depend on all
cases. Parameters are those that require grad, in the order of ``named_parameters``, each flattened by rows.

Nothing of the model changes, neither buffers nor random numbers. Random layers draw the same numbers in every pass,
so that a Fisher matrix, a product with it and a KL divergence are about one function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import fail, one_of, positive_int
from .closed import closed_jacobian, printed_jacobian
from .evaluation import Evaluation, trained_parameters
from .families import Family, family_of

__all__ = [
    "METHODS", "FisherProduct", "blocks", "closed_jacobian", "fisher", "flat", "jacobian", "kl", "metric",
    "printed_jacobian", "where",
]  # fmt: skip

METHODS = ("jacobian", "closed", "printed", "sampled")


def fisher(
    model: nn.Module,
    x: Any,
    family: str | Family = "bernoulli",
    method: str = "jacobian",
    samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The Fisher matrix [P, P], averaged over the cases of ``x``.

    method: "jacobian", exact, by autograd; "closed", the closed form of a single ``lamina.Linear``; "printed", the
        paper's block formula for it, which is wrong under layer norm; "sampled", the mean outer product of the
        scores of ``samples`` values of y drawn for every case.
    generator: for "sampled"; without it torch's global one is drawn from.
    """
    one_of("method", method, METHODS)
    call = Evaluation(model, x, family)
    _check_fits(call, list(call.parameters))
    if method == "sampled":
        return call.assemble(
            call.pieces(list(call.parameters)), call.sampled(positive_int("samples", samples), generator)
        )
    if method == "jacobian":
        return call.assemble(call.pieces(list(call.parameters)), call.exact)
    found = (closed_jacobian if method == "closed" else printed_jacobian)(model, x)
    return call.assemble(iter([(slice(None), found)]), call.exact)


def _check_fits(call: Evaluation, names: Sequence[str]) -> None:
    """Raise where a Fisher matrix and the sum in which it is formed exceed the device's memory."""
    count, device = sum(call.parameters[name].numel() for name in names), call.logits.device
    needed, there = 2 * count**2 * call.logits.element_size(), _memory(device)
    if there is not None and needed > there:
        raise fail(
            f"a Fisher matrix [P, P] and its sum must fit into the memory of {device}, {there / 2**30:,.1f} GiB",
            f"P = {count:,} parameters, which need {needed / 2**30:,.1f} GiB",
            "Use FisherProduct(model, x, family) @ vector, which never forms the matrix.",
        )


def _memory(device: torch.device) -> int | None:
    """All memory of a device in bytes, None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def jacobian(model: nn.Module, x: Any) -> Tensor:
    """d logits / d parameters [N, H, P] by autograd."""
    call = Evaluation(model, x, None)
    return torch.cat([piece for _, piece in call.pieces(list(call.parameters))])


def blocks(model: nn.Module, x: Any, family: str | Family = "bernoulli") -> dict[str, Tensor]:
    """The diagonal block of the Fisher matrix of each module that owns parameters, by the module's name.

    A model that is itself such a module has the name "", as in ``named_modules``. The whole matrix is never formed.
    """
    call = Evaluation(model, x, family)
    owners: dict[str, list[str]] = {}
    for name in call.parameters:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    for names in owners.values():
        _check_fits(call, names)
    return {owner: call.assemble(call.pieces(names), call.exact) for owner, names in owners.items()}


def metric(model: nn.Module, x: Any, direction: Tensor, family: str | Family = "bernoulli") -> Tensor:
    """ds^2 = 1/2 d^T F d for a direction d [P], from one forward-mode pass."""
    call = Evaluation(model, x, family)
    change = call.push(direction)
    return 0.5 * (change * call.family.weigh(call.logits, change)).sum() / call.cases


def kl(model: nn.Module, x: Any, direction: Tensor, family: str | Family = "bernoulli") -> Tensor:
    """KL(P at the parameters || P at parameters + direction), averaged over the cases; ``metric`` to second order."""
    call = Evaluation(model, x, family)
    steps = call.split(direction)
    with torch.no_grad():
        other = call.run({name: p + steps[name] for name, p in call.parameters.items()})
    return call.family.kl(call.logits, other).mean()


def flat(model: nn.Module) -> Tensor:
    """The parameters [P] as one vector, a copy."""
    return torch.cat([parameter.flatten() for parameter in trained_parameters(model).values()])


def where(model: nn.Module) -> dict[str, slice]:
    """Which part of the flat vector each parameter is."""
    found, start = {}, 0
    for name, parameter in trained_parameters(model).items():
        found[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return found


class FisherProduct:
    """F as an operator: ``FisherProduct(model, x) @ vector`` [P], for sizes at which F does not fit.

    Each product costs a forward-mode and a reverse-mode pass and sees the model's parameters as they then are.
    """

    def __init__(self, model: nn.Module, x: Any, family: str | Family = "bernoulli") -> None:
        self.model, self.x, self.family = model, x, family_of(family)
        self.size = sum(parameter.numel() for parameter in trained_parameters(model).values())
        Evaluation(model, x, self.family)

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    def __matmul__(self, vector: Tensor) -> Tensor:
        call = Evaluation(self.model, self.x, self.family)
        return call.pull(call.family.weigh(call.logits, call.push(vector)) / call.cases)
