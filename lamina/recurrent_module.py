"""Base class of recurrent layers and cells: parameters, options, statistics, masks and initial states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .baselines import StepStatistics
from .checks import autocast_dtype, boolean, positive_int, transformed
from .kernels import Request
from .options import Options, initialise, parameter_shapes
from .placements import STATES
from .reference import CellWeights, Masks, Moments, Recurrence, statistics_dtype
from .scripting import refuse

State = tuple[Tensor, ...]
GivenState = tuple[Tensor | None, ...]  # None means zeros


class RecurrentModule(nn.Module):
    """Base class with the parameters, options and masks of one or more cells of one type."""

    cell: ClassVar[str]
    single_step: ClassVar[bool] = False  # True if a call is one step, False if it is a whole sequence
    nonlinearity: str = "tanh"

    def __init__(
        self, input_size: int, hidden_size: int, proj_size: int, bias: bool, options: Options, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.input_size = positive_int("input_size", input_size)
        # torch.nn's cells accept hidden_size=0, its layers do not.
        self.hidden_size = positive_int("hidden_size", hidden_size, or_zero=self.single_step)
        self.proj_size = proj_size
        self.bias = boolean("bias", bias)
        self.options = options
        self._where = self.options.check(self.cell, bias)
        self._factory = {"device": device, "dtype": dtype}

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script."""
        return refuse(self)

    @property
    def norm(self) -> str | None:
        return self.options.norm

    @property
    def placement(self) -> str | None:
        """Name of the placement, or None if no site carries a norm."""
        return self._where.name if self._where.sites() else None

    @property
    def eps(self) -> float:
        return self.options.eps

    @property
    def eps_mode(self) -> str:
        return self.options.eps_mode

    @property
    def backend(self) -> str:
        return self.options.backend

    @property
    def output_size(self) -> int:
        return self.proj_size or self.hidden_size

    @property
    def state_sizes(self) -> tuple[int, ...]:
        return (self.output_size, self.hidden_size)[: STATES[self.cell]]

    def _add_cell(self, suffix: str, input_size: int) -> None:
        shapes = parameter_shapes(
            self.cell, input_size, self.hidden_size, self.proj_size, self.bias, self.norm, self._where
        )
        if self.options.learn_initial_state:
            shapes |= {f"initial_{s}": (width,) for s, width in zip("hc", self.state_sizes)}
        for name, shape in shapes.items():
            self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **self._factory)))
        self._fields = tuple(name for name in shapes if name in CellWeights._fields)
        if self.norm == "batch":
            widths = {site: shapes[f"gain_{site}"][0] for site in self._where.sites()}
            options = self.options
            statistics = StepStatistics(widths, options.momentum, **self._factory, max_steps=options.max_steps)
            self.add_module(f"statistics{suffix}", statistics)

    def _suffixes(self) -> list[str]:
        """Return the parameter-name suffix of each cell: "_l0", "_l0_reverse", ...; a single cell has ""."""
        raise NotImplementedError

    def _cell_parameters(self, suffix: str) -> dict[str, Tensor]:
        names = (*CellWeights._fields, "initial_h", "initial_c")
        parameters = ((name, getattr(self, name + suffix, None)) for name in names)
        return {name: tensor for name, tensor in parameters if tensor is not None}

    def reset_parameters(self) -> None:
        """Redraw the weights as torch.nn does; reset gains and statistics, and biases to 0 under a norm."""
        for suffix in self._suffixes():
            initialise(self._cell_parameters(suffix), self.cell, self.hidden_size, self.options)
            if self.norm == "batch":
                self._statistics(suffix).reset()

    def _weights(self, suffix: str) -> CellWeights:
        stored = self._parameters  # faster than getattr, which only parametrised weights need
        names = [field + suffix for field in self._fields]
        tensors: list[Any] = [stored[name] if name in stored else getattr(self, name) for name in names]
        return CellWeights(**dict(zip(self._fields, tensors)))

    def _statistics(self, suffix: str) -> StepStatistics:
        statistics = self.get_submodule(f"statistics{suffix}")
        if not isinstance(statistics, StepStatistics):
            raise TypeError(f"statistics{suffix} must be a StepStatistics, got {type(statistics).__name__}.")
        return statistics

    def _population(self, suffix: str) -> dict[str, Moments] | None:
        """Return batch norm's stored moments, or None if the moments of the current batch apply."""
        collecting = self.norm == "batch" and self._statistics(suffix).collecting
        if self.norm != "batch" or self.training or collecting or self.options.eval_statistics == "batch":
            return None
        return self._statistics(suffix).population()

    def _observe(self, suffix: str, moments: dict[str, Moments], counts: Tensor | int, first_step: int = 0) -> None:
        if moments and (self.training or self._statistics(suffix).collecting):
            self._statistics(suffix).observe(moments, counts, first_step)

    def _zoneout(self, steps: int, batch: int, like: Tensor) -> Masks:
        """Return 0/1 masks of the units that keep their value in training, the rates in evaluation, None if off."""
        if not self.options.zoneout:
            return (None,) * STATES[self.cell]
        rates = self.options.zoneout_rates(self.cell)
        dtype = statistics_dtype(like.dtype)

        def mask(rate: float, width: int) -> Tensor | float | None:
            if not rate or not self.training:
                return rate or None
            return (torch.rand(steps, batch, width, device=like.device, dtype=dtype) < rate).to(dtype)

        return tuple(mask(rate, width) for rate, width in zip(rates, self.state_sizes))

    def _draw_recurrent_mask(self, batch: int, like: Tensor) -> Tensor | None:
        """Return one inverted-dropout mask for a whole sequence (Gal and Ghahramani 2016)."""
        rate = self.options.recurrent_dropout
        if not rate or not self.training:
            return None
        dtype = statistics_dtype(like.dtype)
        keep = torch.rand(batch, self.output_size, device=like.device, dtype=dtype) >= rate
        return keep.to(dtype) / (1 - rate)

    def _default_state(self, suffix: str, batch: int) -> GivenState:
        """Return the initial state that applies if the caller passes none."""
        if not self.options.learn_initial_state:
            return (None,) * STATES[self.cell]
        initial = (getattr(self, f"initial_{s}{suffix}") for s in "hc"[: STATES[self.cell]])
        return tuple(p.unsqueeze(0).expand(batch, -1) for p in initial)

    def _recurrence(self, suffix: str, x: Tensor, state: GivenState, **more: Any) -> Recurrence:
        return Recurrence(
            self.cell, x, state, self._weights(suffix), self.norm, self._where, self.eps, self.eps_mode,
            self.nonlinearity, population=self._population(suffix), recompute=self.options.recompute, **more,
        )  # fmt: skip

    def backend_request(self, *args: Any) -> Request:
        """Return the request that ``lamina.explain`` decides on, from the input or else from the parameters."""
        weight = self.get_parameter("weight_ih" + self._suffixes()[0])
        like = next((a.data if isinstance(a, PackedSequence) else a for a in args), weight)
        dtype = autocast_dtype(like) or like.dtype
        return Request(
            "recurrence", like.device, dtype, self.eps, self.eps_mode, self.cell, self.norm, self._where.name,
            self.single_step, self.hidden_size, self._batch_of(*args), bool(self.proj_size),
            transformed(like), self.nonlinearity, recompute=self.options.recompute,
            directions=getattr(self, "num_directions", 1), layers=getattr(self, "num_layers", 1),
        )  # fmt: skip

    def _batch_of(self, *args: Any) -> int:
        """Return the batch size of the input; 1 without an input."""
        x = args[0] if args else None
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0])
        if x is None or x.dim() != (2 if self.single_step else 3):
            return 1
        return int(x.shape[0 if self.single_step or getattr(self, "batch_first", False) else 1])

    def _option_repr(self) -> list[str]:
        others = replace(self.options, norm="layer", placement=None)
        options = {"norm": self.norm, **({"placement": self.placement} if self.placement else {})}
        options |= {name: value for name, value in vars(others).items() if value != getattr(Options, name)}
        return [f"{name}={value!r}" for name, value in options.items()]
