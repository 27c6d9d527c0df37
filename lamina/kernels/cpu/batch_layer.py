"""Forward and backward pass of a batch-normalised layer on a CPU, by the kernels of ``batch_norm``.

Threads split the units. Tensors as wide as all gates are ordered by threads, then gates, so that each thread's part is
contiguous; gradients and moments are restored to torch's order at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...reference import Moments, inverse_deviation
from ..forms import Setting
from ..given import NAMES, Given
from ..given import there as _there
from . import team
from .layer import Call, MatrixGradients, in_order, multiply, packed, start
from .machine import panel_width, vectors

Population = Mapping[str, Moments] | None  # a row for each step of the call
# Tensors with a row for each unit of each gate.
WIDE = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "gain_ih", "gain_hh", "gain_sum")
MEETING = 2**18  # multiplications of a step's product that are worth a thread, at one barrier per step
UNITS = 8  # fewest units per thread, and the granularity of the split


@dataclass(frozen=True)
class Parts:
    """Partition of the units among the threads."""

    hidden: int
    gates: int
    each: int  # units per thread; the last one may have fewer

    @staticmethod
    def of(hidden: int, gates: int, batch: int, threads: int) -> Parts:
        count = max(1, min(threads, batch * gates * hidden * hidden // MEETING))
        return Parts(hidden, gates, min(hidden, -(-hidden // (count * UNITS)) * UNITS))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(first, min(self.hidden, first + self.each)) for first in range(0, self.hidden, self.each)]

    def ordered(self, wide: Tensor, axis: int = 0) -> Tensor:
        """Return ``wide`` ordered by threads, then gates."""
        return wide if self.each == self.hidden else wide.index_select(axis, _order_of(self)[0])

    def restored(self, wide: Tensor, axis: int = 0) -> Tensor:
        """Return ``wide`` in torch's order, by gates."""
        return wide if self.each == self.hidden else wide.index_select(axis, _order_of(self)[1])


@lru_cache(64)
def _order_of(parts: Parts) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        units = torch.arange(parts.gates * parts.hidden).view(parts.gates, parts.hidden)
        order = torch.cat([units[:, first:last].flatten() for first, last in parts.bounds])
        return order, order.argsort()


