"""One step of a recurrence with its gradients on a GPU: both products in one launch where rows are few, and one kernel.

Nothing is looked up on the device and nothing waits for it, so that loops of such steps can be captured as CUDA
graphs. Of a step only its inputs and the two products are kept. What calls of the same sizes share is worked out once
(``Kind``): a step costs the host more than the device. A gradient that is to be differentiated again is taken through
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..checks import batched
from ..reference import Recurrence, SequenceResult
from . import cell_product, fused, interpreted
from .forms import Form, Setting, form_of, power, setting_of
from .given import COUNT, NAMES, STEP, Given, extras_of, tensors_of, there
from .plans import OVERRIDE, processors
from .precision import as_cudnn_multiplies, tf32_wanted
from .prepared import Launch

KEEP_H, KEEP_C = STEP, STEP + 1  # where zoneout's masks stand among what a step is given
SMALL = slice(NAMES.index("bias_ih"), STEP)  # biases and gains
KINDS = 1024  # that are kept
_AS_IT_IS = nullcontext()


def run(call: Recurrence) -> SequenceResult:
    """One step of a recurrence, of an input [1, B, D]."""
    tensors, extras = tensors_of(call, None), extras_of(call)
    masks = [None if m is None else m[0] for m in extras[2:4]]
    found = step(setting_of(call, "cell"), there(tensors[0])[0], *tensors[1:STEP], *masks, extras[4])
    return SequenceResult(found[0].unsqueeze(0), found, {})


def step(setting: Setting, *given: Given) -> tuple[Tensor, ...]:
    """The new state: of x [B, D], the rest of given.NAMES, both keep masks [B, H] and the dropout mask.

    All but the masks lie side by side in memory.
    """
    return kind_of(setting, given)(*given)


def kind_of(setting: Setting, given: Sequence[Given]) -> Kind:
    """The kind of a call."""
    looks = tuple(None if t is None else (t.dtype, t.shape, t.device) for t in given)
    return _kind(setting, looks, _is_rate(given[KEEP_H]), _is_rate(given[KEEP_C]))


def _is_rate(mask: Given) -> bool:
    """Whether a mask is one number, expanded."""
    return mask is not None and not any(mask.stride())


@lru_cache(KINDS)
def _kind(setting: Setting, looks: tuple[Any, ...], rate_h: bool, rate_c: bool) -> Kind:
    return Kind(setting, looks, rate_h, rate_c)


class Kind:
    """Calls of one setting whose tensors have the same dtypes, shapes and device, with all that they share."""

    def __init__(self, setting: Setting, looks: tuple[Any, ...], rate_h: bool, rate_c: bool) -> None:
        x, h, _, weight_ih, weight_hh = looks[:5]
        if x is None or weight_ih is None or weight_hh is None:
            raise TypeError("a step needs its input and its matrices, got None.")
        self.setting, self.form = setting, form_of(setting)
        self.dtype, (batch, inputs), self.device = x
        width, hidden = weight_hh[1]
        self.sizes = cell_product.Sizes(batch, inputs, hidden, width, self.dtype.itemsize, h is None, self.device)
        self.state, self.gates = (batch, hidden), (batch, width)
        wanted = [(self.dtype, (width, n), self.device) for n in (inputs, hidden)]
        self._fitting = [weight_ih, weight_hh] == wanted  # of what does not fit the library tells in words
        self.constants = _constants(self.form, hidden, rate_h, rate_c)
        self.options = {"num_warps": max(1, min(16, power(hidden) // 128))}
        self.programs = min(batch, 2 * processors(self.device))  # of the kernel backward
        self.gain = NAMES.index("gain_hh" if self.form.site == "hh" else "gain_sum")
        self.small = _common_dtype(looks[SMALL])
        self._forward = Launch(_kernels().forward_kernel, batch, self.constants, self.options, self.device)
        self._products: dict[cell_product.Cut, Launch] = {}
        self._backward: dict[tuple[bool, ...], Launch] = {}

    def __call__(self, *given: Given) -> tuple[Tensor, ...]:
        """The new state."""
        h, c = _apply(self, *given) if torch.is_grad_enabled() else self.forward(given)[:2]
        return (h,) if c is None else (h, c)

    def forward(self, given: Sequence[Given]) -> tuple[Tensor, Given, Tensor, Given, Given]:
        """The new h and c, then for backward both products and the h that was multiplied."""
        x, h, _, weight_ih, weight_hh, *_, drop = given
        seen = h if h is None or drop is None else h * drop
        if seen is not None and seen.dtype is not self.dtype:
            seen = seen.to(self.dtype)
        from_x, from_h = self._multiplied(there(x), seen, there(weight_ih), there(weight_hh))
        h_new = from_x.new_empty(self.state) if seen is None else torch.empty_like(seen)
        c_new = torch.empty_like(h_new) if self.form.cell == "LSTM" else None
        self._forward((*self._row_tensors(given, from_x, from_h), h_new, c_new))
        return h_new, c_new, from_x, from_h, seen

    def _multiplied(self, x: Tensor, seen: Given, weight_ih: Tensor, weight_hh: Tensor) -> tuple[Tensor, Given]:
        """W_x x and W_h h'."""
        both = self._both_products()
        if both is None:
            with self.multiplication():
                return linear(x, weight_ih), None if seen is None else linear(seen, weight_hh)
        from_x = x.new_empty(self.gates)
        from_h = None if seen is None else torch.empty_like(from_x)
        both((x, seen, weight_ih, weight_hh, from_x, from_h))
        return from_x, from_h

    def _both_products(self) -> Launch | None:
        """What forms both products; None where the library does, as in float32 that is to keep all its digits."""
        cut = cell_product.cut(self.sizes) if OVERRIDE else self._usual_cut
        if (
            cut is None
            or not self._fitting
            or (self.dtype is torch.float32 and not tf32_wanted() and not interpreted())
        ):
            return None
        found = self._products.get(cut)
        if found is None:
            launch = cell_product.launch(self.sizes, cut)
            found = self._products[cut] = Launch(_kernels().products_kernel, *launch, self.device)
        return found

    @cached_property
    def _usual_cut(self) -> cell_product.Cut | None:
        """Where no tuner tries another."""
        return cell_product.cut(self.sizes)

    def multiplication(self) -> AbstractContextManager[None]:
        """In which the library forms products."""
        return as_cudnn_multiplies(self.dtype) if self.dtype is torch.float32 else _AS_IT_IS

    def _row_tensors(self, given: Sequence[Given], from_x: Tensor, from_h: Given) -> tuple[Given, ...]:
        """What both kernels of rows take, in their order."""
        _, h, c, _, _, bias_x, bias_h, gain_x, _, _, gain_cell, bias_cell, keep_h, keep_c, _ = given
        if keep_h is not None or keep_c is not None:
            keep_h, keep_c = _mask(keep_h), _mask(keep_c)
        gain_h = given[self.gain]
        return from_x, from_h, gain_x, gain_h, bias_x, bias_h, gain_cell, bias_cell, h, c, keep_h, keep_c

    def backward(self, given: Sequence[Given], kept: Sequence[Given], grads: Sequence[Given], small: bool) -> Any:
        """Gradients of both products, of the old h past them and of the old c, and shares of the small parameters'."""
        form, from_x = self.form, there(kept[0])
        alike = (form.cell in ("LSTM", "RNN") and form.site != "hh") or form.site == "sum"
        past = form.cell in ("GRU", "DREAMER") or given[KEEP_H] is not None
        d_from_x = torch.empty_like(from_x)
        d_from_h = None if alike else torch.empty_like(from_x)
        d_h_old = from_x.new_empty(self.state) if past else None
        d_c_old = from_x.new_empty(self.state) if form.cell == "LSTM" else None
        shares = from_x.new_empty(self.programs, sum(self._parts()), dtype=torch.float32) if small else None
        d_h, d_c = (None if g is None else g.contiguous() for g in (*grads, None)[:2])
        tensors = (d_h, d_c, d_from_x, d_from_h, d_h_old, d_c_old, shares)
        self._backward_launch(tensors)((*self._row_tensors(given, from_x, kept[1]), *tensors))
        return d_from_x, d_from_x if d_from_h is None else d_from_h, d_h_old, d_c_old, shares

    def _backward_launch(self, tensors: Sequence[Given]) -> Launch:
        """For tensors of which the same are None."""
        absent = tuple(t is None for t in tensors)
        found = self._backward.get(absent)
        if found is None:
            constants = {**self.constants, "B": self.sizes.batch}
            found = Launch(_kernels().backward_kernel, self.programs, constants, self.options, self.device)
            self._backward[absent] = found
        return found

    def _parts(self) -> list[int]:
        """Numbers of a share of the gradients of bias_x, gain_x, bias_h, gain_h, bias_cell and gain_cell."""
        return [self.sizes.width] * 4 + [self.sizes.hidden] * 2

    def of_parameters(self, shares: Tensor, given: Sequence[Given]) -> list[Given]:
        """The gradients of bias_ih, bias_hh, gain_ih, gain_hh, gain_sum, gain_cell and bias_cell.

        A share has numbers for all of them, and those that this kind of call has not are nobody's.
        """
        total = shares.sum(0).to(self.small)
        bias_x, gain_x, bias_h, gain, bias_cell, gain_cell = torch.split(total, self._parts())
        bias_h = bias_h if self.form.cell == "GRU" else bias_x
        cell = (gain_cell, bias_cell) if self.form.cell_norm else (None, None)
        found = (bias_x, bias_h, gain_x, gain, gain, *cell)
        return [None if t is None else d for d, t in zip(found, given[SMALL])]


