"""A model at one input as a function of its parameters only: logits, Jacobians and products with Jacobians.

J is the Jacobian d logits / d parameters, of N cases, H outputs and P parameters. Buffers are copied and random layers
draw the same numbers in every pass, so the model does not change.
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
from .statistics_checks import checked_statistics

CHUNK = 2**22  # numbers in one chunk of a Jacobian and its upstream gradients: 32 MiB of float64

Chunks = Iterable[tuple[slice, Tensor]]  # cases, and their part of the Jacobian [n cases, H, P]
Weigh = Callable[[slice, Tensor], Tensor]  # Cov[y]/phi^2 times such a part


class Evaluation:
    """Model at one input, as a function of its parameters only."""

    def __init__(self, model: nn.Module, x: Any, family: str | Family | None) -> None:
        self.model, self.x = model, x
        self.parameters = trained_parameters(model)
        self.family = family_of("gaussian" if family is None else family)
        with torch.no_grad(), checked_statistics(model):
            self.logits = self.run(self.parameters)
        self.family.check_logits(type(model).__name__, self.logits)
        self.cases = self.logits.shape[0]

    def run(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [N, H]; buffers are copies, so the running statistics of the model stay."""
        state = {**{name: buffer.clone() for name, buffer in self.model.named_buffers()}, **parameters}
        with _repeatable(self.parameters.values()):
            output = functional_call(self.model, state, (self.x,))
        return as_cases(type(self.model).__name__, output)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a flat vector into tensors of the parameters' shapes."""
        sizes = [p.numel() for p in self.parameters.values()]
        if not isinstance(vector, Tensor) or tuple(vector.shape) != (sum(sizes),):
            owner = type(self.model).__name__
            rule = f"a direction of {owner} must be a vector [{sum(sizes)}], one number for each parameter"
            raise fail(rule, describe(vector), "where(model) says which part of it belongs to which parameter.")
        parts = torch.split(vector.detach(), sizes)
        return {name: part.reshape(p.shape).to(p) for part, (name, p) in zip(parts, self.parameters.items())}

    def jvp(self, vector: Tensor) -> Tensor:
        """Return J times a flat vector, [N, H]."""
        tangents = self.split(vector)
        with _plain_kernels():
            try:
                return self._jvp_forward(tangents)
            except NotImplementedError:  # an operator without a forward mode
                return self._jvp_by_reverse(tangents)

    @torch.no_grad()
    def _jvp_forward(self, tangents: Mapping[str, Tensor]) -> Tensor:
        make_dual: Any = forward_ad.make_dual  # torch gives neither a type
        unpack_dual: Any = forward_ad.unpack_dual
        with forward_ad.dual_level():
            logits = self.run({name: make_dual(p, tangents[name]) for name, p in self.parameters.items()})
            tangent: Tensor | None = unpack_dual(logits).tangent
            return torch.zeros_like(self.logits) if tangent is None else tangent.clone()

    @torch.enable_grad()
    def _jvp_by_reverse(self, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return J v as the derivative of u -> (J^T u) . v, which needs the reverse mode only."""
        leaves, logits = self._graph()
        upstream = torch.zeros_like(logits, requires_grad=True)
        pulled = torch.autograd.grad(logits, list(leaves.values()), upstream, create_graph=True, materialize_grads=True)
        along = torch.stack([(g * t).sum() for g, t in zip(pulled, tangents.values())]).sum()
        return torch.autograd.grad(along, upstream)[0]

    def vjp(self, upstream: Tensor) -> Tensor:
        """Return J^T times upstream [N, H], a flat vector."""
        leaves, logits = self._graph()
        return _flat_gradient(logits, list(leaves.values()), upstream)

    @torch.enable_grad()
    def _graph(self) -> tuple[dict[str, Tensor], Tensor]:
        leaves = {name: p.requires_grad_() for name, p in trained_parameters(self.model).items()}
        logits = self.run(leaves)
        if not logits.requires_grad:
            owner = type(self.model).__name__
            rule = f"the output of {owner} must depend on its parameters by differentiable operations"
            raise fail(rule, "an output without a gradient", "Remove detach() or no_grad() from its forward.")
        return leaves, logits

    def jacobian_chunks(self, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """Yield the Jacobian for the named parameters, some cases [n, H, P] at a time, to bound peak memory."""
        leaves, logits = self._graph()
        chosen = [leaves[name] for name in names]
        step = max(1, CHUNK // (logits.shape[1] * (logits.numel() + sum(leaf.numel() for leaf in chosen))))
        for start in range(0, self.cases, step):
            cases = slice(start, min(start + step, self.cases))
            rows = _rows(logits, chosen, cases)
            yield cases, rows.reshape(cases.stop - cases.start, logits.shape[1], -1)

    def information(self, chunks: Chunks, weigh: Weigh) -> Tensor:
        """Return the mean over the cases of J^T Cov[y]/phi^2 J."""
        products = (chunk.flatten(0, 1).T @ weigh(cases, chunk).flatten(0, 1) for cases, chunk in chunks)
        total = sum(products, self.logits.new_zeros(()))
        return (total + total.T) / (2 * self.cases)

    def exact(self, cases: slice, chunk: Tensor) -> Tensor:
        """Multiply a chunk of the Jacobian by the exact Cov[y]/phi^2."""
        return self.family.weigh(self.logits[cases], chunk)

    def sampled(self, samples: int, generator: torch.Generator | None) -> Weigh:
        """Return a weighing by the mean outer product of d log P(y)/d logits over drawn y: J^T of it is y's score."""
        count, width = self.logits.shape
        total = self.logits.new_zeros(count, width, width)
        at_once = max(1, CHUNK // self.logits.numel())
        for start in range(0, samples, at_once):
            draws = min(at_once, samples - start)
            scores = self._output_scores(draws, generator).reshape(draws, count, width)
            total += torch.einsum("snh,snk->nhk", scores, scores)
        return lambda cases, chunk: (total[cases] / samples) @ chunk

    @torch.enable_grad()
    def _output_scores(self, draws: int, generator: torch.Generator | None) -> Tensor:
        logits = self.logits.repeat(draws, 1).requires_grad_()
        y = self.family.sample(logits, generator)
        return torch.autograd.grad(self.family.log_prob(y, logits).sum(), logits)[0]


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return detached views of the parameters that require grad, so that their flags can be changed freely."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        received, remedy = f"a {type(model).__name__} without any", "Call requires_grad_() on those to analyse."
        raise fail("an analysis needs parameters that require grad", received, remedy)
    return parameters


@contextmanager
def _repeatable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Make random layers draw the same numbers in every pass, and restore the user's generators afterwards."""
    devices = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices):
        # torch.manual_seed would reseed devices that fork_rng does not restore.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d] for d in devices)):
            generator.manual_seed(0)
        yield


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Disable fused recurrences and attention, which have neither forward-mode nor second derivatives."""
    backends: Any = torch._C  # the public switches change other flags too, and warn about it
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
    """Return the rows of the Jacobian for every output of some cases, [n * H, P]."""
    width = logits.shape[1]
    outputs = torch.arange(cases.start * width, cases.stop * width, device=logits.device)
    one_hot = logits.new_zeros(len(outputs), logits.numel())
    one_hot = one_hot.scatter(1, outputs.unsqueeze(1), 1).reshape(-1, *logits.shape)
    try:
        gradients = torch.autograd.grad(logits, leaves, one_hot, True, is_grads_batched=True, allow_unused=True)
    except RuntimeError:  # an operator whose backward cannot be batched
        return torch.stack([_flat_gradient(logits, leaves, upstream, retain_graph=True) for upstream in one_hot])
    zeros = (leaf.new_zeros(len(outputs), leaf.numel()) for leaf in leaves)
    return torch.cat([z if g is None else g.flatten(1) for g, z in zip(gradients, zeros)], 1)


def _flat_gradient(logits: Tensor, leaves: Sequence[Tensor], upstream: Tensor, retain_graph: bool = False) -> Tensor:
    gradients = torch.autograd.grad(logits, leaves, upstream, retain_graph, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])
