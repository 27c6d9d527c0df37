"""An experiment on paper: settings, scales, axes, claims, figures and numbers.

A sheet holds no model and imports no torch, so the command line and the report open it at once.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import fail, one_of
from .claims import Claim
from .results import Metric

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
    """Return the field of a setting; ``sweep`` lets the command line take several values (``--norm layer,none``)."""
    metadata = {"help": help, "choices": tuple(choices), "sweep": sweep, "above": above, "least": least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Every:
    """A length of training: so many updates, or so many epochs."""

    updates: int = 0
    epochs: float = 0.0

    def __post_init__(self) -> None:
        if (self.updates > 0) == (self.epochs > 0) or min(self.updates, self.epochs) < 0:
            raise fail("a length of training is in updates or in epochs", repr(self), "Give one of them, above 0.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings every experiment has; each adds its own."""

    epochs: float = option(60.0, "passes over the training data", above=0)
    updates: int = option(0, "updates of training in place of --epochs; 0: epochs count", least=0)
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
    eval_updates: int = option(0, "updates between evaluations in place of --eval-every; 0: epochs count", least=0)
    log_every: int = option(100, "updates between lines of training loss", least=1)
    checkpoint_every: int = option(1000, "updates between checkpoints", least=1)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_setting(item, getattr(self, item.name))
        if self.coupling() and self.batch_size < 2:
            rule = f"{self.coupling()} need at least two cases in a batch"
            raise fail(rule, f"--batch-size {self.batch_size}", "Take a larger --batch-size.")
        check_parts(self, self.accumulate, 1)

    @property
    def length(self) -> Every:
        return Every(updates=self.updates) if self.updates else Every(epochs=self.epochs)

    @property
    def evaluation_interval(self) -> Every:
        return Every(updates=self.eval_updates) if self.eval_updates else Every(epochs=self.eval_every)

    def coupling(self) -> str:
        """Return what couples the cases of a batch, in the plural; empty where the loss is a sum over cases."""
        return ""


def check_parts(config: Config, accumulate: int, processes: int) -> None:
    """Refuse to cut a batch into parts where its cases are coupled, or where they do not share it evenly."""
    parts = accumulate * processes
    received = f"{config.batch_size} cases in {accumulate} parts on {processes} processes"
    if parts > 1 and config.coupling():
        rule = f"a batch stays whole where {config.coupling()} couple its cases: parts would train another function"
        raise fail(rule, received, "Leave out --accumulate, and use one process.")
    if config.batch_size % parts:
        raise fail("--batch-size must divide evenly over processes and --accumulate", received, "Change one of them.")


def _check_setting(item: dataclasses.Field[Any], value: Any) -> None:
    """Right type, finite, in range, one of the choices."""
    kind, flag, rule = type(item.default), f"--{item.name.replace('_', '-')}", ""
    if kind is float and type(value) is int:
        return _check_setting(item, float(value))
    choices, above, least = (item.metadata.get(k) for k in ("choices", "above", "least"))
    if type(value) is not kind:
        rule = kind.__name__
    elif choices:
        one_of(flag, value, choices)
    elif isinstance(value, float) and not math.isfinite(value):
        rule = "finite"
    elif (above is not None and value <= above) or (least is not None and value < least):
        rule = f"above {above:g}" if above is not None else f"at least {least:g}"
    if rule:
        raise fail(f"{flag} must be {rule}", repr(value), f"The default is {item.default!r}.")


PANELS = ("curve", "profile", "bars", "table", "gallery")


@dataclass(frozen=True)
class Panel:
    """One part of a figure, by ``kind``.

    curve: the metric ``y`` against "update" or "epoch", one line for each variant, mean and spread over seeds.
    profile: the same for the list ``y`` of a run's extras, against the list ``x``.
    bars: the metric ``y`` at the end of training, or at its best, by variant.
    table: the metrics that ``y`` names, separated by spaces, by variant; ``printed`` holds rows of the paper's table.
    gallery: pictures of each variant's first finished run; ``y`` is a pattern of file names ("sample-*.png").
    """

    title: str
    y: str
    y_label: str = ""
    x: str = "update"
    x_label: str = ""
    log: bool = False
    log_x: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)  # only runs whose settings are these
    kind: str = "curve"
    y_limits: tuple[float, float] | None = None
    references: Mapping[str, float] = field(default_factory=dict)  # lines by name: {"the paper's": 1.3}
    measured_references: Mapping[str, str] = field(default_factory=dict)  # lines by name: metrics, mean over all runs
    printed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    at: str = "last"  # or "best": the value of bars and tables
    scale: float = 1.0  # of the values in a table: 100 for percent

    def __post_init__(self) -> None:
        one_of("the kind of a panel", self.kind, PANELS)


