"""Streaming inference: a recurrent layer that processes one frame per call, for speech, control and the like."""

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

_version = attrgetter("_version")  # torch's counter of in-place changes


def stream(layer: RecurrentLayer, batch_size: int = 1) -> Stream:
    """Return the layer as a function of one frame that carries its own state.

    >>> import torch
    >>> step = lamina.stream(lamina.LSTM(3, 4).eval())
    >>> step(torch.zeros(1, 3)).shape
    torch.Size([1, 4])
    """
    return Stream(layer, batch_size)


class Stream:
    """Layer that takes one frame per call: ``step(frame)`` returns the output that a call on all frames would give.

    ``state``: current state, in the layout that the layer returns.
    ``reset(state, cases)``: reset all or some cases to the layer's initial state or to a given one.
    ``refresh()``: reload the layer's weights and keep the state.

    The next frame uses changed weights automatically, with every backend: after in-place changes
    (``load_state_dict``, an optimiser) and after all parameters are replaced (``load_state_dict(assign=True)``,
    ``layer.to(...)``). Call ``refresh`` or ``reset``, which always reload them, if only some parameters are replaced
    or if ``parameter.data`` is changed, which torch does not count.
    """

    def __init__(self, layer: RecurrentLayer, batch_size: int = 1) -> None:
        self.layer, self.batch_size = layer, positive_int("batch_size", batch_size)
        self._check(layer)
        self.reset()

    @staticmethod
    def _check(layer: Any) -> None:
        if not isinstance(layer, RecurrentLayer):
            remedy = "Convert it first: lamina.convert(model)." if isinstance(layer, nn.RNNBase) else "Pass a layer."
            raise TypeError(f"stream takes lamina.RNN, lamina.LSTM or lamina.GRU, got {_public_name(layer)}. {remedy}")
        if layer.bidirectional:
            raise fail("stream needs a layer that does not read backwards", "bidirectional=True", "Use one direction.")
        if layer.norm == "batch":
            raise fail("stream does not support batch norm per time step", "norm='batch'", "Use layer norm.")
        if layer.training:
            raise fail("stream needs a layer in evaluation mode", "training mode", "Call layer.eval() first.")

    def refresh(self) -> None:
        """Reload the layer's weights and keep the state."""
        states = self._current()
        self._prepare()
        self._put([state.to(self.dtype) for state in states])

    def _prepare(self) -> None:
        """Pack the weights and everything else that a frame needs, except the state."""
        weight = self.layer.get_parameter("weight_ih_l0")
        self._parameters = tuple(self.layer.parameters())
        self._versions = sum(map(_version, self._parameters))
        self._name, self._weight = next(iter(self.layer._parameters.items()))
        self._address = self._parameters[0].data_ptr()
        self.dtype, self.shape = weight.dtype, torch.Size((self.batch_size, self.layer.input_size))
        x = weight.detach().new_zeros(1, *self.shape)
        self.choice: Choice = explain(self.layer, x.transpose(0, 1) if self.layer.batch_first else x)
        self._steps: list[Any] = self._build_steps(x) if self.choice.backend == "numba" else []
        self._calls = [(step.kernel, step.address) for step in self._steps]
        if self._steps:  # cached attributes: Python takes a quarter of the time of a frame of 128 units
            first, last = self._steps[0], self._steps[-1]
            self._first, self._left, self._last, self._out = first.numbers, first.left, last.numbers, last.out
            self._like = last.output

    def _stale(self) -> bool:
        """Return whether weights have changed; to save time, only the first one is checked for replacement."""
        if self.layer._parameters.get(self._name) is not self._weight:
            return True
        return sum(map(_version, self._parameters)) != self._versions or self._parameters[0].data_ptr() != self._address

    def _build_steps(self, x: Tensor) -> list[Any]:
        """Build the step of each layer, which reads from the output buffer of the layer below."""
        from .kernels.cpu.stream import Step

        steps: list[Any] = []
        for suffix in self.layer._suffixes():
            zoneout = self.layer._zoneout(1, self.batch_size, x)
            call = self.layer._recurrence(suffix, x, (None,) * len(self.layer.state_sizes), zoneout=zoneout)
            steps.append(Step(call))
            if len(steps) > 1:
                steps[-1].read(steps[-2].output.data_ptr())
            x = x.new_zeros(1, self.batch_size, self.layer.hidden_size)
        return steps

    @torch.no_grad()
    def reset(self, state: Any = None, cases: Any = None) -> None:
        """Reset to the layer's initial state (zeros or the learned one) or to ``state``, and reload the weights.

        state: state of the whole batch, in the layout that the layer returns.
        cases: cases to reset, a bool mask [B] or indices; the others keep their state. None resets all.
        """
        selected = None if cases is None else self._checked_cases(cases)
        x = self.layer.get_parameter("weight_ih_l0").new_zeros(1, self.batch_size, self.layer.input_size)
        cells = self.layer._states(state, x, 3)
        states = [
            torch.stack([_or_zeros(s[k], x, width) for s in cells]) for k, width in enumerate(self.layer.state_sizes)
        ]
        self._prepare() if selected is None else self.refresh()
        if selected is not None:
            mask = torch.zeros(self.batch_size, 1, dtype=torch.bool, device=x.device)
            mask[selected.to(x.device)] = True
            states = [torch.where(mask, new, old) for new, old in zip(states, self._current())]
        self._put(states)

    def _checked_cases(self, cases: Any) -> Tensor:
        """Return ``cases`` as a tensor, a mask or indices; raise if it does not fit this stream."""
        selected = torch.as_tensor(cases, dtype=torch.int64 if isinstance(cases, list) and not cases else None)
        rule = f"cases must be a bool mask [{self.batch_size}] or indices of {self.batch_size} cases"
        if selected.dim() != 1 or selected.dtype not in (torch.bool, torch.int32, torch.int64):
            raise fail(rule, describe(selected), "Pass a 1-D tensor or a list.")
        masked, count = selected.dtype is torch.bool, self.batch_size
        if len(selected) != count if masked else bool(((selected < 0) | (selected >= count)).any()):
            raise fail(rule, describe(selected) if masked else selected.tolist(), "Select cases of this stream.")
        return selected if masked else selected.long()

    def _current(self) -> tuple[Tensor, ...]:
        """Return (h,), or (h, c) for the LSTM, each [num_layers, B, H]."""
        if not self._steps:
            return self._held
        return tuple(torch.stack(states) for states in zip(*(step.state() for step in self._steps)))

    def _put(self, states: Sequence[Tensor]) -> None:
        if not self._steps:
            self._held = tuple(states)
            return
        for layer, step in enumerate(self._steps):
            for buffer, state in zip(step.state(), states):
                buffer.copy_(state[layer])

    @property
    def state(self) -> Any:
        """Current state in the layer's layout: h [num_layers, B, H], for the LSTM (h, c)."""
        states = self._current()
        return states if self.layer.cell == "LSTM" else states[0]

    def __call__(self, frame: Tensor) -> Tensor:
        """Return the output [B, H] for a frame [B, D], or [H] for a frame [D] of one case."""
        if self._stale():
            self.refresh()
        if frame.shape != self.shape or frame.dtype != self.dtype:
            return self._unbatched(frame)
        if not self._calls:
            return self._call_layer(frame)
        if not frame.is_contiguous():
            frame = frame.contiguous()
        output = torch.empty_like(self._like)
        self._first[self._left] = frame.data_ptr()
        self._last[self._out] = output.data_ptr()
        for kernel, address in self._calls:
            kernel(address)
        return output

    def _unbatched(self, frame: Tensor) -> Tensor:
        if frame.dim() == 1 and self.batch_size == 1 and frame.shape == self.shape[1:] and frame.dtype == self.dtype:
            return self(frame.unsqueeze(0))[0]
        rule = f"this stream takes frames {list(self.shape)} of {self.dtype}"
        raise fail(rule, describe(frame), "Reshape or cast it.")

    @torch.no_grad()
    def _call_layer(self, frame: Tensor) -> Tensor:
        output, state = self.layer(frame.unsqueeze(1 if self.layer.batch_first else 0), self.state)
        self._held = tuple(state) if self.layer.cell == "LSTM" else (state,)
        flat: Tensor = output.flatten(0, 1)
        return flat


def _public_name(layer: Any) -> str:
    """Return a type's name as users import it: torch.nn.LSTM, lamina.LSTM."""
    cls = type(layer)
    package = next((p for p in ("torch.nn", "lamina") if cls.__module__.startswith(f"{p}.")), cls.__module__)
    return f"{package}.{cls.__name__}"


def _or_zeros(state: Tensor | None, like: Tensor, width: int) -> Tensor:
    return like.new_zeros(like.shape[1], width) if state is None else state
