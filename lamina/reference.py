"""Reference implementation of the paper's equations in plain PyTorch, for any dtype and device.

Every fast path is tested against this module, so it follows the paper's appendix closely. Letters:
T steps, B cases, D inputs, H units, P = proj_size or H, G gates; sigma is the logistic function in the cells
and the standard deviation in the norms. Backward passes are autograd's, so they can be differentiated again.

Dtypes: products are computed in the dtype of their operands; statistics, gates and carried states are kept in
float32 (float64 for float64 operands); the output has the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .placements import GATES, STATES, Placement, resolve

EPS_MODES = ("var", "std")

Masks = tuple[Tensor | float | None, ...]
LSTMState = tuple[Tensor, Tensor]
Activation = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, tuple[Tensor, ...], int], tuple[Tensor, ...]]  # x_t, state and t to the next state


def identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "identity": identity,
}


class CellWeights(NamedTuple):
    """Parameters of one cell under torch's names, plus the gains; None for those that the placement does not have."""

    weight_ih: Tensor  # [G*H, D]
    weight_hh: Tensor  # [G*H, P]
    bias_ih: Tensor | None = None  # [G*H]
    bias_hh: Tensor | None = None  # [G*H]
    weight_hr: Tensor | None = None  # [P, H], LSTM with a projection
    gain_ih: Tensor | None = None  # [G*H]
    gain_hh: Tensor | None = None  # [G*H]
    gain_sum: Tensor | None = None  # [G*H]
    gain_cell: Tensor | None = None  # [H]
    bias_cell: Tensor | None = None  # [H]
    gain_hr: Tensor | None = None  # [P], weight norm of the projection


class Moments(NamedTuple):
    """Per-step statistics of one site of a batch-normalised recurrence."""

    mean: Tensor  # [T, F]
    var: Tensor  # [T, F], biased


class SequenceResult(NamedTuple):
    """Result of a whole sequence: outputs, final states and, under batch norm, the batch moments of each site."""

    output: Tensor  # [T, B, P]
    state: tuple[Tensor, ...]  # h_n [B, P] and for the LSTM c_n [B, H]
    moments: dict[str, Moments]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def root(x: Tensor) -> Tensor:
    """Return the square root, with gradient 0 at 0 instead of inf, so that a constant vector gives no NaN gradients."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def inverse(x: Tensor) -> Tensor:
    """Return 1/x, and 0 at 0: with eps = 0 a constant vector normalises to 0, the limit of eps -> 0."""
    nonzero = x != 0
    return torch.where(nonzero, 1.0 / torch.where(nonzero, x, 1.0), 0.0)


def inverse_deviation(var: Tensor, eps: float, eps_mode: str) -> Tensor:
    """Return 1/sqrt(var + eps) for eps_mode "var", 1/(sqrt(var) + eps) for "std"."""
    return inverse(root(var + eps) if eps_mode == "var" else root(var) + eps)


def standardise(z: Tensor, dims: tuple[int, ...], eps: float, eps_mode: str) -> Tensor:
    """Return (z - mu)/sigma with the biased variance over ``dims``."""
    centred = z - z.mean(dims, keepdim=True)
    var = centred.square().mean(dims, keepdim=True)
    return centred * inverse_deviation(var, eps, eps_mode)


def affine(z: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    z = z if gain is None else z * gain
    return z if bias is None else z + bias


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, eps_mode: str = "var",
    *, activation: str | None = None, residual: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return gain (z - mu)/sigma + bias over the last ``len(normalized_shape)`` axes (Eq. 3).

    The named activation follows. With a residual, z is input + residual and the result is the pair (output, z).
    """
    dims = tuple(range(-len(normalized_shape), 0))
    total = input if residual is None else input + residual
    z = total.to(statistics_dtype(total.dtype))
    out = affine(standardise(z, dims, eps, eps_mode), weight, bias)
    out = (out if activation is None else ACTIVATIONS[activation](out)).to(total.dtype)
    return out if residual is None else (out, total)


