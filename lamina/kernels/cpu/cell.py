"""Single step of a cell, for Python loops: one kernel call forward, one backward, and as little Python as possible.

``Kernel`` serves all calls with tensors of the same shapes. ``Step`` packs the matrices inside each call, because they
may have changed since the last one in ways that torch does not count (``p.data.add_()``). ``PreparedStep`` packs them
once, and computes the gradients of the parameters once for all steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import BackendError, batched
from ..forms import Setting
from ..given import COUNT, EXTRAS, NAMES, STEP, Given, there
from . import team
from .call_record import PLACES
from .layer import KINDS, WORTH, Call, SumOfProducts, packed
from .machine import DEPTH, LEFTS, STRETCH, TILE, panel_width, vectors

X, H, C, W_IH, W_HH, B_IH, B_HH, G_IH, G_HH, G_SUM, G_CELL, B_CELL = range(STEP)
FORWARD, BACKWARD = range(2)
NO_EXTRAS: tuple[None, ...] = (None,) * len(EXTRAS)
ALIGNED = 64  # numbers: alignment of the parts of a call's buffers

# Positions in the call record, with the index of the tensor or row whose address is written there.
_PARAMETERS = [PLACES[n] for n in ("bias_x", "gain", "gain_x", "gain_cell", "bias_cell", "weight_x", "weight")]
_STATES = [(PLACES[n], at) for n, at in (("reset_h", H), ("reset_c", C), ("left", X))]
_GRADIENTS = [(PLACES[n], row) for row, n in enumerate(("dh", "dc", "d_reset_h", "d_reset_c"))]
_MATRICES = [(X, PLACES["dx"]), (W_IH, PLACES["d_weight_x"]), (W_HH, PLACES["d_weight"])]
_KEPT = [PLACES[n] for n in ("summed", "xhat", "rstd")]
_BIAS, _VECTORS, _Z_ROW, _HIST, _C_HIST, _TOTALS = map(
    PLACES.__getitem__, ("bias", "vectors", "z_row", "hist", "c_hist", "totals")
)


class Kernel:
    """Call record for tensors of one shape and dtype, without their addresses, and a pool of calls' buffers."""

    def __init__(self, setting: Setting, tensors: Sequence[Given], packs: bool = True) -> None:
        x = there(tensors[X])
        sequence = [x.unsqueeze(0), *tensors[1:], *[None] * (COUNT - STEP)]
        call = Call(setting, dict(zip(NAMES, [None if t is None else t.detach() for t in sequence])), NO_EXTRAS)
        self.template, self.held, form = call.numbers, call.held, call.form
        self.batch, self.hidden, self.width, self.inputs = call.batch, call.hidden, call.width, x.shape[1]
        self.lstm, self.gru, self.site, self.groups = (
            form.cell == "LSTM",
            form.cell == "GRU",
            form.site,
            len(call.groups),
        )
        self.dtype, self.present = x.dtype, [t is not None for t in tensors]
        self.packs = packs and self.batch > 1  # a single row takes the matrices unpacked
        multiplications = self.batch * self.width * (self.hidden + self.inputs)
        self.threads = max(1, min(team.threads(), self.batch, multiplications // (2 * WORTH)))
        self.plane = self.batch * self.hidden * self.dtype.itemsize
        self.idle: list[Tensor] = []  # calls' buffers that are not in use
        self._fill_in()

    def _fill_in(self) -> None:
        panel = panel_width(self.dtype.itemsize)
        self.vectors = tuple(vectors(n, self.dtype.itemsize) for n in (self.width, self.hidden))
        self.panels = tuple(-(-n // panel) for n in (self.width, self.hidden, self.inputs))
        outer = (TILE + (max(self.panels[1:]) + LEFTS) * min(DEPTH, self.batch)) * panel
        scratch = 2 * self.width + 6 * self.hidden + 64 + max(STRETCH * panel, outer)
        self.z_rows = tuple(panels * panel for panels in self.panels)
        self.offsets, self.size = _laid_out(self._sizes(panel, scratch), self.dtype.itemsize)
        # Every step counts as a reset to the states that it receives, so that they need not lie in a history.
        self.held["resets"] = torch.ones(self.batch, dtype=torch.uint8)
        self.held["zeros"] = torch.zeros(self.batch, self.hidden, dtype=self.dtype)
        numbers = {
            **{"steps": 1, "begin": 0, "end": 1, "threads": self.threads, "shared": 0, "packs": self.packs},
            **{"depth": self.inputs, "c_step": self.plane, "scratch_size": scratch},
            "resets": self.held["resets"].data_ptr(),
        }
        for name, number in numbers.items():
            self.template[PLACES[name]] = number

    def _sizes(self, panel: int, scratch: int) -> dict[str, int]:
        """Return the size of each part of a call's buffers; only ``shares`` must be 0 before and is 0 after a call."""
        batch, hidden, width = self.batch, self.hidden, self.width
        of_width, of_hidden, of_inputs = (panels * panel * self.packs for panels in self.panels)
        rows = self.threads * -(-batch // self.threads)
        return {
            "shares": self.threads * (4 * width + 2 * hidden),
            "z": rows * max(self.z_rows[:2]),
            "operand": rows * hidden,
            "past": batch * hidden,
            "packed": max(of_width * hidden, of_hidden * width),
            "packed_x": of_width * self.inputs,
            "packed_dx": of_inputs * width,
            **dict.fromkeys(("d_raw", "d_summed", "summed"), batch * width),
            "scratch": self.threads * scratch,
        }

    def parameters(self, numbers: Any, tensors: Sequence[Given]) -> Tensor | None:
        """Write the addresses of the parameters; return the sum of two biases, which must outlive the record."""
        bias_ih, bias_hh, total = tensors[B_IH], tensors[B_HH], None
        if self.gru and bias_hh is not None:
            numbers[_BIAS] = bias_hh.data_ptr()
        elif bias_ih is not None and bias_hh is not None:
            total = bias_ih = bias_ih + bias_hh
        elif bias_ih is None:
            bias_ih = bias_hh
        gain = tensors[G_HH] if self.site == "hh" else tensors[G_SUM]
        others = gain, tensors[G_IH], tensors[G_CELL], tensors[B_CELL], tensors[W_IH], tensors[W_HH]
        for place, tensor in zip(_PARAMETERS, (bias_ih, *others)):
            if tensor is not None:
                numbers[place] = tensor.data_ptr()
        return total

    def record(self, way: int, buffer: Tensor, tensors: Sequence[Given]) -> Any:
        """Return a call record with the addresses of the call's buffers, the input and the states."""
        numbers, start = type(self.template).from_buffer_copy(self.template), buffer.data_ptr()
        for place, offset in self.offsets:
            numbers[place] = start + offset
        for place, at in _STATES:
            tensor = tensors[at]
            numbers[place] = (self.held["zeros"] if tensor is None else tensor).data_ptr()
        numbers[_VECTORS], numbers[_Z_ROW] = self.vectors[way], self.z_rows[way]
        return numbers

    def run(self, way: int, numbers: Any) -> None:
        team.run(f"{('forward', 'backward')[way]}_{KINDS[self.dtype]}", ctypes.addressof(numbers), self.threads)

    def buffer(self) -> Tensor:
        """Return the buffers for one call; the caller puts them back into ``idle``."""
        try:
            return self.idle.pop()
        except IndexError:
            return torch.zeros(self.size, dtype=self.dtype)

    def new_state(self, numbers: Any) -> tuple[Tensor, ...]:
        """Allocate the new h, and c of an LSTM, and write their addresses."""
        h = torch.empty(self.batch, self.hidden, dtype=self.dtype)
        numbers[_HIST] = h.data_ptr() - self.plane  # address of the state before the step
        if not self.lstm:
            return (h,)
        c = torch.empty(self.batch, self.hidden, dtype=self.dtype)
        numbers[_C_HIST] = c.data_ptr() - self.plane
        return h, c

    def kept(self) -> Tensor:
        """Allocate what is saved for backward: W_x x, x^ and 1/deviations."""
        return torch.empty(self.batch * (2 * self.width + self.groups), dtype=self.dtype)

    def keep(self, numbers: Any, saved: Tensor) -> None:
        """Write the addresses of what is saved for backward."""
        span, start = self.batch * self.width * self.dtype.itemsize, saved.data_ptr()
        for number, place in enumerate(_KEPT):
            numbers[place] = start + number * span

    def state_gradients(self, numbers: Any, grads: Sequence[Given]) -> Tensor:
        """Allocate gradients [4, B, H]: of the new h and c, copied from ``grads``, and of the old h and c."""
        states = torch.zeros(4, self.batch, self.hidden, dtype=self.dtype)
        for row, grad in enumerate(grads):
            if grad is not None:
                states[row].copy_(grad)
        for place, row in _GRADIENTS:
            numbers[place] = states.data_ptr() + row * self.plane
        return states

    def totals(self) -> Tensor:
        """Allocate the sums that are the gradients of gains and biases."""
        return torch.zeros(self.threads, 4 * self.width + 2 * self.hidden, dtype=torch.float64)

    def small_gradients(self, totals: Tensor) -> list[Tensor]:
        """Return the gradients of gains and biases, in the order of NAMES."""
        total = (totals[0] if self.threads == 1 else totals.sum(0)).to(self.dtype)
        parts = torch.split(total, [self.width] * 4 + [self.hidden] * 2)
        bias, gain, bias_x, gain_x, bias_cell, gain_cell = parts
        d_bias_ih = bias if self.site == "sum" else bias_x
        d_bias_hh = bias if self.gru and self.site != "sum" else d_bias_ih
        return [d_bias_ih, d_bias_hh, gain_x, gain, gain, gain_cell, bias_cell]

    def of_present(self, gradients: Sequence[Given]) -> list[Given]:
        return [gradient if present else None for gradient, present in zip(gradients, self.present)]


def _laid_out(sizes: dict[str, int], itemsize: int) -> tuple[list[tuple[int, int]], int]:
    """Return record position and byte offset of each part of a buffer, and the buffer's size in numbers."""
    offsets, size = [], 0
    for name, count in sizes.items():
        if count:
            offsets.append((PLACES[name], size * itemsize))
            size += -(-count // ALIGNED) * ALIGNED
    return offsets, size


def serves(tensors: Sequence[Given]) -> bool:
    """Return whether these kernels accept the tensors: all must have one dtype."""
    return len({t.dtype for t in tensors if t is not None}) == 1


class Step:
    """Step of cells with one setting and tensors of one shape, called with tensors in the order of NAMES."""

    def __init__(self, setting: Setting, tensors: Sequence[Given]) -> None:
        self.setting, self.kernel, self.threads = setting, Kernel(setting, tensors[:STEP]), team.threads()

    def __call__(self, *tensors: Given) -> tuple[Tensor, ...]:
        """Return the new state."""
        tensors = tensors[:STEP]
        if self.threads != team.threads():  # torch's number of threads has changed, or this is a forked child
            self.kernel, self.threads = Kernel(self.setting, tensors), team.threads()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _Step.apply(self.setting, self.kernel, *tensors)  # type: ignore[no-untyped-call, no-any-return]
        return _forward(self.kernel, tensors, None)

    def prepared(self, tensors: Sequence[Given]) -> PreparedStep:
        """Return the step for parameters that do not change."""
        return PreparedStep(self.setting, tensors)


def _forward(kernel: Kernel, tensors: Sequence[Given], saved: Tensor | None) -> tuple[Tensor, ...]:
    buffer = kernel.buffer()
    numbers = kernel.record(FORWARD, buffer, tensors)
    bias = kernel.parameters(numbers, tensors)
    state = kernel.new_state(numbers)
    if saved is not None:
        kernel.keep(numbers, saved)
    kernel.run(FORWARD, numbers)
    kernel.idle.append(buffer)
    del bias
    return state


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setting: Setting, kernel: Kernel, *tensors: Given) -> tuple[Tensor, ...]:
        saved = kernel.kept()
        state = _forward(kernel, tensors, saved)
        ctx.setting, ctx.kernel = setting, kernel
        ctx.save_for_backward(*tensors, saved)
        ctx.set_materialize_grads(False)
        return state

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Given, ...]:
        *tensors, saved = ctx.saved_tensors
        needed, kernel = ctx.needs_input_grad[2:], ctx.kernel
        if torch.is_grad_enabled() or batched(grads):  # create_graph, or a batch of gradients
            return None, None, *_by_the_reference(ctx.setting, tensors, grads, needed)
        buffer = kernel.buffer()
        numbers, totals = kernel.record(BACKWARD, buffer, tensors), kernel.totals()
        bias = kernel.parameters(numbers, tensors)
        kernel.keep(numbers, saved)
        states, numbers[_TOTALS] = kernel.state_gradients(numbers, grads), totals.data_ptr()
        large = {at: torch.empty_like(tensors[at]) for at, _ in _MATRICES if needed[at]}
        for at, place in _MATRICES:
            numbers[place] = large[at].data_ptr() if at in large else 0
        kernel.run(BACKWARD, numbers)
        kernel.idle.append(buffer)
        del bias
        others = large.get(X), states[2], states[3], large.get(W_IH), large.get(W_HH)
        return None, None, *kernel.of_present([*others, *kernel.small_gradients(totals)])


def _by_the_reference(
    setting: Setting, tensors: Sequence[Given], grads: Sequence[Given], needed: Sequence[bool]
) -> list[Given]:
    from ..fused import differentiable_gradients

    inputs = [there(tensors[X]).unsqueeze(0), *tensors[1:], *[None] * (COUNT - STEP)]
    wanted = [*needed, *[False] * (COUNT - STEP)]
    d_x, *others = differentiable_gradients(setting, inputs, NO_EXTRAS, (None, *grads, None)[:3], wanted, "cpu")[:STEP]
    return [None if d_x is None else d_x.squeeze(0), *others]


class PreparedStep:
    """Steps of one sequence with parameters that do not change: packed once, their gradients computed once."""

    def __init__(self, setting: Setting, tensors: Sequence[Given]) -> None:
        self.setting, self.parameters = setting, tensors[W_IH:STEP]
        self.kernel = kernel = Kernel(setting, tensors[:STEP], packs=False)
        self._bias = kernel.parameters(kernel.template, [None if t is None else t.detach() for t in tensors[:STEP]])
        self.packed: list[dict[int, Tensor]] = [{}, {}]
        if kernel.batch > 1:
            w_ih, w_hh = there(tensors[W_IH]).detach(), there(tensors[W_HH]).detach()
            self.packed[FORWARD] = {PLACES["packed"]: packed(w_hh, True), PLACES["packed_x"]: packed(w_ih, True)}
            self.packed[BACKWARD] = {PLACES["packed"]: packed(w_hh, False), PLACES["packed_dx"]: packed(w_ih, False)}
        self.graph, self.totals = -1, kernel.totals()
        self.factors: list[tuple[Tensor, Tensor, Tensor]] = []  # of each backward step: d, x and h
        self.token: Tensor | None = None
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.parameters):
            self.token = _Parameters.apply(self, *self.parameters)  # type: ignore[no-untyped-call]

    def __call__(self, x: Tensor, h: Given, c: Given) -> tuple[Tensor, ...]:
        """Return the new state."""
        inputs = (x, h, c)
        if torch.is_grad_enabled() and (
            self.token is not None or any(t is not None and t.requires_grad for t in inputs)
        ):
            return _PreparedStep.apply(self, self.token, *inputs)  # type: ignore[no-untyped-call, no-any-return]
        return self.forward(inputs, None)

    def record(self, way: int, buffer: Tensor, inputs: Sequence[Given]) -> Any:
        numbers = self.kernel.record(way, buffer, inputs)
        for place, tensor in self.packed[way].items():
            numbers[place] = tensor.data_ptr()
        return numbers

    def forward(self, inputs: Sequence[Given], saved: Tensor | None) -> tuple[Tensor, ...]:
        kernel, buffer = self.kernel, self.kernel.buffer()
        numbers = self.record(FORWARD, buffer, inputs)
        state = kernel.new_state(numbers)
        if saved is not None:
            kernel.keep(numbers, saved)
        kernel.run(FORWARD, numbers)
        kernel.idle.append(buffer)
        return state

    def backward(self, inputs: Sequence[Given], saved: Tensor, grads: Sequence[Given], graph: int) -> list[Given]:
        """Return the gradients of x, h and c; those of the parameters follow at the end of this backward pass."""
        if graph != self.graph:  # a new backward pass: discard the sums of an unfinished one
            self.graph, self.totals, self.factors = graph, self.kernel.totals(), []
        kernel, buffer = self.kernel, self.kernel.buffer()
        numbers = self.record(BACKWARD, buffer, inputs)
        kernel.keep(numbers, saved)
        states, numbers[_TOTALS] = kernel.state_gradients(numbers, grads), self.totals.data_ptr()
        x, h = there(inputs[X]), inputs[H]
        d, d_x = x.new_empty(2, kernel.batch, kernel.width), torch.empty_like(x)
        numbers[PLACES["d_raw"]], numbers[PLACES["d_summed"]] = d[0].data_ptr(), d[1].data_ptr()
        numbers[PLACES["dx"]] = d_x.data_ptr()
        kernel.run(BACKWARD, numbers)
        kernel.idle.append(buffer)
        if self.token is not None:
            self.factors.append((d, x, kernel.held["zeros"] if h is None else h))
        return [d_x, *(None if t is None else g for t, g in zip(inputs[1:], states[2:]))]

    def parameter_gradients(self) -> list[Given]:
        """Return the gradients of the parameters, summed over all steps of this backward pass."""
        w_ih, w_hh = (SumOfProducts(there(w)) for w in self.parameters[:2])
        if self.factors:
            d, x, h = zip(*self.factors)
            d_raw, d_summed = torch.stack(d, 1).flatten(1, 2)
            w_ih.add(d_summed, torch.cat(x))
            w_hh.add(d_raw, torch.cat(h))
        gradients = [w_ih.result(), w_hh.result(), *self.kernel.small_gradients(self.totals)]
        self.graph, self.factors = -1, []
        return [g if present else None for g, present in zip(gradients, self.kernel.present[W_IH:])]


class _Parameters(torch.autograd.Function):
    """Token that every step of a sequence takes, so that autograd calls this backward after those of all steps."""

    @staticmethod
    def forward(ctx: Any, steps: PreparedStep, *parameters: Given) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(*parameters)
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Given, ...]:
        ctx.saved_tensors  # noqa: B018  (raises where a parameter has changed in place since it was packed)
        return None, *ctx.steps.parameter_gradients()


class _PreparedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: PreparedStep, token: Given, *inputs: Given) -> tuple[Tensor, ...]:
        saved = steps.kernel.kept()
        state = steps.forward(inputs, saved)
        ctx.steps = steps
        ctx.save_for_backward(*inputs, saved)
        ctx.set_materialize_grads(False)
        return state

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Given, ...]:
        if torch.is_grad_enabled() or batched(grads):
            rule = "gradients of lamina.loop come once and one at a time"
            raise BackendError(f"{rule}, got create_graph=True or is_grads_batched=True. Call the cell itself.")
        *inputs, saved = ctx.saved_tensors
        graph = torch._C._current_graph_task_id()
        return None, None, *ctx.steps.backward(inputs, saved, grads, graph)
