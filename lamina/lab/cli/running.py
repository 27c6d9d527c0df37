"""``lamina run NAME``, whose options are the experiment's settings; ``reproduce`` and ``paper``, which run them all."""

from __future__ import annotations

import dataclasses
import inspect
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError, fail
from ..experiment import Config, Job, Sheet
from ..experiments import SHEETS, find
from . import jobs as plan
from . import workers
from .jobs import DeviceOption, How, flag, rank, whole, writable_folder
from .screen import KINDS, say, show_notes, show_report, table

if TYPE_CHECKING:
    from ..data.registry import Dataset

run_app = typer.Typer(help="Train an experiment: lamina run mnist --norm layer,batch --seeds 3")


# A command for each experiment


def _add_run_command(sheet: Sheet) -> None:
    """A command whose options are the fields of the sheet's settings, then those of ``How``."""

    def command(context: typer.Context, **given: Any) -> None:
        how = How(**{f.name: given.pop(f.name) for f in dataclasses.fields(How) if f.init})
        how.command = _typed(context)
        _run(sheet, {name: value for name, value in given.items() if value is not None}, how)

    own = [_setting(f) for f in dataclasses.fields(sheet.config)]
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    how = inspect.signature(How, eval_str=True).parameters.values()
    parameters = [first, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *how))]
    defaults = dataclasses.asdict(sheet.config())
    command.__doc__ = f"{sheet.title} (section {sheet.section}). {sheet.described([defaults])}"
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    run_app.command(sheet.name, short_help=f"{sheet.title} (section {sheet.section})")(command)


def _setting(item: dataclasses.Field[Any]) -> inspect.Parameter:
    kind = type(item.default)
    several, choices = item.metadata["sweep"], item.metadata["choices"]
    help = item.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
    help += ("; several with commas between" if several else "") + f" (default {item.default})"
    names = {int: "INTEGER", float: "FLOAT", str: "NAME"}
    option = typer.Option(
        flag(item.name),
        help=help,
        show_default=False,
        metavar=names[kind] + (",..." if several else ""),
        rich_help_panel="Settings",
    )
    annotation = Annotated[str | None, option]  # read by plan.parse, which tells what it got
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


for _sheet in SHEETS.values():
    _add_run_command(_sheet)


@run_app.callback(invoke_without_command=True)
def _no_experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        names = ", ".join(SHEETS)
        raise fail("lamina run needs the name of an experiment", "none", f"Choose one of {names}: see lamina list.")


# From options to results


def _run(sheet: Sheet, given: Mapping[str, str], how: How) -> None:
    jobs = _jobs(sheet, given, how)
    how.check(sheet)
    from ..data import registry as data

    dataset = data.load(_dataset(jobs[0]), how.data)
    if rank() == 0 and not how.quiet:
        _announce(jobs, dataset, how)
    code = workers.carry_out(jobs, how, lambda job: job.label)
    if rank() == 0:
        _show_results(sheet, jobs, f"{dataset.name}-{dataset.kind}", Path(how.runs))
        say(f"Figures, claims and all numbers: lamina report {shlex.quote(how.runs)}")
    raise typer.Exit(code)


def _dataset(job: Job) -> str:
    return str(getattr(job.config, "dataset"))  # noqa: B009  (each experiment's own field)


def _jobs(sheet: Sheet, given: Mapping[str, str], how: How) -> list[Job]:
    """Return every run that was asked for, with what tuning chose where nothing else was given."""
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    values = {name: plan.parse(fields[name], text) for name, text in given.items()}
    if how.scale:
        return plan.jobs_of_scale(sheet, how.scale, _seeds(how, plan.find_scale(sheet, how.scale).seeds), **values)
    return plan.jobs_for(sheet, _tuned(sheet, plan.combine(sheet, values), how, tuple(given)), _seeds(how, 1))


def _tuned(sheet: Sheet, configs: list[Config], how: How, given: tuple[str, ...]) -> list[Config]:
    if how.tuned is None:
        return configs
    from ..reports import records, tuning

    record = records.load(how.tuned, "lamina tune")
    return [tuning.apply(record, sheet.name, config, given) for config in configs]


def _typed(context: typer.Context) -> str:
    """Return the command as it was typed, for the runs' headers."""
    return shlex.join(["lamina", *context.find_root().obj])


def _seeds(how: How, usual: int) -> range:
    return range(how.first_seed, how.first_seed + (how.seeds or usual))


def _announce(jobs: Sequence[Job], dataset: Dataset, how: How) -> None:
    device = "GPU" if how.uses_cuda() else "CPU"
    say(f"{len(jobs)} run(s) on {KINDS[dataset.kind]}: {dataset.label}; {device}; folder {how.runs}")


def _show_results(sheet: Sheet, jobs: Sequence[Job], data: str, runs: Path) -> None:
    from ..reports import convergence

    notes: list[str] = []
    for home in dict.fromkeys(job.home(runs, data) for job in jobs):
        own = [job for job in jobs if job.home(runs, data) == home]
        for title, columns, rows in convergence.results(sheet, own, home, notes):
            table(title, columns, rows)
    show_notes(notes)


# All of them