def batch_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    unbiased: bool = False, eps_mode: str = "var",
) -> Tensor:  # fmt: skip
    """Normalise each feature (axis 1) over all cases and positions of the batch (Eq. 2).

    ``unbiased=True`` divides by n-1 inside the normalisation itself, as the paper does for batches of 4.
    In training, and without running statistics, the statistics of the batch apply; training updates the running ones.
    """
    z = input.to(statistics_dtype(input.dtype))
    dims = tuple(d for d in range(z.dim()) if d != 1)
    shape = [-1 if d == 1 else 1 for d in range(z.dim())]
    if training or running_mean is None or running_var is None:
        mean, var = batch_moments(z, dims, unbiased)
        if training and running_mean is not None and running_var is not None:
            values = z.numel() // max(z.shape[1], 1)
            with torch.no_grad():
                if values > 0:
                    running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
                if values > 1:  # a single value carries no information about the variance
                    running_var.lerp_(batch_moments(z.detach(), dims, True)[1].to(running_var.dtype), momentum)
    else:
        mean, var = running_mean, running_var
    scale = inverse_deviation(var, eps, eps_mode) * (1.0 if weight is None else weight)
    out = (z - mean.reshape(shape)) * scale.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(input.dtype)


def batch_moments(z: Tensor, dims: tuple[int, ...], unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each feature; a single value has variance 0 with either divisor."""
    count = z.numel() // max(z.shape[1], 1)
    mean = z.mean(dims, keepdim=True)
    var = (z - mean).square().sum(dims) / max(count - 1 if unbiased else count, 1)
    return mean.reshape(-1), var


def weight_norm(weight: Tensor, gain: Tensor) -> Tensor:
    """Return gain_i w_i / ||w_i||; in the paper's framework mu = 0 and sigma_i = ||w_i||. Axis 0 is the unit."""
    rows = weight.flatten(1).to(statistics_dtype(weight.dtype))
    scale = gain * inverse(root(rows.square().sum(1)))
    return (rows * scale.unsqueeze(1)).reshape(weight.shape).to(weight.dtype)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, gain: Tensor | None = None,
    *, norm: str | None = "layer", eps: float = 1e-5, eps_mode: str = "var",
) -> Tensor:  # fmt: skip
    """Return g/sigma (W x - mu) + b, the summed inputs of a layer normalised by ``norm``, before the non-linearity."""
    if norm == "weight" and gain is not None:
        return F.linear(input, weight_norm(weight, gain), bias)
    summed = F.linear(input, weight)
    if norm == "layer":
        out: Tensor = layer_norm(summed, summed.shape[-1:], gain, bias, eps, eps_mode)
        return out
    if norm == "batch":
        flat = summed.reshape(-1, summed.shape[-1])
        return batch_norm(flat, None, None, gain, bias, True, 0.0, eps, False, eps_mode).reshape(summed.shape)
    return affine(summed, gain, bias)


# The cells, one step each, as in the appendix.
#
# x is W_x x_t, already normalised if the placement has a norm at "ih"; y is W_h h_{t-1}. norms.apply(site, z, t)
# normalises z if the placement has a norm at that site, and otherwise returns z.


