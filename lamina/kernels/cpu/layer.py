"""Forward and backward pass of a layer on a CPU, by the kernels of ``entries``.

``fused`` wraps ``forward`` and ``backward`` as an autograd function; their tensors are in the order of NAMES.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..forms import CELLS, SITES, Setting, form_of
from ..given import NAMES, STEP, Given
from ..given import there as _there
from . import machine, team
from .call_record import PLACES
from .machine import DEPTH, LEFTS, STRETCH, TILE, panel_width, vectors

CHUNK = 512, 1024  # least and most rows whose W_x x, or gradients, are in memory at once, so that they stay in the
CHUNK_NUMBERS = 2**18  # caches: this many numbers, where that is between the two
KINDS = {torch.float32: "float32", torch.float64: "float64"}
PIECE = 2048  # most rows in one float32 sum of a matrix's gradient
BLOCK = 64  # such sums that are added up before they join the total
FEW = 64  # rows per thread below which threads split a product's columns: splitting rows costs more packing
SHARE = 2**15  # weights per thread that are worth a thread of their own, for the product of one row
LARGE = 2**17  # bytes of a matrix, times a thread's rows squared, from which threads share its columns (two cores)
WORTH = 2**17  # multiplications per thread that are worth a thread of their own, for products of many rows


class Job:
    """Call record of one kernel call, and the tensors whose addresses it holds."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.numbers = (ctypes.c_int64 * len(PLACES))()
        self.held: dict[str, Tensor] = {}

    def set(self, **fields: Any) -> None:
        """Write fields of the record: numbers, or tensors as addresses; the job keeps the tensors alive."""
        numbers, held = self.numbers, self.held
        for name, value in fields.items():
            if isinstance(value, Tensor):
                held[name] = value
                value = value.data_ptr()
            numbers[PLACES[name]] = value

    def let_go(self, *names: str) -> None:
        """Drop tensors that are not needed again, and clear their addresses."""
        for name in names:
            self.held.pop(name, None)
            self.numbers[PLACES[name]] = 0

    def run(self, name: str, threads: int) -> None:
        self.set(threads=threads)
        team.run(f"{name}_{KINDS[self.dtype]}", ctypes.addressof(self.numbers), threads)

    def empty(self, *shape: int) -> Tensor:
        """Return uninitialised memory, in huge pages where it is large."""
        tensor = torch.empty(shape, dtype=self.dtype)
        size = tensor.numel() * tensor.itemsize
        if size >= machine.HUGE:
            machine.use_huge_pages(tensor.data_ptr(), size)
        return tensor

    def full(self, count: int, value: float) -> Tensor:
        """Return a cached tensor of one value, which must never be written to."""
        return _constants(count, value, self.dtype)

    def as_read(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the kernels' dtype, contiguous."""
        ready = tensor.dtype is self.dtype and tensor.is_contiguous()
        return tensor if ready else tensor.detach().to(self.dtype).contiguous()


@lru_cache(256)
def _constants(count: int, value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((count,), value, dtype=dtype)


@lru_cache(256)
def _whole_numbers(values: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(values, dtype=torch.int64)


def packed(weight: Tensor, turned: bool, out: Tensor | None = None) -> Tensor:
    """Return packed panels of a matrix or its transpose, for products of several rows: [panels, depth, panel width]."""
    depth, columns = (weight.shape[1], weight.shape[0]) if turned else weight.shape
    panel = panel_width(weight.element_size())
    job = Job(weight.dtype)
    out = job.empty(-(-columns // panel), depth, panel) if out is None else out
    job.set(weight=weight, depth=depth, columns=columns, turned=turned, packed=out)
    job.run("packs", team.threads())
    return out


def multiply(left: Tensor, weight: Tensor, turned: bool, out: Tensor) -> None:
    """Write left times a matrix or its transpose to ``out``; a row's bits do not depend on the number of rows."""
    (rows, depth), columns = left.shape, out.shape[1]
    if depth == 0:
        out.zero_()
        return
    panel, job = panel_width(left.element_size()), Job(left.dtype)
    panels, size = -(-columns // panel), (STRETCH + 2 * depth) * panel
    count = max(1, min(team.threads(), rows * weight.numel() // WORTH))
    by_columns = panels >= 4 * count or rows < FEW * count
    count = min(count, panels if by_columns else rows)
    job.set(
        left=left, rows=rows, depth=depth, columns=columns, weight=weight, turned=turned, out=out, shared=by_columns,
        scratch=job.empty(count, size), scratch_size=size,
    )  # fmt: skip
    job.run("products", count)


def add_outer(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Write left^T right to ``out``, or add it."""
    (rows, height), width = left.shape, right.shape[1]
    if rows == 0 or width == 0:
        if not add:
            out.zero_()
        return
    panel, job = panel_width(left.element_size()), Job(left.dtype)
    size = (TILE + (-(-width // panel) + LEFTS) * DEPTH) * panel
    count = max(1, min(team.threads(), rows * height * width // WORTH, -(-height // panel)))
    job.set(
        left=left, rows=rows, depth=height, columns=width, weight=right, out=out, turned=add,
        scratch=job.empty(count, size), scratch_size=size,
    )  # fmt: skip
    job.run("gradients", count)


def prepared(setting: Setting, tensors: Sequence[Given], extras: Sequence[Given]) -> Call:
    """Return a call for forward and then backward, so that parameters are prepared only once."""
    return Call(setting, dict(zip(NAMES, tensors)), extras)


def _division(batch: int, weight: Tensor) -> tuple[int, bool]:
    """Return the number of threads, and whether they share the columns of a step's product instead of its rows.

    Sharing columns costs two barriers a step. It pays where a thread's few rows would each time need the whole matrix
    from beyond its L2 cache.
    """
    threads = team.threads()
    if batch == 1:
        threads = max(1, min(threads, weight.numel() // SHARE))
        return threads, threads > 1
    rows = max(2, -(-batch // threads))
    shared = weight.numel() * weight.element_size() >= rows * rows * LARGE
    threads = threads if shared else min(threads, batch)
    return threads, shared and threads > 1


class _Ragged:
    """Slots for cases of several lengths: longest first, so that those that still have steps are neighbours.

    order: cases [B]; counts: number of cases that have a step t [T]; starts: rows of earlier steps [T+1], ``begins``
    as a list; index: positions in [T * B] of the rows without padding.
    """

    def __init__(self, lengths: Tensor, steps: int, batch: int) -> None:
        self.lengths = lengths = lengths.to(torch.int64).clamp(max=steps)
        self.order = lengths.argsort(descending=True, stable=True)
        times = torch.arange(steps).unsqueeze(1)
        valid = times < lengths[self.order]
        self.counts = valid.sum(1)
        self.starts = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])
        self.begins: list[int] = self.starts.tolist()
        self.index = (times * batch + self.order)[valid]


class Call(Job):
    """Call record and tensors that forward and backward of a recurrence share."""

    def __init__(self, setting: Setting, by_name: dict[str, Given], extras: Sequence[Given]) -> None:
        x, weight = _there(by_name["input"]), _there(by_name["weight_hh"])
        super().__init__(weight.dtype)
        self.form = form_of(setting)
        (self.steps, self.batch), (self.width, self.hidden) = x.shape[:2], weight.shape
        self.threads, self.shared = _division(self.batch, weight)
        form, where = self.form, setting.where
        self.placement = where
        self.groups = where.groups(form.site) if form.site else ()
        self.set(
            steps=self.steps, batch=self.batch, hidden=self.hidden, gates=form.gates, cell=CELLS[form.cell],
            site=SITES[form.site], cell_norm=form.cell_norm, carry=form.carry, relu=form.relu, std=form.std,
            eps=self.full(1, form.eps), norm_x=bool(where.ih), shared=self.shared,
            groups=len(self.groups), sizes=_whole_numbers(tuple(self.groups)), groups_x=len(where.ih),
            sizes_x=_whole_numbers(tuple(where.ih)),
        )  # fmt: skip
        self._parameters(by_name)
        self._extras(extras)
        if self.resets is not None:
            states = {name: by_name[name] for name in NAMES[STEP:]}
            self.set(**{name: self._state(state) for name, state in states.items()})

    def copy(self) -> Call:
        """Return a copy with its own record: several threads may run backward through one graph."""
        other = copy.copy(self)
        other.numbers, other.held = type(self.numbers).from_buffer_copy(self.numbers), dict(self.held)
        return other

    def _parameters(self, by_name: dict[str, Given]) -> None:
        """Set gains (1 where absent) and biases (0 where absent); biases that only occur as their sum are added."""
        gain = by_name["gain_hh"] if self.form.site == "hh" else by_name["gain_sum"]
        bias_ih, bias_hh = by_name["bias_ih"], by_name["bias_hh"]
        gru = self.form.cell == "GRU"
        biases = [b for b in ((bias_ih,) if gru else (bias_ih, bias_hh)) if b is not None]
        bias_x = self.full(self.width, 0.0) if not biases else biases[0] if len(biases) == 1 else biases[0] + biases[1]
        bias = bias_hh if gru and bias_hh is not None else self.full(self.width, 0.0)
        ones = self.full(self.width, 1.0)
        parameters = {
            "gain": ones if gain is None or not self.form.site else gain, "bias": bias, "bias_x": bias_x,
            "gain_x": by_name["gain_ih"] if by_name["gain_ih"] is not None else ones,
            "gain_cell": by_name["gain_cell"] if by_name["gain_cell"] is not None else ones,
            "bias_cell": by_name["bias_cell"] if by_name["bias_cell"] is not None else self.full(self.hidden, 0.0),
        }  # fmt: skip
        self.set(**{name: self.as_read(t) for name, t in parameters.items()})

    def _extras(self, extras: Sequence[Given]) -> None:
        lengths, resets, keep_h, keep_c, drop = extras
        self.ragged = None if lengths is None else _Ragged(lengths, self.steps, self.batch)
        self.resets, self.drop = resets, drop
        if self.ragged is not None:
            self.set(order=self.ragged.order, counts=self.ragged.counts, starts=self.ragged.starts)
        if resets is not None:
            self.set(resets=resets.to(torch.uint8).contiguous())
        if drop is not None:
            self.set(drop=drop.to(self.dtype).contiguous())
        if resets is not None or drop is not None or (self.ragged is not None and self.batch > 1):
            self.set(operand=self.empty(self.product_rows, self.hidden))
        for name, mask in (("keep_h", keep_h), ("keep_c", keep_c)):
            if mask is not None:
                self._mask(name, mask)

    @property
    def product_rows(self) -> int:
        """Return the number of rows of a step's product: equally many for each thread."""
        return self.threads * -(-self.batch // self.threads)

    @property
    def chunk(self) -> int:
        """Return the number of steps that are in memory at once where they are not saved."""
        rows = sorted((*CHUNK, CHUNK_NUMBERS // self.width))[1]
        return max(1, min(self.steps, rows // self.batch))

    def first_row(self, step: int) -> int:
        """Return the first row of a step in tensors without padding."""
        return step * self.batch if self.ragged is None else self.ragged.begins[step]

    def last(self, states: Tensor) -> Tensor:
        """Return each case's last state, from all states or from one state that steps overwrite."""
        if self.ragged is None or states.shape[0] == 1:
            return states[-1].clone()
        return states[self.ragged.lengths, torch.arange(self.batch)]

    def without_padding(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Return the rows of a tensor [T, B, D] from step ``begin`` to ``end``, without padding."""
        if self.ragged is None:
            return tensor[begin:end].flatten(0, 1)
        return tensor.flatten(0, 1).index_select(0, self.ragged.index[self.first_row(begin) : self.first_row(end)])

    def _state(self, state: Given) -> Tensor:
        return torch.zeros(self.batch, self.hidden, dtype=self.dtype) if state is None else self.as_read(state)

    def _mask(self, name: str, mask: Tensor) -> None:
        """Set a zoneout mask: a row for each step and case, or for a single rate one row with strides 0."""
        size = self.dtype.itemsize
        rate = not any(mask.stride())
        rows = (mask[:1, :1] if rate else mask).to(self.dtype).contiguous()
        strides = {f"{name}_t": 0, f"{name}_b": 0} if rate else {
            f"{name}_t": self.batch * self.hidden * size, f"{name}_b": self.hidden * size
        }  # fmt: skip
        self.set(**{name: rows, **strides})

    def matrix(self, weight: Tensor, backward: bool) -> None:
        """Set the product's matrix, unpacked for one row and else packed, and allocate the output ``z``."""
        columns = weight.shape[1] if backward else weight.shape[0]
        panel = panel_width(weight.element_size())
        panels = -(-columns // panel)
        self.set(weight=weight, z=self.empty(self.product_rows, panels * panel), z_row=panels * panel)
        if self.batch > 1:
            self.set(packed=packed(weight, not backward), vectors=vectors(columns, weight.element_size()))


def _scratch(call: Call, widths: int) -> Tensor:
    """Set the size of each thread's scratch, and return the memory."""
    size = widths * call.width + 6 * call.hidden + 64
    call.set(scratch_size=size)
    return call.empty(call.threads, size)


def start(state: Given, out: Tensor) -> None:
    """Write the initial state to ``out``."""
    if state is None:
        out.zero_()
    else:
        out.copy_(state)


def forward(
    setting: Setting, tensors: Sequence[Given], extras: Sequence[Given], keep: str, call: Call | None = None
) -> list[Tensor]:
    """Return hist [T+1, B, H], the final h and c, and what ``keep`` selects.

    keep: "nothing"; "states": c_hist; "all": W_x x, c_hist, x^ and 1/deviations, which backward needs.
    """
    by_name = dict(zip(NAMES, tensors))
    call = call or Call(setting, by_name, extras)
    steps, batch, hidden, lstm = call.steps, call.batch, call.hidden, call.form.cell == "LSTM"
    x, weight_ih = _there(by_name["input"]), _there(by_name["weight_ih"])
    hist = call.empty(steps + 1, batch, hidden)
    start(by_name["h"], hist[0])
    whole_c, train = keep != "nothing", keep == "all"
    c_hist = call.empty((steps + 1 if whole_c else 1) if lstm else 0, batch, hidden)
    if lstm:
        start(by_name["c"], c_hist[0])
    xhat = call.empty(steps if train else 0, batch, call.width)
    rstd = call.empty(steps if train else 0, batch, len(call.groups))
    size = hist.element_size()
    call.matrix(_there(by_name["weight_hh"]), False)
    call.set(
        hist=hist, c_hist=c_hist, c_step=batch * hidden * size if whole_c else 0,
        xhat=xhat if train else 0, rstd=rstd, scratch=_scratch(call, 2),
    )  # fmt: skip
    summed = call.empty(steps if train else call.chunk, batch, call.width)
    for begin in range(0, steps, summed.shape[0]):
        end = min(steps, begin + summed.shape[0])
        before, count = call.first_row(begin), call.first_row(end) - call.first_row(begin)
        multiply(call.without_padding(x, begin, end), weight_ih, True, summed.flatten(0, 1)[:count])
        call.set(begin=begin, end=end, summed=summed.data_ptr() - before * call.width * size)  # address of row 0
        call.run("forward", call.threads)
    # The call must not keep results alive: autograd saves them and decides how long they live.
    call.let_go("weight", "packed", "z", "scratch", "hist", "c_hist", "xhat", "rstd")
    h_n, c_n = call.last(hist), call.last(c_hist) if lstm else hist.new_empty(0)
    saved = {"nothing": [], "states": [c_hist], "all": [summed, c_hist, xhat, rstd]}[keep]
    return [hist, h_n, c_n, *saved]


def backward(
    setting: Setting, tensors: Sequence[Given], extras: Sequence[Given], saved: Sequence[Tensor],
    grads: Sequence[Given], needed: Sequence[bool], call: Call | None = None,
) -> list[Given]:  # fmt: skip
    """Return gradients in the order of ``tensors``; ``grads``: of the output, h_n and c_n; ``call``: forward's."""
    by_name, wanted = dict(zip(NAMES, tensors)), dict(zip(NAMES, needed))
    hist, summed, c_hist, xhat, rstd = saved
    call = call.copy() if call else Call(setting, by_name, extras)
    steps, batch, hidden, width = call.steps, call.batch, call.hidden, call.width
    size, weight, lstm = hist.element_size(), _there(by_name["weight_hh"]), call.form.cell == "LSTM"
    d_out, d_h, d_c = (None if g is None else g.to(call.dtype).contiguous() for g in grads)
    dh, dc, d_reset_h, d_reset_c, past = torch.zeros(5, batch, hidden, dtype=call.dtype).unbind()
    if d_h is not None:
        dh.copy_(d_h)
    if d_c is not None and lstm:
        dc.copy_(d_c)
    shares = torch.zeros(call.threads, 4 * width + 2 * hidden, dtype=call.dtype)
    totals = torch.zeros_like(shares, dtype=torch.float64)
    chunk = call.chunk
    d_raw, d_summed = call.empty(chunk * batch, width), call.empty(chunk * batch, width)
    call.matrix(weight, True)
    call.set(
        summed=summed, hist=hist, c_hist=c_hist, c_step=batch * hidden * size, xhat=xhat,
        rstd=rstd, scratch=_scratch(call, 1), dh=dh, dc=dc,
        d_reset_h=d_reset_h, d_reset_c=d_reset_c, past=past, d_raw=d_raw, d_summed=d_summed, shares=shares,
        totals=totals, d_out=hist.new_empty(0) if d_out is None else d_out,
    )  # fmt: skip
    matrices = MatrixGradients(call, by_name, hist, wanted)
    for end in range(steps, 0, -chunk):
        begin = max(0, end - chunk)
        call.set(begin=begin, end=end)
        call.run("backward", call.threads)
        rows = call.first_row(end) - call.first_row(begin)
        matrices.add(begin, end, d_raw[:rows], d_summed[:rows])
    call.let_go("weight", "packed", "z", "scratch")
    states = {"h": dh, "c": dc, "reset_h": d_reset_h, "reset_c": d_reset_c}
    gradients = {**matrices.result(), **states, **_small(call, totals, by_name)}
    return in_order(by_name, gradients)


def in_order(by_name: dict[str, Given], grads: dict[str, Any]) -> list[Given]:
    """Return gradients in the order of the tensors and in their dtypes; None where there is no tensor."""
    pairs = [(t, grads[name]) for name, t in by_name.items()]
    return [None if t is None or d is None else d if d.dtype is t.dtype else d.to(t.dtype) for t, d in pairs]


class MatrixGradients:
    """Gradients of the matrices and of the input, accumulated chunk by chunk."""

    def __init__(self, call: Call, by_name: dict[str, Given], hist: Tensor, wanted: dict[str, bool]) -> None:
        self.call, self.hist = call, hist
        x, self.weight_ih = _there(by_name["input"]), _there(by_name["weight_ih"])
        self.x = x
        self.d_input = None
        if wanted["input"]:
            self.d_input = torch.empty_like(x) if call.ragged is None else torch.zeros_like(x)
        self.d_ih = SumOfProducts(self.weight_ih) if wanted["weight_ih"] else None
        self.d_hh = SumOfProducts(_there(by_name["weight_hh"])) if wanted["weight_hh"] else None

    def add(self, begin: int, end: int, raw: Tensor, summed: Tensor) -> None:
        """Add steps begin to end; ``raw``, ``summed``: gradients of the two products, a row for each step and case."""
        call = self.call
        if self.d_hh is not None:
            self.d_hh.add(raw, self._factors(begin, end))
        if self.d_ih is not None:
            self.d_ih.add(summed, call.without_padding(self.x, begin, end))
        if self.d_input is not None:
            self._add_input(summed, slice(call.first_row(begin), call.first_row(end)))

    def _add_input(self, summed: Tensor, rows: slice) -> None:
        d_input, ragged = self.d_input.flatten(0, 1), self.call.ragged  # type: ignore[union-attr]  # it is wanted
        if ragged is None:
            multiply(summed, self.weight_ih, False, d_input[rows])
        else:
            compact = d_input.new_empty(summed.shape[0], d_input.shape[1])
            multiply(summed, self.weight_ih, False, compact)
            d_input.index_copy_(0, ragged.index[rows], compact)

    def _factors(self, begin: int, end: int) -> Tensor:
        """Return the recurrent product's left factor (h after resets and dropout), a row for each step and case."""
        call, before = self.call, self.hist[begin:end]
        if call.resets is not None:
            before = torch.where(call.resets[begin:end].unsqueeze(-1), call.held["reset_h"], before)
        before = (before if call.drop is None else before * call.drop).flatten(0, 1)
        if call.ragged is None:
            return before
        rows = slice(call.first_row(begin), call.first_row(end))
        return before.index_select(0, call.ragged.index[rows] - begin * call.batch)

    def result(self) -> dict[str, Any]:
        sums = {"weight_ih": self.d_ih, "weight_hh": self.d_hh}
        matrices = {name: None if d is None else d.result() for name, d in sums.items()}
        return {"input": self.d_input, **matrices}


class SumOfProducts:
    """Sum of left^T right over many rows, in blocks: one float32 sum over all rows is off by 1e-5 of its value.

    ``add_outer`` continues the sum in its output, row by row, so at most ``PIECE`` rows go into one output.
    """

    def __init__(self, like: Tensor) -> None:
        self.piece = torch.empty_like(like)
        self.block: Tensor | None = None
        self.total: Tensor | None = None
        self.rows = self.pieces = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        parts = -(-left.shape[0] // PIECE)
        for left_part, right_part in zip(left.chunk(parts), right.chunk(parts)) if parts > 1 else [(left, right)]:
            if self.rows + left_part.shape[0] > PIECE:
                self._end_piece()
            add_outer(left_part, right_part, self.piece, self.rows > 0)
            self.rows += left_part.shape[0]

    def _end_piece(self) -> None:
        self.rows, self.pieces = 0, self.pieces + 1
        self.block = block = _added(self.block, self.piece)
        if self.pieces % BLOCK == 0:
            self.total, self.block = _added(self.total, block), None

    def result(self) -> Tensor:
        """Return the sum; nothing can be added after that."""
        for sum_ in (self.block, self.total):
            if sum_ is not None:
                self.piece.add_(sum_)
        return self.piece


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part.clone() if total is None else total.add_(part)


def _small(call: Call, totals: Tensor, by_name: dict[str, Given]) -> dict[str, Any]:
    """Return the gradients of gains and biases."""
    width, hidden, form = call.width, call.hidden, call.form
    total = (totals[0] if call.threads == 1 else totals.sum(0)).to(call.dtype)
    bias, gain, bias_x, gain_x, bias_cell, gain_cell = torch.split(total, [width] * 4 + [hidden] * 2)
    d_bias_ih = bias if form.site == "sum" else bias_x
    return {
        "bias_ih": d_bias_ih, "bias_hh": bias if form.cell == "GRU" and form.site != "sum" else d_bias_ih,
        "gain_ih": gain_x, "gain_hh": gain, "gain_sum": gain, "gain_cell": gain_cell, "bias_cell": bias_cell,
    }  # fmt: skip


def shapes(setting: Setting, x: Tensor, weight_hh: Tensor, keep: bool) -> list[tuple[int, ...]]:
    """Return the shapes of ``forward``'s results; with ``keep`` all that backward needs is among them."""
    form = form_of(setting)
    (steps, batch), (width, hidden), lstm = x.shape[:2], weight_hh.shape, form.cell == "LSTM"
    results: list[tuple[int, ...]] = [(steps + 1, batch, hidden), (batch, hidden), (batch, hidden) if lstm else (0,)]
    if keep:
        groups = len(setting.where.groups(form.site)) if form.site else 0
        results += [(steps, batch, width), (steps + 1 if lstm else 0, batch, hidden), (steps, batch, width)]
        results.append((steps, batch, groups))
    return results