RunsOption = Annotated[str, typer.Option(help="folder for the runs")]
OutOption = Annotated[str, typer.Option(help="folder for the report")]
OnlyOption = Annotated[str, typer.Option(help="experiments, with commas between (default: all)")]
SeedsOption = Annotated[
    int | None, typer.Option(help="seeds of each variant (default: the scale's)", metavar="N", parser=whole(1, 999))
]
JobsOption = Annotated[
    int | None, typer.Option(help="processes (default: one a core)", metavar="N", parser=whole(1, 999))
]
QuietOption = Annotated[bool, typer.Option(help="no progress, only the results")]


def reproduce(
    context: typer.Context,
    seeds: SeedsOption = None,
    runs: RunsOption = "runs/reproduce",
    out: OutOption = "runs/reproduce",
    only: OnlyOption = "",
    jobs: JobsOption = None,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    epochs: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Every experiment, small, on embedded data, then the report. Stop it and run it again: it goes on."""
    how = How(data="embedded", runs=runs, device=device, jobs=jobs, resume=True, quiet=quiet, seeds=seeds)
    how.command = _typed(context)
    changed = {} if epochs is None else {"epochs": (epochs,)}
    raise typer.Exit(_all(_chosen(only), "smoke", how, out, changed))


def paper(
    context: typer.Context,
    data: Annotated[str, typer.Option(help="folder of the real data sets")],
    hours: Annotated[float | None, typer.Option(help="save every run and stop after so long")] = None,
    runs: RunsOption = "runs/paper",
    out: OutOption = "runs/paper",
    only: OnlyOption = "",
    jobs: JobsOption = None,
    device: DeviceOption = "cpu",
    quiet: QuietOption = False,
) -> None:
    """Every experiment whose real data are there, sized for two cores, then the report. Run it again: it goes on."""
    if hours is not None and not (math.isfinite(hours) and hours > 0):
        raise fail("--hours must be above 0", repr(hours), "Leave it out to run to the end.")
    how = How(data=data, runs=runs, device=device, jobs=jobs, resume=True, quiet=quiet)
    how.command, how.hours = _typed(context), hours or 0.0
    sheets = [sheet for sheet in _chosen(only) if _has_data(sheet, data)]
    if not sheets:
        say(f"{data} holds the data of no experiment; lamina data lists them")
        raise typer.Exit(0)
    raise typer.Exit(_all(sheets, "laptop", how, out, {}))


def _chosen(only: str) -> list[Sheet]:
    return [find(name.strip()) for name in only.split(",")] if only else list(SHEETS.values())


def _has_data(sheet: Sheet, root: str) -> bool:
    """Whether an experiment's real data are there; say which is missing where they are not."""
    from ..data import registry

    name = str(getattr(sheet.config(**sheet.scales["laptop"].settings), "dataset"))  # noqa: B009
    try:
        registry.load(name, root)
    except InputError as error:
        say(f"{sheet.name}: left out. {error}")
        return False
    say(f"{sheet.name}: {sheet.scales['laptop'].about}")
    return True


def _all(sheets: Sequence[Sheet], scale: str, how: How, out: str, changed: Mapping[str, Sequence[Any]]) -> int:
    """Run a scale of every experiment, then write the report; return the worst exit code."""
    began = time.monotonic()
    writable_folder(out, "--out")
    work = list[Job]()
    for sheet in sheets:
        how.check(sheet)
        work += plan.jobs_of_scale(sheet, scale, _seeds(how, sheet.scales[scale].seeds), **changed)
    progress = Progress(work, Path(how.runs), "embedded" if how.data == "embedded" else "real")
    say(f"{len(work)} runs in {how.runs}, {len(work) - progress.left()} of them finished")
    try:
        code = workers.carry_out(work, how, lambda job: f"{job.experiment}/{job.label}", progress.after)
    except workers.Stopped as stopped:
        if not how.hours:
            raise
        say(str(stopped))
        code = 0
    _report(Path(how.runs), sheets, out)
    say(f"{time.monotonic() - began:,.0f} s in all, {progress.left()} of {len(work)} runs left")
    return code


def _report(runs: Path, sheets: Sequence[Sheet], out: str) -> None:
    from ..reports.page import build

    folders = [runs / sheet.name for sheet in sheets if (runs / sheet.name).is_dir()]
    if folders:
        show_report(build(folders, out))


@dataclass
class Progress:
    """How many runs of each experiment are finished, and when the rest will be."""

    jobs: Sequence[Job]
    runs: Path
    kind: str

    def __post_init__(self) -> None:
        self.began, self.ended = time.monotonic(), 0

    def left(self, experiment: str = "") -> int:
        """Return the number of unfinished runs, of one experiment or of all."""
        return sum(not self._is_done(job) for job in self.jobs if job.experiment == experiment or not experiment)

    def _is_done(self, job: Job) -> bool:
        return (job.home(self.runs, f"{_dataset(job)}-{self.kind}") / job.label / "summary.json").exists()

    def after(self, job: Job) -> None:
        """Say how far a job's experiment is, and when the rest of all runs will be done at the rate so far."""
        self.ended += 1
        own, left = sum(other.experiment == job.experiment for other in self.jobs), self.left()
        minutes = (time.monotonic() - self.began) / self.ended * left / 60
        told = f"{job.experiment}: {own - self.left(job.experiment)} of {own} runs done"
        say(f"{told}; {left} of all runs left, about {minutes:,.0f} min")
