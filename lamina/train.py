"""The only training loop: any experiment, one process or many, one run or several side by side, never lost."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from . import data, engine, records
from .batches import Batches
from .errors import RunError, fail
from .experiments import Experiment, module_of
from .optim import Adam
from .progress import Reporter
from .runs import Checkpoint, RunFolder, rng_state, set_rng_state
from .sheets import Job, find
from .stack import Stack

MIXED = {"float32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
TOGETHER = 6  # runs side by side on one GPU, unless told otherwise


@dataclass(frozen=True)
class Settings:
    """How to run, not what: beyond rounding nothing here changes a result."""

    root: str | None = None  # of the data; None asks LAMINA_DATA, "embedded" takes the stand-in
    runs: Path = Path("runs")
    device: str = "auto"
    engine: str = "auto"
    together: int = 0  # runs side by side on one device; 0 chooses
    resume: bool = False
    restart: bool = False
    keep_best: bool = True
    command: str = ""


class Interrupted(Exception):
    """A signal asked for the end; every run has saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: checkpoint saved, go on with --resume")
        self.exit_code = 128 + number


@dataclass
class Stop:
    """Remembers the first SIGINT or SIGTERM; a second one ends the process at once."""

    number: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Clock:
    """Training time: stands still while runs evaluate, save and compile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.seconds += time.perf_counter() - self._since
        yield
        self._since = time.perf_counter()


def accelerator_for(settings: Settings, precision: str) -> Accelerator:
    """Accelerate's view of device and processes, for one precision of products."""
    cuda = torch.cuda.is_available()
    if settings.device not in ("auto", "cpu", "cuda"):
        raise fail("--device must be auto, cpu or cuda", repr(settings.device), "Leave it at auto.")
    if settings.device == "cuda" and not cuda:
        raise fail("--device cuda needs a CUDA device", "none found", "Use --device auto.")
    # Accelerate keeps one state for the process; runs of another precision or device begin with a fresh one. Under a
    # launcher the process group stays.
    AcceleratorState._reset_state(reset_partial_state="WORLD_SIZE" not in os.environ)
    accelerator = Accelerator(mixed_precision=MIXED[precision], cpu=settings.device == "cpu" or not cuda)
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return accelerator


