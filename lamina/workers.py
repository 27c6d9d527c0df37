"""From options to runs, and the processes that carry them out when there are several. No torch in this room."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from .errors import fail, one_of
from .progress import Reporter
from .sheets import Config, Job, Sheet

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KINDS = {int: "a whole number", float: "a number", str: "a name"}
MOVED_ON = re.compile(r"([\d,]+)/([\d,]+)  (.*?)  +[\d.]+/s")  # of a line that says how far a run has come


# Which runs


def flag(name: str) -> str:
    """``batch_size`` as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def parse(item: dataclasses.Field[Any], text: str) -> tuple[Any, ...]:
    """The value of a setting, or those of a comma list; their ranges are the settings' own business."""
    words = text.split(",") if item.metadata["sweep"] else [text]
    return tuple(_parse_one(item, word.strip()) for word in words)


def _parse_one(item: dataclasses.Field[Any], word: str) -> Any:
    kind: Any = type(item.default)
    try:
        if word:
            return kind(word)
    except ValueError:
        pass
    several = ", or several with commas between" if item.metadata["sweep"] else ""
    raise fail(f"{flag(item.name)} must be {KINDS[kind]}{several}", repr(word), f"The default is {item.default}.")


def combine(sheet: Sheet, values: Mapping[str, Sequence[Any]]) -> list[Config]:
    """The settings of every combination of values, each of them checked."""
    for name, several in values.items():
        twice = [value for value, count in Counter(several).items() if count > 1]
        if twice:
            raise fail(f"{flag(name)} takes each value once", f"{twice[0]} twice", "Leave one out.")
    return [sheet.config(**dict(zip(values, chosen))) for chosen in itertools.product(*values.values())]


def jobs_for(sheet: Sheet, configs: Sequence[Config], seeds: Sequence[int], stacked: bool) -> list[Job]:
    """One job for each of the settings and each seed, or for all seeds together; no two share a folder."""
    groups = [tuple(seeds)] if stacked else [(seed,) for seed in seeds]
    jobs = [Job(sheet.name, config, group, _vary(sheet, config)) for config in configs for group in groups]
    label, count = Counter(job.label for job in jobs).most_common(1)[0]
    if count > 1:
        raise fail("each run needs a folder of its own", f"{count} runs named {label}", "Give values further apart.")
    return jobs


def _vary(sheet: Sheet, config: Config) -> tuple[str, ...]:
    """The settings in a run's label follow from the settings alone, so any command finds the same folder again."""
    swept = [f for f in dataclasses.fields(config) if f.metadata["sweep"] and f.name not in sheet.vary]
    return (*sheet.vary, *(f.name for f in swept if getattr(config, f.name) != f.default))


def _is_done(job: Job, folder: Path) -> bool:
    """Whether the folder holds this very run, finished; anything else is for the run itself to judge."""
    from . import runs

    if not folder.is_dir():
        return False
    found = runs.status(folder)
    header = found["header"] or {}
    same = (header.get("config"), header.get("seeds")) == (dataclasses.asdict(job.config), list(job.seeds))
    return bool(found["finished"]) and same


