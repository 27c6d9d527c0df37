"""Loops over a cell, for recurrences with something inside: attention windows, glimpses, sampled inputs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .cells import RecurrentCell, cache_key, ordinary
from .checks import fail


def loop(cell: RecurrentCell) -> Loop:
    """Return a cell as a function for all steps of one sequence; make a new one for the next sequence.

    >>> import torch
    >>> step, state = lamina.loop(lamina.LSTMCell(3, 4)), None
    >>> for frame in torch.zeros(5, 2, 3):
    ...     state = step(frame, state)
    >>> state[0].shape
    torch.Size([2, 4])
    """
    return Loop(cell)


class Loop:
    """Cell whose parameters do not change while its loop runs: ``step(input, hx)`` returns what the cell would.

    On a CPU with numba the parameters are prepared once and their gradients formed once, at the end of the backward
    pass. Everywhere else each call is the cell's. Gradients cannot be differentiated again. Make a new loop after the
    parameters have changed: a backward pass raises if torch has counted the change, but changes of ``parameter.data``
    are not counted.
    """

    def __init__(self, cell: Any) -> None:
        if not isinstance(cell, RecurrentCell):
            rule = "loop takes lamina.RNNCell, lamina.LSTMCell or lamina.GRUCell"
            raise fail(rule, type(cell).__name__, "A layer for whole sequences needs no loop.")
        self.cell: RecurrentCell = cell
        self._steps: Any = None  # the prepared parameters
        self._key: Any = None  # the kind of call, threads and process that they were prepared for

    def __call__(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state, as the cell does."""
        state = () if hx is None else hx if isinstance(hx, (tuple, list)) else (hx,)
        given = (input, *state, *(None,) * (2 - len(state)))
        if self._steps is None or self._key != self._key_of(given):
            new = self.cell(input, hx)  # which checks everything
            self._prepare(given)
            return new
        new_state = self._steps(*[t if t is None or t.is_contiguous() else t.contiguous() for t in given])
        return new_state if self.cell.cell == "LSTM" else new_state[0]

    @staticmethod
    def _key_of(given: tuple[Any, ...]) -> Any:
        """Return the key of calls that the same prepared parameters serve; None where none do.

        A forked child has none of its parent's threads, so it prepares its own.
        """
        if not all(t is None or type(t) is Tensor for t in given) or not ordinary(given[0]):
            return None
        return cache_key(given), torch.get_num_threads(), os.getpid()

    def _prepare(self, given: tuple[Any, ...]) -> None:
        """Prepare the parameters if the cell's own step, which has just run, runs in the CPU kernels."""
        key = self._key_of(given)
        step = key and self.cell.fused_step(*given)
        if step is None or not hasattr(step, "prepared"):
            return
        self._steps, self._key = step.prepared(self.cell.step_tensors(*given)), key