@dataclass
class SiteNorms:
    """Norms of one recurrence: ``apply("hh", z, t)`` normalises z at that site and step t."""

    kind: str | None
    placement: Placement
    weights: CellWeights
    eps: float
    eps_mode: str
    valid: Tensor | None = None  # [T, B, 1], True where a step is not padding
    population: Mapping[str, Moments] | None = None  # if present, it replaces the moments of the batch
    record: dict[str, list[Moments]] = field(default_factory=dict)

    def apply(self, site: str, z: Tensor, step: int | None) -> Tensor:
        """Normalise z, [B, F] at one step or [T, B, F] with ``step=None`` for all steps at once."""
        groups = self.placement.groups(site)
        if not groups:
            return z
        gain: Tensor | None = getattr(self.weights, f"gain_{site}")
        if self.kind == "batch":
            return affine(self._over_batch(site, z, step), gain, None)
        width = z.shape[-1] // sum(groups)
        parts = torch.split(z, [width * g for g in groups], dim=-1)
        return affine(torch.cat([standardise(p, (-1,), self.eps, self.eps_mode) for p in parts], -1), gain, None)

    def _over_batch(self, site: str, z: Tensor, step: int | None) -> Tensor:
        if self.population is not None:
            mean, var = self._population_moments(self.population[site], z, step)
        else:
            mean, var = self._batch_moments(z, step)
            moments = Moments(mean.detach().flatten(0, -2), var.detach().flatten(0, -2))
            self.record.setdefault(site, []).append(moments)
        return (z - mean) * inverse_deviation(var, self.eps, self.eps_mode)

    def _batch_moments(self, z: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
        if self.valid is None:
            mean = z.mean(-2, keepdim=True)
            return mean, (z - mean).square().mean(-2, keepdim=True)
        valid = (self.valid if step is None else self.valid[step]).to(z.dtype)
        count = valid.sum(-2, keepdim=True).clamp(min=1)
        mean = (z * valid).sum(-2, keepdim=True) / count
        return mean, ((z - mean).square() * valid).sum(-2, keepdim=True) / count

    @staticmethod
    def _population_moments(stored: Moments, z: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
        """Return the moments of step t, or of the last stored step if t lies beyond it."""
        last = stored.mean.shape[0] - 1
        if step is not None:
            row = min(step, last)
            return stored.mean[row].to(z.dtype), stored.var[row].to(z.dtype)
        rows = torch.arange(z.shape[0], device=z.device).clamp(max=last)
        return stored.mean[rows].unsqueeze(1).to(z.dtype), stored.var[rows].unsqueeze(1).to(z.dtype)

    def moments(self) -> dict[str, Moments]:
        return {
            site: Moments(torch.cat([m.mean for m in steps]), torch.cat([m.var for m in steps]))
            for site, steps in self.record.items()
        }


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return W x, computed in the precision of the weight and cast to that of the statistics."""
    out = F.linear(x.to(weight.dtype), weight)
    return out.to(statistics_dtype(out.dtype))


def _rnn_step(x: Tensor, y: Tensor, w: CellWeights, norms: SiteNorms, t: int, nonlinearity: str) -> Tensor:
    a = norms.apply("sum", x + norms.apply("hh", y, t), t)
    a = affine(affine(a, None, w.bias_ih), None, w.bias_hh)
    return torch.tanh(a) if nonlinearity == "tanh" else torch.relu(a)


def _lstm_step(x: Tensor, y: Tensor, c: Tensor, w: CellWeights, norms: SiteNorms, t: int) -> LSTMState:
    a = norms.apply("sum", x + norms.apply("hh", y, t), t)
    a = affine(affine(a, None, w.bias_ih), None, w.bias_hh)
    i, f, g, o = a.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    normed = affine(norms.apply("cell", c, t), None, w.bias_cell)  # LN(c)
    h = torch.sigmoid(o) * torch.tanh(normed)
    if w.weight_hr is not None:
        h = product(h, w.weight_hr)
    return h, normed if norms.placement.carry else c


def _gru_step(x: Tensor, y: Tensor, h: Tensor, w: CellWeights, norms: SiteNorms, t: int) -> Tensor:
    if norms.placement.dreamer:
        a = norms.apply("sum", x + y, t)
        r, u, n = affine(affine(a, None, w.bias_ih), None, w.bias_hh).chunk(3, -1)
        u = torch.sigmoid(u - 1)
        return u * torch.tanh(torch.sigmoid(r) * n) + (1 - u) * h
    x_r, x_z, x_n = affine(x, None, w.bias_ih).chunk(3, -1)
    h_r, h_z, h_n = affine(norms.apply("hh", y, t), None, w.bias_hh).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    return (1 - z) * torch.tanh(x_n + r * h_n) + z * h


@dataclass(frozen=True)
class Recurrence:
    """Description of one recurrent call, the argument of every backend."""

    cell: str  # "RNN", "LSTM" or "GRU"
    input: Tensor  # [T, B, D]
    state: tuple[Tensor | None, ...]  # h [B, P], LSTM also c [B, H]; None means zeros
    weights: CellWeights
    norm: str | None
    placement: Placement
    eps: float = 1e-5
    eps_mode: str = "var"
    nonlinearity: str = "tanh"
    lengths: Tensor | None = None  # [B]
    resets: Tensor | None = None  # bool [T, B]
    reverse: bool = False
    zoneout: Masks = (None, None)  # weight of the old h and c: 0/1 masks [T, B, .] or a rate
    recurrent_mask: Tensor | None = None  # [B, P], multiplies h before the product with W_h
    population: Mapping[str, Moments] | None = None
    first_step: int = 0  # step number of input[0], for per-step batch statistics
    recompute: bool = False  # do not save the gates for the backward pass; the reference ignores this
    reset_state: tuple[Tensor | None, ...] = (None, None)  # state after a reset, shaped as ``state``; None means zeros

    def state_shapes(self) -> list[tuple[int, int]]:
        """Return [B, P] of h, and for the LSTM [B, H] of c."""
        w, batch = self.weights, self.input.shape[1]
        widths = (w.weight_hh.shape[1], w.weight_hh.shape[0] // GATES[self.cell])
        return [(batch, width) for width in widths[: STATES[self.cell]]]

    def initial(self) -> tuple[Tensor, ...]:
        """Return the state before the first step."""
        return self._or_zeros(self.state)

    def after_reset(self) -> tuple[Tensor, ...]:
        """Return the state before the first step of a new segment."""
        return self._or_zeros(self.reset_state)

    def _or_zeros(self, states: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        pairs = zip(states, self.state_shapes())
        return tuple(self.input.new_zeros(shape) if s is None else s for s, shape in pairs)

    def forwards(self) -> Recurrence:
        """Return the same recurrence with time running forwards and without resets in the padding."""
        resets = self.resets
        if resets is not None and self.lengths is not None:
            resets = resets & valid_steps(self.lengths, resets.shape[0])
        if not self.reverse:
            return self if resets is self.resets else replace(self, resets=resets)
        resets = None if resets is None else reverse_resets(resets, self.lengths)
        return replace(self, reverse=False, input=reverse_sequences(self.input, self.lengths), resets=resets)


def valid_steps(lengths: Tensor, steps: int) -> Tensor:
    """Return a mask [T, B] that is True at the steps that are not padding."""
    return torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths.unsqueeze(0)


def reverse_sequences(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the valid steps of each case and leave the padding in place; x is [T, B] or [T, B, F]."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    source = lengths.unsqueeze(0) - 1 - steps
    source = torch.where(source >= 0, source, steps)
    return x.gather(0, source if x.dim() == 2 else source.unsqueeze(-1).expand_as(x))


def reverse_resets(resets: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse resets: read backwards, a segment begins at the step that precedes the next segment's first one."""
    return reverse_sequences(torch.cat([resets[1:], torch.zeros_like(resets[:1])]), lengths)


def evaluate(call: Recurrence) -> SequenceResult:
    """Run a recurrence step by step."""
    result = _evaluate_forward(call.forwards())
    return result._replace(output=reverse_sequences(result.output, call.lengths)) if call.reverse else result


def effective_weights(call: Recurrence) -> CellWeights:
    """Return the weights of the products: with normalised rows under weight norm, otherwise unchanged."""
    w = call.weights
    if call.norm != "weight":
        return w
    pairs = {"weight_ih": w.gain_ih, "weight_hh": w.gain_hh, "weight_hr": w.gain_hr}
    normed = {name: weight_norm(getattr(w, name), gain) for name, gain in pairs.items() if gain is not None}
    return w._replace(**normed)


def _evaluate_forward(call: Recurrence) -> SequenceResult:
    x, valid = call.input, None
    if call.lengths is not None:
        valid = valid_steps(call.lengths, x.shape[0]).unsqueeze(-1)
        x = torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))  # padding may hold NaN
    w = effective_weights(call)
    norms = SiteNorms(call.norm, call.placement, w, call.eps, call.eps_mode, valid, call.population)
    # LN(W_x x) does not depend on h, so all steps are computed at once.
    only_step = call.first_step if call.population is not None and x.shape[0] == 1 else None
    summed = norms.apply("ih", product(x, w.weight_ih), only_step)
    step = _step_function(call, w, norms)
    output, state = _unroll(step, summed, call, valid)
    return SequenceResult(output.to(call.input.dtype), tuple(s.to(call.input.dtype) for s in state), norms.moments())


