"""A recurrent layer one frame at a time: speech, control, anything that cannot wait for the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import describe, fail, positive_int
from .functional import explain
from .kernels import Choice
from .recurrent import RecurrentLayer


def stream(layer: RecurrentLayer, batch_size: int = 1) -> Stream:
    """The layer as a function of one frame that carries its own state.

    >>> import torch
    >>> step = lamina.stream(lamina.LSTM(3, 4).eval())
    >>> step(torch.zeros(1, 3)).shape
    torch.Size([1, 4])
    """
    return Stream(layer, batch_size)


class Stream:
    """``step(frame)`` gives the layer's output for the next frame: what a call on all frames would give.

    On a CPU with numba everything is in its place beforehand, and the weights are those of when the stream was made:
    ``refresh`` takes them anew. ``reset`` goes back to the layer's initial state, or to a given one.
    """

    def __init__(self, layer: RecurrentLayer, batch_size: int = 1) -> None:
        self.layer, self.batch_size = layer, positive_int("batch_size", batch_size)
        self._check(layer)
        self.refresh()

    @staticmethod
    def _check(layer: Any) -> None:
        if not isinstance(layer, RecurrentLayer):
            raise TypeError(f"stream takes lamina.RNN, LSTM or GRU, got {type(layer).__name__}.")
        if layer.bidirectional:
            raise fail("a stream has no end to read backwards from", "bidirectional=True", "Use one direction.")
        if layer.norm == "batch":
            raise fail("a stream cannot tell batch norm which step it is at", "norm='batch'", "Use layer norm.")
        if layer.training:
            raise fail("a stream is for inference", "a layer in training mode", "Call layer.eval() first.")

    def refresh(self) -> None:
        """Take over the layer's weights as they are now, and begin anew."""
        weight = self.layer.get_parameter("weight_ih_l0")
        self.dtype, self.shape = weight.dtype, torch.Size((self.batch_size, self.layer.input_size))
        x = weight.detach().new_zeros(1, *self.shape)
        self.choice: Choice = explain(self.layer, x.transpose(0, 1) if self.layer.batch_first else x)
        self._steps: list[Any] = self._made(x) if self.choice.backend == "numba" else []
        self._calls = [(step.kernel, step.address) for step in self._steps]
        if self._steps:  # what a frame needs, near at hand: Python's share of a frame of 128 units is a quarter
            first, last = self._steps[0], self._steps[-1]
            self._first, self._left, self._last, self._out = first.numbers, first.left, last.numbers, last.out
            self._like = last.output
        self.reset()

    def _made(self, x: Tensor) -> list[Any]:
        """Each layer's step, reading where the one below writes."""
        from .kernels.cpu_stream import Step

        steps: list[Any] = []
        for suffix in self.layer._suffixes():
            zoneout = self.layer._zoneout(1, self.batch_size, x)
            call = self.layer._recurrence(suffix, x, (None, None)[: self._states()], zoneout=zoneout)
            steps.append(Step(call))
            if len(steps) > 1:
                steps[-1].read(steps[-2].output.data_ptr())
            x = x.new_zeros(1, self.batch_size, self.layer.hidden_size)
        return steps

    def _states(self) -> int:
        return len(self.layer.state_sizes)

    @torch.no_grad()
    def reset(self, state: Any = None) -> None:
        """Go back to the layer's initial state, or to ``state``, laid out as the layer gives it back."""
        x = self.layer.get_parameter("weight_ih_l0").new_zeros(1, self.batch_size, self.layer.input_size)
        given = self.layer._states(state, x, 3)
        if not self._steps:
            pairs = [[(s[k], w) for s in given] for k, w in enumerate(self.layer.state_sizes)]
            self._held = tuple(torch.stack([_or_zeros(s, x, w) for s, w in kind]) for kind in pairs)
            return
        for step, found in zip(self._steps, given):
            for place, value in zip(step.state(), found):
                place.zero_() if value is None else place.copy_(value)

    @property
    def state(self) -> Any:
        """As the layer gives it back: h [num_layers, B, H], for the LSTM with c."""
        if not self._steps:
            found = self._held
        else:
            found = tuple(torch.stack(kind) for kind in zip(*(step.state() for step in self._steps)))
        return found if self.layer.cell == "LSTM" else found[0]

    def __call__(self, frame: Tensor) -> Tensor:
        """The output [B, H] for a frame [B, D]; [H] for a frame [D] of one case."""
        if frame.shape != self.shape or frame.dtype != self.dtype:
            return self._unusual(frame)
        if not self._calls:
            return self._by_the_layer(frame)
        if not frame.is_contiguous():
            frame = frame.contiguous()
        found = torch.empty_like(self._like)
        self._first[self._left] = frame.data_ptr()
        self._last[self._out] = found.data_ptr()
        for kernel, address in self._calls:
            kernel(address)
        return found

    def _unusual(self, frame: Tensor) -> Tensor:
        if frame.dim() == 1 and self.batch_size == 1 and frame.shape == self.shape[1:] and frame.dtype == self.dtype:
            return self(frame.unsqueeze(0))[0]
        raise fail(
            f"this stream takes frames {list(self.shape)} of {self.dtype}", describe(frame), "Reshape or cast it."
        )

    @torch.no_grad()
    def _by_the_layer(self, frame: Tensor) -> Tensor:
        output, state = self.layer(frame.unsqueeze(1 if self.layer.batch_first else 0), self.state)
        self._held = tuple(state) if self.layer.cell == "LSTM" else (state,)
        found: Tensor = output.flatten(0, 1)
        return found


def _or_zeros(state: Tensor | None, like: Tensor, width: int) -> Tensor:
    return like.new_zeros(like.shape[1], width) if state is None else state
