"""One run: model, optimiser, folder and progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from ...optim import Adam
from ..experiment import Every, Job, check_parts
from ..experiments import find
from ..options import Settings
from ..protocol import Evaluation, Experiment, module_of
from ..runs.environment import environment
from ..runs.folder import Checkpoint, RunFolder
from ..runs.progress import Reporter
from . import update as engine
from .batches import length_in_updates
from .control import Diverged
from .draws import Draws, draws_of_evaluation

SCHEMA = 2  # of the header in a run's folder


def at_once(part: str, compute: Callable[[], Any]) -> Any:
    """Compute a part of an evaluation without storing it, as evaluations during training do."""
    return compute()


class Run:
    """Model, optimiser, folder and progress of one job."""

    def __init__(self, job: Job, settings: Settings, accelerator: Accelerator, data: Any, say: Reporter) -> None:
        self.job, self.config, self.settings, self.accelerator, self.say = job, job.config, settings, accelerator, say
        self.sheet = find(job.experiment)
        self.experiment: Experiment = module_of(job.experiment)
        self.label = job.label
        self.described = data.describe()
        self.data = data.to(accelerator.device)
        self.batches = self.experiment.batches(job.config, self.data, job.seed)
        measured = [one for one in self.experiment.evaluations(job.config) if not one.on_checkpoint]
        self.evaluations = [one for one in measured if not one.at_best]
        self.at_best = [one for one in measured if one.at_best]
        self.total_steps = length_in_updates(self.batches, self.config.length)
        self.step, self.until, self.logged, self.base_seconds = 0, 0, 0, 0.0
        self.side_by_side = 1
        self.folder: RunFolder | None = None
        self.headline = self.sheet.headline
        self.best = self.headline.worst
        check_parts(self.config, self.config.accumulate, accelerator.num_processes)

    # Getting ready

    def prepare(self, stack: ExitStack) -> bool:
        """Open the folder, build the model, go back to the last checkpoint; False when the run is finished."""
        opened = self._opened(stack)
        if isinstance(opened, dict):
            self.say.end(self.label, "already finished")
            return False
        self._build()
        if opened is not None:
            self._resume(opened)
        self._choose_engine()
        if self.step == self.total_steps:  # killed after the last checkpoint, before the summary
            self._finish(0.0)
            return False
        self.say.begin(self.label, self.step, self.total_steps)
        return True

    def _opened(self, stack: ExitStack) -> Checkpoint | dict[str, Any] | None:
        """Open the folder in the main process only; broadcast the checkpoint, the summary or the error."""
        outcome: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                outcome = [self._open(stack)]
            except Exception as error:
                outcome = [error]
        broadcast_object_list(outcome)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]  # type: ignore[no-any-return]

    def _open(self, stack: ExitStack) -> Checkpoint | dict[str, Any] | None:
        home = self.job.home(self.settings.runs, f"{self.described['name']}-{self.described['kind']}")
        self.folder = stack.enter_context(RunFolder.open(home / self.label))
        header = {
            "schema": SCHEMA,
            "experiment": self.job.experiment,
            "scale": self.job.scale,
            "config": asdict(self.config),
            "seeds": [self.job.seed],
            "data": self.described,
            "environment": environment(),
            "command": self.settings.command,
        }
        self.folder.start(header, resume=self.settings.resume, restart=self.settings.restart)
        summary = self.folder.read_json("summary.json")
        if summary is not None:
            return dict(summary)
        checkpoint = self.folder.load()
        self._pass_on_notes()
        return checkpoint

    def _pass_on_notes(self) -> None:
        while self.folder is not None and self.folder.notes:
            self.say.line(f"{self.label}: {self.folder.notes.pop(0)}")

    def _build(self) -> None:
        torch.manual_seed(self.job.seed)
        model = self.experiment.build(self.config, self.data).to(self.accelerator.device)
        optimizer = Adam(model.parameters(), self.config.lr, bias_correction=self.config.bias_correction)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.total = torch.zeros((), device=self.accelerator.device)

    @property
    def plain_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)  # type: ignore[no-any-return]

    def _choose_engine(self) -> None:
        name, reason = engine.choose(self.settings.engine, self.accelerator, self.config, self.sheet)
        self.engine_name = name
        label = self.described["label"]
        self.say.line(f"{self.label}: {label}; {self.accelerator.device}; engine {name} ({reason})")
        self._warn()
        captured = name == "graph"
        update = engine.Update(
            self.experiment,
            self.config,
            self.plain_model if captured else self.model,
            self.optimizer.optimizer if captured else self.optimizer,
            self.data,
            self.accelerator,
            self.total,
            self.job.seed,
            self.sheet.sampled,
        )
        self.steps = (
            engine.Captured(update, self.batches, self.step) if captured else engine.Eager(update, self.batches)
        )

    def _warn(self) -> None:
        """Warn if the device does not support the requested precision."""
        if self.config.precision == "tf32" and self.accelerator.device.type == "cpu":
            self.say.line(f"{self.label}: a CPU has no tf32 and computes in float32")

    # Where it stands

    def _resume(self, found: Checkpoint) -> None:
        state = found.state
        self.plain_model.load_state_dict(found.weights)
        self.optimizer.load_state_dict(found.optimizer)
        self.step, self.logged, self.base_seconds = found.step, state["logged"], state["seconds"]
        self.best = self.headline.worst if state["best"] is None else state["best"]
        self.total.fill_(state["total"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.say.line(f"{self.label}: resumed at update {self.step:,}")

    def save(self, seconds: float, best: float | None = None) -> None:
        """Save everything that the next update depends on; ``best`` marks the checkpoint as the best so far.

        Cases and random numbers depend on seed and update only, so no generator is saved.
        """
        total = self._mean_total()
        if self.folder is None:
            return
        scaler = self.accelerator.scaler
        state = {
            "logged": self.logged,
            "seconds": self.base_seconds + seconds,
            "best": self.best if math.isfinite(self.best) else None,
            "total": total.double().item(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self.folder.save(self.step, self.plain_model.state_dict(), self.optimizer.state_dict(), state, best=best)

    # Events: what happens between stretches of updates

    def next_event(self) -> int:
        """Return the update after which something is to be logged, evaluated or saved."""
        regular = (self.config.log_every, self.config.checkpoint_every)
        after = [self.step - self.step % every + every for every in regular]
        evaluations = (self._next(self._interval(one)) for one in self.evaluations)
        return min(*after, *evaluations, self.total_steps)

    def _interval(self, evaluation: Evaluation) -> Every:
        return evaluation.every or self.config.evaluation_interval

    def _next(self, every: Every) -> int:
        """Return the next multiple of a length of training."""
        if every.updates:
            return self.step - self.step % every.updates + every.updates
        done = math.floor(self.batches.epoch(self.step) / every.epochs + 1e-9)
        for number in (done, done + 1, done + 2):
            step = self.batches.updates(number * every.epochs)
            if number and step > self.step:
                return step
        return self.total_steps

    def _is_due(self, every: Every) -> bool:
        if every.updates or self.step == self.total_steps:
            return self.step == self.total_steps or self.step % every.updates == 0
        number = round(self.batches.epoch(self.step) / every.epochs)
        near = (self.batches.updates(n * every.epochs) for n in (number - 1, number, number + 1) if n > 0)
        return self.step in near

    def handle(self, seconds: float) -> None:
        """Log, evaluate and save what is due at this update."""
        self.steps.wait()
        loss = self._checked_loss()
        end = self.step == self.total_steps
        if end or self.step % self.config.log_every == 0:
            self._log(loss, seconds)
        better = self._evaluate(seconds)
        if end or better or self.step % self.config.checkpoint_every == 0:
            self.save(seconds, self.best if better else None)
        if end:
            self._finish(seconds)

    def _mean_total(self) -> torch.Tensor:
        """Return the sum of losses since the last log line, over all processes."""
        several = self.accelerator.num_processes > 1
        return self.accelerator.reduce(self.total, "mean") if several else self.total

    def _checked_loss(self) -> float:
        """Return the mean loss since the last log line; raise if it is not finite."""
        loss: float = (self._mean_total() / max(self.step - self.logged, 1)).item()
        if not math.isfinite(loss):
            raise Diverged(
                f"{self.label}: the loss is not finite at update {self.step} (seed {self.job.seed}); earlier "
                "checkpoints are intact. Lower --lr or set --clip"
            )
        return loss

    def _log(self, loss: float, seconds: float) -> None:
        self._write("log", seconds, {"loss": loss})
        self.say.advance(self.label, self.step, self.total_steps, {"loss": loss})
        self.total.zero_()
        self.logged = self.step

    def _evaluate(self, seconds: float) -> bool:
        """Run the evaluations that are due; return whether to save this checkpoint as the best so far."""
        metrics: dict[str, float] = {}
        for evaluation in self.evaluations:
            if self._is_due(self._interval(evaluation)):
                metrics |= self._measured(evaluation)
        if metrics:
            self._write("eval", seconds, metrics)
        value = metrics.get(self.headline.name)
        if value is None:
            return False
        self.say.advance(self.label, self.step, self.total_steps, {self.headline.name: value})
        if not self.headline.is_better(value, self.best):
            return False
        self.best = value
        return self.settings.keep_best

    def _measured(self, evaluation: Evaluation) -> dict[str, float]:
        """Return metrics by name. All processes use those of the first, so that all save at the same updates."""
        measured = self._run(evaluation)
        self.plain_model.train()
        metrics: list[dict[str, float]] = [{name: float(value) for name, value in measured.items()}]
        return broadcast_object_list(metrics)[0]  # type: ignore[no-any-return]

    def _run(self, evaluation: Evaluation) -> Mapping[str, Any]:
        model = self.plain_model
        model.eval()
        with torch.no_grad():
            return evaluation.run(model, self.data, self.config, self._draws(evaluation.name), at_once)

    def _measure_best(self, folder: RunFolder, seconds: float) -> dict[str, list[float]]:
        """Log what the best checkpoint is to be measured on, and return the metrics that are lists."""
        best = folder.best_checkpoint() if self.at_best else None
        if best is None:
            return {}
        self.plain_model.load_state_dict(best.weights)
        measured = {name: torch.as_tensor(v) for one in self.at_best for name, v in self._run(one).items()}
        self._write("eval", seconds, {name: float(value) for name, value in measured.items() if not value.dim()})
        return {name: value.tolist() for name, value in measured.items() if value.dim()}

    def _draws(self, purpose: str) -> Draws:
        return draws_of_evaluation(self.job.seed, self.step, purpose, self.accelerator.device)

    def _write(self, kind: str, seconds: float, row: Mapping[str, float]) -> None:
        if self.folder is None:
            return
        when = {
            "kind": kind,
            "step": self.step,
            "epoch": round(self.batches.epoch(self.step), 6),
            "seconds": round(self.base_seconds + seconds, 4),
        }
        self.folder.log([{**when, "seed": self.job.seed, **row}])
        self._pass_on_notes()

    def _finish(self, seconds: float) -> None:
        model = self.plain_model
        model.eval()
        draws = self._draws("artefacts")
        extras = self.experiment.inspect(model, self.data, self.config)
        if self.folder is None:
            return
        with torch.no_grad():
            self.experiment.artefacts(model, self.data, self.config, draws, self.folder.artefacts)
        if extras := {**extras, **self._measure_best(self.folder, seconds)}:
            self.folder.write_json("extras.json", {str(self.job.seed): extras})
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
