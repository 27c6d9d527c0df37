"""The command line. Torch and other slow imports wait inside the commands that need them: help comes at once."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import rich  # noqa: F401  (imported by screen.py; its absence is reported here)
    import typer
    from typer.core import TyperGroup
except ImportError as missing:
    from ...errors import not_installed

    print(f"lamina: {not_installed(missing.name)}", file=sys.stderr)
    raise SystemExit(2) from None

from ...errors import InputError, RunError, fail, not_installed, one_of
from ..experiment import SCALES
from ..experiments import SHEETS
from ..options import Settings
from . import nearest, reading, running, searching, suites
from .jobs import DeviceOption, processes, rank, uses_cuda, writable_folder
from .screen import KINDS, say, show_notes, show_report, table

LAB = ("accelerate", "jinja2", "matplotlib", "safetensors", "scipy", "sklearn", "tensorboard")


class Commands(TyperGroup):
    """A group that suggests the nearest name for one it does not know."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            one_of("experiment" if self.name == "run" else "command", args[0], self.commands)
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(cls=Commands, help="Data sets: what is there, fetch one, check one.")
app.add_typer(running.run_app, name="run", cls=Commands)
app.add_typer(data_app, name="data")


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
        text, code = message_and_code(error)
        process = f" (process {rank()})" if rank() else ""
        print(f"lamina{process}: {' '.join(text.split())}", file=sys.stderr)
        return code


def run_and_exit() -> None:
    """Run ``main`` and end the process.

    One of several processes skips the interpreter's shutdown: torch keeps the threads of gloo alive after
    DistributedDataParallel was used, and processes with such threads have aborted at shutdown ("terminate called
    without an active exception"). Every file is closed by now, so nothing is lost.
    """
    code = main()
    if processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def message_and_code(error: BaseException) -> tuple[str, int]:
    """Return the message of an error and the exit code. Raise a mistake of ours again: it keeps its traceback."""
    if hasattr(error, "format_message"):  # a usage error, of whichever click typer was built on
        return str(error.format_message()), int(getattr(error, "exit_code", 2))
    if isinstance(error, (InputError, RunError)):
        return str(error), 2 if isinstance(error, InputError) else 1
    if hasattr(error, "exit_code"):  # a signal ended the runs
        return str(error), int(error.exit_code)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", 130
    if isinstance(error, OSError):
        return f"{error.filename or 'the system'}: {error.strerror or error}", 1
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in LAB:
        return not_installed(error.name), 2
    if isinstance(error, MemoryError) or any(words in str(error) for words in ("out of memory", "allocate memory")):
        return f"not enough memory. Take a smaller network or batch ({error})", 1
    raise error


def _show_version(requested: bool) -> None:
    if requested:
        from ... import __version__

        say(f"lamina {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")] = False,
) -> None:
    """Layer Normalization (Ba, Kiros, Hinton 2016): the paper's experiments, their data and the report."""


@app.command("list")
def list_experiments() -> None:
    """List the experiments, and how to run them."""
    sheets = SHEETS.values()
    rows = [[s.name, s.section, s.title, ", ".join(s.datasets)] for s in sheets]
    table("Experiments", ["Name", "Section", "Title", "Data sets"], rows)
    sizes = [(s.name, name, size) for s in sheets for name, size in s.scales.items()]
    rows = [[experiment, name, str(size.seeds), size.about] for experiment, name, size in sizes if not size.explores]
    table("Scales", ["Experiment", "Scale", "Seeds", "Data and time"], rows)
    rows = [[experiment, name, size.explores, size.about] for experiment, name, size in sizes if size.explores]
    table("Explorations (--scale): why a claim did not reproduce", ["Experiment", "Name", "Claim", "Change"], rows)
    example = next(iter(SHEETS))
    for command, meaning in (
        (f"lamina run {example}", "one run with the paper's settings"),
        (f"lamina run {example} --scale smoke --data embedded", "what its claims compare, in a minute"),
        (f"lamina run {example} --help", "every setting"),
        ("lamina reproduce", "all of them, small, with a report"),
        ("lamina paper --data DIR", "all whose real data are in DIR, sized for two cores"),
    ):
        say(f"{command:<56}{meaning}")


