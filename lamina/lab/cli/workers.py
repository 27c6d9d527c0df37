"""Jobs carried out: here, or in processes of their own when there are several. No torch in this room."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rich.console import Console

from ..experiments import Job
from ..runs.progress import Reporter
from .jobs import How, flag, processes, rank

MOVED_ON = re.compile(r"([\d,]+)/([\d,]+)  (.*?)  +[\d.]+/s")  # of a line that says how far a run has come


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    from ..training.loop import Settings, train

    names = ("device", "engine", "together", "resume", "restart", "keep_best")
    shared = {name: getattr(how, name) for name in names}
    train(jobs, Settings(root=how.data, runs=Path(how.runs), command=how.command, **shared), say)


def _in_processes(jobs: Sequence[Job], how: How, data: Mapping[str, str], limit: int, say: Reporter) -> int:
    """Finished runs are passed over here: a process takes seconds to find that out."""
    folders = [Path(how.runs) / job.experiment / data[job.experiment] / job.label for job in jobs]
    left = [job for job, folder in zip(jobs, folders) if not (how.resume and _is_done(job, folder))]
    if len(left) < len(jobs):
        say.line(f"{len(jobs) - len(left)} of {len(jobs)} runs are finished already")
    tasks = [task_for(job, how, f"{job.experiment}/{job.label}" if len(data) > 1 else job.label) for job in left]
    return Pool(tasks, limit, say).run()


def _is_done(job: Job, folder: Path) -> bool:
    """Whether the folder holds this very run, finished; anything else is for the run itself to judge."""
    from ..runs import folder as runs

    if not folder.is_dir():
        return False
    found = runs.status(folder)
    header = found["header"] or {}
    same = (header.get("config"), header.get("seeds")) == (dataclasses.asdict(job.config), list(job.seeds))
    return bool(found["finished"]) and same


@dataclass(frozen=True)
class Task:
    """A run for a process of its own: what it is called on the screen, and the arguments of ``lamina``."""

    name: str
    arguments: tuple[str, ...]


def task_for(job: Job, how: How, name: str) -> Task:
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
