"""The command line. Torch and other slow imports wait inside the commands that need them: help comes at once."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text
    from typer.core import TyperGroup
except ImportError as missing:
    print(f"lamina: the command line needs {missing.name}, got none. Run `pip install 'lamina[lab]'`.", file=sys.stderr)
    raise SystemExit(2) from None

from . import workers
from .errors import InputError, RunError, fail, one_of
from .sheets import SHEETS, Job, Sheet, find
from .workers import How, flag, rank, whole, writable_folder

if TYPE_CHECKING:
    from .data import Dataset

KINDS = {"real": "REAL data", "embedded": "EMBEDDED STAND-IN for the real data"}
LAB = ("accelerate", "jinja2", "matplotlib", "safetensors", "scipy", "sklearn", "tensorboard")
VERDICTS = {True: "held", False: "did not hold", None: "not enough runs"}


class Commands(TyperGroup):
    """A group that suggests the nearest name for one it does not know."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            one_of("experiment" if self.name == "run" else "command", args[0], self.commands)
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
run_app = typer.Typer(cls=Commands, help="Train an experiment: lamina run mnist --norm layer,batch --seeds 3")
data_app = typer.Typer(cls=Commands, help="Data sets: what is there, fetch one, check one.")
app.add_typer(run_app, name="run")
app.add_typer(data_app, name="data")


# Errors and output


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command; errors become one line on standard error and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if not sys.stdout.isatty():
        os.environ.setdefault("TERMINAL_WIDTH", "120")  # of help, which is else cut for 80 columns
    try:
        code = typer.main.get_command(app).main(words, prog_name="lamina", standalone_mode=False, obj=words)
        sys.stdout.flush()
        if code == 130:  # Ctrl-C outside training, where typer keeps silent
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end
        return 128 + 13
    except (Exception, KeyboardInterrupt) as error:
        told = _told(error)
        if told is None:
            raise
        process = f" (process {rank()})" if rank() else ""
        print(f"lamina{process}: {' '.join(told[0].split())}", file=sys.stderr)
        return told[1]


def _told(error: BaseException) -> tuple[str, int] | None:
    """What to say of an error and the exit code; None for a mistake of ours, which keeps its traceback."""
    if hasattr(error, "format_message"):  # a usage error, of whichever click typer was built on
        return str(error.format_message()), int(getattr(error, "exit_code", 2))
    if isinstance(error, InputError):
        return str(error), 2
    if isinstance(error, RunError):
        return str(error), 1
    if hasattr(error, "exit_code"):  # train.Interrupted
        return str(error), int(error.exit_code)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", 130
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}", 1
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in LAB:
        return f"this needs {error.name}, got none. Run `pip install 'lamina[lab]'`.", 2
    if isinstance(error, MemoryError) or any(words in str(error) for words in ("out of memory", "allocate memory")):
        return f"not enough memory. Take a smaller network or batch ({error})", 1
    return None


class _Screen(Console):
    """Standard output: a terminal's own width; lines as long as they are elsewhere."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        if not self.is_terminal:
            self.width = 10_000

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _say(text: str) -> None:
    """A line of results, never cut."""
    _Screen().print(text, markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    _say(title)
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*map(Text, row))  # brackets in a cell are no markup
    _Screen().print(table)


def _show_version(asked: bool) -> None:
    if asked:
        from . import __version__

        _say(f"lamina {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="and end")] = False,
) -> None:
    """Layer Normalization (Ba, Kiros, Hinton 2016): the paper's experiments, their data and the report."""


@app.command("list")
def list_experiments() -> None:
    """The experiments, and how to run them."""
    rows = [[s.name, s.section, s.title, ", ".join(s.datasets), ", ".join(s.norms), _size(s)] for s in SHEETS.values()]
    _table("Experiments", ["Name", "Section", "Title", "Data sets", "Norms", "Size"], rows)
    example = next(iter(SHEETS))
    for command, meaning in (
        (f"lamina run {example}", "one run with the paper's settings"),
        (f"lamina run {example} --small --norm layer,batch,none --seeds 3", "a quick comparison"),
        (f"lamina run {example} --help", "every setting"),
        ("lamina reproduce", "all of them, small, with a report"),
    ):
        _say(f"{command:<68}{meaning}")


