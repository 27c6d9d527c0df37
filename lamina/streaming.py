"""A recurrent layer one frame at a time: speech, control, anything that cannot wait for the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .checks import describe, fail, positive_int
from .functional import explain
from .kernels import Choice
from .recurrent import RecurrentLayer

_version = attrgetter("_version")  # counts what changes a tensor in place


def stream(layer: RecurrentLayer, batch_size: int = 1) -> Stream:
    """The layer as a function of one frame that carries its own state.

    >>> import torch
    >>> step = lamina.stream(lamina.LSTM(3, 4).eval())
    >>> step(torch.zeros(1, 3)).shape
    torch.Size([1, 4])
    """
    return Stream(layer, batch_size)


class Stream:
    """A layer that takes one frame at a time: ``step(frame)`` returns the output that a call on all frames would.

    ``state``: the current state, laid out as the layer returns it.
    ``reset(state, cases)``: go back to the layer's initial state or to a given one, in all cases or in some.
    ``refresh()``: take the layer's weights as they are now and keep the state.

    The next frame takes over weights that changed, whichever backend serves: in place (``load_state_dict``, an
    optimiser) or all replaced (``load_state_dict(assign=True)``, ``layer.to(...)``). Where only some parameters are
    replaced by others, call ``refresh`` or ``reset``, which compare every one.
    """

    def __init__(self, layer: RecurrentLayer, batch_size: int = 1) -> None:
        self.layer, self.batch_size = layer, positive_int("batch_size", batch_size)
        self._check(layer)
        self._prepare()
        self.reset()

    @staticmethod
    def _check(layer: Any) -> None:
        if not isinstance(layer, RecurrentLayer):
            remedy = "Convert it first: lamina.convert(model)." if isinstance(layer, nn.RNNBase) else "Pass a layer."
            raise TypeError(f"stream takes lamina.RNN, lamina.LSTM or lamina.GRU, got {_public_name(layer)}. {remedy}")
        if layer.bidirectional:
            raise fail("a stream has no end to read backwards from", "bidirectional=True", "Use one direction.")
        if layer.norm == "batch":
            raise fail("a stream cannot tell batch norm which step it is at", "norm='batch'", "Use layer norm.")
        if layer.training:
            raise fail("a stream is for inference", "a layer in training mode", "Call layer.eval() first.")

    def refresh(self) -> None:
        """Take the layer's weights as they are now; the state stays."""
        held = self._current()
        self._prepare()
        self._put([kind.to(self.dtype) for kind in held])

    def _prepare(self) -> None:
        """Pack the weights and set out what a frame needs; the state is not set."""
        weight = self.layer.get_parameter("weight_ih_l0")
        self._parameters = tuple(self.layer.parameters())
        self._versions, self._addresses = sum(map(_version, self._parameters)), self._places()
        self._name, self._weight = next(iter(self.layer._parameters.items()))
        self._address = self._parameters[0].data_ptr()
        self.dtype, self.shape = weight.dtype, torch.Size((self.batch_size, self.layer.input_size))
        x = weight.detach().new_zeros(1, *self.shape)
        self.choice: Choice = explain(self.layer, x.transpose(0, 1) if self.layer.batch_first else x)
        self._steps: list[Any] = self._made(x) if self.choice.backend == "numba" else []
        self._calls = [(step.kernel, step.address) for step in self._steps]
        if self._steps:  # what a frame needs, near at hand: Python's share of a frame of 128 units is a quarter
            first, last = self._steps[0], self._steps[-1]
            self._first, self._left, self._last, self._out = first.numbers, first.left, last.numbers, last.out
            self._like = last.output

    def _stale(self) -> bool:
        """Whether weights have changed; of replaced ones the first tells, for a frame has little time."""
        if self.layer._parameters.get(self._name) is not self._weight:
            return True
        return sum(map(_version, self._parameters)) != self._versions or self._parameters[0].data_ptr() != self._address

    def _places(self) -> list[tuple[int, int]]:
        """Identity and address of every parameter: they change where a parameter is replaced."""
        return [(id(p), p.data_ptr()) for p in self.layer.parameters()]

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
    def reset(self, state: Any = None, cases: Any = None) -> None:
        """Go back to the layer's initial state (zeros or the learned one), or to ``state``; look at the weights.

        state: of the whole batch, laid out as the layer returns it.
        cases: which cases to reset, a bool mask [B] or indices; the others keep their state. None: all.
        """
        chosen = None if cases is None else self._chosen(cases)
        if self._stale() or self._places() != self._addresses:
            self._prepare() if chosen is None else self.refresh()
        x = self.layer.get_parameter("weight_ih_l0").new_zeros(1, self.batch_size, self.layer.input_size)
        given = self.layer._states(state, x, 3)
        found = [
            torch.stack([_or_zeros(s[k], x, width) for s in given]) for k, width in enumerate(self.layer.state_sizes)
        ]
        if chosen is not None:
            mask = torch.zeros(self.batch_size, 1, dtype=torch.bool, device=x.device)
            mask[chosen.to(x.device)] = True
            found = [torch.where(mask, new, old) for new, old in zip(found, self._current())]
        self._put(found)

    def _chosen(self, cases: Any) -> Tensor:
        """A mask or indices of cases, checked."""
        found = torch.as_tensor(cases, dtype=torch.int64 if isinstance(cases, list) and not cases else None)
        rule = f"cases must be a bool mask [{self.batch_size}] or indices of {self.batch_size} cases"
        if found.dim() != 1 or found.dtype not in (torch.bool, torch.int32, torch.int64):
            raise fail(rule, describe(found), "Pass a 1-D tensor or a list.")
        masked, count = found.dtype is torch.bool, self.batch_size
        if len(found) != count if masked else bool(((found < 0) | (found >= count)).any()):
            raise fail(rule, describe(found) if masked else f"{found.tolist()}", "Name cases of this stream.")
        return found if masked else found.long()

    def _current(self) -> tuple[Tensor, ...]:
        """h [num_layers, B, H], for the LSTM with c."""
        if not self._steps:
            return self._held
        return tuple(torch.stack(kind) for kind in zip(*(step.state() for step in self._steps)))

    def _put(self, found: Sequence[Tensor]) -> None:
        if not self._steps:
            self._held = tuple(found)
            return
        for n, step in enumerate(self._steps):
            for place, kind in zip(step.state(), found):
                place.copy_(kind[n])

    @property
    def state(self) -> Any:
        """The current state as the layer returns it: h [num_layers, B, H], for the LSTM (h, c)."""
        found = self._current()
        return found if self.layer.cell == "LSTM" else found[0]

    def __call__(self, frame: Tensor) -> Tensor:
        """The output [B, H] for a frame [B, D]; [H] for a frame [D] of one case."""
        if self._stale():
            self.refresh()
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


def _public_name(layer: Any) -> str:
    """torch.nn.LSTM and lamina.LSTM by the names that users import."""
    kind = type(layer)
    package = next((p for p in ("torch.nn", "lamina") if kind.__module__.startswith(f"{p}.")), kind.__module__)
    return f"{package}.{kind.__name__}"


def _or_zeros(state: Tensor | None, like: Tensor, width: int) -> Tensor:
    return like.new_zeros(like.shape[1], width) if state is None else state
