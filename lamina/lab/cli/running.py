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
from statistics import median
from typing import Annotated, Any, get_origin

import typer

from ...errors import InputError, RunError, fail
from ..experiment import Config, Job, Sheet
from ..experiments import SHEETS, find
from ..options import Settings, whole
from . import jobs as plan
from . import workers
from .jobs import DeviceOption, flag, rank, writable_folder
from .screen import KINDS, say, show_notes, show_report, table

run_app = typer.Typer(help="Train an experiment: lamina run mnist --norm layer,batch --seeds 3")


def _add_run_command(sheet: Sheet) -> None:
    """Add a command whose options are the fields of the sheet's settings, then those of ``Settings``."""

    def command(context: typer.Context, **given: Any) -> None:
        shared = {f.name: given.pop(f.name) for f in dataclasses.fields(Settings) if f.name in given}
        settings = Settings(**shared, command=_typed(context))
        _run(sheet, {name: value for name, value in given.items() if value is not None}, settings)

    own = [_setting(f) for f in dataclasses.fields(sheet.config)]
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    shared = inspect.signature(Settings, eval_str=True).parameters.values()
    options = [p for p in shared if get_origin(p.annotation) is Annotated]
    parameters = [first, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options))]
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
    metavar = {int: "INTEGER", float: "FLOAT", str: "NAME"}[kind] + (",..." if several else "")
    option = typer.Option(flag(item.name), help=help, show_default=False, metavar=metavar, rich_help_panel="Settings")
    annotation = Annotated[str | None, option]  # read by plan.parse, which tells what it got
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


for _sheet in SHEETS.values():
    _add_run_command(_sheet)


@run_app.callback(invoke_without_command=True)
def _no_experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        names = ", ".join(SHEETS)
        raise fail("lamina run needs the name of an experiment", "none", f"Choose one of {names}: see lamina list.")


def _run(sheet: Sheet, given: Mapping[str, str], settings: Settings) -> None:
    jobs = _jobs(sheet, given, settings)
    plan.check(settings)
    data = _described(jobs[0], settings)
    if rank() == 0 and not settings.quiet:
        device = "GPU" if plan.uses_cuda(settings) else "CPU"
        say(f"{len(jobs)} run(s) on {KINDS[data['kind']]}: {data['label']}; {device}; folder {settings.runs}")
        show_notes(data.get("notes", ()))
    code = workers.carry_out(jobs, settings, lambda job: job.label)
    if rank() == 0:
        _show_results(sheet, jobs, f"{data['name']}-{data['kind']}", Path(settings.runs))
        say(f"Figures, claims and all numbers: lamina report {shlex.quote(settings.runs)}")
    raise typer.Exit(code)


def _described(job: Job, settings: Settings) -> dict[str, Any]:
    """Load a job's data here first, so that data which are not there or broken are one error; describe them."""
    from ..protocol import module_of

    return module_of(job.experiment).load(job.config, settings.root).describe()


def _jobs(sheet: Sheet, given: Mapping[str, str], settings: Settings) -> list[Job]:
    """Return every run that was asked for, with what tuning chose where nothing else was given."""
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    values = {name: plan.parse(fields[name], text) for name, text in given.items()}
    if settings.scale:
        return plan.jobs_of_scale(
            sheet, settings.scale, _seeds(settings, plan.find_scale(sheet, settings.scale).seeds), **values
        )
    return plan.jobs_for(sheet, _tuned(sheet, plan.combine(sheet, values), settings, tuple(given)), _seeds(settings, 1))


def _tuned(sheet: Sheet, configs: list[Config], settings: Settings, given: tuple[str, ...]) -> list[Config]:
    if settings.tuned is None:
        return configs
    from ..reports import records, tuning

    record = records.load(settings.tuned, "lamina tune")
    return [tuning.apply(record, sheet.name, config, given) for config in configs]


def _typed(context: typer.Context) -> str:
    """Return the command as it was typed, for the runs' headers."""
    return shlex.join(["lamina", *context.find_root().obj])


def _seeds(settings: Settings, usual: int) -> range:
    return range(settings.first_seed, settings.first_seed + (settings.seeds or usual))


def _show_results(sheet: Sheet, jobs: Sequence[Job], data: str, runs: Path) -> None:
    from ..reports.page import run_tables

    notes: list[str] = []
    for home in dict.fromkeys(job.home(runs, data) for job in jobs):
        own = [job for job in jobs if job.home(runs, data) == home]
        for title, columns, rows in run_tables(sheet, own, home, notes):
            table(title, columns, rows)
    show_notes(notes)


RunsOption = Annotated[str, typer.Option(help="folder for the runs")]
OutOption = Annotated[str, typer.Option(help="folder for the report")]
OnlyOption = Annotated[str, typer.Option(help="experiments, with commas between (default: all)")]
SeedsOption = Annotated[int | None, whole("seeds of each variant (default: the scale's)", 1, 999, panel=None)]
JobsOption = Annotated[int | None, whole("processes (default: one a core)", 1, 999, panel=None)]
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
    """Run every experiment at smoke scale on embedded data and write the report. A second call resumes a first."""
    settings = Settings(
        root="embedded",
        seeds=seeds,
        runs=runs,
        device=device,
        jobs=jobs,
        resume=True,
        quiet=quiet,
        command=_typed(context),
    )
    plan.check(settings)
    writable_folder(out, "--out")
    changed = {} if epochs is None else {"epochs": (epochs,), "updates": (0,)}
    raise typer.Exit(_all(_chosen(only), "smoke", settings, out, changed))