def _size(sheet: Sheet) -> str:
    full, small = sheet.config(), sheet.config(**sheet.small)
    return f"{full.epochs:g} epochs of batches of {full.batch_size}; --small {small.epochs:g} epochs"


# lamina run


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
    command.__doc__ = f"{sheet.title} (section {sheet.section}). {sheet.about}"
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
    annotation = Annotated[str | None, option]  # read by workers.parse, which tells what it got
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


for _sheet in SHEETS.values():
    _add_run_command(_sheet)


@run_app.callback(invoke_without_command=True)
def _no_experiment(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        names = ", ".join(SHEETS)
        raise fail("lamina run needs the name of an experiment", "none", f"Choose one of {names}: see lamina list.")


def _values(sheet: Sheet, given: Mapping[str, str], small: bool) -> dict[str, Sequence[Any]]:
    """What each setting is to be, as lists: the small settings where asked for, and what was given over them."""
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    base = {name: (value,) for name, value in (sheet.small if small else {}).items()}
    return {**base, **{name: workers.parse(fields[name], text) for name, text in given.items()}}


def _run(sheet: Sheet, given: Mapping[str, str], how: How) -> None:
    configs = workers.combine(sheet, _values(sheet, given, how.small))
    if how.tuned is not None:
        from . import records, tuning

        configs = [tuning.apply(records.load(how.tuned), sheet.name, config, tuple(given)) for config in configs]
    how.check(sheet)
    if how.worker_of is not None:
        workers.watch_parent()
    from . import data

    dataset = data.load(str(getattr(configs[0], "dataset")), how.data)  # noqa: B009  (each experiment's own field)
    jobs = workers.jobs_for(sheet, configs, *_seeds(sheet, how))
    speaks = how.worker_of is None and rank() == 0
    if speaks and not how.quiet:
        _announce(jobs, dataset, how)
    code = workers.carry_out(jobs, how, {sheet.name: f"{dataset.name}-{dataset.kind}"})
    if speaks:
        _show_results(sheet, jobs, Path(how.runs) / sheet.name / f"{dataset.name}-{dataset.kind}")
        _say(f"Figures, claims and all numbers: lamina report {shlex.quote(how.runs)}")
    raise typer.Exit(code)


def _typed(context: typer.Context) -> str:
    """The command as it was typed, for the runs' headers."""
    return shlex.join(["lamina", *context.find_root().obj])


def _seeds(sheet: Sheet, how: How) -> tuple[range, bool]:
    """The seeds, and whether they train as one stacked model."""
    auto = how.uses_cuda() and sheet.stackable and workers.processes() == 1
    stacked = how.seeds > 1 and (auto if how.stack is None else how.stack)
    return range(how.first_seed, how.first_seed + how.seeds), stacked


def _announce(jobs: Sequence[Job], dataset: Dataset, how: How) -> None:
    seeds = sum(len(job.seeds) for job in jobs)
    stacked = f" ({seeds} seeds, stacked)" if seeds > len(jobs) else ""
    device = "GPU" if how.uses_cuda() else "CPU"
    _say(f"{len(jobs)} run(s){stacked} on {KINDS[dataset.kind]}: {dataset.label}; {device}; folder {how.runs}")


def _show_results(sheet: Sheet, jobs: Sequence[Job], home: Path) -> None:
    from . import convergence

    notes: list[str] = []
    for title, columns, rows in convergence.results(sheet, jobs, home, notes):
        _table(title, columns, rows)
    _show_notes(notes)


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda")]
PathsArgument = Annotated[list[str] | None, typer.Argument(help="folders of runs, and records (default: runs)")]
DataOption = Annotated[str | None, typer.Option("--data", help="folder of data sets (default: LAMINA_DATA, or cache)")]


# lamina reproduce, report


@app.command()
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
    work, data = list[Job](), dict[str, str]()
    for sheet in sheets:
        how = How(seeds or sheet.small_seeds, data="embedded", runs=runs, device=device, jobs=jobs, resume=True)
        how.check(sheet)
        scale = {} if epochs is None else {"epochs": (epochs,)}
        configs = workers.combine(sheet, {**_values(sheet, {}, small=True), **sheet.small_sweep, **scale})
        work += workers.jobs_for(sheet, configs, *_seeds(sheet, how))
        data[sheet.name] = f"{getattr(configs[0], 'dataset')}-embedded"  # noqa: B009
    writable_folder(out, "--out")
    how.quiet, how.command = quiet, _typed(context)
    _say(f"{len(work)} run(s) on {KINDS['embedded']}; experiments: {', '.join(data)}; folder {runs}")
    code = workers.carry_out(work, how, data)
    _report([Path(runs) / name for name in data if (Path(runs) / name).is_dir()], out, None)
    _say(f"{time.monotonic() - began:,.0f} s in all")
    raise typer.Exit(code)


@app.command()
def report(
    paths: PathsArgument = None,
    out: Annotated[str, typer.Option(help="folder for page, figures and records")] = "report",
    markdown: Annotated[str | None, typer.Option(help="where RESULTS.md goes instead")] = None,
    until: Annotated[float | None, typer.Option(help="judge every run at this epoch (default: at its end)")] = None,
) -> None:
    """Runs and records as one page (report.html), RESULTS.md, figures and records."""
    places = _places(paths)
    writable_folder(out, "--out")
    _check_file(markdown, "--markdown")
    if until is not None and not (math.isfinite(until) and until > 0):
        raise fail("--until must be an epoch above 0", repr(until), "Leave it out for the runs' own ends.")
    _report(places, out, markdown, until)


def _places(paths: Sequence[str] | None) -> list[Path]:
    places = [Path(path) for path in paths or ["runs"]]
    for place in places:
        if not place.exists():
            received = f"{place}, which is not there"
            raise fail("this reads folders of runs, and records", received, "Begin with: lamina run mnist")
    return places


def _check_file(path: str | None, name: str) -> None:
    """A file that can be written, or the user hears of it before the work."""
    if path is not None:
        if Path(path).is_dir() or not Path(path).name:
            raise fail(f"{name} must be a file", repr(path), "Pass a file name.")
        writable_folder(Path(path).parent, f"the folder of {name}")


def _report(places: Sequence[Path], out: str, markdown: str | None, until: float | None = None) -> None:
    from . import records
    from .report import build

    built = build(places, out, markdown=markdown, until=until)
    _show_notes(built.notes)
    for record in map(records.load, built.records):
        rows = [[claim["name"], VERDICTS[claim["held"]], claim["measured"]] for claim in record["claims"]]
        title = f"{record['experiment']}, {records.badge(record)}: {record['data']['label']}"
        _table(title, ["Claim", "Verdict", "Measured"], rows)
    _say(f"claims: {built.held} held, {built.not_held} did not hold, {built.undecided} not enough runs")
    _say(f"report: {built.html}")
    _say(f"text:   {built.markdown}")


# lamina data


@data_app.callback(invoke_without_command=True)
def data_sets(context: typer.Context, data: DataOption = None) -> None:
    """Data sets: what is there, where, and under which licence."""
    if context.invoked_subcommand is not None:
        return
    from . import download

    rows = [
        [s.name, s.title, s.state, f"{s.size / 1e6:,.1f} MB" if s.size else "-", str(s.folder), s.licence]
        for s in download.status(data)
    ]
    _table("Data sets", ["Name", "Title", "State", "Size", "Folder", "Licence"], rows)
    _say("lamina data get NAME fetches one; an absent one has an embedded stand-in, and every result says so.")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="of the data set")],
    data: DataOption = None,
    mirror: Annotated[str | None, typer.Option(help="fetch from this address instead")] = None,
) -> None:
    """Fetch a data set; a transfer that broke off goes on where it stopped."""
    from . import download
    from .progress import Reporter

    with Reporter() as say:
        files = download.get(name, data, base_urls=(mirror and [mirror]) or None, progress=_Transfer(say))
    _say(f"{name}: {len(files)} file(s) in {files[0].parent}")


