"""Fisher information of a model's conditional distribution P(y | x), and the KL divergence it approximates.

F = E_x[ J^T Cov[y | x]/phi^2 J ], the mean over the given cases x, with J = d logits / d parameters and phi the
dispersion of the family. N counts cases, H outputs and P parameters.

A model is any module whose (first) output [N, H], or [T, B, H] with T * B cases, holds the logits of a family. Its mode
is kept: batch norm in training takes its statistics from the given batch, so each case's logits depend on all cases.
Parameters are those that require grad, in the order of ``named_parameters``, each flattened by rows.

The model does not change, neither its buffers nor the state of the random generators. Random layers draw the same
numbers in every pass, so a Fisher matrix, a product with it and a KL divergence describe one function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import fail, one_of, positive_int
from .closed import closed_jacobian, printed_jacobian
from .evaluation import Evaluation, trained_parameters
from .families import Family, family_of

METHODS = ("jacobian", "closed", "printed", "sampled")


def fisher(
    model: nn.Module, x: Any, family: str | Family = "bernoulli", method: str = "jacobian", samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Return the Fisher matrix [P, P], averaged over the cases of ``x``.

    method: "jacobian", exact, by autograd; "closed", the closed form of a single ``lamina.Linear``; "printed", the
        paper's block formula for it, which is wrong under layer norm; "sampled", the mean outer product of the
        scores of ``samples`` values of y drawn for every case.
    generator: random generator for "sampled"; None draws from torch's global one.
    """
    one_of("method", method, METHODS)
    call = Evaluation(model, x, family)
    names = list(call.parameters)
    _check_memory(call, names)
    if method in ("closed", "printed"):
        in_closed_form = closed_jacobian if method == "closed" else printed_jacobian
        return call.information([(slice(None), in_closed_form(model, x))], call.exact)
    weigh = call.exact if method == "jacobian" else call.sampled(positive_int("samples", samples), generator)
    return call.information(call.jacobian_chunks(names), weigh)


def _check_memory(call: Evaluation, names: Sequence[str]) -> None:
    """Raise where a Fisher matrix and the sum that forms it exceed the memory of the device."""
    count, device = sum(call.parameters[name].numel() for name in names), call.logits.device
    needed, available = 2 * count**2 * call.logits.element_size(), _memory(device)
    if available is not None and needed > available:
        rule = f"a Fisher matrix [P, P] and its sum must fit into the memory of {device}, {available / 2**30:,.1f} GiB"
        received = f"P = {count:,} parameters, which need {needed / 2**30:,.1f} GiB"
        raise fail(rule, received, "Use FisherProduct(model, x, family) @ vector, which never forms the matrix.")


def _memory(device: torch.device) -> int | None:
    """Return the total memory of a device in bytes, or None where it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def jacobian(model: nn.Module, x: Any) -> Tensor:
    """Return d logits / d parameters [N, H, P] by autograd."""
    call = Evaluation(model, x, None)
    return torch.cat([chunk for _, chunk in call.jacobian_chunks(list(call.parameters))])


def blocks(model: nn.Module, x: Any, family: str | Family = "bernoulli") -> dict[str, Tensor]:
    """Return the diagonal block of the Fisher matrix of each module that owns parameters, by the module's name.

    A model that owns parameters itself has the name "", as in ``named_modules``. The whole matrix is never formed.
    """
    call = Evaluation(model, x, family)
    owners: dict[str, list[str]] = {}
    for name in call.parameters:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    for names in owners.values():
        _check_memory(call, names)
    return {owner: call.information(call.jacobian_chunks(names), call.exact) for owner, names in owners.items()}


def metric(model: nn.Module, x: Any, direction: Tensor, family: str | Family = "bernoulli") -> Tensor:
    """Return ds^2 = 1/2 d^T F d for a direction d [P], from one forward-mode pass."""
    call = Evaluation(model, x, family)
    change = call.jvp(direction)
    return 0.5 * (change * call.family.weigh(call.logits, change)).sum() / call.cases


def kl(model: nn.Module, x: Any, direction: Tensor, family: str | Family = "bernoulli") -> Tensor:
    """Return the mean KL(P at the parameters || P at parameters + direction); to second order it is ``metric``."""
    call = Evaluation(model, x, family)
    steps = call.split(direction)
    with torch.no_grad():
        other = call.run({name: p + steps[name] for name, p in call.parameters.items()})
    return call.family.kl(call.logits, other).mean()


def flat(model: nn.Module) -> Tensor:
    """Return a copy of the parameters as one vector [P]."""
    return torch.cat([parameter.flatten() for parameter in trained_parameters(model).values()])


def where(model: nn.Module) -> dict[str, slice]:
    """Return the slice of the flat vector that belongs to each parameter."""
    sizes = {name: parameter.numel() for name, parameter in trained_parameters(model).items()}
    return {name: slice(end - sizes[name], end) for name, end in zip(sizes, accumulate(sizes.values()))}


class FisherProduct:
    """F as an operator: ``FisherProduct(model, x) @ vector`` [P], for sizes at which F does not fit into memory.

    Each product costs a forward-mode and a reverse-mode pass and uses the current parameters of the model.
    """

    def __init__(self, model: nn.Module, x: Any, family: str | Family = "bernoulli") -> None:
        self.model, self.x, self.family = model, x, family_of(family)
        self.size = sum(parameter.numel() for parameter in trained_parameters(model).values())
        Evaluation(model, x, self.family)  # raises for unsuitable models and inputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    def __matmul__(self, vector: Tensor) -> Tensor:
        call = Evaluation(self.model, self.x, self.family)
        return call.vjp(call.family.weigh(call.logits, call.jvp(vector)) / call.cases)