def paper(
    context: typer.Context,
    data: Annotated[str, typer.Option(help="folder of the real data sets")],
    hours: Annotated[float, typer.Option(help="save every run and stop after so long (default: no limit)")] = math.inf,
    runs: RunsOption = "runs/paper",
    out: OutOption = "runs/paper",
    only: OnlyOption = "",
    jobs: JobsOption = None,
    device: DeviceOption = "cpu",
    quiet: QuietOption = False,
) -> None:
    """Run each experiment whose real data are there, sized for two cores; write the report. Run again to go on."""
    if not hours > 0:
        raise fail("--hours must be above 0", repr(hours), "Leave it out to run to the end.")
    command = _typed(context)
    settings = Settings(
        root=data, hours=hours, runs=runs, device=device, jobs=jobs, resume=True, quiet=quiet, command=command
    )
    plan.check(settings)
    writable_folder(out, "--out")
    sheets = [sheet for sheet in _chosen(only) if _can_run(sheet, "laptop", settings)]
    if not sheets:
        remedy = "lamina data lists the sets, and lamina data get NAME --data DIR fetches one."
        raise fail("lamina paper needs the real data of an experiment", f"none in {data}", remedy)
    raise typer.Exit(_all(sheets, "laptop", settings, out, {}))


def _chosen(only: str) -> list[Sheet]:
    return [find(name.strip()) for name in only.split(",")] if only else list(SHEETS.values())


def _can_run(sheet: Sheet, scale: str, settings: Settings) -> bool:
    """Return whether an experiment has this scale, and its real data are there; say so, or why not."""
    if scale not in sheet.scales:
        say(f"{sheet.name}: left out. It has no {scale} scale")
        return False
    try:
        described = _described(plan.jobs_of_scale(sheet, scale)[0], settings)
    except (InputError, OSError) as error:
        say(f"{sheet.name}: left out. {' '.join(str(error).split())}")
        return False
    if described["kind"] != "real":
        say(f"{sheet.name}: left out. {settings.root} holds none of its real data, only {described['label']} would do")
        return False
    say(f"{sheet.name}: {described['label']}; {sheet.scales[scale].about}")
    return True


def _all(
    sheets: Sequence[Sheet], scale: str, settings: Settings, out: str, changed: Mapping[str, Sequence[Any]]
) -> int:
    """Run a scale of every experiment, then write the report; return the worst exit code."""
    began = time.monotonic()
    seeds = [_seeds(settings, plan.find_scale(sheet, scale).seeds) for sheet in sheets]
    work = [job for s, those in zip(sheets, seeds) for job in plan.jobs_of_scale(s, scale, those, **changed)]
    progress = Progress(work, settings)
    progress.show()
    try:
        code = workers.carry_out(work, settings, lambda job: f"{job.experiment}/{job.label}", progress.after)
    except RunError as error:  # of runs in this process; workers' are told as they come
        show_notes([str(error)])
        code = 1
    except Exception as error:
        if not hasattr(error, "exit_code") or time.monotonic() - began < 3600 * settings.hours:
            raise
        code = 0  # the time is over
    _report(Path(settings.runs), sheets, out)
    progress.show()
    left = len(work) - sum(len(progress.done(name)) for name in progress.names)
    say(f"{time.monotonic() - began:,.0f} s in all; {left} of {len(work)} runs left")
    return code


def _report(runs: Path, sheets: Sequence[Sheet], out: str) -> None:
    from ..reports.page import build

    if folders := [runs / sheet.name for sheet in sheets if any((runs / sheet.name).glob("*/*/config.json"))]:
        show_report(build(folders, out))


@dataclass
class Progress:
    """Finished and unfinished runs of each experiment, and when the rest will end."""

    jobs: Sequence[Job]
    settings: Settings

    def __post_init__(self) -> None:
        self.names = list(dict.fromkeys(job.experiment for job in self.jobs))

    def done(self, experiment: str) -> list[float]:
        """Return the minutes that each finished run of an experiment took."""
        data = "*-embedded" if self.settings.root == "embedded" else "*-real"
        homes = [job.home(Path(), data) / job.label for job in self.jobs if job.experiment == experiment]
        ends = [end for home in homes for end in Path(self.settings.runs).glob(str(home / "summary.json"))]
        return [(end.stat().st_mtime - end.with_name("config.json").stat().st_mtime) / 60 for end in ends]

    def rows(self) -> list[list[str]]:
        """Return for each experiment: runs done, runs left, and when its last one will end."""
        rows, minutes, processes = list[list[str]](), 0.0, self.settings.jobs or workers.cores()
        for name in self.names:
            done = self.done(name)
            left = sum(job.experiment == name for job in self.jobs) - len(done)
            # a run that was stopped in between took longer than the others: the median does not mind
            minutes += left * (median(done) if done else math.inf) / processes if left else 0
            rows.append([name, str(len(done)), str(left), _clock(minutes) if left else "-"])
        return rows

    def show(self) -> None:
        """Print a table of all experiments."""
        table(f"Runs in {Path(self.settings.runs)}", ["Experiment", "Done", "Left", "Ends"], self.rows())

    def after(self, job: Job) -> str:
        """Return how far the experiment of a job that has ended is."""
        name, done, left, end = next(row for row in self.rows() if row[0] == job.experiment)
        return f"{name}: {done} runs done, {left} left, ends {end}"


def _clock(minutes: float) -> str:
    if math.isinf(minutes):
        return "not known yet"
    return time.strftime("about %a %H:%M", time.localtime(time.time() + 60 * minutes))