class _Transfer:
    """Bytes so far as a bar on a terminal, or as a line now and then."""

    def __init__(self, say: Any) -> None:
        self.say, self.begun = say, set[str]()

    def __call__(self, done: int, total: int | None, name: str) -> None:
        if name not in self.begun:
            self.begun.add(name)
            self.say.begin(name, done, total or done + 1)
        self.say.advance(name, done, total or done + 1, {})


@data_app.command()
def check(name: Annotated[str, typer.Argument(help="of the data set")], data: DataOption = None) -> None:
    """Load a data set and compare every byte with what was published."""
    from .data import load

    found = load(name, data)
    _say(f"{name}: {KINDS[found.kind]}: {found.label}")


# lamina analyse, bench, info


@app.command()
def analyse(
    paths: PathsArgument = None,
    metric: Annotated[str | None, typer.Option(help="lower is better (default: the experiment's headline)")] = None,
    target: Annotated[float | None, typer.Option(help="value to reach (default: the baseline's best)")] = None,
    baseline: Annotated[str, typer.Option(help="norm that ratios are taken to")] = "none",
    out: Annotated[str | None, typer.Option(help="JSON file for the rows")] = None,
) -> None:
    """Speed of convergence: updates to the best value and to a target, and their ratio to the baseline's."""
    from . import convergence
    from .report import gather

    if target is not None and not math.isfinite(target):
        raise fail("--target must be finite", repr(target), "Leave it out for the baseline's best.")
    _check_file(out, "--out")
    notes: list[str] = []
    found = [record for record in gather(_places(paths), notes)[0] if record["kind"] == "experiment"]
    if not found:
        raise fail("convergence is measured on runs", "none there", "Begin with: lamina run mnist")
    _show_notes(notes)
    rows = [row for record in found for row in convergence.analyse(record, metric, target, baseline)]
    title = "Updates until ...; ratios are to the baseline's, seed by seed"
    _table(title, convergence.COLUMNS, [convergence.cells(row) for row in rows])
    _write_json(out, {"schema": 1, "kind": "convergence", "baseline": baseline, "rows": rows})