# How to run


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How to run", **more)


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A reader of whole numbers in a range that tells what it got."""

    def parse(given: Any) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(f"must be a whole number from {least} to {most}, got {given!r}.")
        return number

    return parse


@dataclass
class How:
    """The options of ``lamina run`` that are not settings of the experiment."""

    seeds: Annotated[int, _option("number of seeds", metavar="N", parser=whole(1, 1000))] = 1
    first_seed: Annotated[int, _option("the first of them", metavar="N", parser=whole(0, 2**31))] = 0
    stack: Annotated[bool | None, _option("train all seeds as one model (default: on a GPU)")] = None
    small: Annotated[bool, _option("begin from the small settings of lamina reproduce", "--small")] = False
    tuned: Annotated[str | None, _option("record of lamina tune: each variant with what was chosen for it")] = None
    data: Annotated[str | None, _option("folder with the data sets, or embedded for the stand-in")] = None
    runs: Annotated[str, _option("folder for the runs")] = "runs"
    device: Annotated[str, _option("auto, cpu or cuda")] = "auto"
    engine: Annotated[str, _option("auto, eager, graph (CUDA graph) or compile")] = "auto"
    together: Annotated[
        int, _option("runs side by side on one device; 0 chooses", metavar="N", parser=whole(0, 64))
    ] = 0
    jobs: Annotated[
        int | None, _option("processes (default: cores; 1 on a GPU)", metavar="N", parser=whole(1, 999))
    ] = None
    resume: Annotated[bool, _option("go on where runs stopped; finished ones are passed over", "--resume")] = False
    restart: Annotated[bool, _option("begin anew; what is there is moved to old-1, old-2 ...", "--restart")] = False
    keep_best: Annotated[bool, _option("keep the checkpoint that validates best")] = True
    quiet: Annotated[bool, _option("no progress, only the results", "--quiet")] = False
    worker_of: Annotated[str | None, _option("the command this process works for", hidden=True)] = None
    command: str = field(default="", init=False)  # as it was typed, for the runs' headers

    def check(self, sheet: Sheet) -> None:
        """What can be told to be wrong without torch or data."""
        one_of("--device", self.device, ("auto", "cpu", "cuda"))
        one_of("--engine", self.engine, ("auto", "eager", "graph", "compile"))
        if self.data == "":
            raise fail("--data must be a folder, or embedded", "''", "Leave it out for the default.")
        if self.resume and self.restart:
            raise fail("a run is resumed or begun anew", "--resume and --restart together", "Pass one of them.")
        if self.stack and not sheet.stackable:
            raise fail("--stack needs an experiment whose seeds can be stacked", sheet.name, "Leave it out.")
        if processes() > 1 and (self.jobs or 1) > 1:
            raise fail("--jobs is 1 when a launcher starts the processes", f"--jobs {self.jobs}", "Leave it out.")
        writable_folder(self.runs, "--runs")

    def uses_cuda(self) -> bool:
        """Whether runs will be on a GPU; only there can an update be captured."""
        cuda = False
        if self.device != "cpu":
            import torch

            cuda = torch.cuda.is_available()
        if self.device == "cuda" and not cuda:
            raise fail("--device cuda needs a CUDA device", "none found", "Use --device auto.")
        if self.engine in ("graph", "compile") and not cuda:
            raise fail(f"--engine {self.engine} needs a CUDA device", "the CPU", "Use --engine auto.")
        return cuda


def writable_folder(path: Path | str, name: str) -> Path:
    """A folder that can be made and written to, or the user hears of it before anything starts."""
    try:
        if not str(path):
            raise FileNotFoundError(errno.ENOENT, "no name")
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no right to write")
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        received = f"{str(path)!r} ({error.strerror})"
        raise fail(f"{name} must be a folder to write to", received, "Pass another.") from None
    return Path(path)


def processes() -> int:
    """Those that torchrun or accelerate launch started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Which of them this one is."""
    return int(os.environ.get("RANK") or 0)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Here, or in processes of their own


def carry_out(jobs: Sequence[Job], how: How, data: Mapping[str, str]) -> int:
    """Train the jobs and return the exit code; ``data`` names each experiment's folder of runs (``mnist-real``)."""
    kind = _Unread if how.worker_of is not None else Console
    console = kind(stderr=True, highlight=False, quiet=how.quiet or rank() > 0)
    limit = how.jobs or (1 if processes() > 1 or how.uses_cuda() else min(cores(), len(jobs)))
    with Reporter(console) as say:
        if min(limit, len(jobs)) > 1:
            return _in_processes(jobs, how, data, limit, say)
        _train_here(jobs, how, say)
    return 0


