"""One step of a recurrence on a CPU, with everything prepared: a call allocates, packs and checks nothing."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...reference import Recurrence
from .. import given
from ..forms import setting_of
from ..given import NAMES
from . import team
from .call_record import PLACES
from .layer import KINDS, Call, packed
from .machine import STRETCH, panel_width


class Step:
    """Step of a layer for one batch size, with the weights as they are at construction: packed for several rows."""

    @torch.no_grad()
    def __init__(self, call: Recurrence) -> None:
        extras = given.extras_of(call)
        tensors = [None if t is None else t.detach() for t in given.tensors_of(call, None)]
        by_name = dict(zip(NAMES, tensors))
        x, weight_ih, weight_hh = call.input, by_name["weight_ih"], by_name["weight_hh"]
        if weight_ih is None or weight_hh is None:
            raise TypeError("a recurrence needs its matrices, got None.")
        self.job, batch, lstm = Call(setting_of(call, "cpu"), by_name, extras), x.shape[1], call.cell == "LSTM"
        job, (width, hidden) = self.job, weight_hh.shape
        self.hist = torch.zeros(2, batch, hidden, dtype=x.dtype)  # states before and after the step
        self.c = torch.zeros(batch, hidden, dtype=x.dtype)
        job.matrix(weight_hh, False)
        job.set(
            threads=1, shared=False, begin=0, end=1, summed=job.empty(batch, width), hist=self.hist, c_step=0,
            c_hist=self.c if lstm else self.c[:0],
            scratch=job.empty(2 * width + 6 * hidden + 64 + STRETCH * panel_width(x.element_size())),
            depth=x.shape[2], packed_x=packed(weight_ih, True), columns=width, streams=True,
        )  # fmt: skip
        self.output = self.hist[1]
        self.numbers, self.address = job.numbers, ctypes.addressof(job.numbers)
        self.left, self.out = PLACES["left"], PLACES["out"]
        self.kernel = team.entry(f"forward_{KINDS[x.dtype]}")[1]

    def read(self, left: int) -> None:
        """Set the address of the input [B, D] of all later calls."""
        self.numbers[self.left] = left

    def state(self) -> tuple[Tensor, ...]:
        """Return h, and c of an LSTM."""
        return (self.hist[0], self.c)[: 2 if self.job.form.cell == "LSTM" else 1]
