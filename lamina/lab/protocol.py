"""What an experiment must provide; one module each, in ``lamina.lab.experiments``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor, nn

from .data.registry import Dataset
from .experiments import Config, find

Split = tuple[Tensor, ...]  # equal first axes: cases
Model = Callable[..., Any]


class Experiment(Protocol):
    """The functions of an experiment's module. It knows no device, no process and no folder."""

    def splits(self, dataset: Dataset, config: Any) -> dict[str, Split]:
        """Tensors of "train", "valid" and "test"; the engine moves them to the device."""

    def build(self, config: Any, splits: Mapping[str, Split]) -> nn.Module:
        """The model, drawn from torch's global generator."""

    def batch(self, split: Split, index: Tensor) -> Any:
        """The cases of ``index`` [...], as ``loss`` takes them: tensors [..., *]."""

    def loss(self, model: Model, batch: Any) -> Tensor:
        """The mean over the batch's cases; must run under torch.vmap when the sheet says ``stackable``."""

    def evaluate(self, model: Model, splits: Mapping[str, Split], config: Any) -> dict[str, Tensor]:
        """Metrics, lower is better; of a stack of models [members] each."""

    def inspect(self, model: nn.Module, splits: Mapping[str, Split], config: Any) -> dict[str, list[float]]:
        """What the report shows besides curves, measured on the trained model; may be empty."""


def module_of(config_or_name: Config | str) -> Experiment:
    """The experiment's functions, by name."""
    return cast(Experiment, import_module(find(str(config_or_name)).module))
