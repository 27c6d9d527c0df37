"""Long evaluations of a run's best checkpoint: outside training, resumable, with progress."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import fail
from ..experiment import Config
from ..experiments import find
from ..options import Settings
from ..protocol import Evaluation, module_of
from ..runs.folder import Checkpoint, RunFolder, status
from ..runs.progress import Reporter
from .control import accelerator_for
from .draws import draws_of_evaluation
from .run import SCHEMA

RESULT = "evaluated.json"


def evaluate(path: Path, settings: Settings, say: Reporter) -> dict[str, Any]:
    """Run the experiment's evaluations of checkpoints; return metrics by name, and the checkpoint's update."""
    header = header_of(path, "lamina evaluate")
    name, config = header["experiment"], config_of(header)
    wanted = [one for one in module_of(name).evaluations(config) if one.on_checkpoint]
    if not wanted:
        raise fail("an experiment must have evaluations of checkpoints", name, "Its curves tell all there is.")
    with RunFolder.open(path) as folder:
        return _evaluate(folder, header, wanted, settings, say)


def header_of(path: Path, command: str) -> dict[str, Any]:
    """Return the header of a run's folder, or raise if it has none that this version reads."""
    header: dict[str, Any] | None = status(path)["header"]
    if header is None or header.get("schema") != SCHEMA:
        received = f"{path}, {'another' if header else 'none'}"
        raise fail(f"{command} needs the folder of a run of schema {SCHEMA}", received, "Pass another folder.")
    return header


def config_of(header: dict[str, Any]) -> Config:
    return find(header["experiment"]).config(**header["config"])


class Restored(NamedTuple):
    """Best model of a run, in evaluation mode, and the data of its training."""

    model: nn.Module
    data: Any
    checkpoint: Checkpoint
    device: torch.device


def restored(folder: RunFolder, header: dict[str, Any], settings: Settings) -> Restored:
    """Load data and model of a run's best checkpoint."""
    checkpoint, config = folder.best_checkpoint(), config_of(header)
    if checkpoint is None:
        raise fail("an evaluation needs a checkpoint", f"{folder.path} without one", "Train the run first.")
    experiment = module_of(header["experiment"])
    device = accelerator_for(settings, config.precision).device
    data = experiment.load(config, settings.root).to(device)
    _check_same_data(header["data"], data.describe())
    torch.manual_seed(int(header["seeds"][0]))
    model = experiment.build(config, data).to(device)
    model.load_state_dict(checkpoint.weights)
    return Restored(model.eval(), data, checkpoint, device)


def _evaluate(
    folder: RunFolder, header: dict[str, Any], wanted: list[Evaluation], settings: Settings, say: Reporter
) -> dict[str, Any]:
    model, data, checkpoint, device = restored(folder, header, settings)
    metrics: dict[str, Any] = {"update": checkpoint.step}
    for evaluation in wanted:
        progress = _Parts(folder, checkpoint, evaluation.name, say, int(header["seeds"][0]), device)
        with torch.no_grad():
            measured = evaluation.run(model, data, config_of(header), progress.draws, progress)
        metrics |= {name: float(value) for name, value in measured.items()}
    folder.write_json(RESULT, metrics)
    return metrics


def _check_same_data(trained: dict[str, Any], here: dict[str, Any]) -> None:
    if any(trained.get(name) != here.get(name) for name in ("name", "kind", "sha256")):
        received = f"{trained.get('label')} then and {here.get('label')} now"
        raise fail("an evaluation reads the data of its training", received, "Pass --data as for lamina run.")


class _Parts:
    """Parts of an evaluation, each reported on the screen and stored in the run's folder.

    Each part has its own seed, so it draws the same numbers whether earlier parts were stored or computed.
    """

    def __init__(
        self, folder: RunFolder, checkpoint: Checkpoint, name: str, say: Reporter, seed: int, device: torch.device
    ) -> None:
        self.memo, self.name, self.say = folder.memo(name, checkpoint), name, say
        self.draws_of = partial(draws_of_evaluation, seed, checkpoint.step, device=device)
        self.draws = self.draws_of(name)

    def __call__(self, part: str, compute: Callable[[], Any]) -> Any:
        value = self.memo(part, lambda: self._compute(part, compute))
        self.say.line(f"{self.name}: {part} done")
        return value

    def _compute(self, part: str, compute: Callable[[], Any]) -> Any:
        part_draws = self.draws_of(f"{self.name}: {part}")
        self.draws.once().manual_seed(part_draws.once().initial_seed())
        return compute()
