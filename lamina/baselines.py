"""Baselines of the paper: batch norm, its per-step statistics for recurrences, and weight norm's initial gain.

Batch norm differs from ``torch.nn`` where the paper's comparison requires it: the variance inside the normalisation
can be the unbiased one (batches of 4), population statistics can come from one exact pass over the data
(``population_statistics``), and a recurrence keeps separate statistics for every time step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import reference
from .checks import check_kind, describe, epsilon, fail, finite, one_of, positive_int, probability, readable
from .population_statistics import StatisticsModule, padded, population_statistics
from .reference import EPS_MODES, Moments, statistics_dtype
from .scripting import leaf, refuse, symbolic

__all__ = ["BatchNorm", "StepStatistics", "population_statistics", "weight_norm_gain"]

POPULATIONS = ("running", "exact")


def weight_norm_gain(weight: Tensor) -> Tensor:
    """Return ||w_i|| for each row of ``weight`` [units, ...], the gain with which weight norm keeps the function."""
    rows = weight.detach().flatten(1)
    norms: Tensor = torch.linalg.vector_norm(rows.to(statistics_dtype(rows.dtype)), dim=1)
    return norms.to(weight.dtype)


class BatchNorm(StatisticsModule):
    """Batch norm (Eq. 2) of inputs [N, C] or [N, C, *]: gain (a - mu)/sigma + bias for each of the C features.

    In training, mu and sigma are those of the minibatch over all axes but the second; in evaluation those of the
    population. The arguments up to ``dtype``, the parameters ``weight``, ``bias`` and the buffers ``running_mean``,
    ``running_var``, ``num_batches_tracked`` are those of ``torch.nn.BatchNorm1d/2d/3d``, whose state_dicts load.

    num_features: C. eps, eps_mode: sqrt(var + eps) for "var", sqrt(var) + eps for "std"; eps may be 0.
    momentum: weight of the newest batch in the running statistics; None averages over all batches.
    affine: learn gains (``weight``, initially ``gain_init``) and biases (initially 0).
    track_running_stats: False uses the statistics of the minibatch in evaluation too.
    unbiased: divide by n-1 inside the normalisation itself, as the paper does for batches of 4.
    population: "running", torch's moving average, or "exact": training does not change the statistics, and one pass
        with ``population_statistics`` sets them before evaluation.

    Unlike torch, training accepts a single value per feature: its variance is 0, the output is the bias, and
    ``running_var`` is not updated.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unbiased: bool = False,
        population: str = "running",
        eps_mode: str = "var",
        gain_init: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_features = positive_int("num_features", num_features)
        self.eps = epsilon(eps)
        self.momentum = None if momentum is None else probability("momentum", momentum)
        self.affine, self.track_running_stats, self.unbiased = affine, track_running_stats, unbiased
        one_of("population", population, POPULATIONS)
        one_of("eps_mode", eps_mode, EPS_MODES)
        self.population, self.eps_mode = population, eps_mode
        self.gain_init = finite("gain_init", gain_init)
        if population == "exact" and not track_running_stats:
            raise fail(
                "population='exact' needs track_running_stats=True",
                "track_running_stats=False",
                "Drop one of the two options.",
            )
        self._register(device, dtype)
        self.reset_parameters()

    def _register(self, device: Any, dtype: torch.dtype | None) -> None:
        size, buffer_dtype = self.num_features, statistics_dtype(dtype or torch.get_default_dtype())
        for name in ("weight", "bias"):
            parameter = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if self.affine else None
            self.register_parameter(name, parameter)
        for name in ("running_mean", "running_var"):
            buffer = torch.empty(size, device=device, dtype=buffer_dtype) if self.track_running_stats else None
            self.register_buffer(name, buffer)
        count = torch.zeros((), dtype=torch.int64, device=device) if self.track_running_stats else None
        self.register_buffer("num_batches_tracked", count)

    def reset_running_stats(self) -> None:
        """Reset the population statistics: mean 0, variance 1, no batches seen."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Reset gains to ``gain_init``, biases to 0 and the statistics."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.constant_(self.weight, self.gain_init)
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [N, C] or [N, C, *]; shape and dtype stay the same."""
        if symbolic(input):
            return leaf(self, input)  # type: ignore[no-any-return]
        return self.normalise(input, self.weight, self.bias)

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script."""
        return refuse(self)

    def normalise(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Run forward with the caller's gains and biases [C], for layers that have their own."""
        self._check_input(input)
        by_batch = self.training or self.collecting or not self.track_running_stats
        if by_batch:
            self._update_statistics(input)
        mean, var = (None, None) if by_batch else self._population()
        if self._is_torch_form(input, by_batch):
            dtype = statistics_dtype(input.dtype)
            gain, shift = (None if p is None else p.to(dtype) for p in (weight, bias))
            return F.batch_norm(input, mean, var, gain, shift, by_batch, 0.0, self.eps)
        options = (by_batch, 0.0, self.eps, self.unbiased, self.eps_mode)
        return reference.batch_norm(input, mean, var, weight, bias, *options)

    def _is_torch_form(self, input: Tensor, by_batch: bool) -> bool:
        """Return whether torch's fused kernel computes the same; it does not support a single value per feature."""
        if self.eps_mode != "var" or self.eps == 0:
            return False
        return not by_batch or (not self.unbiased and self._values_per_feature(input) != 1)

    def _values_per_feature(self, input: Tensor) -> int:
        return input.numel() // self.num_features

    def _population(self) -> tuple[Tensor | None, Tensor | None]:
        count = self.num_batches_tracked
        if self.population == "exact" and count is not None and readable(count) and not count:
            raise fail(
                "BatchNorm with population='exact' has no statistics for evaluation before a pass over the data",
                "num_batches_tracked=0",
                "Call lamina.baselines.population_statistics(model, batches) first, or use population='running'.",
            )
        return self.running_mean, self.running_var

    @torch.no_grad()
    def _update_statistics(self, input: Tensor) -> None:
        values, dims = self._values_per_feature(input), tuple(d for d in range(input.dim()) if d != 1)
        if self.collecting:
            mean, var = reference.batch_moments(input.detach().to(torch.float64), dims, False)
            counts = torch.tensor([values], device=input.device)
            pool = self._pool("input", self.num_features, input.device)
            pool.merge(Moments(mean.unsqueeze(0), var.unsqueeze(0)), counts)
        elif self.training and self.population == "running":
            self._update_running(input.detach(), dims, values)

    def _update_running(self, input: Tensor, dims: tuple[int, ...], values: int) -> None:
        """Update the moving average, which estimates the variance with n-1 as in torch."""
        mean, var, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or tracked is None:
            return
        _check_may_change(tracked)
        tracked.add_(1)
        if values == 0:
            return
        factor = 1 / tracked.to(mean.dtype) if self.momentum is None else self.momentum
        z = input.to(statistics_dtype(input.dtype))
        new_var, new_mean = torch.var_mean(z, dims, correction=min(1, values - 1))
        mean.add_((new_mean.to(mean.dtype) - mean) * factor)
        if values > 1:
            var.add_((new_var.to(var.dtype) - var) * factor)

    def _adopt(self) -> bool:
        pool = (self._pools or {}).get("input")
        if pool is None or not pool.batches[0]:
            return False
        pooled = pool.moments()
        for buffer, value in zip(
            (self.running_mean, self.running_var, self.num_batches_tracked),
            (pooled.mean[0], pooled.var[0], pool.batches[0]),
        ):
            if buffer is not None:
                buffer.copy_(value)
        return True

    def _check_input(self, input: object) -> None:
        name = f"BatchNorm({self.num_features})"
        like = self.running_mean if self.weight is None else self.weight
        x = check_kind(name, input, like, half_input=True)
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise fail(
                f"{name} needs an input [N, {self.num_features}] or [N, {self.num_features}, *]",
                describe(x),
                "Move the features to the second axis.",
            )

    def extra_repr(self) -> str:
        shown = (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )
        defaults = {"unbiased": False, "population": "running", "eps_mode": "var"}
        return shown + "".join(f", {k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k) != v)


def _check_may_change(buffer: Tensor) -> None:
    """Raise inside a torch.func transform, which forbids changing buffers that are not its own inputs."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    if not torch._C._functorch.is_functorch_wrapped_tensor(buffer):
        raise fail(
            "batch norm in training changes its running statistics, which torch.func transforms do not allow",
            "a BatchNorm with population='running' inside a transform",
            "Use population='exact' or track_running_stats=False, or call .eval(); under vmap, stack the buffers too.",
        )


class StepStatistics(StatisticsModule):
    """Population statistics of a batch-normalised recurrence: one mean and variance per site and time step.

    The buffers are ``mean_{site}`` and ``var_{site}`` [steps, width], at least float32, and ``batches`` [steps], the
    number of batches that reached each step. They start with one step (mean 0, variance 1) and grow with the
    longest sequence seen. A state_dict with another number of steps loads.

    widths: number of features of each site. momentum: weight of the newest batch; None averages over all batches.
    max_steps: keep this many steps from the start and never grow; later steps share the last one. Set it if
        processes see sequences of different lengths: DistributedDataParallel broadcasts buffers, whose shapes must
        be equal in all processes.
    """

    batches: Tensor

    def __init__(
        self,
        widths: Mapping[str, int],
        momentum: float | None = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.max_steps = None if max_steps is None else positive_int("max_steps", max_steps)
        if not widths or not all(isinstance(site, str) and site.isidentifier() for site in widths):
            raise fail("widths must name at least one site", repr(dict(widths)), "Pass for example {'ih': 32}.")
        self.widths = {site: positive_int(f"widths[{site!r}]", width, or_zero=True) for site, width in widths.items()}
        self.momentum = None if momentum is None else probability("momentum", momentum)
        buffer_dtype = statistics_dtype(dtype or torch.get_default_dtype())
        for site, width in self.widths.items():
            for moment in ("mean", "var"):
                self.register_buffer(f"{moment}_{site}", torch.empty(1, width, device=device, dtype=buffer_dtype))
        self.register_buffer("batches", torch.empty(1, dtype=torch.int64, device=device))
        self.reset()

    def reset(self) -> None:
        """Reset to one step (or ``max_steps`` steps) with mean 0, variance 1 and no batches."""
        for name in self._fills():
            setattr(self, name, getattr(self, name)[:1].clone())
        for name, fill in self._fills().items():
            getattr(self, name).fill_(fill)
        self._fit()

    reset_parameters = reset

    def population(self) -> dict[str, Moments]:
        """Return the moments [steps, width] for evaluation; steps that no case reached repeat the last reached one."""
        reached = self._last_reached()
        return {site: Moments(*(m[reached] for m in self._buffers_of(site))) for site in self.widths}

    def _last_reached(self) -> Tensor:
        """Return for each step the last step up to it that some case has reached."""
        steps = torch.arange(self.batches.shape[0], device=self.batches.device)
        reached = torch.where(self.batches > 0, steps, 0)
        if torch.onnx.is_in_onnx_export():  # ONNX has no cummax; this is quadratic in the steps, but runs once
            return torch.where(steps <= steps.unsqueeze(1), reached, 0).amax(1)
        return reached.cummax(0).values

    @torch.no_grad()
    def observe(self, moments: Mapping[str, Moments], counts: Tensor | int | None = None, first_step: int = 0) -> None:
        """Update the statistics with one batch's moments [T, width] of every site, starting at step ``first_step``.

        counts: number of cases of each step, [T] or one number for all steps; steps with 0 cases are not updated.
        None means full steps, which suffices for the moving average but not for ``population_statistics``.
        """
        steps = self._check_moments(moments)
        if first_step < 0:
            raise fail("first_step must not be negative", f"first_step={first_step}", "Number the steps from 0.")
        cases = self._counts(counts, steps)
        if self.collecting:
            self._merge(moments, counts, cases, first_step)
            return
        last = first_step + steps
        self._grow(last if self.max_steps is None else min(last, self.max_steps))
        batches = self.batches[first_step:last]
        updated, factor = cases[: batches.shape[0]] > 0, self._factor(batches).unsqueeze(1)
        for site, new in moments.items():
            for stored, value in zip(self._buffers_of(site), new):
                rows = stored[first_step:last]
                moved = rows.lerp(value[: rows.shape[0]].to(rows), factor.to(rows.dtype))
                rows.copy_(torch.where(updated.unsqueeze(1), moved, rows))
        batches += updated

    def _factor(self, batches: Tensor) -> Tensor:
        """Return the weight of the newest batch: 1/n for the nth batch, but at least the momentum.

        Torch's moving average needs tens of batches to forget its initial mean 0 and variance 1. Late steps, which
        few sequences reach, would never get there.
        """
        average = 1 / (batches + 1).to(torch.float64)
        return average if self.momentum is None else average.clamp(min=self.momentum)

    def _counts(self, counts: Tensor | int | None, steps: int) -> Tensor:
        """Return the number of cases of each step, [T]; 1 if ``counts`` is None."""
        if not isinstance(counts, Tensor):
            return self.batches.new_full((steps,), 1 if counts is None else counts)
        if tuple(counts.shape) != (steps,):
            raise fail(f"counts must have shape [{steps}], one number for each step", describe(counts), "Match T.")
        return counts.to(self.batches.device)

    def _merge(
        self, moments: Mapping[str, Moments], counts: Tensor | int | None, cases: Tensor, first_step: int
    ) -> None:
        if counts is None:
            raise fail(
                "pooling over batches needs the number of cases of each step",
                "counts=None",
                "Pass counts= to observe: a tensor [T], or the batch size.",
            )
        for site, new in moments.items():
            self._pool(site, self.widths[site], new.mean.device).merge(new, cases, first_step)

    def _check_moments(self, moments: Mapping[str, Moments]) -> int:
        """Return the number of steps; raise unless every site has moments [T, width]."""
        if set(moments) != set(self.widths):
            raise fail(f"moments must cover the sites {sorted(self.widths)}", sorted(moments), "Pass each site once.")
        steps = next(iter(moments.values())).mean.shape[0]
        for site, width in self.widths.items():
            for value in moments[site]:
                if tuple(value.shape) != (steps, width):
                    rule = f"moments of site {site!r} must have shape [{steps}, {width}]"
                    raise fail(rule, describe(value), "Pass one row for each step and one column for each unit.")
        return steps

    def _buffers_of(self, site: str) -> tuple[Tensor, Tensor]:
        mean: Tensor = getattr(self, f"mean_{site}")
        var: Tensor = getattr(self, f"var_{site}")
        return mean, var

    def _fills(self) -> dict[str, float]:
        """Return the name and initial value of every buffer."""
        values = {"mean": 0.0, "var": 1.0}
        fills = {f"{moment}_{site}": fill for site in self.widths for moment, fill in values.items()}
        return {**fills, "batches": 0}

    def _grow(self, steps: int) -> None:
        for name, fill in self._fills().items():
            setattr(self, name, padded(getattr(self, name), steps, fill))

    def _fit(self) -> None:
        """Resize the buffers to ``max_steps`` rows, if set."""
        if self.max_steps is not None:
            self._grow(self.max_steps)
            for name in self._fills():
                setattr(self, name, getattr(self, name)[: self.max_steps].clone())

    def _adopt(self) -> bool:
        pools = self._pools or {}
        if not pools or not any(pool.batches.any() for pool in pools.values()):
            return False
        for site, pool in pools.items():
            for name, value in zip((f"mean_{site}", f"var_{site}"), pool.moments()):
                setattr(self, name, value.to(getattr(self, name)))
            self.batches = pool.batches.to(self.batches)
        self._fit()
        return True

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Resize to the checkpoint's number of steps; torch then copies the values or reports mismatches."""
        saved = state_dict.get(prefix + "batches")
        if isinstance(saved, Tensor) and saved.dim() == 1 and saved.shape[0] > 0:
            self._grow(saved.shape[0])
            for name in self._fills():
                setattr(self, name, getattr(self, name)[: saved.shape[0]].clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._fit()

    def extra_repr(self) -> str:
        sites = ", ".join(f"{site}={width}" for site, width in self.widths.items())
        return f"{sites}, momentum={self.momentum}" + (f", max_steps={self.max_steps}" if self.max_steps else "")