@dataclass(frozen=True)
class Figure:
    """Panels in one row, with the caption that goes under them.

    datasets: those whose runs have this figure; all if empty.
    """

    name: str
    caption: str
    panels: tuple[Panel, ...]
    datasets: tuple[str, ...] = ()


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
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """A setting that tells variants apart: its values with their names in tables, in order, and the baseline."""

    setting: str
    labels: Mapping[Any, str]
    baseline: Any


@dataclass(frozen=True)
class Scale:
    """One size of an experiment: its settings, the variants that are trained, and how many seeds of each.

    values: several values by setting; every combination is trained, but for those in ``without``.
    tuned: what was chosen for a variant on other seeds; a row holds the axes' settings and the chosen ones.
    fewer: variants with fewer seeds than the others: their settings and how many.
    placebo: the variant that is trained with as many further seeds, to be compared with itself.
    explores: the claim whose failure a change of settings could explain. Such runs change no verdict.
    """

    about: str  # data and time: "real MNIST, 40 minutes on two cores"
    seeds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without: tuple[Mapping[str, Any], ...] = ()
    tuned: tuple[Mapping[str, Any], ...] = ()
    fewer: tuple[tuple[Mapping[str, Any], int], ...] = ()
    placebo: Mapping[str, Any] = field(default_factory=dict)
    explores: str = ""


SCALES = ("smoke", "laptop", "paper")


@dataclass(frozen=True)
class Sheet:
    """Everything about an experiment but the model: ``module`` holds that."""

    name: str
    title: str
    section: str
    about: str  # {hidden} and the like stand for settings
    config: type[Config]
    module: str
    axes: tuple[Axis, ...]
    scales: Mapping[str, Scale]
    datasets: tuple[str, ...]
    figures: tuple[Figure, ...]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]
    headline: Metric  # decides which checkpoint is best
    metrics: tuple[Metric, ...] = ()
    fixed_shapes: bool = True  # every batch has the shapes of the first, so an update can be captured
    sampled: bool = False  # the loss draws random numbers

    @property
    def vary(self) -> tuple[str, ...]:
        """Return the settings that tell variants apart, in tables and run folders."""
        return tuple(axis.setting for axis in self.axes)

    def metric(self, name: str) -> Metric:
        """Return the metric of this name; one that the experiment does not list is better the lower it is."""
        known = (self.headline, *self.metrics)
        return next((metric for metric in known if metric.name == name), Metric(name, name.replace("_", " ")))

    def described(self, configs: Iterable[Mapping[str, Any]]) -> str:
        """Return ``about`` with the settings of these runs: ``256``, or ``256 or 1000`` where they differ."""
        runs = list(configs)
        names = [name for _, name, _, _ in string.Formatter().parse(self.about) if name]
        values = {name: dict.fromkeys(in_words(run[name]) for run in runs if name in run) for name in names}
        return self.about.format(**{name: " or ".join(several) or "an unknown" for name, several in values.items()})


def in_words(value: Any) -> str:
    """Return a setting as text: ``0.001``, ``cyclic``."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


@dataclass(frozen=True)
class Job:
    """One run: an experiment's settings and a seed."""

    experiment: str
    config: Config
    seed: int = 0
    vary: tuple[str, ...] = ()  # settings in the label: the sheet's, and any other that was swept
    scale: str = ""

    def home(self, runs: str | Path, data: str) -> Path:
        """Return the folder that holds the runs of this experiment, scale and data (``mnist-real``)."""
        return Path(runs) / self.experiment / "-".join(filter(None, (data, self.scale)))

    @property
    def label(self) -> str:
        """Return the name of the run's folder: ``layer-batch_size128-seed0``."""
        values = {name: getattr(self.config, name) for name in self.vary}
        parts = [str(v) if isinstance(v, str) else f"{k}{v:g}" for k, v in values.items()]
        return "-".join([*parts, f"seed{self.seed}"])
