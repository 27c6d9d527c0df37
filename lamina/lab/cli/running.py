"""``lamina run NAME``, whose options are the experiment's settings, and ``lamina reproduce``, which runs them all."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import fail
from ..experiments import SHEETS, Config, Job, Sheet, find
from . import jobs as plan
from . import workers
from .jobs import DeviceOption, How, flag, processes, rank, whole, writable_folder
from .screen import KINDS, say, show_notes, show_report, table

if TYPE_CHECKING:
    from ..data.registry import Dataset

run_app = typer.Typer(help="Train an experiment: lamina run mnist --norm layer,batch --seeds 3")


# A command for each experiment


def _add_run_command(sheet: Sheet) -> None:
    """A command whose options are the fields of the sheet's settings, then those of ``How``."""

    def command(context: typer.Context, **given: Any) -> None:
        how = How(**{f.name: given.pop(f.name) for f in dataclasses.fields(How) if f.init})
        how.command = how.worker_of or _typed(context)
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


def _values(sheet: Sheet, given: Mapping[str, str], small: bool) -> dict[str, Sequence[Any]]:
    """What each setting is to be, as lists: the small settings where asked for, and what was given over them."""
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    base = {name: (value,) for name, value in (sheet.small if small else {}).items()}
    return {**base, **{name: plan.parse(fields[name], text) for name, text in given.items()}}


def _run(sheet: Sheet, given: Mapping[str, str], how: How) -> None:
    configs = _configs(sheet, given, how)
    how.check(sheet)
    if how.worker_of is not None:
        workers.watch_parent()
    from ..data import registry as data

    dataset = data.load(str(getattr(configs[0], "dataset")), how.data)  # noqa: B009  (each experiment's own field)
    jobs = plan.jobs_for(sheet, configs, *_seeds(sheet, how))
    speaks = how.worker_of is None and rank() == 0
    if speaks and not how.quiet:
        _announce(jobs, dataset, how)
    code = workers.carry_out(jobs, how, {sheet.name: f"{dataset.name}-{dataset.kind}"})
    if speaks:
        _show_results(sheet, jobs, Path(how.runs) / sheet.name / f"{dataset.name}-{dataset.kind}")
        say(f"Figures, claims and all numbers: lamina report {shlex.quote(how.runs)}")
    raise typer.Exit(code)


def _configs(sheet: Sheet, given: Mapping[str, str], how: How) -> list[Config]:
    """The settings of every run, with what tuning chose where nothing else was given."""
    configs = plan.combine(sheet, _values(sheet, given, how.small))
    if how.tuned is None:
        return configs
    from ..reports import records, tuning

    record = records.load(how.tuned, "lamina tune")
    return [tuning.apply(record, sheet.name, config, tuple(given)) for config in configs]


def _typed(context: typer.Context) -> str:
    """The command as it was typed, for the runs' headers."""
    return shlex.join(["lamina", *context.find_root().obj])


def _seeds(sheet: Sheet, how: How) -> tuple[range, bool]:
    """The seeds, and whether they train as one stacked model."""
    auto = how.uses_cuda() and sheet.stackable and processes() == 1
    stacked = how.seeds > 1 and (auto if how.stack is None else how.stack)
    return range(how.first_seed, how.first_seed + how.seeds), stacked


def _announce(jobs: Sequence[Job], dataset: Dataset, how: How) -> None:
    seeds = sum(len(job.seeds) for job in jobs)
    stacked = f" ({seeds} seeds, stacked)" if seeds > len(jobs) else ""
    device = "GPU" if how.uses_cuda() else "CPU"
    say(f"{len(jobs)} run(s){stacked} on {KINDS[dataset.kind]}: {dataset.label}; {device}; folder {how.runs}")


def _show_results(sheet: Sheet, jobs: Sequence[Job], home: Path) -> None:
    from ..reports import convergence

    notes: list[str] = []
    for title, columns, rows in convergence.results(sheet, jobs, home, notes):
        table(title, columns, rows)
    show_notes(notes)


# All of them


def reproduce(
    context: typer.Context,
    seeds: Annotated[int | None, typer.Option(help="seeds of each variant", metavar="N", parser=whole(1, 999))] = None,
    runs: Annotated[str, typer.Option(help="folder for the runs")] = "runs/reproduce",
    out: Annotated[str, typer.Option(help="folder for the report")] = "runs/reproduce",
    only: Annotated[str, typer.Option(help="experiments, with commas between (default: all)")] = "",
    jobs: Annotated[int | None, typer.Option(help="processes", metavar="N", parser=whole(1, 999))] = None,
    device: DeviceOption = "auto",
    quiet: Annotated[bool, typer.Option(help="no progress, only the results")] = False,
    epochs: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Every experiment, small, on embedded data, then the report. Stop it and run it again: it goes on."""
    began = time.monotonic()
    sheets = [find(name.strip()) for name in only.split(",")] if only else list(SHEETS.values())
    how = How(data="embedded", runs=runs, device=device, jobs=jobs, resume=True)
    work = list[Job]()
    for sheet in sheets:
        work += _small_jobs(sheet, dataclasses.replace(how, seeds=seeds or sheet.small_seeds), epochs)
    data = {job.experiment: f"{getattr(job.config, 'dataset')}-embedded" for job in work}  # noqa: B009
    writable_folder(out, "--out")
    how.quiet, how.command = quiet, _typed(context)
    say(f"{len(work)} run(s) on {KINDS['embedded']}; experiments: {', '.join(data)}; folder {runs}")
    code = workers.carry_out(work, how, data)
    from ..reports.page import build

    show_report(build([Path(runs) / name for name in data if (Path(runs) / name).is_dir()], out))
    say(f"{time.monotonic() - began:,.0f} s in all")
    raise typer.Exit(code)


def _small_jobs(sheet: Sheet, how: How, epochs: float | None) -> list[Job]:
    how.check(sheet)
    scale = {} if epochs is None else {"epochs": (epochs,)}
    configs = plan.combine(sheet, {**_values(sheet, {}, small=True), **sheet.small_sweep, **scale})
    return plan.jobs_for(sheet, configs, *_seeds(sheet, how))
