"""Recurrences on a CPU: products of all steps by torch, everything else by ``entries``'s kernels.

``forward`` and ``backward`` are what ``fused`` wraps with gradients; their tensors travel in the order of its NAMES.
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
from .machine import DEPTH, LEFTS, STRETCH, TILE, panel_width

CHUNK = 512  # rows whose W_x x, or gradients, are there at once: what is not kept stays in the caches
KINDS = {torch.float32: "float32", torch.float64: "float64"}
PIECE = 2048  # rows of one product at most that becomes a part of a matrix's gradient
BLOCK = 64  # such products that are added up before they meet the sum of all
FEW = 64  # rows of a product for each thread below which threads take columns: rows are shared at the price of packing
SHARE = 2**15  # numbers of a matrix that are worth a thread of their own where threads share one row's product
WORTH = 2**17  # multiplications of a product, likewise


class Job:
    """The numbers of one kernel call, and the tensors whose addresses are among them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.numbers = (ctypes.c_int64 * len(PLACES))()
        self.held: dict[str, Tensor] = {}

    def set(self, **fields: Any) -> None:
        """Numbers as they are, tensors as their address; they live as long as the job."""
        numbers, held = self.numbers, self.held
        for name, value in fields.items():
            if isinstance(value, Tensor):
                held[name] = value
                value = value.data_ptr()
            numbers[PLACES[name]] = value

    def let_go(self, *names: str) -> None:
        """Of tensors that are not needed again."""
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
        """Of one value; never written to."""
        return _constants(count, value, self.dtype)

    def as_read(self, tensor: Tensor) -> Tensor:
        """In the kernels' dtype, its numbers side by side."""
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
    """A matrix, or its transpose, as products of several rows take it: [panels, depth, columns of a panel]."""
    depth, columns = (weight.shape[1], weight.shape[0]) if turned else weight.shape
    panel = panel_width(weight.element_size())
    job = Job(weight.dtype)
    out = job.empty(-(-columns // panel), depth, panel) if out is None else out
    job.set(weight=weight, depth=depth, columns=columns, turned=turned, packed=out)
    job.run("packs", team.threads())
    return out


def multiply(left: Tensor, weight: Tensor, turned: bool, out: Tensor) -> None:
    """out = left times a matrix or its transpose: a row's numbers are the same bits among few rows and among many."""
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
    """out = or += left^T right."""
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
    """A call for forward and then backward, whose parameters need looking at but once."""
    return Call(setting, dict(zip(NAMES, tensors)), extras)


class _Ragged:
    """Sequences of several lengths: cases by falling length, so that those which still have steps are neighbours.

    order: cases [B]; counts: how many have a step t [T]; starts: rows of earlier steps [T+1], ``begins`` as a list;
    index: where the rows without padding lie among the steps and cases.
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
    """What forward and backward of a recurrence have in common."""

    def __init__(self, setting: Setting, by_name: dict[str, Given], extras: Sequence[Given]) -> None:
        x, weight = _there(by_name["input"]), _there(by_name["weight_hh"])
        super().__init__(weight.dtype)
        self.form = form_of(setting)
        (self.steps, self.batch), (self.width, self.hidden) = x.shape[:2], weight.shape
        parts = weight.numel() // SHARE if extras[1] is None and extras[4] is None else 1
        shared = self.batch == 1 and parts > 1
        self.threads = max(1, min(team.threads(), parts if shared else self.batch))
        form, where = self.form, setting.where
        self.placement = where
        self.groups = where.groups(form.site) if form.site else ()
        self.set(
            steps=self.steps, batch=self.batch, hidden=self.hidden, gates=form.gates, cell=CELLS[form.cell],
            site=SITES[form.site], cell_norm=form.cell_norm, carry=form.carry, relu=form.relu, std=form.std,
            eps=self.full(1, form.eps), norm_x=bool(where.ih), shared=shared and self.threads > 1,
            groups=len(self.groups), sizes=_whole_numbers(tuple(self.groups)), groups_x=len(where.ih),
            sizes_x=_whole_numbers(tuple(where.ih)),
        )  # fmt: skip
        self._parameters(by_name)
        self._extras(extras)
        if self.resets is not None:
            states = {name: by_name[name] for name in NAMES[STEP:]}
            self.set(**{name: self._state(state) for name, state in states.items()})

    def copy(self) -> Call:
        """Another of the same numbers: several threads may walk back through one graph."""
        other = copy.copy(self)
        other.numbers, other.held = type(self.numbers).from_buffer_copy(self.numbers), dict(self.held)
        return other

    def _parameters(self, by_name: dict[str, Given]) -> None:
        """Gains of 1 and biases of 0 where there are none; biases that are only ever seen as their sum, as that."""
        gain = by_name["gain_hh"] if self.form.site == "hh" else by_name["gain_sum"]
        bias_ih, bias_hh = by_name["bias_ih"], by_name["bias_hh"]
        apart = self.form.cell == "GRU"
        outer = [b for b in ((bias_ih,) if apart else (bias_ih, bias_hh)) if b is not None]
        total = self.full(self.width, 0.0) if not outer else outer[0] if len(outer) == 1 else outer[0] + outer[1]
        inner = bias_hh if apart and bias_hh is not None else self.full(self.width, 0.0)
        ones = self.full(self.width, 1.0)
        found = {
            "gain": ones if gain is None or not self.form.site else gain, "bias": inner, "bias_x": total,
            "gain_x": by_name["gain_ih"] if by_name["gain_ih"] is not None else ones,
            "gain_cell": by_name["gain_cell"] if by_name["gain_cell"] is not None else ones,
            "bias_cell": by_name["bias_cell"] if by_name["bias_cell"] is not None else self.full(self.hidden, 0.0),
        }  # fmt: skip
        self.set(**{name: self.as_read(t) for name, t in found.items()})

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
        """Return the rows of a step's product: as many for each thread."""
        return self.threads * -(-self.batch // self.threads)

    def first_row(self, step: int) -> int:
        """Return the row where a step's cases begin in tensors that hold no padding."""
        return step * self.batch if self.ragged is None else self.ragged.begins[step]

    def last(self, states: Tensor) -> Tensor:
        """Return each case's last state, of all states or of those that steps have overwritten."""
        if self.ragged is None or states.shape[0] == 1:
            return states[-1].clone()
        return states[self.ragged.lengths, torch.arange(self.batch)]

    def without_padding(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Return a row of the tensor [T, B, D] for each step and case from ``begin`` to ``end``, but no padding."""
        if self.ragged is None:
            return tensor[begin:end].flatten(0, 1)
        return tensor.flatten(0, 1).index_select(0, self.ragged.index[self.first_row(begin) : self.first_row(end)])

    def _state(self, state: Given) -> Tensor:
        return torch.zeros(self.batch, self.hidden, dtype=self.dtype) if state is None else self.as_read(state)

    def _mask(self, name: str, mask: Tensor) -> None:
        """A row of units for each step and case; one number for all as one row."""
        size = self.dtype.itemsize
        rate = not any(mask.stride())
        rows = (mask[:1, :1] if rate else mask).to(self.dtype).contiguous()
        steps = {f"{name}_t": 0, f"{name}_b": 0} if rate else {
            f"{name}_t": self.batch * self.hidden * size, f"{name}_b": self.hidden * size
        }  # fmt: skip
        self.set(**{name: rows, **steps})

    def matrix(self, weight: Tensor, backward: bool) -> None:
        """The product's matrix: as it is for one row, else packed; and where products go."""
        columns = weight.shape[1] if backward else weight.shape[0]
        panel = panel_width(weight.element_size())
        panels = -(-columns // panel)
        self.set(weight=weight, z=self.empty(self.product_rows, panels * panel), z_row=panels * panel)
        if self.batch > 1:
            self.set(packed=packed(weight, not backward), panels=panels)


def _scratch(call: Call, widths: int) -> Tensor:
    """Each thread's own rows."""
    size = widths * call.width + 6 * call.hidden + 64
    call.set(scratch_size=size)
    return call.empty(call.threads, size)


def start(state: Given, out: Tensor) -> None:
    """Put the state before the first step in its place."""
    if state is None:
        out.zero_()
    else:
        out.copy_(state)


def forward(
    setting: Setting, tensors: Sequence[Given], extras: Sequence[Given], keep: str, call: Call | None = None
) -> list[Tensor]:
    """hist [T+1, B, H], the final h and c; to keep "states" c_hist; "all" W_x x, c_hist, x^ and 1/deviations."""
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
    summed = call.empty(steps if train else min(steps, max(1, CHUNK // batch)), batch, call.width)
    for begin in range(0, steps, summed.shape[0]):
        end = min(steps, begin + summed.shape[0])
        before, count = call.first_row(begin), call.first_row(end) - call.first_row(begin)
        multiply(call.without_padding(x, begin, end), weight_ih, True, summed.flatten(0, 1)[:count])
        call.set(begin=begin, end=end, summed=summed.data_ptr() - before * call.width * size)  # of row 0
        call.run("forward", call.threads)
    call.let_go(
        "weight", "packed", "z", "scratch", "hist", "c_hist", "xhat", "rstd"
    )  # who saves them decides how long they stay
    h_n, c_n = call.last(hist), call.last(c_hist) if lstm else hist.new_empty(0)
    kept = {"nothing": [], "states": [c_hist], "all": [summed, c_hist, xhat, rstd]}[keep]
    return [hist, h_n, c_n, *kept]


def backward(
    setting: Setting, tensors: Sequence[Given], extras: Sequence[Given], kept: Sequence[Tensor],
    grads: Sequence[Given], needed: Sequence[bool], call: Call | None = None,
) -> list[Given]:  # fmt: skip
    """Gradients in the order of ``tensors``; ``grads`` are those of the output, h_n and c_n; ``call``: forward's."""
    by_name, wanted = dict(zip(NAMES, tensors)), dict(zip(NAMES, needed))
    hist, summed, c_hist, xhat, rstd = kept
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
    chunk = max(1, min(steps, CHUNK // batch))
    d_raw, d_summed = call.empty(chunk * batch, width), call.empty(chunk * batch, width)
    call.matrix(weight, True)
    call.set(
        summed=summed, hist=hist, c_hist=c_hist, c_step=batch * hidden * size, xhat=xhat,
        rstd=rstd, scratch=_scratch(call, 1), dh=dh, dc=dc,
        d_reset_h=d_reset_h, d_reset_c=d_reset_c, past=past, d_raw=d_raw, d_summed=d_summed, shares=shares,
        totals=totals, d_out=hist.new_empty(0) if d_out is None else d_out,
    )  # fmt: skip
    found = MatrixGradients(call, by_name, hist, wanted)
    for end in range(steps, 0, -chunk):
        begin = max(0, end - chunk)
        call.set(begin=begin, end=end)
        call.run("backward", call.threads)
        rows = call.first_row(end) - call.first_row(begin)
        found.add(begin, end, d_raw[:rows], d_summed[:rows])
    call.let_go("weight", "packed", "z", "scratch")
    states = {"h": dh, "c": dc, "reset_h": d_reset_h, "reset_c": d_reset_c}
    given = {**found.result(), **states, **_small(call, totals, by_name)}
    return in_order(by_name, given)


def in_order(by_name: dict[str, Given], grads: dict[str, Any]) -> list[Given]:
    """Gradients in the order of the tensors and in their dtypes; None where there is no tensor."""
    pairs = [(t, grads[name]) for name, t in by_name.items()]
    return [None if t is None or d is None else d if d.dtype is t.dtype else d.to(t.dtype) for t, d in pairs]


class MatrixGradients:
    """Gradients of the matrices and of the input, chunk by chunk."""

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
        """Of steps begin to end; ``raw``, ``summed``: gradients of the two products, a row for each step and case."""
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
        """h' as the products saw it, a row for each step and case."""
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
        found = {name: None if d is None else d.result() for name, d in sums.items()}
        return {"input": self.d_input, **found}


class SumOfProducts:
    """left^T right over many rows, summed in blocks: one float32 sum over all rows is off by 1e-5 of its value.

    torch.addmm goes on with the sum that it is given, row by row, so no product's sum has more than ``PIECE`` rows.
    """

    def __init__(self, like: Tensor) -> None:
        self.piece = torch.empty_like(like)
        self.block: Tensor | None = None
        self.total: Tensor | None = None
        self.rows = self.pieces = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        parts = -(-left.shape[0] // PIECE)
        for some, others in zip(left.chunk(parts), right.chunk(parts)) if parts > 1 else [(left, right)]:
            if self.rows + some.shape[0] > PIECE:
                self._end_piece()
            add_outer(some, others, self.piece, self.rows > 0)
            self.rows += some.shape[0]

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
    """Gradients of gains and biases."""
    width, hidden, form = call.width, call.hidden, call.form
    total = (totals[0] if call.threads == 1 else totals.sum(0)).to(call.dtype)
    bias, gain, bias_x, gain_x, bias_cell, gain_cell = torch.split(total, [width] * 4 + [hidden] * 2)
    outer = bias if form.site == "sum" else bias_x
    return {
        "bias_ih": outer, "bias_hh": bias if form.cell == "GRU" and form.site != "sum" else outer, "gain_ih": gain_x,
        "gain_hh": gain, "gain_sum": gain, "gain_cell": gain_cell, "bias_cell": bias_cell,
    }  # fmt: skip


def shapes(setting: Setting, x: Tensor, weight_hh: Tensor, keep: bool) -> list[tuple[int, ...]]:
    """Of what ``forward`` gives, with all that backward needs or nothing."""
    form = form_of(setting)
    (steps, batch), (width, hidden), lstm = x.shape[:2], weight_hh.shape, form.cell == "LSTM"
    found: list[tuple[int, ...]] = [(steps + 1, batch, hidden), (batch, hidden), (batch, hidden) if lstm else (0,)]
    if keep:
        groups = len(setting.where.groups(form.site)) if form.site else 0
        found += [(steps, batch, width), (steps + 1 if lstm else 0, batch, hidden), (steps, batch, width)]
        found.append((steps, batch, groups))
    return found