class BatchCall(Call):
    """Call record and tensors that forward and backward of a batch-normalised recurrence share.

    Threads split the rows where statistics are known and ``train`` is false, else the units.
    """

    def __init__(
        self,
        setting: Setting,
        tensors: Sequence[Given],
        extras: Sequence[Given],
        population: Population,
        train: bool,
    ) -> None:
        by_name = dict(zip(NAMES, tensors))
        batch, (width, hidden) = _there(by_name["input"]).shape[1], _there(by_name["weight_hh"]).shape
        by_rows = population is not None and not train and batch > 1
        self.parts = parts = Parts.of(hidden, width // hidden, batch, 1 if by_rows else team.threads())
        self.wide = {name: t if t is None else parts.ordered(t) for name, t in by_name.items() if name in WIDE}
        super().__init__(setting, {**by_name, **self.wide}, extras)
        self.threads = min(team.threads(), batch) if by_rows else len(parts.bounds)
        self.set(shared=False, each=parts.each, by_rows=by_rows)
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}  # of each site, ordered by threads
        where = self.placement
        sites = {"z": self.form.site, "xs": "ih" if where.ih else "", "c": "cell" if where.cell else ""}
        for field, site in sites.items():
            self._statistics(field, site, population)

    def by_name(self, tensors: Sequence[Given]) -> dict[str, Given]:
        """Return the call's tensors; those as wide as all gates are ordered by threads."""
        return {**dict(zip(NAMES, tensors)), **self.wide}

    def _parameters(self, by_name: dict[str, Given]) -> None:
        """Set gains and biases; a GRU's candidate has a bias on each side, its other gates both on the input's side."""
        bias_ih, bias_hh = by_name["bias_ih"], by_name["bias_hh"]
        if self.form.cell == "GRU" and bias_hh is not None:
            candidate = self.parts.ordered(torch.arange(self.width) >= 2 * self.hidden)
            other_gates = bias_hh.masked_fill(candidate, 0)
            by_name = {**by_name, "bias_ih": other_gates if bias_ih is None else bias_ih + other_gates}
        super()._parameters(by_name)

    def _extras(self, extras: Sequence[Given]) -> None:
        """Set lengths and masks; padding stays in the tensors, and a step's statistics leave it out."""
        lengths, *others = extras
        super()._extras([None, *others])
        if lengths is not None:
            self.set(ends=lengths.to(torch.int64).contiguous())
        if self.resets is not None or self.drop is not None:
            self.set(operand=self.empty(2, self.batch, self.hidden))  # of this step and the next

    def _statistics(self, field: str, site: str, population: Population) -> None:
        """Set a site's mean, variance and 1/deviation: known ones, or memory for the batch's."""
        width = self.hidden if field == "c" else self.width
        if not site:
            mean = var = self.full(width, 0.0)
            scale = self.full(width, 1.0)
        elif population is None:
            mean, var, scale = torch.empty(3, self.steps, width, dtype=self.dtype).unbind()
            self.moments[site] = (mean, var)
        else:
            mean, var, scale = self._known(population[site], field)
        self.set(**{f"mean_{field}": mean, f"var_{field}": var, f"scale_{field}": scale})
        live = bool(site) and population is None
        self.set(**{f"step_{field}": width * self.dtype.itemsize if site else 0, f"live_{field}": live})

    def _known(self, moments: Moments, field: str) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = (m.detach().to(self.dtype) for m in moments)
        scale = self._scale(var)
        if field != "c":
            mean, scale = self.parts.ordered(mean, 1), self.parts.ordered(scale, 1)
        return mean.contiguous(), var, scale.contiguous()

    def _scale(self, var: Tensor) -> Tensor:
        """Return 1/deviation; usually by two operations instead of eight, which take much of a single step's time."""
        eps, std = self.form.eps, self.form.std
        if eps > 0 and not std:
            return var.add(eps).rsqrt_()
        return inverse_deviation(var, eps, "std" if std else "var")

    def matrix(self, weight: Tensor, backward: bool) -> None:
        """Set the product's matrix, unpacked for one row and else packed per thread, and allocate the output ``z``."""
        columns, size = self.parts.each * (1 if backward else self.parts.gates), weight.element_size()
        panels, count = -(-columns // panel_width(size)), len(self.parts.bounds)
        row = panels * panel_width(size)
        z = self.empty(count, self.batch, row)
        self.set(weight=weight, z=z, z_row=row, z_step=self.batch * row * size if count > 1 else 0)
        if self.batch > 1:
            parts = self._packed(weight, backward, panels)
            step = parts.stride(0) * size if count > 1 else 0
            self.set(packed=parts, vectors=vectors(columns, size), panel_step=step)

    def _packed(self, weight: Tensor, backward: bool, panels: int) -> Tensor:
        """Return the packed panels of each thread's rows of the matrix, or for backward of its columns."""
        gates, bounds = self.parts.gates, self.parts.bounds
        depth = self.width if backward else self.hidden
        parts = self.empty(len(bounds), panels, depth, panel_width(weight.element_size()))
        for (first, last), out in zip(bounds, parts):
            part = weight[:, first:last].contiguous() if backward else weight[gates * first : gates * last]
            packed(part, not backward, out)
        return parts

    def scratch(self, rows: int, units: int, for_each_case: int) -> None:
        """Allocate each thread's scratch: rows of its gates, rows of its units, numbers per case; see the kernels."""
        each, size = self.parts.each, 8 // self.dtype.itemsize
        count = size * self.batch + rows * each * self.parts.gates + units * each + for_each_case * self.batch
        self.set(scratch_size=count, scratch=self.empty(self.threads, count))

    def histories(self, hist: Tensor, c_hist: Tensor, xhat: Tensor) -> None:
        """Set the states and x^ of all steps; a single c has ``c_step`` 0, and absent x^ the address 0."""
        size, several = self.batch * self.hidden * self.dtype.itemsize, c_hist.shape[0] > 1
        self.set(hist=hist, c_hist=c_hist, c_step=size if several else 0, xhat=xhat if xhat.shape[0] else 0)

    def site_moments(self) -> dict[str, Moments]:
        """Return the moments of each site as copies in torch's order; backward reads the originals."""
        return {site: Moments(*(self._copied(site, m) for m in self.moments[site])) for site in self._live_sites()}

    def _live_sites(self) -> list[str]:
        return [site for site in self.placement.sites() if site in self.moments]

    def _copied(self, site: str, moment: Tensor) -> Tensor:
        restored = moment if site == "cell" else self.parts.restored(moment, 1)
        return restored.clone() if restored is moment else restored


def forward(call: BatchCall, tensors: Sequence[Given], train: bool) -> tuple[list[Tensor], dict[str, Moments]]:
    """Return hist [T+1, B, H], the final h and c, with ``train`` backward's tensors; and the moments of each site."""
    by_name, lstm, steps, state = call.by_name(tensors), call.form.cell == "LSTM", call.steps, (call.batch, call.hidden)
    hist = call.empty(steps + 1, *state)
    c_hist = call.empty((steps + 1 if train else 1) if lstm else 0, *state)
    start(by_name["h"], hist[0])
    if lstm:
        start(by_name["c"], c_hist[0])
    xhat = call.empty(steps if train else 0, call.batch, call.width)
    call.matrix(_there(by_name["weight_hh"]), False)
    call.scratch(7, 1, call.parts.each)
    call.histories(hist, c_hist, xhat)
    summed = _walk(call, by_name, train and bool(call.placement.ih))
    call.let_go("weight", "packed", "z", "scratch", "hist", "c_hist", "xhat")
    c_n = c_hist[-1].clone() if lstm else hist.new_empty(0)
    return [hist, hist[-1].clone(), c_n, *([summed, c_hist, xhat] if train else [])], call.site_moments()


def _walk(call: BatchCall, by_name: dict[str, Given], whole: bool) -> Tensor:
    """Run the steps, in chunks or, to save x^ of W_x x of all (``whole``), at once; return W_x x if ``whole``."""
    x, weight = _there(by_name["input"]), _there(by_name["weight_ih"])
    steps, row = call.steps, call.batch * call.width * call.dtype.itemsize
    summed = call.empty(steps if whole else call.chunk, call.batch, call.width)
    for begin in range(0, steps, summed.shape[0]):
        end = min(steps, begin + summed.shape[0])
        multiply(x[begin:end].flatten(0, 1), weight, True, summed[: end - begin].flatten(0, 1))
        call.set(begin=begin, end=end, summed=summed.data_ptr() - begin * row)  # address of step 0
        call.run("batch_forward", call.threads)
    return summed if whole else summed.new_empty(0)


def backward(
    call: BatchCall, tensors: Sequence[Given], saved: Sequence[Tensor], grads: Sequence[Given], needed: Sequence[bool]
) -> list[Given]:
    """Return gradients in the order of NAMES; ``grads``: of the output, h_n and c_n; ``call``: a copy of forward's."""
    by_name, (hist, summed, c_hist, xhat) = call.by_name(tensors), saved
    states = _arriving(call, grads)
    call.matrix(_there(by_name["weight_hh"]), True)
    call.scratch(8, 11, (call.parts.gates + 4) * call.parts.each)
    call.histories(hist, c_hist, xhat)
    call.set(summed=summed)
    matrices = MatrixGradients(call, by_name, hist, dict(zip(NAMES, needed)))
    totals = _walk_back(call, matrices)
    gradients = {**matrices.result(), **states, **_small(call, totals)}
    gradients |= {name: call.parts.restored(d) for name, d in gradients.items() if name in WIDE and d is not None}
    return in_order(by_name, gradients)


def _arriving(call: BatchCall, grads: Sequence[Given]) -> dict[str, Tensor]:
    """Set and return the gradients of the final states; backward overwrites them with those of the initial ones."""
    d_out, d_h, d_c = (None if g is None else g.to(call.dtype).contiguous() for g in grads)
    dh, dc, reset_h, reset_c, past = torch.zeros(5, call.batch, call.hidden, dtype=call.dtype).unbind()
    if d_h is not None:
        dh.copy_(d_h)
    if d_c is not None:
        dc.copy_(d_c)
    call.set(dh=dh, dc=dc, d_reset_h=reset_h, d_reset_c=reset_c, past=past)
    call.set(d_out=dh.new_empty(0) if d_out is None else d_out)
    return {"h": dh, "c": dc, "reset_h": reset_h, "reset_c": reset_c}


def _walk_back(call: BatchCall, matrices: MatrixGradients) -> Tensor:
    """Run the steps back in chunks; return the sums for gains and biases."""
    shares = torch.zeros(4 * call.width + 2 * call.hidden, dtype=call.dtype)
    totals = torch.zeros_like(shares, dtype=torch.float64)
    chunk = call.chunk
    d_raw = call.empty(chunk * call.batch, call.width)
    d_summed = torch.empty_like(d_raw) if call.placement.ih else d_raw
    call.set(d_raw=d_raw, d_summed=d_summed, shares=shares, totals=totals)
    for end in range(call.steps, 0, -chunk):
        begin = max(0, end - chunk)
        call.set(begin=begin, end=end)
        call.run("batch_backward", call.threads)
        rows = (end - begin) * call.batch
        matrices.add(begin, end, d_raw[:rows], d_summed[:rows])
    return totals


def _small(call: BatchCall, totals: Tensor) -> dict[str, Any]:
    """Return the gradients of gains and biases."""
    widths = [call.width] * 4 + [call.hidden] * 2
    bias, gain, bias_x, gain_x, bias_cell, gain_cell = torch.split(totals.to(call.dtype), widths)
    gains = {"gain_ih": gain_x, "gain_hh": gain, "gain_sum": gain, "gain_cell": gain_cell}
    d_bias_ih = bias_x if call.placement.ih else bias
    return {"bias_ih": d_bias_ih, "bias_hh": bias, "bias_cell": bias_cell, **gains}