PathsArgument = Annotated[list[str] | None, typer.Argument(help="folders of runs, and records (default: runs)")]
DataOption = Annotated[str | None, typer.Option("--data", help="folder of data sets (default: LAMINA_DATA, or cache)")]


app.command()(running.reproduce)
app.command()(running.paper)
app.command()(searching.search)
app.command()(reading.read)
app.command()(nearest.nearest)


@app.command()
def report(
    paths: PathsArgument = None,
    out: Annotated[str, typer.Option(help="folder for page, figures and records")] = "report",
    markdown: Annotated[str | None, typer.Option(help="where RESULTS.md goes instead")] = None,
    until: Annotated[float | None, typer.Option(help="judge every run at this epoch (default: at its end)")] = None,
) -> None:
    """Show runs and records as one page (report.html), RESULTS.md, figures and records."""
    places = _places(paths)
    writable_folder(out, "--out")
    _check_file(markdown, "--markdown")
    if until is not None and not (math.isfinite(until) and until > 0):
        raise fail("--until must be an epoch above 0", repr(until), "Leave it out for the runs' own ends.")
    from ..reports.page import build

    show_report(build(places, out, markdown=markdown, until=until))


def _places(paths: Sequence[str] | None) -> list[Path]:
    places = [Path(path) for path in paths or ["runs"]]
    for place in places:
        if not place.exists():
            received = f"{place}, which is not there"
            raise fail("this reads folders of runs, and records", received, "Begin with: lamina run mnist")
    return places


def _check_file(path: str | None, name: str) -> None:
    """Check before the work that a file can be written."""
    if path is not None:
        if Path(path).is_dir() or not Path(path).name:
            raise fail(f"{name} must be a file", repr(path), "Pass a file name.")
        writable_folder(Path(path).parent, f"the folder of {name}")


@data_app.callback(invoke_without_command=True)
def data_sets(context: typer.Context, data: DataOption = None) -> None:
    """List the data sets: which are there, where, and under which licence."""
    if context.invoked_subcommand is not None:
        return
    from ..data import registry

    rows = list[list[str]]()
    for s in registry.SOURCES.values():
        folder, state, size = registry.status(s, data)
        rows.append([s.name, s.title, state, f"{size / 1e6:,.1f} MB" if size else "-", str(folder), s.licence])
    table("Data sets", ["Name", "Title", "State", "Size", "Folder", "Licence"], rows)
    say("lamina data get NAME fetches one, or says which files to bring.")
    say("An absent one has an embedded stand-in, and every result says so.")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="of the data set")],
    data: DataOption = None,
    mirror: Annotated[str | None, typer.Option(help="fetch from this address instead")] = None,
) -> None:
    """Fetch a data set and check every byte; files that are there and right are not fetched again."""
    from ..data import fetch

    files = fetch.get(name, data, base_urls=(mirror and [mirror]) or None)
    say(f"{name}: {len(files)} file(s) in {files[0].parent}")


