"""Functions that an experiment provides: data, model, batches, loss and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from .experiment import Every
from .experiments import find
from .training.batches import Batches
from .training.draws import Draws


class Data(Protocol):
    """Data of an experiment: anything that can describe itself and go to a device."""

    def describe(self) -> dict[str, Any]:
        """Return name, kind ("real" or "embedded"), label and checksums, for the record."""

    def to(self, device: torch.device) -> Any:
        """Return the data with everything that updates read on the device."""


class Loss(NamedTuple):
    """Losses of a batch, summed, and what the sum is divided by: its cases, words or points."""

    total: Tensor
    weight: Tensor | int


class Progress(Protocol):
    """Parts of an evaluation: a long one tells how far it is, and keeps the parts that are done."""

    def __call__(self, part: str, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, as JSON can hold it, or what it returned before the evaluation was stopped."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics that are measured together, and how often.

    run: takes the model in evaluation mode, data, settings, random draws that depend on seed and update alone (of one
    case: see ``Draws.of_cases``), and ``Progress``; returns metrics by name. every: None for the settings' own
    interval. on_checkpoint: too long to wait for during training; ``lamina evaluate`` measures it on the best
    checkpoint. at_best: measured once, on the best checkpoint when training has ended; a metric that is a list of
    numbers, one for each test case, goes into the run's extras.
    """

    name: str
    run: Callable[[nn.Module, Any, Any, Draws, Progress], Mapping[str, float | Tensor]]
    every: Every | None = None
    on_checkpoint: bool = False
    at_best: bool = False


class Experiment(Protocol):
    """The functions of an experiment's module. It knows no device, no process and no training loop."""

    def load(self, config: Any, root: str | None) -> Data:
        """Return the data that these settings ask for."""

    def build(self, config: Any, data: Any) -> nn.Module:
        """Return the model, drawn from torch's global generator."""

    def batches(self, config: Any, data: Any, seed: int) -> Batches:
        """Return which cases each update sees."""

    def batch(self, data: Any, index: Tensor) -> Any:
        """Return the cases of ``index``: tensors, in any nesting of tuples, lists and dicts."""

    def loss(self, model: nn.Module, batch: Any, draws: Draws) -> Loss:
        """Return the loss of a batch; it draws random numbers, dropout's too, where the sheet says ``sampled``."""

    def evaluations(self, config: Any) -> tuple[Evaluation, ...]:
        """Return what is measured during training and afterwards."""

    def inspect(self, model: nn.Module, data: Any, config: Any) -> dict[str, list[float]]:
        """Return what the report shows besides curves, measured on the trained model; may be empty."""

    def artefacts(self, model: nn.Module, data: Any, config: Any, draws: Draws, folder: Path) -> None:
        """Write pictures, samples and the like of the trained model into ``folder``; may write nothing."""


def module_of(name: str) -> Experiment:
    """Return the experiment's functions, by name."""
    return cast(Experiment, import_module(find(name).module))
