"""Growth and rotation of normalised weights along a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import fail, one_of, positive_int
from ..layers import NormalisedLayer
from ..recurrent_module import RecurrentModule
from .rates import angle_between


@dataclass(frozen=True)
class Observation:
    """One weight w after one update.

    step: number of updates so far. norm: ||w|| now. angle: radians turned since the last observation.
    gradient_norm: size ||grad|| of the current gradient, None without one.
    effective_rate: tan(angle)/(||w|| ||grad||) with the norm before the update, None without a gradient. ||w|| ||grad||
        is the size of the gradient at ||w|| = 1, so this is the learning rate that would turn a unit vector as much.
        Plain SGD gives lr/||w||^2.
    """

    step: int
    norm: float
    angle: float
    gradient_norm: float | None
    effective_rate: float | None


class Tracker:
    """Record of every normalised weight of a model: call ``observe()`` after each ``optimizer.step()``.

    names: parameters to follow instead, by their names in the model. A copy of each is kept. Call ``observe`` before
    the gradients are set to zero; afterwards it finds none to record.

    ``history[name]`` is the list of observations and begins with the start.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None) -> None:
        self._weights = dict(normalised_weights(model)) if names is None else _named(model, names)
        if not self._weights:
            rule = "a model with a normalised weight is needed"
            raise fail(rule, f"{type(model).__name__} without one", "Name the weights to follow in names=[...].")
        self._last = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.history = {n: [Observation(0, _norm(w), 0.0, None, None)] for n, w in self._weights.items()}

    def observe(self) -> dict[str, Observation]:
        """Record the effect of the last update and return the newest observation of every weight."""
        return {name: self._observe(name, weight) for name, weight in self._weights.items()}

    def _observe(self, name: str, weight: Tensor) -> Observation:
        past, gradient = self.history[name], weight.grad
        angle = angle_between(self._last[name], weight)
        gradient_norm = None if gradient is None else _norm(gradient)
        unit_size = (gradient_norm or 0.0) * past[-1].norm
        rate = float(angle.tan()) / unit_size if unit_size else None
        past.append(Observation(past[-1].step + 1, _norm(weight), float(angle), gradient_norm, rate))
        self._last[name].copy_(weight.detach())
        return past[-1]

    def series(self, name: str, field: str) -> list[float | None]:
        """Return one field of one weight over the run, for a plot."""
        one_of("a tracked weight", name, self.history)
        return [getattr(observation, field) for observation in self.history[name]]


def track(model: nn.Module, update: Callable[[], object], steps: int, names: Sequence[str] | None = None) -> Tracker:
    """Call ``update()``, one training step, ``steps`` times and observe the weights after each."""
    tracker = Tracker(model, names)
    for _ in range(positive_int("steps", steps)):
        update()
        tracker.observe()
    return tracker


def normalised_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the weights whose products are normalised, with their names in the model.

    These are W of a normalised Linear or Conv2d, and W_ih and W_hh of recurrent layers with a norm on the product or
    on the sum. A norm on the sum ignores the scale of both together, not of each.
    """
    return [
        (f"{prefix}.{name}".lstrip("."), parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if _is_normalised(module, name)
    ]


def _is_normalised(module: nn.Module, name: str) -> bool:
    if isinstance(module, NormalisedLayer):
        return name == "weight" and module.norm is not None
    if not isinstance(module, RecurrentModule) or not name.startswith("weight_"):
        return False
    gains = {name.replace("weight_", "gain_", 1)}
    if not name.startswith("weight_hr"):
        gains.add("gain_sum" + name[len("weight_ih") :])
    return any(hasattr(module, gain) for gain in gains)


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    for name in names:
        one_of("a tracked parameter", name, parameters)
    return {name: parameters[name] for name in names}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double()))