class Run:
    """One job on its way: model, optimiser, folder, and where it stands."""

    def __init__(
        self, job: Job, settings: Settings, accelerator: Accelerator, dataset: data.Dataset, say: Reporter
    ) -> None:
        self.job, self.config, self.settings, self.accelerator, self.say = job, job.config, settings, accelerator, say
        self.sheet = find(job.experiment)
        self.experiment: Experiment = module_of(job.experiment)
        self.label = job.label
        self.data = dataset.describe()
        self.splits = {
            name: tuple(t.to(accelerator.device) for t in split)
            for name, split in self.experiment.splits(dataset, job.config).items()
        }
        self.batches = Batches(len(self.splits["train"][0]), self.config.batch_size, job.seeds)
        self.total_steps = self.batches.updates(self.config.epochs)
        self.step, self.until, self.logged, self.base_seconds = 0, 0, 0, 0.0
        self.side_by_side = 1
        self.folder: RunFolder | None = None
        self.best = math.inf
        self._check_shares()

    def _check_shares(self) -> None:
        parts = self.accelerator.num_processes * self.config.accumulate
        if self.config.batch_size % parts:
            raise fail(
                "--batch-size must divide evenly over processes and --accumulate",
                f"{self.config.batch_size} cases in {parts} parts",
                "Change one of them.",
            )
        if len(self.job.seeds) > 1 and self.accelerator.num_processes > 1:
            raise fail(
                "seeds are stacked in one process only",
                f"{self.accelerator.num_processes} processes",
                "Use --no-stack.",
            )

    # Getting ready

    def prepare(self, stack: ExitStack) -> bool:
        """Open the folder, build the model, go back to the last checkpoint; False when the run is finished."""
        found = self._opened(stack)
        if isinstance(found, dict):
            self.say.end(self.label, "already finished")
            return False
        self._build()
        if found is not None:
            self._resume(found)
        self._choose_engine()
        self.say.begin(self.label, self.step, self.total_steps)
        return True

    def _opened(self, stack: ExitStack) -> Checkpoint | dict[str, Any] | None:
        """The main process alone touches the folder; the others hear from it what it found, errors included."""
        told: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                told = [self._open(stack)]
            except Exception as error:
                told = [error]
        broadcast_object_list(told)
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0]  # type: ignore[no-any-return]

    def _open(self, stack: ExitStack) -> Checkpoint | dict[str, Any] | None:
        kind = f"{self.data['name']}-{self.data['kind']}"
        self.folder = stack.enter_context(RunFolder.open(self.settings.runs / self.job.experiment / kind / self.label))
        header = {
            "schema": 1,
            "experiment": self.job.experiment,
            "config": asdict(self.config),
            "seeds": list(self.job.seeds),
            "data": self.data,
            "environment": records.environment(),
            "command": self.settings.command,
        }
        self.folder.start(header, resume=self.settings.resume, restart=self.settings.restart)
        summary = self.folder.read_json("summary.json")
        if summary is not None:
            return dict(summary)
        found = self.folder.load()
        self._pass_on_notes()
        return found

    def _pass_on_notes(self) -> None:
        while self.folder is not None and self.folder.notes:
            self.say.line(f"{self.label}: {self.folder.notes.pop(0)}")

    def _build(self) -> None:
        models = [self._seeded(seed) for seed in self.job.seeds]
        model: nn.Module = models[0] if len(models) == 1 else Stack(models)
        model.to(self.accelerator.device)
        torch.manual_seed(self.job.seeds[0] + self.accelerator.process_index)
        optimizer = Adam(model.parameters(), self.config.lr, bias_correction=self.config.bias_correction)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.total = torch.zeros(len(models), device=self.accelerator.device)

    def _seeded(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.experiment.build(self.config, self.splits)

    @property
    def plain_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)  # type: ignore[no-any-return]

    def _choose_engine(self) -> None:
        name, reason = engine.choose(
            self.settings.engine, self.accelerator, self.config, self.sheet, self.total_steps - self.step
        )
        self.engine_name = name
        self.say.line(f"{self.label}: {self.data['label']}; {self.accelerator.device}; engine {name} ({reason})")
        plain = name in ("graph", "compile")
        update = engine.Update(
            self.experiment,
            self.config,
            self.plain_model if plain else self.model,
            self.optimizer.optimizer if plain else self.optimizer,
            self.splits["train"],
            self.accelerator,
            self.total,
            compiled=name == "compile",
        )
        self.steps = engine.Captured(update, self.batches, self.step) if plain else engine.Eager(update, self.batches)

    # Where it stands

    def _resume(self, found: Checkpoint) -> None:
        state = found.state
        self.plain_model.load_state_dict(found.weights)
        self.optimizer.load_state_dict(found.optimizer)
        self.step, self.logged, self.base_seconds = found.step, state["logged"], state["seconds"]
        self.best = math.inf if state["best"] is None else state["best"]
        self.total.copy_(torch.tensor(state["total"], dtype=torch.float64))
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        rank = self.accelerator.process_index
        if rank < len(state["rng"]):
            set_rng_state(state["rng"][rank])
        self.say.line(f"{self.label}: resumed at update {self.step:,}")

    def save(self, seconds: float, best: float | None = None) -> None:
        """A checkpoint of everything that the next update depends on; ``best`` marks it as the best so far."""
        rng = gather_object([rng_state()])
        if self.folder is None:
            return
        scaler = self.accelerator.scaler
        state = {
            "logged": self.logged,
            "seconds": self.base_seconds + seconds,
            "best": None if math.isinf(self.best) else self.best,
            "total": self.total.double().tolist(),
            "rng": rng,
            "sampler": {
                "cases": self.batches.cases,
                "batch_size": self.config.batch_size,
                "seeds": list(self.job.seeds),
            },
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self.folder.save(self.step, self.plain_model.state_dict(), self.optimizer.state_dict(), state, best=best)

    # Events: what happens between stretches of updates

    def next_event(self) -> int:
        """The update after which something is to be logged, evaluated or saved."""
        regular = (self.config.log_every, self.config.checkpoint_every)
        after = [self.step - self.step % every + every for every in regular]
        return min(*after, self._next_evaluation(), self.total_steps)

    def _next_evaluation(self) -> int:
        done = math.floor(self.batches.epoch(self.step) / self.config.eval_every + 1e-9)
        for number in (done, done + 1, done + 2):
            step = self.batches.updates(number * self.config.eval_every)
            if number and step > self.step:
                return step
        return self.total_steps

    def _is_evaluation(self) -> bool:
        number = round(self.batches.epoch(self.step) / self.config.eval_every)
        near = (self.batches.updates(n * self.config.eval_every) for n in (number - 1, number, number + 1) if n > 0)
        return self.step == self.total_steps or self.step in near

    def handle(self, seconds: float) -> None:
        """Log, evaluate, save: whatever is due at this update."""
        self.steps.wait()
        losses = self._checked_losses()
        end = self.step == self.total_steps
        if end or self.step % self.config.log_every == 0:
            self._log(losses, seconds)
        better = self._is_evaluation() and self._evaluate(seconds)
        if end or better or self.step % self.config.checkpoint_every == 0:
            self.save(seconds, self.best if better else None)
        if end:
            self._finish(seconds)

    def _checked_losses(self) -> list[float]:
        """Mean loss of each seed since the last log line; a run whose every seed has diverged ends here."""
        total = self.accelerator.reduce(self.total, "mean") if self.accelerator.num_processes > 1 else self.total
        losses: list[float] = (total / max(self.step - self.logged, 1)).tolist()
        if not any(map(math.isfinite, losses)):
            raise RunError(
                f"{self.label}: the loss is not finite at update {self.step} (seeds {list(self.job.seeds)}); earlier "
                "checkpoints are intact. Lower --lr or set --clip"
            )
        return losses

    def _log(self, losses: Sequence[float], seconds: float) -> None:
        self._write("log", seconds, [{"loss": value} for value in losses])
        finite = [value for value in losses if math.isfinite(value)]
        self.say.advance(self.label, self.step, self.total_steps, {"loss": sum(finite) / len(finite)})
        self.total.zero_()
        self.logged = self.step

    def _evaluate(self, seconds: float) -> bool:
        """Metrics of every seed; True when the headline is the best so far and such checkpoints are kept."""
        model = self.plain_model
        model.eval()
        with torch.no_grad():
            found = self.experiment.evaluate(model, self.splits, self.config)
        model.train()
        columns = {name: value.reshape(-1).tolist() for name, value in found.items()}
        rows = [{name: values[k] for name, values in columns.items()} for k in range(len(self.job.seeds))]
        self._write("eval", seconds, rows)
        if self.sheet.headline not in columns:
            return False
        values = columns[self.sheet.headline]
        mean = sum(values) / len(values)
        self.say.advance(self.label, self.step, self.total_steps, {self.sheet.headline: mean})
        if not mean < self.best:
            return False
        self.best = mean
        return self.settings.keep_best

    def _write(self, kind: str, seconds: float, rows: Sequence[dict[str, float]]) -> None:
        if self.folder is None:
            return
        when = {
            "kind": kind,
            "step": self.step,
            "epoch": round(self.batches.epoch(self.step), 6),
            "seconds": round(self.base_seconds + seconds, 4),
        }
        self.folder.log([{**when, "seed": seed, **row} for seed, row in zip(self.job.seeds, rows)])
        self._pass_on_notes()

    def _finish(self, seconds: float) -> None:
        model = self.plain_model
        model.eval()
        members = [model.member(k) for k in range(model.members)] if isinstance(model, Stack) else [model]
        extras = {str(s): self.experiment.inspect(m, self.splits, self.config) for s, m in zip(self.job.seeds, members)}
        if self.folder is None:
            return
        if any(extras.values()):
            self.folder.write_json("extras.json", extras)
        summary = {
            "finished": True,
            "steps": self.step,
            "seconds": round(self.base_seconds + seconds, 4),
            "side_by_side": self.side_by_side,
            "engine": self.engine_name,
            "processes": self.accelerator.num_processes,
        }
        self.folder.write_json("summary.json", summary)
        self.say.end(self.label, f"finished, {self.step:,} updates in {summary['seconds']:.1f} s of training")


def train(jobs: Sequence[Job], settings: Settings, say: Reporter) -> None:
    """Train every job, some side by side where that is faster; finished ones are passed over when resuming."""
    waiting = list(jobs)
    failures: list[str] = []  # a run that fails ends alone; the others go on, and all is told at the end
    with Stop() as stop:
        while waiting:
            accelerator = accelerator_for(settings, waiting[0].config.precision)
            limit = settings.together or (TOGETHER if accelerator.device.type == "cuda" else 1)
            alike = [job for job in waiting if job.config.precision == waiting[0].config.precision][:limit]
            waiting = [job for job in waiting if job not in alike]
            with ExitStack() as folders:
                runs = [Run(job, settings, accelerator, _dataset(job, settings), say) for job in alike]
                active = [run for run in runs if run.prepare(folders)]
                for run in active:
                    run.side_by_side = sum(len(other.job.seeds) for other in active)
                failures += _together(active, accelerator, stop)
    if failures:
        raise RunError("; ".join(failures))


def _dataset(job: Job, settings: Settings) -> data.Dataset:
    return data.load(getattr(job.config, "dataset"), settings.root)  # noqa: B009  (a field of each experiment's own)


def _together(runs: list[Run], accelerator: Accelerator, stop: Stop) -> list[str]:
    """A few updates of each run in turn; on a GPU they only enqueue work, so the runs overlap. Returns failures."""
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
            if run.step == run.until:
                failure = _event(run, clock)
                failures += [failure] if failure else []
                if failure or run.step == run.total_steps:
                    runs.remove(run)
        if _asked_to_stop(stop, accelerator, runs):
            with clock.stopped():
                for run in runs:
                    run.steps.wait()
                    run._checked_losses()
                    run.save(clock.seconds)
            raise Interrupted(stop.number or signal.SIGTERM)
    return failures


def _event(run: Run, clock: Clock) -> str:
    """What is due between two stretches of updates; returns the reason when the run cannot go on."""
    run.steps.wait()  # on the clock: this is training
    with clock.stopped():
        try:
            run.handle(clock.seconds)
        except RunError as error:
            run.say.end(run.label, f"stopped: {error}")
            return str(error)
        run.until = run.next_event()
        if run.step < run.total_steps:
            run.steps.begin(run.step, run.until - run.step)
    return ""


def _asked_to_stop(stop: Stop, accelerator: Accelerator, runs: Sequence[Run]) -> bool:
    """Whether a signal came; several processes agree on the update at which they look."""
    if accelerator.num_processes == 1:
        return bool(stop.number) and bool(runs)
    if not runs or runs[0].step != runs[0].logged:
        return False
    flag = torch.tensor([float(stop.number)], device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum").item())