@app.command()
def tune(
    paths: PathsArgument = None,
    out: Annotated[str, typer.Option(help="folder for the records")] = "runs",
) -> None:
    """Of runs over a grid (lamina run NAME --lr A,B,C), the settings that validate best, for lamina run --tuned."""
    from . import records, tuning

    places = _places(paths)
    writable_folder(out, "--out")
    for record in tuning.choose(places):
        rows = [[*map(str, row.values())] for row in record["chosen"]]
        _table(f"{record['experiment']}, {record['data']['label']}: {record['metric']}", [*record["chosen"][0]], rows)
        _say(f"record: {records.save(record, out)}")


def _write_json(out: str | None, record: dict[str, Any]) -> None:
    from . import records

    if out is not None:
        records.write(Path(out), json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        _say(f"record: {out}")


@app.command()
def bench(
    out: Annotated[str | None, typer.Option(help="JSON file for the record")] = None,
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option(help="a few updates of the small network only")] = False,
) -> None:
    """Training speed on this machine: each norm against none; on a GPU each engine, and seeds stacked."""
    one_of("--device", device, ("auto", "cpu", "cuda"))
    How(device=device).uses_cuda()
    _check_file(out, "--out")
    from . import bench

    record = bench.measure(device, quick, lambda text: print(text, file=sys.stderr))
    title = f"Milliseconds an update, mnist, batches of {record['batch_size']}, {record['device']}"
    _table(title, bench.COLUMNS, [bench.cells(row) for row in record["rows"]])
    _write_json(out, record)


@app.command()
def info() -> None:
    """Versions, devices, which backend serves the layers here and why, and where data are looked for."""
    from . import bench

    for name, value in bench.machine().items():
        _say(f"{name + ':':<18}{value}")
