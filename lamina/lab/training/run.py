"""One run on its way: model, optimiser, folder, and where it stands between two stretches of updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from ...errors import fail
from ...optim import Adam
from ...population_statistics import StatisticsModule
from ..data import registry
from ..experiment import check_statistics
from ..experiments import Job, find
from ..protocol import Experiment, module_of
from ..runs.environment import environment
from ..runs.folder import Checkpoint, RunFolder, rng_state, set_rng_state
from ..runs.progress import Reporter
from . import update as engine
from .batches import Batches
from .control import Diverged, Settings
from .stack import Stack


class Run:
    """One job on its way: model, optimiser, folder, and where it stands."""

    def __init__(
        self, job: Job, settings: Settings, accelerator: Accelerator, dataset: registry.Dataset, say: Reporter
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
        check_statistics(self.config, parts)
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
        if self.step == self.total_steps:  # killed after the last checkpoint, before the summary
            self._finish(0.0)
            return False
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
            "environment": environment(),
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
        self._warn()
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

    def _warn(self) -> None:
        """What may not be as the user thinks."""
        if self.config.precision == "tf32" and self.accelerator.device.type == "cpu":
            self.say.line(f"{self.label}: a CPU has no tf32 and computes in float32")
        own = any(isinstance(module, StatisticsModule) for module in self.plain_model.modules())
        if own and self.accelerator.num_processes > 1:
            self.say.line(f"{self.label}: batch norm's statistics are of each process's share of the batch")

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
        rng, total = gather_object([rng_state()]), self._mean_total()
        if self.folder is None:
            return
        scaler = self.accelerator.scaler
        state = {
            "logged": self.logged,
            "seconds": self.base_seconds + seconds,
            "best": None if math.isinf(self.best) else self.best,
            "total": total.double().tolist(),
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

    def _mean_total(self) -> torch.Tensor:
        """Summed losses of the seeds since the last log line, over all processes."""
        several = self.accelerator.num_processes > 1
        return self.accelerator.reduce(self.total, "mean") if several else self.total

    def _checked_losses(self) -> list[float]:
        """Mean loss of each seed since the last log line; a run whose every seed has diverged ends here."""
        losses: list[float] = (self._mean_total() / max(self.step - self.logged, 1)).tolist()
        if not any(map(math.isfinite, losses)):
            raise Diverged(
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
        # Processes may find different figures (batch norm's statistics are each one's own): the first one's count, or
        # some would save where others do not, and wait for ever.
        told = [{name: value.reshape(-1).tolist() for name, value in found.items()}]
        columns: dict[str, list[float]] = broadcast_object_list(told)[0]
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
