"""Evaluations that take too long for training: on a run's best checkpoint, resumable, with progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...errors import fail
from ..experiment import Config
from ..experiments import find
from ..protocol import Evaluation, module_of
from ..runs.folder import Checkpoint, RunFolder, status
from ..runs.progress import Reporter
from .control import Settings, accelerator_for
from .draws import draws_of_evaluation

RESULT = "evaluated.json"


def evaluate(path: Path, settings: Settings, say: Reporter) -> dict[str, Any]:
    """Measure what the experiment measures on checkpoints; return metrics by name, and the update they are of."""
    header = status(path)["header"]
    if header is None:
        raise fail("lamina evaluate needs the folder of a run", str(path), "Pass one that holds config.json.")
    sheet = find(header["experiment"])
    config = sheet.config(**header["config"])
    wanted = [one for one in module_of(sheet.name).evaluations(config) if one.on_checkpoint]
    if not wanted:
        raise fail("an experiment must have evaluations of checkpoints", sheet.name, "Its curves tell all there is.")
    with RunFolder.open(path) as folder:
        return _evaluate(folder, header, config, wanted, settings, say)


def _evaluate(
    folder: RunFolder,
    header: dict[str, Any],
    config: Config,
    wanted: list[Evaluation],
    settings: Settings,
    say: Reporter,
) -> dict[str, Any]:
    checkpoint = folder.best_checkpoint()
    if checkpoint is None:
        raise fail("an evaluation needs a checkpoint", f"{folder.path} without one", "Train the run first.")
    experiment, seed = module_of(header["experiment"]), int(header["seeds"][0])
    device = accelerator_for(settings, config.precision).device
    data = experiment.load(config, settings.root).to(device)
    model = experiment.build(config, data).to(device)
    model.load_state_dict(checkpoint.weights)
    model.eval()
    found: dict[str, Any] = {"update": checkpoint.step}
    for number, evaluation in enumerate(wanted):
        draws = draws_of_evaluation(seed, checkpoint.step, number, device)
        progress = _Told(folder, checkpoint, evaluation.name, say)
        with torch.no_grad():
            measured = evaluation.run(model, data, config, draws, progress)
        found |= {name: float(value) for name, value in measured.items()}
    folder.write_json(RESULT, found)
    return found


class _Told:
    """Parts of an evaluation, each told on the screen and kept in the run's folder."""

    def __init__(self, folder: RunFolder, checkpoint: Checkpoint, name: str, say: Reporter) -> None:
        self.memo, self.name, self.say = folder.memo(name, checkpoint), name, say

    def __call__(self, part: str, compute: Any) -> Any:
        value = self.memo(part, compute)
        self.say.line(f"{self.name}: {part} done")
        return value
