"""A toy experiment with all that a sequence experiment needs: ragged text, a metric that is better the higher it is and
evaluated often, a rarer one, one on checkpoints, a loss that draws noise, one that couples its batch, a picture.

``python -m tests.lab.toy`` is the ``lamina`` command with this experiment added.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import fail
from lamina.lab.data.text import Ragged, Vocabulary
from lamina.lab.experiment import Axis, Config, Every, Scale, Sheet, option
from lamina.lab.experiments import SHEETS
from lamina.lab.protocol import Evaluation, Loss
from lamina.lab.results import Metric
from lamina.lab.training.batches import BucketedBatches
from lamina.lab.training.draws import Draws

TEXT = Path(__file__).parents[1] / "data" / "treasure_island.txt"
HELD_OUT = 16


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    """Settings of the toy."""

    updates: int = option(60, "updates", least=0)
    batch_size: int = option(8, "lines in a batch", sweep=True, least=1)
    eval_updates: int = option(30, "updates between evaluations", least=0)
    log_every: int = option(10, "updates", least=1)
    checkpoint_every: int = option(25, "updates", least=1)
    objective: str = option("next", "next letter, or the fitting half", choices=("next", "halves"), sweep=True)
    units: int = option(12, "units", least=1)
    noise: float = option(0.1, "deviation of the noise", least=0)
    accident: str = option("none", "in the first update", choices=("none", "kill", "mistake"), sweep=True)

    def coupling(self) -> str:
        return "in-batch negatives" if self.objective == "halves" else ""


@dataclass(frozen=True)
class Lines:
    """Lines of a text as letters, and what they are called in a run's folder."""

    lines: Ragged
    letters: int
    kind: str

    def describe(self) -> dict[str, Any]:
        return {"name": "lines", "kind": self.kind, "label": f"lines of a story ({self.kind})", "sha256": {}}

    def to(self, device: torch.device) -> Lines:
        return replace(self, lines=self.lines.to(device))


def load(config: ToyConfig, root: str | None) -> Lines:
    """Call the text real where a folder was asked for that holds it."""
    kind = "embedded" if root in (None, "embedded") else "real"
    path = Path(root) / TEXT.name if kind == "real" else TEXT
    if not path.exists():
        raise fail("--data must be a folder with the lines in it", str(root), "Pass another.")
    return _read(path, kind)


@lru_cache
def _read(path: Path, kind: str) -> Lines:
    lines = [line for line in path.read_text().splitlines() if 20 <= len(line) <= 60]
    vocabulary = Vocabulary(Counter("".join(lines)))
    return Lines(Ragged.of([vocabulary.encode(line) for line in lines]), len(vocabulary), kind)


