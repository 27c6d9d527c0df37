"""A model at one input as a function of its parameters alone: logits, Jacobians, and products with them.

Buffers are copies and random layers draw the same numbers in every pass, so nothing of the model changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..checks import describe, fail
from .families import Family, as_cases, family_of
from .singular import watched_statistics

PIECE = 2**22  # numbers in one piece of a Jacobian and its upstream gradients: 32 MiB of float64

Weigh = Callable[[slice, Tensor], Tensor]


class Evaluation:
    """A model at one input as a function of its parameters alone."""

    def __init__(self, model: nn.Module, x: Any, family: str | Family | None) -> None:
        self.model, self.x = model, x
        self.parameters = trained_parameters(model)
        self.family = family_of("gaussian" if family is None else family)
        with torch.no_grad(), watched_statistics(model):
            self.logits = self.run(self.parameters)
        self.family.check_logits(type(model).__name__, self.logits)
        self.cases = self.logits.shape[0]

    def run(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The logits [cases, H]; buffers are copies, so that running statistics stay."""
        state = {**{name: buffer.clone() for name, buffer in self.model.named_buffers()}, **parameters}
        with _repeatable(self.parameters.values()):
            output = functional_call(self.model, state, (self.x,))
        return as_cases(type(self.model).__name__, output)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as tensors of the parameters' shapes."""
        size = sum(p.numel() for p in self.parameters.values())
        if not isinstance(vector, Tensor) or tuple(vector.shape) != (size,):
            rule = (
                f"a direction of {type(self.model).__name__} must be a vector [{size}], one number for each parameter"
            )
            raise fail(rule, describe(vector), "where(model) says which part of it belongs to which parameter.")
        parts = torch.split(vector.detach(), [p.numel() for p in self.parameters.values()])
        return {name: part.reshape(p.shape).to(p) for part, (name, p) in zip(parts, self.parameters.items())}

    def push(self, vector: Tensor) -> Tensor:
        """J times a flat vector, [cases, H]."""
        tangents = self.split(vector)
        with _plain_kernels():
            try:
                return self._push_forward(tangents)
            except NotImplementedError:  # an operator without a forward mode
                return self._push_by_reverse(tangents)

    @torch.no_grad()
    def _push_forward(self, tangents: Mapping[str, Tensor]) -> Tensor:
        make_dual: Any = forward_ad.make_dual  # torch gives neither a type
        unpack_dual: Any = forward_ad.unpack_dual
        with forward_ad.dual_level():
            logits = self.run({name: make_dual(p, tangents[name]) for name, p in self.parameters.items()})
            tangent: Tensor | None = unpack_dual(logits).tangent
            return torch.zeros_like(self.logits) if tangent is None else tangent.clone()

    @torch.enable_grad()
    def _push_by_reverse(self, tangents: Mapping[str, Tensor]) -> Tensor:
        """J v as the derivative of u -> (J^T u) . v, which needs the reverse mode only."""
        leaves, logits = self._graph()
        upstream = torch.zeros_like(logits, requires_grad=True)
        pulled = torch.autograd.grad(logits, list(leaves.values()), upstream, create_graph=True, materialize_grads=True)
        along = torch.stack([(g * t).sum() for g, t in zip(pulled, tangents.values())]).sum()
        return torch.autograd.grad(along, upstream)[0]

    def pull(self, upstream: Tensor) -> Tensor:
        """J^T times upstream [cases, H], a flat vector."""
        leaves, logits = self._graph()
        found = torch.autograd.grad(logits, list(leaves.values()), upstream, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in found])

    @torch.enable_grad()
    def _graph(self) -> tuple[dict[str, Tensor], Tensor]:
        leaves = {name: p.requires_grad_() for name, p in trained_parameters(self.model).items()}
        logits = self.run(leaves)
        if not logits.requires_grad:
            raise fail(
                f"the output of {type(self.model).__name__} must depend on its parameters by differentiable operations",
                "an output without a gradient",
                "Remove detach() or no_grad() from its forward.",
            )
        return leaves, logits

    def pieces(self, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """The Jacobian for the named parameters, some cases [n, H, p] at a time."""
        leaves, logits = self._graph()
        chosen = [leaves[name] for name in names]
        step = max(1, PIECE // (logits.shape[1] * (logits.numel() + sum(leaf.numel() for leaf in chosen))))
        for start in range(0, self.cases, step):
            cases = slice(start, min(start + step, self.cases))
            rows = _rows(logits, chosen, cases)
            yield cases, rows.reshape(cases.stop - cases.start, logits.shape[1], -1)

    def assemble(self, pieces: Iterator[tuple[slice, Tensor]], weigh: Weigh) -> Tensor:
        """Mean over the cases of J^T (weighed J)."""
        total: Tensor | None = None
        for cases, piece in pieces:
            part = piece.flatten(0, 1).T @ weigh(cases, piece).flatten(0, 1)
            total = part if total is None else total + part
        if total is None:
            raise fail("a Fisher matrix needs at least one case", describe(self.logits), "Pass cases.")
        return (total + total.T) / (2 * self.cases)

    def exact(self, cases: slice, piece: Tensor) -> Tensor:
        return self.family.weigh(self.logits[cases], piece)

    def sampled(self, samples: int, generator: torch.Generator | None) -> Weigh:
        """Weigh by the mean outer product of d log P(y)/d logits over drawn y: J^T of it is the score of y."""
        count, width = self.logits.shape
        total = self.logits.new_zeros(count, width, width)
        at_once = max(1, PIECE // self.logits.numel())
        for start in range(0, samples, at_once):
            draws = min(at_once, samples - start)
            scores = self._output_scores(draws, generator).reshape(draws, count, width)
            total += torch.einsum("snh,snk->nhk", scores, scores)
        return lambda cases, piece: (total[cases] / samples) @ piece

    @torch.enable_grad()
    def _output_scores(self, draws: int, generator: torch.Generator | None) -> Tensor:
        logits = self.logits.repeat(draws, 1).requires_grad_()
        y = self.family.sample(logits, generator)
        return torch.autograd.grad(self.family.log_prob(y, logits).sum(), logits)[0]


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require grad, cut off from them: what is done to these tensors' flags stays here."""
    found = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise fail(
            "an analysis needs parameters that require grad",
            f"a {type(model).__name__} without any",
            "Call requires_grad_() on those to analyse.",
        )
    return found


@contextmanager
def _repeatable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Random layers draw the same numbers in every pass; the user's generators are put back afterwards."""
    devices = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices):
        # Not torch.manual_seed: it would reseed devices that are not put back.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d] for d in devices)):
            generator.manual_seed(0)
        yield


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without the fused recurrences and attention, which have neither forward-mode nor second derivatives."""
    backends: Any = torch._C  # the public switches also set what else they know, and warn about it
    before = backends._get_cudnn_enabled(), backends._get_mkldnn_enabled()
    backends._set_cudnn_enabled(False)
    backends._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        backends._set_cudnn_enabled(before[0])
        backends._set_mkldnn_enabled(before[1])


def _rows(logits: Tensor, leaves: Sequence[Tensor], cases: slice) -> Tensor:
    """Rows of the Jacobian for every output of some cases, [n * H, p]."""
    width = logits.shape[1]
    picked = torch.arange(cases.start * width, cases.stop * width, device=logits.device)
    seeds = logits.new_zeros(len(picked), logits.numel())
    seeds = seeds.scatter(1, picked.unsqueeze(1), 1).reshape(-1, *logits.shape)
    try:
        found = torch.autograd.grad(logits, leaves, seeds, True, is_grads_batched=True, allow_unused=True)
    except RuntimeError:  # an operator whose backward cannot be batched
        return torch.stack([_row(logits, leaves, seed) for seed in seeds])
    zeros = (leaf.new_zeros(len(picked), leaf.numel()) for leaf in leaves)
    return torch.cat([z if g is None else g.flatten(1) for g, z in zip(found, zeros)], 1)


def _row(logits: Tensor, leaves: Sequence[Tensor], seed: Tensor) -> Tensor:
    found = torch.autograd.grad(logits, leaves, seed, True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])