class _Unread(Console):
    """A console whose reader may die: the run lives on until its checkpoint is saved (see ``watch_parent``)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _train_here(jobs: Sequence[Job], how: How, say: Reporter) -> None:
    from .train import Settings, train

    names = ("device", "engine", "together", "resume", "restart", "keep_best")
    shared = {name: getattr(how, name) for name in names}
    train(jobs, Settings(root=how.data, runs=Path(how.runs), command=how.command, **shared), say)


def _in_processes(jobs: Sequence[Job], how: How, data: Mapping[str, str], limit: int, say: Reporter) -> int:
    """Finished runs are passed over here: a process takes seconds to find that out."""
    folders = [Path(how.runs) / job.experiment / data[job.experiment] / job.label for job in jobs]
    left = [job for job, folder in zip(jobs, folders) if not (how.resume and _is_done(job, folder))]
    if len(left) < len(jobs):
        say.line(f"{len(jobs) - len(left)} of {len(jobs)} runs are finished already")
    tasks = [_task_for(job, how, f"{job.experiment}/{job.label}" if len(data) > 1 else job.label) for job in left]
    return Pool(tasks, limit, say).run()


@dataclass(frozen=True)
class Task:
    """A run for a process of its own: what it is called on the screen, and the arguments of ``lamina``."""

    name: str
    arguments: tuple[str, ...]


def _task_for(job: Job, how: How, name: str) -> Task:
    """The command line of exactly this job."""
    settings = {f.name: getattr(job.config, f.name) for f in dataclasses.fields(job.config)}
    passed_on = ("data", "runs", "device", "engine", "together", "resume", "restart", "keep_best")
    options = {name: getattr(how, name) for name in passed_on}
    seeds = {"first_seed": job.seeds[0], "seeds": len(job.seeds), "stack": len(job.seeds) > 1}
    everything = {**settings, **options, **seeds, "jobs": 1, "worker_of": how.command}
    words = [_word(key, value) for key, value in everything.items() if value is not None]
    return Task(name, ("run", job.experiment, *filter(None, words)))


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        negative = f"--no-{flag(key)[2:]}" if key in ("keep_best", "stack") else ""
        return flag(key) if value else negative
    return f"{flag(key)}={value}"


def watch_parent() -> None:
    """End this process in good order when standard input closes, which it does however the parent ends."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Stopped(Exception):
    """A signal asked for the end; every child has ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: runs that had begun saved a checkpoint, go on with --resume")
        self.exit_code = 128 + number


@dataclass
class _Child:
    task: Task
    process: subprocess.Popen[str]
    reader: threading.Thread
    told: int = 0  # signals passed on


@dataclass
class Pool:
    """Up to ``limit`` child processes at a time; what they say goes to ``say``, and signals go to them."""

    tasks: Sequence[Task]
    limit: int
    say: Reporter
    codes: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # signals that came, in their order

    def __post_init__(self) -> None:
        self._waiting, self._running, self._bars = list(self.tasks), list[_Child](), set[str]()
        self._lines: queue.Queue[tuple[Task, str]] = queue.Queue()

    def run(self) -> int:
        """Carry out every task; returns the worst exit code of them."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._running or (self._waiting and not self.asked):
                self._start()
                self._pass_on_signals()
                self._relay(wait=0.05)
                self._reap()
        finally:
            for child in self._running:  # only after an error of our own
                child.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.asked:
            raise Stopped(self.asked[0])
        return max(self.codes, default=0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.limit and not self.asked:
            task = self._waiting.pop(0)
            # A session of its own: Ctrl-C reaches the parent alone, which passes it on once. A second would end a child
            # before its checkpoint is written.
            process = subprocess.Popen(
                [sys.executable, "-m", "lamina", *task.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // self.limit)), "PYTHONIOENCODING": "utf-8"},
            )
            reader = threading.Thread(target=self._read, args=(task, process.stdout), daemon=True)
            reader.start()
            self._running.append(_Child(task, process, reader))

    def _read(self, task: Task, lines: IO[str]) -> None:
        for line in lines:
            self._lines.put((task, line.rstrip()))

    def _pass_on_signals(self) -> None:
        """The first signal asks for a checkpoint; after a second nobody waits for it."""
        for child in self._running:
            if self.asked and not child.told:
                child.process.send_signal(self.asked[0])
                child.told = 1
            elif len(self.asked) > 1:
                child.process.kill()

    def _relay(self, wait: float) -> None:
        try:
            self._show(*self._lines.get(timeout=wait))
            while True:
                self._show(*self._lines.get_nowait())
        except queue.Empty:
            pass

    def _show(self, task: Task, line: str) -> None:
        said = line.removeprefix("lamina: ")
        said = said.split(": ", 1)[-1] if said.startswith(task.name.split("/")[-1] + ": ") else said
        moved = MOVED_ON.match(said)
        if moved and self.say.console.is_terminal:
            step, total = (int(number.replace(",", "")) for number in moved.groups()[:2])
            self._move_bar(task.name, step, total, moved[3])
        elif said:
            self.say.line(f"{task.name}: {said}")

    def _move_bar(self, name: str, step: int, total: int, figures: str) -> None:
        if name not in self._bars:
            self._bars.add(name)
            self.say.begin(name, step, total)
        words = figures.split()
        self.say.advance(name, step, total, {k: float(v) for k, v in zip(words[::2], words[1::2])})

    def _reap(self) -> None:
        for child in [c for c in self._running if c.process.poll() is not None]:
            self._running.remove(child)
            child.reader.join(timeout=5)
            self._relay(wait=0.001)
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    pipe.close()
            self._take_note(child)

    def _take_note(self, child: _Child) -> None:
        code, name = child.process.returncode, child.task.name
        self.codes.append(code if code in (0, 2) else 1)
        if code < 0 and not self.asked:
            self.say.line(f"{name}: ended by {signal.Signals(-code).name}, which nobody here sent (out of memory?)")
        if len(self.tasks) > 1:
            done, failed = len(self.codes), sum(map(bool, self.codes))
            text = f"{done} of {len(self.tasks)} runs have ended" + (f", {failed} of them failed" if failed else "")
            self.say.end(name, f"{'done' if code == 0 else 'not finished'}; {text}")