class Reader(nn.Module):
    """Letters to states."""

    def __init__(self, letters: int, config: ToyConfig) -> None:
        super().__init__()
        self.config, units = config, config.units
        self.embedding = nn.Embedding(letters, units)
        self.recurrence = nn.GRU(units, units, batch_first=True)
        self.logits = nn.Linear(units, letters)

    def forward(self, letters: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        states: Tensor = self.recurrence(self.embedding(letters) + noise)[0]
        return states

    def ends(self, letters: Tensor, lengths: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return the state after the last letter of each line."""
        return self(letters, noise)[torch.arange(len(letters)), lengths - 1]

    def halves(self, letters: Tensor, lengths: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return how well each first half fits each second half."""
        middle = lengths // 2
        first = self.ends(letters, middle, noise)
        place = (torch.arange(letters.shape[1]) + middle.unsqueeze(1)).clamp(max=letters.shape[1] - 1)
        second = self.ends(letters.gather(1, place), lengths - middle, noise)
        return F.normalize(first, dim=1) @ F.normalize(second, dim=1).T


def build(config: ToyConfig, data: Lines) -> Reader:
    return Reader(data.letters, config)


def batches(config: ToyConfig, data: Lines, seed: int) -> BucketedBatches:
    lengths = data.lines.offsets.diff()[HELD_OUT:].tolist()
    return BucketedBatches(lengths, config.batch_size, seed, bucket=4, drop_last=bool(config.coupling()))


def batch(data: Lines, index: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"text": data.lines.padded(index + HELD_OUT)}


def loss(model: Reader, batch: Mapping[str, Any], draws: Draws) -> Loss:
    letters, lengths = batch["text"]
    reader = model if isinstance(model, Reader) else model.module  # DistributedDataParallel's
    if reader.config.accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif reader.config.accident == "mistake":
        raise RuntimeError("a mistake of ours")
    noise = reader.config.noise * draws.normal(1, reader.config.units)
    if reader.config.objective == "halves":
        fits = 10 * reader.halves(letters, lengths, noise)
        return Loss(F.cross_entropy(fits, torch.arange(len(fits)), reduction="sum"), len(fits))
    logits = reader.logits(model(letters[:, :-1], noise))
    beyond = torch.arange(1, letters.shape[1]) >= lengths.unsqueeze(1)
    wanted = letters[:, 1:].masked_fill(beyond, -100)
    total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    return Loss(total, (lengths - 1).sum())


def recall(model: Reader, data: Lines, config: ToyConfig, *_: Any) -> dict[str, Tensor]:
    """Return the share of first halves whose second half fits best."""
    fits = model.halves(*data.lines.padded(torch.arange(HELD_OUT)))
    return {"recall": (fits.argmax(1) == torch.arange(HELD_OUT)).float().mean()}


def held_out_loss(model: Reader, data: Lines, config: ToyConfig, draws: Draws, _: Any) -> dict[str, Tensor]:
    found = loss(model, {"text": data.lines.padded(torch.arange(HELD_OUT))}, draws.of_cases(HELD_OUT))
    return {"valid_loss": found.total / found.weight}


def line_by_line(model: Reader, data: Lines, config: ToyConfig, draws: Draws, progress: Any) -> dict[str, float]:
    """Measure the loss of each held-out line with noise of its own: slow, and so on a checkpoint."""

    def measured(number: int) -> float:
        found = loss(model, {"text": data.lines.padded(torch.tensor([number]))}, draws)
        return float(found.total / found.weight)

    lines = [progress(f"line {number}", lambda number=number: measured(number)) for number in range(4)]
    return {"line_loss": sum(lines) / len(lines)}


def evaluations(config: ToyConfig) -> tuple[Evaluation, ...]:
    return (
        Evaluation("retrieval", recall),
        Evaluation("held out", held_out_loss, every=Every(epochs=1)),
        Evaluation("lines", line_by_line, on_checkpoint=True),
    )


def inspect(model: Reader, data: Lines, config: ToyConfig) -> dict[str, list[float]]:
    return {"bias": model.logits.bias.tolist()}


def artefacts(model: Reader, data: Lines, config: ToyConfig, draws: Draws, folder: Path) -> None:
    """Draw which halves fit."""
    fits = model.halves(*data.lines.padded(torch.arange(HELD_OUT)))
    Image.fromarray(((fits + 1) * 127.5).byte().numpy()).save(folder / "fits.png")


SHEET = Sheet(
    name="toy",
    title="Lines of a story",
    section="0",
    about="A recurrent network of {units} units reads lines of a story.",
    config=ToyConfig,
    module="tests.lab.toy",
    axes=(Axis("objective", {"next": "next letter", "halves": "fitting halves"}, "next"),),
    scales={
        "smoke": Scale("a story, seconds", seeds=2, values={"objective": ("next", "halves")}),
        "laptop": Scale("a story, seconds", seeds=2, values={"objective": ("next", "halves")}),
    },
    datasets=("lines",),
    figures=(),
    numbers=(),
    claims=(),
    headline=Metric("recall", "recall", better="higher"),
    metrics=(Metric("valid_loss", "loss of held-out lines"),),
    fixed_shapes=False,
    sampled=True,
)


def main() -> int:
    """Carry out a command with the toy among the experiments; ``worker`` is a worker process with it."""
    from tests.lab import toy

    SHEETS["toy"] = toy.SHEET
    from lamina.lab.cli import commands, worker

    if sys.argv[1:] == ["worker"]:
        worker.main()
        return 0
    commands.run_and_exit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
