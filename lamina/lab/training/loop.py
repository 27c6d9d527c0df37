"""Training loop of every experiment: one or several processes, one or several runs side by side, resumable."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator

from ...errors import RunError
from ..experiment import Job
from ..options import Settings
from ..protocol import module_of
from ..runs.progress import Reporter
from .control import Clock, Diverged, Interrupted, Stop, accelerator_for
from .run import Run

__all__ = ["Diverged", "Interrupted", "Run", "Settings", "train"]

TOGETHER = 6  # default number of runs side by side on one GPU


def train(jobs: Sequence[Job], settings: Settings, say: Reporter) -> None:
    """Train every job, several at a time on a GPU; skip finished ones when resuming."""
    waiting = list(jobs)
    failures: list[str] = []  # a failure ends one run; all failures are raised at the end
    accelerator: Accelerator | None = None
    with Stop() as stop:
        while waiting:
            accelerator = accelerator_for(settings, waiting[0].config.precision)
            limit = settings.together or (TOGETHER if accelerator.device.type == "cuda" else 1)
            if accelerator.scaler is not None:
                limit = 1  # accelerate has one loss scale: runs that shared it would change one another
            alike = [job for job in waiting if job.config.precision == waiting[0].config.precision][:limit]
            waiting = [job for job in waiting if job not in alike]
            with ExitStack() as folders:
                runs = [Run(job, settings, accelerator, _loaded(job, settings), say) for job in alike]
                active = [run for run in runs if run.prepare(folders)]
                for run in active:
                    run.side_by_side = len(active)
                failures += _together(active, accelerator, stop)
    if accelerator is not None and accelerator.num_processes > 1:
        # Leave together, so that no process waits for one that has ended. A sum, because accelerate's own barrier asks
        # for a GPU of the process's number, on the CPU too.
        accelerator.reduce(torch.zeros(1, device=accelerator.device), "sum")
        accelerator.end_training()
    if failures:
        raise RunError("; ".join(failures))


def _loaded(job: Job, settings: Settings) -> Any:
    return module_of(job.experiment).load(job.config, settings.root)


def _together(runs: list[Run], accelerator: Accelerator, stop: Stop) -> list[str]:
    """Launch a few updates of each run in turn, which overlap on a GPU; return the errors that ended runs early."""
    clock = Clock()
    failures: list[str] = []
    for run in runs:
        with clock.stopped():
            run.until = run.next_event()
            run.steps.begin(run.step, run.until - run.step)
    while runs:
        for run in list(runs):
            count = min(run.steps.burst, run.until - run.step)
            run.steps.launch(run.step, count)
            run.step += count
            run.say.move(run.label, run.step, run.total_steps)
            if run.step == run.until:
                failure = _event(run, clock)
                failures += [failure] if failure else []
                if failure or run.step == run.total_steps:
                    runs.remove(run)
        if _asked_to_stop(stop, accelerator, runs):
            with clock.stopped():
                for run in runs:
                    _save_unless_diverged(run, clock.seconds)
            raise Interrupted(stop.number or signal.SIGTERM)
    return failures


def _save_unless_diverged(run: Run, seconds: float) -> None:
    run.steps.wait()
    try:
        run._checked_loss()
    except Diverged as error:
        run.say.line(str(error))  # keep its earlier checkpoints; the other runs are still to be saved
    else:
        run.save(seconds)


def _event(run: Run, clock: Clock) -> str:
    """Log, evaluate and save between updates; return the error if it ends the run."""
    run.steps.wait()  # before the clock stops: this is training time
    with clock.stopped():
        try:
            run.handle(clock.seconds)
        except RunError as error:
            if run.accelerator.num_processes > 1 and not isinstance(error, Diverged):
                raise  # only the first process sees a full disk: the others would wait for ever
            run.say.end(run.label, f"stopped: {error}")
            return str(error)
        run.until = run.next_event()
        if run.step < run.total_steps:
            run.steps.begin(run.step, run.until - run.step)
    return ""


def _asked_to_stop(stop: Stop, accelerator: Accelerator, runs: Sequence[Run]) -> bool:
    """Return whether a signal came. Several processes look at the same update, so that all see it."""
    if accelerator.num_processes == 1:
        return bool(stop.number) and bool(runs)
    if not runs or runs[0].step != runs[0].logged:
        return False
    flag = torch.tensor([float(stop.number)], device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum").item())
