"""RNNCell, LSTMCell and GRUCell: one step of the layers in ``lamina.recurrent``, with the interface of ``torch.nn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import functional
from .checks import describe, fail, one_of, traced, transformed, watched
from .kernels.given import NAMES, STEP
from .options import Options, with_options
from .placements import STATES
from .recurrent_module import RecurrentModule, State
from .scripting import leaf, symbolic

_PARAMETERS = NAMES[3:STEP]


def ordinary(input: Any) -> bool:
    """Return whether only autograd acts on the tensor: no compiler, tracer, transform, subclass, mode or autocast."""
    if torch.compiler.is_compiling() or traced() or watched(input) or transformed(input):
        return False
    return not torch.is_autocast_enabled(input.device.type)


def cache_key(tensors: Any) -> Any:
    """Return everything about the tensors (or None) that the checks and the choice of a backend depend on."""
    return (torch.is_grad_enabled(), *[t if t is None else (t.shape, t.dtype, t.device) for t in tensors])


class RecurrentCell(RecurrentModule):
    """Base class of cells, which compute one time step per call."""

    single_step = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        norm: str | None = "layer",
        placement: str | None = None,
        eps: float = 1e-5,
        eps_mode: str = "var",
        gain_init: float | None = None,
        forget_bias: float | None = None,
        zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0,
        learn_initial_state: bool = False,
        backend: str = "auto",
        recompute: bool = False,
        momentum: float | None = 0.1,
        eval_statistics: str = "population",
        max_steps: int | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, 0, bias, Options.of(locals()), device, dtype)
        if self.options.recompute:
            raise fail("recompute is only for layers, because a cell has one step", "recompute=True", "Drop it.")
        self._add_cell("", self.input_size)
        self._fused: dict[Any, Any] = {}  # cache key of a call that passed all checks: its fused step
        self.reset_parameters()

    def _suffixes(self) -> list[str]:
        return [""]

    def extra_repr(self) -> str:
        sizes = f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")
        return ", ".join([sizes, *self._option_repr()])

    def recurrent_mask(self, batch_size: int) -> Tensor | None:
        """Draw the recurrent-dropout mask [B, H] of one sequence, to be passed to the call of every step."""
        return self._draw_recurrent_mask(batch_size, self.get_parameter("weight_hh"))

    def forward(self, input: Tensor, hx: Any = None, recurrent_mask: Tensor | None = None, step: int = 0) -> Any:
        """Return the next state: h [B, H], for the LSTM (h, c); without B for an input [D].

        hx: state before this step; None means the initial state.
        recurrent_mask: result of ``recurrent_mask(batch_size)`` for this sequence, needed with recurrent_dropout.
        step: number of the time step, for batch norm's per-step statistics.
        """
        if symbolic(input):
            return leaf(self, input, hx=hx, recurrent_mask=recurrent_mask, step=step)
        state = self._run_cached(input, hx, recurrent_mask) or self._run(input, hx, recurrent_mask, step)
        return state if self.cell == "LSTM" else state[0]

    def _run_cached(self, input: Tensor, hx: Any, recurrent_mask: Tensor | None) -> State | None:
        """Run the cached fused step if an equivalent call has passed the checks before; else return None."""
        if not self._fused or recurrent_mask is not None or not ordinary(input):
            return None
        state = () if hx is None else hx if isinstance(hx, (tuple, list)) else (hx,)
        if not all(type(s) is Tensor for s in state):
            return None
        tensors = self.step_tensors(input, *state)
        step = self._fused.get(cache_key(tensors))
        if step is None:
            return None
        new_state: State = step(*[t if t is None or t.is_contiguous() else t.contiguous() for t in tensors])
        return new_state

    def fused_step(self, input: Tensor, *state: Tensor | None) -> Any:
        """Return the cached fused step of calls with tensors like these, or None."""
        return self._fused.get(cache_key(self.step_tensors(input, *state)))

    def step_tensors(self, input: Tensor, *state: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the arguments of a fused step; a parametrised weight is None, as it is no longer a parameter."""
        padding = (None,) * (2 - len(state))
        return input, *state, *padding, *map(self._parameters.get, _PARAMETERS), None, None, None

    def _remember(self, call: Any, input: Tensor, state: Any) -> None:
        """Cache the fused step for this kind of call if a fused backend serves it and no mask or mode is involved."""
        options = self.options
        masked = options.zoneout or options.recurrent_dropout or options.learn_initial_state
        if masked or self.norm not in ("layer", None) or input.dim() != 2 or not ordinary(input):
            return
        plain = all(name in self._parameters for name in self._fields)  # no parametrised weight
        path = functional.explain(self, input).path if plain else ""
        if path:
            from .kernels import cell, forms, fused

            tensors, setting = self.step_tensors(input, *(state or ())), forms.setting_of(call, path)
            self._fused[cache_key(tensors)] = (
                cell.kind_of(setting, tensors) if path == "cell" else fused.cpu_step_of(setting, tensors)
            )

    def __getstate__(self) -> dict[str, Any]:
        """Drop the cached steps, which are valid for this process and device only."""
        return {**self.__dict__, "_fused": {}}

    def _run(self, input: Tensor, hx: Any, recurrent_mask: Tensor | None, step: int) -> State:
        self._check_input(input)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        state = self._default_state("", x.shape[0]) if hx is None else self._check_hx(hx, x, batched)
        zoneout, mask = self._zoneout(1, x.shape[0], x), self._check_mask(recurrent_mask)
        call = self._recurrence("", x.unsqueeze(0), state, zoneout=zoneout, recurrent_mask=mask, first_step=step)
        result = functional.run(call, self.backend, single_step=True)
        self._remember(call, input, state)
        self._observe("", result.moments, x.shape[0], step)
        return result.state if batched else tuple(s.squeeze(0) for s in result.state)

    def _check_mask(self, mask: Tensor | None) -> Tensor | None:
        """Require a mask from the caller: only the caller knows where a sequence, and so a new mask, begins."""
        if mask is None and self.training and self.options.recurrent_dropout:
            remedy = (
                "Draw mask = cell.recurrent_mask(batch_size) once per sequence and pass recurrent_mask=mask each step."
            )
            raise fail("recurrent_dropout in a cell needs the mask of the sequence", "recurrent_mask=None", remedy)
        return mask

    def _check_input(self, input: Any) -> None:
        name, size = f"{type(self).__name__}(input_size={self.input_size})", self.input_size
        if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != size:
            rule = f"{name} needs an input [B, {size}] or [{size}]"
            raise fail(rule, describe(input), "Pass one step of a sequence, or use a layer for whole sequences.")

    def _check_hx(self, hx: Any, x: Tensor, batched: bool) -> State:
        state = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        count = STATES[self.cell]
        shape = [x.shape[0], self.hidden_size] if batched else [self.hidden_size]
        if len(state) != count or any(not isinstance(s, Tensor) or list(s.shape) != shape for s in state):
            rule = f"{type(self).__name__} takes {'(h, c)' if count == 2 else 'h'} of shape {shape} as hx"
            remedy = "Match the batch size and hidden_size, or pass None."
            raise fail(rule, ", ".join(describe(s) for s in state), remedy)
        return state if batched else tuple(s.unsqueeze(0) for s in state)


@with_options
class RNNCell(RecurrentCell):
    """One step of ``lamina.RNN``. Positional arguments are those of ``torch.nn.RNNCell``."""

    cell = "RNN"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
        *,
        norm: str | None = "layer",
        placement: str | None = None,
        eps: float = 1e-5,
        eps_mode: str = "var",
        gain_init: float | None = None,
        forget_bias: float | None = None,
        zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0,
        learn_initial_state: bool = False,
        backend: str = "auto",
        recompute: bool = False,
        momentum: float | None = 0.1,
        eval_statistics: str = "population",
        max_steps: int | None = None,
    ) -> None:
        one_of("nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, bias, device, dtype, **vars(Options.of(locals())))
        self.nonlinearity = nonlinearity


@with_options
class GRUCell(RecurrentCell):
    """One step of ``lamina.GRU``. Positional arguments are those of ``torch.nn.GRUCell``."""

    cell = "GRU"


@with_options
class LSTMCell(RecurrentCell):
    """One step of ``lamina.LSTM``. Positional arguments are those of ``torch.nn.LSTMCell``."""

    cell = "LSTM"
