"""What the sheet of an experiment is made of: settings, the paper's claims, and how they are judged and drawn.

A sheet holds no model and imports no torch, so the command line and the report open it at once.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import fail, one_of
from .results import Results

MIN_SEEDS = 3  # of each variant before a claim is judged
PRECISIONS = ("float32", "tf32", "bf16", "fp16")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    sweep: bool = False,
    above: float | None = None,
    least: float | None = None,
) -> Any:
    """A setting with its help; ``sweep`` lets the command line take several values (``--norm layer,none``)."""
    metadata = {"help": help, "choices": tuple(choices), "sweep": sweep, "above": above, "least": least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings every experiment has; each adds its own."""

    norm: str = option("layer", "normalisation", sweep=True)
    epochs: float = option(60.0, "passes over the training data", above=0)
    batch_size: int = option(128, "cases in one update, over all processes", sweep=True, least=1)
    lr: float = option(1e-3, "Adam's step size", sweep=True, above=0)
    bias_correction: str = option(
        "correct", "Adam's: as published, or as in the authors' code (kiros)", choices=("correct", "kiros")
    )
    clip: float = option(0.0, "largest gradient norm; 0 leaves gradients alone", least=0)
    clip_by: str = option("global", "norm of all gradients, or of each tensor", choices=("global", "tensor"))
    accumulate: int = option(1, "parts that one update's batch is taken in", least=1)
    precision: str = option("float32", "arithmetic of products", choices=PRECISIONS)
    eval_every: float = option(1.0, "epochs between evaluations", above=0)
    log_every: int = option(100, "updates between lines of training loss", least=1)
    checkpoint_every: int = option(1000, "updates between checkpoints", least=1)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_setting(item, getattr(self, item.name))
        check_statistics(self, self.accumulate)


def check_statistics(config: Config, parts: int) -> None:
    """Refuse batch norm over one case: its units vary over no cases, so their output is the bias alone."""
    if config.norm.startswith("batch") and config.batch_size // parts < 2:
        received = f"--batch-size {config.batch_size}" + (f" in {parts} parts" if parts > 1 else "")
        raise fail(
            f"--norm {config.norm} needs at least two cases for its statistics", received, "Take a larger --batch-size."
        )


def _check_setting(item: dataclasses.Field[Any], value: Any) -> None:
    """Right type, finite, in range, one of the choices."""
    kind = type(item.default)
    flag = f"--{item.name.replace('_', '-')}"
    if kind is float and type(value) is int:
        return _check_setting(item, float(value))
    if type(value) is not kind:
        raise fail(f"{flag} must be {kind.__name__}", repr(value), f"The default is {item.default!r}.")
    choices, above, least = (item.metadata.get(k) for k in ("choices", "above", "least"))
    if choices:
        one_of(flag, value, choices)
    if isinstance(value, float) and not math.isfinite(value):
        raise fail(f"{flag} must be finite", repr(value), f"The default is {item.default!r}.")
    if (above is not None and value <= above) or (least is not None and value < least):
        rule = f"above {above:g}" if above is not None else f"at least {least:g}"
        raise fail(f"{flag} must be {rule}", repr(value), f"The default is {item.default!r}.")


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held on our runs (None: inconclusive, for ``reason``) and the figures that decide it."""

    held: bool | None
    measured: str
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and the test it is put to."""

    name: str
    text: str
    paper: str
    judge: Callable[[Results], Verdict]


@dataclass(frozen=True)
class Metric:
    """A quantity that an experiment evaluates, and which end of it is the good one."""

    name: str
    label: str
    better: str = "lower"  # or "higher"

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.better == "higher" else value < than

    @property
    def worst(self) -> float:
        return -math.inf if self.better == "higher" else math.inf


@dataclass(frozen=True)
class Panel:
    """One set of axes: ``y`` against ``x``, one line for each variant, mean and spread over seeds.

    where: only runs whose settings are these. kind: "curve" for evaluations during training, "profile" for a
    list kept in a run's ``extras`` under ``y``, with ``x`` the name of the list on the horizontal axis.
    """

    title: str
    y: str
    y_label: str
    x: str = "epoch"
    x_label: str = "epoch"
    log: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "curve"
    y_limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Figure:
    """Panels in one row, with the caption that goes under them."""

    name: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Number:
    """One column of the results table: a metric at its last evaluation ("last"), or its best ("best").

    target: the column is the number of updates until the metric reached this value. paper: the printed number by
    variant label, where the paper gives one.
    """

    metric: str
    label: str
    at: str = "last"
    target: float | None = None
    scale: float = 1.0
    digits: int = 4
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sheet:
    """Everything about an experiment but the model: ``module`` (in ``lamina.lab.experiments``) holds that."""

    name: str
    title: str
    section: str
    about: str  # {hidden} and the like stand for settings
    config: type[Config]
    module: str
    norms: Mapping[str, str]  # setting -> name in tables and legends, in the order they are drawn
    datasets: tuple[str, ...]
    figures: tuple[Figure, ...]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]
    headline: str  # the evaluation metric that decides which checkpoint is best
    metrics: tuple[Metric, ...] = ()  # every metric whose higher values are better, and any that needs a label
    vary: tuple[str, ...] = ("norm",)  # settings that tell variants apart, in tables and run folders
    small: Mapping[str, Any] = field(default_factory=dict)  # settings of ``lamina reproduce``
    small_sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    small_seeds: int = 3
    stackable: bool = False  # seeds may train together as one stacked model (torch.vmap)
    fixed_shapes: bool = True  # every batch has the shapes of the first, so an update can be captured

    def metric(self, name: str) -> Metric:
        """Return the metric of this name; one that the experiment does not list is better the lower it is."""
        return next((metric for metric in self.metrics if metric.name == name), Metric(name, name.replace("_", " ")))

    def described(self, configs: Iterable[Mapping[str, Any]]) -> str:
        """``about`` with the settings that these runs had: ``256``, or ``256 or 1000`` where they differ."""
        runs = list(configs)
        names = [name for _, name, _, _ in string.Formatter().parse(self.about) if name]
        told = {name: dict.fromkeys(_in_words(run[name]) for run in runs if name in run) for name in names}
        return self.about.format(**{name: " or ".join(values) or "an unknown" for name, values in told.items()})


def _in_words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


@dataclass(frozen=True)
class Job:
    """One run: settings, and the seeds it trains; more than one seed trains them side by side, stacked."""

    experiment: str
    config: Config
    seeds: tuple[int, ...] = (0,)
    vary: tuple[str, ...] = ("norm",)  # settings in the label: the sheet's, and any other that was swept

    @property
    def label(self) -> str:
        """The name of the run's folder: ``layer-batch_size128-seed0``."""
        values = {name: getattr(self.config, name) for name in self.vary}
        parts = [str(v) if isinstance(v, str) else f"{k}{v:g}" for k, v in values.items()]
        first, last = self.seeds[0], self.seeds[-1]
        parts.append(f"seed{first}" if first == last else f"seeds{first}-{last}")
        return "-".join(parts)
