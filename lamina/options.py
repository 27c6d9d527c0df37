"""Options, parameter shapes and initialisation of the recurrent layers and cells."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .baselines import weight_norm_gain
from .checks import boolean, epsilon, fail, finite, one_of, positive_int, probability, show
from .kernels import BACKENDS
from .placements import GATES, Placement, resolve
from .reference import EPS_MODES


@dataclass(frozen=True)
class Options:
    """The keyword-only options of every recurrent layer and cell.

    norm: "layer" (default), "batch" (recurrent batch norm, statistics per time step), "weight" or None.
    placement: positions of the norms, a row of ``lamina.placements``; None selects the paper's.
    eps, eps_mode: sqrt(var + eps) for "var", sqrt(var) + eps for "std"; eps may be 0.
    gain_init: initial value of the gains. None means 1 for layer norm, 0.1 for batch norm, and the row norms of the
        weights for weight norm, which keeps the function. Biases start at 0 under any norm.
    forget_bias: initial value of the LSTM's forget-gate bias; None applies the rule above.
    zoneout: probability that a unit of h keeps its old value, or a pair for h and c. Evaluation uses the expectation.
    recurrent_dropout: probability of dropping a unit of h before the product with W_h, one mask per sequence.
    learn_initial_state: make the initial state, which is also the state after a reset, a parameter that starts at 0.
    backend: "auto" or the name of a backend; see ``lamina.explain``.
    recompute: save only the states for the backward pass, which then recomputes the gates in chunks of the sequence:
        less memory, more time. Only the fused kernels support it; see ``lamina.explain``.
    momentum: momentum of batch norm's running statistics; None averages over all batches.
    eval_statistics: "population" or "batch", the statistics that batch norm uses in evaluation.
    max_steps: number of steps for which batch norm keeps statistics; None grows with the longest sequence seen. Set it
        if processes see sequences of different lengths (DistributedDataParallel).
    """

    norm: str | None = "layer"
    placement: str | None = None
    eps: float = 1e-5
    eps_mode: str = "var"
    gain_init: float | None = None
    forget_bias: float | None = None
    zoneout: float | tuple[float, float] = 0.0
    recurrent_dropout: float = 0.0
    learn_initial_state: bool = False
    backend: str = "auto"
    recompute: bool = False
    momentum: float | None = 0.1
    eval_statistics: str = "population"
    max_steps: int | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Collect the options from a constructor's ``locals()``."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls)})

    def check(self, cell: str, bias: bool) -> Placement:
        """Raise if the options do not fit this cell; return the placement they select."""
        where = resolve(cell, self.norm, self.placement)
        epsilon(self.eps)
        one_of("eps_mode", self.eps_mode, EPS_MODES)
        one_of("backend", self.backend, BACKENDS["recurrence"])
        one_of("eval_statistics", self.eval_statistics, ("population", "batch"))
        probability("recurrent_dropout", self.recurrent_dropout, below_one=True)
        self.zoneout_rates(cell)
        boolean("recompute", self.recompute)
        boolean("learn_initial_state", self.learn_initial_state)
        if self.momentum is not None:
            probability("momentum", self.momentum)
        if self.max_steps is not None:
            positive_int("max_steps", self.max_steps)
        if self.gain_init is not None:
            finite("gain_init", self.gain_init)
        self._check_forget_bias(cell, bias)
        return where

    def _check_forget_bias(self, cell: str, bias: bool) -> None:
        if self.forget_bias is None:
            return
        finite("forget_bias", self.forget_bias)
        if cell != "LSTM" or not bias:
            rule = "forget_bias needs an LSTM with bias=True"
            raise fail(rule, f"{cell} with bias={bias}, forget_bias={self.forget_bias}", "Drop forget_bias.")

    def zoneout_rates(self, cell: str) -> tuple[float, ...]:
        """Return the zoneout rate of each state, (h,) or (h, c). A single number applies to h only, as in Haste."""
        rates = tuple(self.zoneout) if isinstance(self.zoneout, (tuple, list)) else (self.zoneout, 0.0)
        if len(rates) != 2 or (cell != "LSTM" and rates[1]):
            rule = "zoneout must be a probability for h, or a pair (h, c) for an LSTM"
            raise fail(rule, f"{show(self.zoneout)} for {cell}", "Pass one number, or (h, c) to an LSTM.")
        checked = tuple(probability("zoneout", rate) for rate in rates)
        return checked if cell == "LSTM" else checked[:1]


Module = TypeVar("Module", bound=type[nn.Module])


def with_options(layer: Module) -> Module:
    """Append the list of options to a layer's docstring."""
    options = inspect.getdoc(Options) or ""
    layer.__doc__ = f"{inspect.getdoc(layer)}\n\n{options.replace('The keyword-only', 'Keyword-only', 1)}"
    return layer


def parameter_shapes(
    cell: str, input_size: int, hidden_size: int, proj_size: int, bias: bool, norm: str | None, where: Placement
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of one cell's parameters: torch's in torch's order, then those of the norm."""
    rows, out = GATES[cell] * hidden_size, proj_size or hidden_size
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, input_size), "weight_hh": (rows, out)}
    if bias:
        shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
    if proj_size:
        shapes["weight_hr"] = (proj_size, hidden_size)
    if norm == "weight":
        shapes |= {"gain_ih": (rows,), "gain_hh": (rows,)} | ({"gain_hr": (proj_size,)} if proj_size else {})
    for site in where.sites():
        shapes[f"gain_{site}"] = (hidden_size if site == "cell" else rows,)
    if bias and where.cell:
        shapes["bias_cell"] = (hidden_size,)
    return shapes


def initial_values_discarded(device: torch.device | None) -> AbstractContextManager[None]:
    """Keep the user's random state while a constructor draws values that are replaced at once."""
    return torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else [])


def initialise(parameters: Mapping[str, Tensor], cell: str, hidden_size: int, options: Options) -> None:
    """Initialise the parameters of one cell, named as in ``parameter_shapes``.

    Torch's own parameters are drawn first and in torch's order, so that a seed gives the same weights as nn.LSTM.
    """
    bound = 1 / math.sqrt(hidden_size or 1)
    for name, parameter in parameters.items():
        if name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
            nn.init.uniform_(parameter, -bound, bound)
    for name, parameter in parameters.items():
        if name.startswith("initial_") or (name.startswith("bias_") and options.norm is not None):
            nn.init.zeros_(parameter)
        elif name.startswith("gain_"):
            _initialise_gain(name, parameters, options)
    _initialise_forget_bias(parameters, hidden_size, options)


def _initialise_gain(name: str, parameters: Mapping[str, Tensor], options: Options) -> None:
    if options.gain_init is None and options.norm == "weight":
        with torch.no_grad():
            parameters[name].copy_(weight_norm_gain(parameters[name.replace("gain", "weight")]))
        return
    default = 0.1 if options.norm == "batch" else 1.0
    nn.init.constant_(parameters[name], default if options.gain_init is None else options.gain_init)


def _initialise_forget_bias(parameters: Mapping[str, Tensor], hidden_size: int, options: Options) -> None:
    """Set bias_ih to the value and bias_hh to 0, because the gate receives their sum."""
    if options.forget_bias is None:
        return
    for name, value in (("bias_ih", options.forget_bias), ("bias_hh", 0.0)):
        nn.init.constant_(parameters[name][hidden_size : 2 * hidden_size], value)
