"""Carry out jobs: here, or in worker processes that take one run after another. No torch in this room."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO

from rich.console import Console

from ..experiment import Job
from ..options import Settings
from ..runs.files import parsed
from ..runs.progress import Reporter
from .jobs import processes, rank, uses_cuda

PROGRAM = ("-m", "lamina.lab.cli.worker")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def carry_out(
    jobs: Sequence[Job], settings: Settings, named: Callable[[Job], str], after: Callable[[Job], str] | None = None
) -> int:
    """Train the jobs and return the exit code.

    named: names on the screen. after: what to say when a job has ended; jobs on a CPU go to worker processes then.
    """
    console = Console(stderr=True, highlight=False, quiet=settings.quiet or rank() > 0)
    alone = processes() > 1 or (uses_cuda(settings) and settings.jobs is None)
    limit = 1 if alone else min(settings.jobs or cores(), len(jobs))
    with Reporter(console) as say, _time_limit(settings.hours, say):
        if limit > 1 or (after and not alone):
            return Pool(jobs, settings, limit, say, named, after or (lambda job: "")).run()
        train_here(jobs, settings, say)
    return 0


@contextlib.contextmanager
def _time_limit(hours: float, say: Reporter) -> Iterator[None]:
    """Send this process SIGTERM after so long: every run saves a checkpoint and ends."""
    over = threading.Event()

    def wait() -> None:
        over.wait(min(3600 * hours, threading.TIMEOUT_MAX))
        while not over.is_set() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # nobody listens yet
            over.wait(0.05)
        if not over.is_set():
            say.line(f"{hours:g} hours are over: every run saves a checkpoint")
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def train_here(jobs: Sequence[Job], settings: Settings, say: Reporter) -> None:
    """Train the jobs in this process."""
    from ..training.loop import train

    train(jobs, settings, say)


class Stopped(Exception):
    """The end that a signal asked for; every worker has ended."""

    def __init__(self, number: int, resume: bool) -> None:
        remedy = "the same command goes on" if resume else "go on with --resume"
        super().__init__(f"{signal.Signals(number).name}: runs that had begun saved a checkpoint, {remedy}")
        self.exit_code = 128 + number


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    reader: threading.Thread
    job: Job | None = None
    told: bool = False  # of the first signal


@dataclass
class Pool:
    """Up to ``limit`` worker processes; what they say goes to ``say``, and signals go to them."""

    jobs: Sequence[Job]
    settings: Settings
    limit: int
    say: Reporter
    named: Callable[[Job], str]
    after: Callable[[Job], str]
    codes: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # signals that came, in their order

    def __post_init__(self) -> None:
        self._waiting, self._workers = list(self.jobs), list[_Worker]()
        self._events: queue.Queue[tuple[_Worker, str]] = queue.Queue()

    def run(self) -> int:
        """Carry out every job; return the worst exit code."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, lambda number, frame: self.asked.append(number)) for one in numbers}
        try:
            while self._busy() or (self._waiting and not self.asked):
                self._start()
                self._pass_on_signals()
                self._relay(wait=0.05)
                self._bury()
        finally:
            self._dismiss()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.asked:
            raise Stopped(self.asked[0], self.settings.resume)
        return max(self.codes, default=0)

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _start(self) -> None:
        """Give every idle worker a job; start workers as long as there are jobs for them."""
        idle = [worker for worker in self._workers if worker.job is None and worker.process.poll() is None]
        while self._waiting and not self.asked and (idle or len(self._workers) < self.limit):
            worker = idle.pop() if idle else self._started()
            worker.job = self._waiting.pop(0)
            order = {"job": {**vars(worker.job), "config": asdict(worker.job.config)}, **asdict(self.settings)}
            with contextlib.suppress(BrokenPipeError):  # it has died; ``_bury`` tells
                print(json.dumps(order), file=worker.process.stdin, flush=True)

    def _started(self) -> _Worker:
        # A session of its own: Ctrl-C reaches the parent alone, which passes it on once. A second would end a worker
        # before its checkpoint is written.
        process = subprocess.Popen(
            [sys.executable, *PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // self.limit)), "PYTHONIOENCODING": "utf-8"},
        )
        worker = _Worker(process, threading.Thread(target=lambda: self._read(worker, process.stdout), daemon=True))
        worker.reader.start()
        self._workers.append(worker)
        return worker

    def _read(self, worker: _Worker, lines: IO[str] | None) -> None:
        for line in lines or ():
            self._events.put((worker, line))

    def _pass_on_signals(self) -> None:
        """Pass the first signal on, which asks for a checkpoint; a second one waits for nothing."""
        for worker in self._busy():
            if self.asked and not worker.told:
                worker.process.send_signal(self.asked[0])
                worker.told = True
            elif len(self.asked) > 1:
                worker.process.kill()

    def _relay(self, wait: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._hear(*self._events.get(timeout=wait))
            while True:
                self._hear(*self._events.get_nowait())

    def _hear(self, worker: _Worker, line: str) -> None:
        """Show one event of a worker under its job's name; anything that is no event is shown as it is."""
        name, label = (self.named(worker.job), worker.job.label) if worker.job else ("worker", "")
        event = parsed(line) or {"event": "line", "text": line.rstrip()}
        if event["event"] == "done":
            self._finished(worker, int(event["code"]), event["text"])
        elif event["event"] == "line":
            self.say.line(f"{name}: {event['text'].removeprefix(f'{label}: ')}")
        else:
            getattr(self.say, event.pop("event"))(**{**event, "label": name})

    def _finished(self, worker: _Worker, code: int, text: str) -> None:
        if worker.job is None:
            return
        job, worker.job = worker.job, None
        self.codes.append(code)
        name = self.named(job)
        if self.asked and code:
            self.say.end(name, "stopped")
            return
        if text:
            self.say.line(f"{name}: {text.removeprefix(f'{job.label}: ')}")
        failed = f", {sum(map(bool, self.codes))} of them failed" if any(self.codes) else ""
        told = f"{len(self.codes)} of {len(self.jobs)} runs have ended{failed}"
        self.say.end(name, "; ".join(filter(None, ["done" if code == 0 else "not finished", told, self.after(job)])))

    def _bury(self) -> None:
        """Take note of workers that died at work; another one is started for the jobs that are left."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            worker.reader.join(timeout=5)
            self._relay(wait=0.001)
            number, died = -worker.process.returncode, ""
            if number > 0:
                died = f"ended by {signal.Signals(number).name}, which nobody here sent (out of memory?)"
            self._finished(worker, 1, died)
            self._workers.remove(worker)
            _close(worker)

    def _dismiss(self) -> None:
        """Close the workers' inputs, at which they end; one that is still busy is left from an error of our own."""
        for worker in self._workers:
            if worker.job is not None:
                worker.process.kill()
            _close(worker)
            worker.process.wait()


def _close(worker: _Worker) -> None:
    for pipe in (worker.process.stdin, worker.process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