def _common_dtype(looks: tuple[Any, ...]) -> torch.dtype:
    """Of gradients that are cast together; float32 where each is cast by itself."""
    dtypes = {look[0] for look in looks if look is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


@cache
def _constants(form: Form, hidden: int, rate_h: bool, rate_c: bool) -> dict[str, Any]:
    rates = {"RATE_H": rate_h, "RATE_C": rate_c}
    return {**form.constants(), **rates, "eps": form.eps, "H": hidden, "BLOCK": power(hidden)}


@cache
def _kernels() -> Any:
    from . import cell_kernels  # needs Triton

    return cell_kernels


def _mask(mask: Given) -> Given:
    """One number expanded as that number, others with their numbers side by side."""
    return mask if mask is None else mask[0, 0] if _is_rate(mask) else mask.contiguous()


class _Cell(torch.autograd.Function):
    """The new h and, for the LSTM, the new c."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, *given: Given) -> tuple[Tensor, Given]:
        h_new, c_new, *kept = kind.forward(given)
        ctx.kind = kind
        ctx.save_for_backward(*given, *kept)
        ctx.set_materialize_grads(False)
        return h_new, c_new

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Any, ...]:
        *given, from_x, from_h, seen = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or batched(grads):  # with create_graph the gradients will be differentiated
            return None, *_differentiable(ctx.kind.setting, given, grads, needed)
        found = _gradients(ctx.kind, given, (from_x, from_h, seen), grads, needed)
        in_kind = [d if d is None or t is None or d.dtype is t.dtype else d.to(t.dtype) for d, t in zip(found, given)]
        return None, *in_kind, None, None, None


# Past torch's look at each argument for remnants of torch.func, which costs 4 us: ``choose`` sends those elsewhere.
_apply: Any = super(torch.autograd.Function, _Cell).apply


def _gradients(
    kind: Kind, given: Sequence[Given], kept: Sequence[Given], grads: tuple[Given, ...], needed: tuple[bool, ...]
) -> list[Given]:
    """Of the input, the state and the parameters, in the order in which they came."""
    x, h, _, weight_ih, weight_hh = given[:5]
    seen, drop = kept[2], given[-1]
    d_from_x, d_from_h, past, d_c, shares = kind.backward(given, kept, grads, any(needed[SMALL]))
    with kind.multiplication():
        found = [
            torch.mm(d_from_x, there(weight_ih)) if needed[0] else None,
            _to_state(d_from_h, there(weight_hh), past, drop) if needed[1] and h is not None else None,
            d_c if needed[2] else None,
            torch.mm(d_from_x.t(), there(x)) if needed[3] else None,
            torch.mm(d_from_h.t(), seen) if needed[4] and seen is not None else None,
        ]
    return found + ([None] * 7 if shares is None else kind.of_parameters(shares, given))


def _to_state(d_from_h: Tensor, weight: Tensor, past: Given, drop: Given) -> Tensor:
    """What reaches the old h, through the product and past it."""
    if drop is None:
        return torch.mm(d_from_h, weight) if past is None else torch.addmm(past, d_from_h, weight)
    found = (torch.mm(d_from_h, weight) * drop).to(weight.dtype)
    return found if past is None else found + past


def _differentiable(setting: Setting, given: list[Given], grads: tuple[Given, ...], needed: tuple[bool, ...]) -> Any:
    """The gradients by the reference's own graph."""
    x, *others = given[:STEP]
    keeps = [None if k is None else k.unsqueeze(0) for k in given[KEEP_H:][:2]]
    tensors = [there(x).unsqueeze(0), *others, *[None] * (COUNT - STEP)]
    arriving = (None, *grads)[: 3 if setting.cell == "LSTM" else 2]
    found = fused.differentiable_gradients(setting, tensors, [None, None, *keeps, given[-1]], arriving, needed)
    first = None if found[0] is None else found[0][0]
    return first, *found[1:STEP], None, None, None