@data_app.command()
def check(name: Annotated[str, typer.Argument(help="of the data set")], data: DataOption = None) -> None:
    """Load a data set and compare every byte with what was published; an absent one is an error."""
    from ..data.registry import asked_root, default_root, extras, load

    dataset = load(name, asked_root(data) or default_root())  # without a folder, load would return the stand-in
    for file, path in extras(name, data).items():
        file.read(path)
    say(f"{name}: {KINDS[dataset.kind]}: {dataset.label}")
    show_notes(dataset.notes)


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(help="folder of one run")],
    data: DataOption = None,
    device: DeviceOption = "auto",
    suite: Annotated[str | None, typer.Option(help="sentences: tasks for the vectors of skip_thoughts")] = None,
    tasks: Annotated[str | None, typer.Option(help="of the suite: SICK,MR,CR,SUBJ,MPQA (default: all)")] = None,
    protocol: Annotated[str | None, typer.Option(help="of the suite: kiros (default) or senteval")] = None,
    vectors: Annotated[str | None, typer.Option(help="word vectors for words that training never saw")] = None,
) -> None:
    """Run the evaluations that are too long for training on a run's best checkpoint. A second call resumes a first."""
    names = suites.checked(suite, tasks, protocol, vectors)
    settings = Settings(root=data, device=device)
    if suite is not None:
        return suites.evaluate_sentences(Path(run), settings, names, protocol or "kiros", vectors)
    from ..runs.progress import Reporter
    from ..training.evaluate import evaluate as measure

    with Reporter() as reporter:
        metrics = measure(Path(run), settings, reporter)
    title = f"Checkpoint at update {metrics.pop('update'):,}"
    table(title, ["Metric", "Value"], [[name, f"{value:.5g}"] for name, value in metrics.items()])


@app.command()
def tune(
    paths: PathsArgument = None,
    out: Annotated[str, typer.Option(help="folder for the records")] = "runs",
    scale: Annotated[str, typer.Option(help="scale whose settings were searched, for the record's name")] = "",
) -> None:
    """Choose from runs over a grid (lamina run NAME --lr A,B,C) what validates best, for lamina run --tuned."""
    from ..reports import records, tuning

    places = _places(paths)
    writable_folder(out, "--out")
    if scale:
        one_of("--scale", scale, SCALES)
    for record in tuning.choose(places, scale):
        rows = [[*map(str, row.values())] for row in record["chosen"]]
        table(f"{record['experiment']}, {record['data']['label']}: {record['metric']}", [*record["chosen"][0]], rows)
        say(f"record: {records.save(record, out)}")


@app.command()
def analyse(
    out: Annotated[str, typer.Option(help="folder for analysis.html and the pictures")] = "analysis",
    seed: Annotated[int, typer.Option(help="of the random layers and data")] = 0,
) -> None:
    """Work out section 5 of the paper: invariances, Fisher matrices, learning rates, noise, with pictures."""
    folder = writable_folder(out, "--out")
    from ...analysis import invariance_table
    from ..reports import analysis
    from .screen import Screen

    Screen().print(invariance_table(seed=seed).rich())
    parts = analysis.study(seed, lambda part: print(f"{part} done", file=sys.stderr))
    for drawing, _, data_table in parts:
        if data_table and drawing.name != "invariances":
            table(data_table.caption, data_table.columns, data_table.rows)
    say(f"page: {analysis.write(parts, folder, seed)[0]}")


@app.command()
def bench(
    out: Annotated[str | None, typer.Option(help="JSON file for the record")] = None,
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option(help="a few updates of the small network only")] = False,
) -> None:
    """Measure training speed on this machine: each norm against none, on a GPU with each engine."""
    one_of("--device", device, ("auto", "cpu", "cuda"))
    uses_cuda(Settings(device=device))
    _check_file(out, "--out")
    from ..reports import records
    from . import bench

    record = bench.measure(device, quick, lambda text: print(text, file=sys.stderr))
    title = f"Milliseconds an update, mnist, batches of {record['batch_size']}, {record['device']}; "
    title += f"median of {record['rounds']} rounds (quartiles)"
    table(title, bench.COLUMNS, [bench.cells(row) for row in record["rows"]])
    if out is not None:
        records.write(Path(out), json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        say(f"record: {out}")


@app.command()
def info() -> None:
    """Show versions, devices, which backend serves the layers and why, and where data are looked for."""
    from . import bench

    for name, value in bench.machine().items():
        say(f"{name + ':':<18}{value}")
