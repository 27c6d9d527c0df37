"""Carry out jobs in this process, or in worker processes that take one run after another. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

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

    named: returns a job's name on the screen. after: returns a text to print when a job has ended; with it, jobs on a
    CPU always go to worker processes.
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
    """Send this process SIGTERM after this time: every run saves a checkpoint and ends."""
    over = threading.Event()

    def wait() -> None:
        over.wait(min(3600 * hours, threading.TIMEOUT_MAX))
        while not over.is_set() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # no handler yet
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
    """Runs ended by a signal, after every worker has ended."""

    def __init__(self, number: int, resume: bool) -> None:
        remedy = "the same command goes on" if resume else "go on with --resume"
        super().__init__(f"{signal.Signals(number).name}: runs that had begun saved a checkpoint, {remedy}")
        self.exit_code = 128 + number


@dataclass
class Pool:
    """Up to ``limit`` worker processes; shows their events with ``say`` and passes signals on to them."""

    jobs: Sequence[Job]
    settings: Settings
    limit: int
    say: Reporter
    named: Callable[[Job], str]
    after: Callable[[Job], str]
    codes: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)  # received so far, in their order

    def __post_init__(self) -> None:
        self._waiting, self._busy = list(self.jobs), set[Process]()

    def run(self) -> int:
        """Carry out every job; return the worst exit code."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            asyncio.run(self._all())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.signals:
            raise Stopped(self.signals[0], self.settings.resume)
        return max(self.codes, default=0)

    def _pass_on(self, number: int, frame: object) -> None:
        """Pass the first signal on, at which workers save a checkpoint; kill them at a second one."""
        self.signals.append(number)
        for process in self._busy:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number if len(self.signals) == 1 else signal.SIGKILL)

    async def _all(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(self.limit)))

    async def _work(self) -> None:
        """Give jobs to a worker process, and to another one if it dies, until none is left or a signal came."""
        while self._waiting and not self.signals:
            process = await self._started()
            try:
                while self._waiting and process.returncode is None:
                    self._busy.add(process)  # before the look at the signals: later ones reach the process
                    if self.signals:
                        break
                    await self._carry_out(process, self._waiting.pop(0))
                    self._busy.remove(process)
            finally:
                if process in self._busy and process.returncode is None:  # without a job, or after an error of ours
                    process.kill()
                cast(asyncio.StreamWriter, process.stdin).close()  # at which it ends
                await process.wait()

    async def _started(self) -> Process:
        # A new session, so that Ctrl-C reaches the parent only, which passes it on once. A second signal would end a
        # worker before its checkpoint is written.
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=2**24,  # bytes in a line
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // self.limit)), "PYTHONIOENCODING": "utf-8"},
        )

    async def _carry_out(self, process: Process, job: Job) -> None:
        """Order one job and show its events, until it is done or the worker has died."""
        orders, lines = cast(asyncio.StreamWriter, process.stdin), cast(asyncio.StreamReader, process.stdout)
        order = {"job": {**vars(job), "config": asdict(job.config)}, **asdict(self.settings)}
        with contextlib.suppress(ConnectionError):  # it has died: its output ends
            orders.write(f"{json.dumps(order)}\n".encode())
            await orders.drain()
        async for line in lines:
            event = parsed(line) or {"event": "line", "text": line.decode(errors="replace").rstrip()}
            if event["event"] == "done":
                return self._finished(job, int(event["code"]), event["text"])
            self._show(job, event)
        number = -await process.wait()
        death = f"ended by {signal.Signals(number).name}, which nobody here sent (out of memory?)" if number > 0 else ""
        self._finished(job, 1, death)

    def _show(self, job: Job, event: dict[str, Any]) -> None:
        """Show one event of a worker under its job's name."""
        name = self.named(job)
        if event["event"] == "line":
            self.say.line(f"{name}: {event['text'].removeprefix(f'{job.label}: ')}")
        else:
            getattr(self.say, event.pop("event"))(**{**event, "label": name})

    def _finished(self, job: Job, code: int, text: str) -> None:
        self.codes.append(code)
        name = self.named(job)
        if self.signals and code:
            self.say.end(name, "stopped")
            return
        if text:
            self.say.line(f"{name}: {text.removeprefix(f'{job.label}: ')}")
        failed = f", {sum(map(bool, self.codes))} of them failed" if any(self.codes) else ""
        progress = f"{len(self.codes)} of {len(self.jobs)} runs have ended{failed}"
        texts = ["not finished" if code else "done", progress, self.after(job)]
        self.say.end(name, "; ".join(filter(None, texts)))