def _step_function(call: Recurrence, w: CellWeights, norms: SiteNorms) -> Step:
    def step(x: Tensor, state: tuple[Tensor, ...], t: int) -> tuple[Tensor, ...]:
        h = state[0] if call.recurrent_mask is None else state[0] * call.recurrent_mask
        y = product(h, w.weight_hh)
        if call.cell == "LSTM":
            return _lstm_step(x, y, state[1], w, norms, t)
        if call.cell == "RNN":
            return (_rnn_step(x, y, w, norms, t, call.nonlinearity),)
        return (_gru_step(x, y, state[0], w, norms, t),)

    return step


def _unroll(step: Step, summed: Tensor, call: Recurrence, valid: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    state, after_reset = (tuple(s.to(summed.dtype) for s in states) for states in (call.initial(), call.after_reset()))
    outputs = []
    for t in range(summed.shape[0]):
        if call.resets is not None:
            begins = call.resets[t].unsqueeze(-1)
            state = tuple(torch.where(begins, first, s) for first, s in zip(after_reset, state))
        new = step(summed[t], state, t + call.first_step)
        new = tuple(_zoneout(old, fresh, mask, t) for old, fresh, mask in zip(state, new, call.zoneout))
        if valid is None:
            state = new
            outputs.append(new[0])
        else:
            state = tuple(torch.where(valid[t], fresh, old) for old, fresh in zip(state, new))
            outputs.append(torch.where(valid[t], new[0], torch.zeros_like(new[0])))
    return torch.stack(outputs), state


def _zoneout(old: Tensor, fresh: Tensor, mask: Tensor | float | None, t: int) -> Tensor:
    """Apply zoneout (Krueger et al. 2017): each unit keeps its old value where the mask is 1."""
    if mask is None:
        return fresh
    keep = mask[t] if isinstance(mask, Tensor) else mask
    return keep * old + (1 - keep) * fresh


def rnn(
    input: Tensor, state: Tensor, weights: CellWeights,
    *, nonlinearity: str = "tanh", norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5,
    eps_mode: str = "var", lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False,
    zoneout: Masks = (None,), recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run h_t = f(g/sigma (a_t - mu) + b), a_t = W_h h_{t-1} + W_x x_t (Eq. 4), over a whole sequence."""
    call = Recurrence(
        "RNN", input, (state,), weights, norm, resolve("RNN", norm, placement), eps, eps_mode, nonlinearity,
        lengths, resets, reverse, zoneout, recurrent_mask, population, reset_state=(reset_state,),
    )  # fmt: skip
    result = evaluate(call)
    return result.output, result.state[0]


def lstm(
    input: Tensor, state: LSTMState, weights: CellWeights,
    *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
    lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False, zoneout: Masks = (None, None),
    recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: LSTMState | None = None,
) -> tuple[Tensor, LSTMState]:  # fmt: skip
    """Run the appendix's LSTM over a whole sequence; ``placement`` selects a row of ``lamina.placements``."""
    call = Recurrence(
        "LSTM", input, state, weights, norm, resolve("LSTM", norm, placement), eps, eps_mode, "tanh",
        lengths, resets, reverse, zoneout, recurrent_mask, population, reset_state=reset_state or (None, None),
    )  # fmt: skip
    result = evaluate(call)
    return result.output, (result.state[0], result.state[1])


def gru(
    input: Tensor, state: Tensor, weights: CellWeights,
    *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
    lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False, zoneout: Masks = (None,),
    recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the appendix's GRU over a whole sequence; ``placement`` selects a row of ``lamina.placements``."""
    call = Recurrence(
        "GRU", input, (state,), weights, norm, resolve("GRU", norm, placement), eps, eps_mode, "tanh",
        lengths, resets, reverse, zoneout, recurrent_mask, population, reset_state=(reset_state,),
    )  # fmt: skip
    result = evaluate(call)
    return result.output, result.state[0]
