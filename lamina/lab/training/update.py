"""How one update is carried out: step by step, or captured once as a CUDA graph and replayed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...errors import fail, one_of
from ...optim import clip_gradients
from ..experiment import Config, Sheet
from ..protocol import Experiment, Loss
from .batches import Batches, ShuffledBatches
from .draws import Draws, draws_of_update

ENGINES = ("auto", "eager", "graph")


def choose(name: str, accelerator: Accelerator, config: Config, sheet: Sheet) -> tuple[str, str]:
    """Return the engine and the reason; one that was asked for and cannot serve raises."""
    one_of("--engine", name, ENGINES)
    obstacle = _obstacle(accelerator, config, sheet)
    if name == "graph" and obstacle:
        raise fail(f"--engine {name} needs one process on a GPU with fixed shapes", obstacle, "Use --engine auto.")
    if name != "auto":
        return name, "asked for"
    return ("eager", obstacle) if obstacle else ("graph", "captured as a CUDA graph: shapes are fixed")


def _obstacle(accelerator: Accelerator, config: Config, sheet: Sheet) -> str:
    """Return why an update cannot be captured; empty when it can."""
    if accelerator.device.type != "cuda":
        return f"no CUDA graphs on {accelerator.device.type}"
    if accelerator.num_processes > 1:
        return f"{accelerator.num_processes} processes exchange gradients from hooks"
    if config.precision == "fp16":
        return "fp16's loss scale is decided on the host"
    if sheet.sampled:
        return "the loss draws random numbers, which a graph would have to draw anew"
    return "" if sheet.fixed_shapes else "shapes change from batch to batch"


@dataclass
class Update:
    """One optimiser update, the same code for every engine. Losses are summed up on the device in ``total``."""

    experiment: Experiment
    config: Config
    model: nn.Module
    optimizer: Any
    data: Any
    accelerator: Accelerator
    total: Tensor  # [], sum of the updates' mean losses
    seed: int

    def __call__(self, index: Tensor, step: int | None = None) -> None:
        """Train on the cases of ``index``, this process's share; ``step`` is None where nothing is drawn."""
        parts = index.chunk(self.config.accumulate)
        self.optimizer.zero_grad(set_to_none=True)
        found = [self._backward(part, number, len(parts), step) for number, part in enumerate(parts)]
        share = self._share([loss.weight for loss in found], len(index))
        total = sum(loss.total for loss in found)
        self.total.add_(total if share is None else total * share)
        if self.config.clip > 0:
            self.accelerator.unscale_gradients(self.optimizer)  # its own, not every run's
            clip_gradients(list(self.model.parameters()), self.config.clip, self.config.clip_by)
        self.optimizer.step()

    def _backward(self, index: Tensor, number: int, parts: int, step: int | None) -> Loss:
        """Add one part's gradients; return its share of the mean loss, if all cases weigh the same, and its weight.

        A part is divided by its number of cases, or where it is the whole batch by its weight at once.
        """
        draws = self._draws(index, number, parts, step)
        batch = tree_map_only(Tensor, self._here, self.experiment.batch(self.data, index))
        with self._quiet(number < parts - 1), self.accelerator.autocast():
            loss = self.experiment.loss(self.model, batch, draws)
            whole = parts * self.accelerator.num_processes == 1
            mean = loss.total / (loss.weight if whole else len(index)) / parts
        self.accelerator.backward(mean)
        return Loss(mean.detach(), loss.weight)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.accelerator.device, non_blocking=True)

    def _draws(self, index: Tensor, number: int, parts: int, step: int | None) -> Draws:
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        if step is None:
            return Draws(torch.default_generator, 0, len(index), len(index))
        part, cases = rank * parts + number, len(index) * parts * world
        return draws_of_update(self.seed, step, self.accelerator.device, part, parts * world, cases)

    def _share(self, weights: list[Tensor | int], cases: int) -> Tensor | None:
        """Scale gradients from a mean over cases to one over weights; None where the two are the same.

        A weight that is a Python number is the number of cases.
        """
        world = self.accelerator.num_processes
        if len(weights) * world == 1 or all(isinstance(weight, int) for weight in weights):
            return None
        both = torch.stack([torch.as_tensor(sum(weights), dtype=torch.float64), torch.tensor(float(cases)).double()])
        both = both.to(self.accelerator.device)
        weight, count = self.accelerator.reduce(both, "sum") if world > 1 else both
        share: Tensor = (count / weight).float()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(share)
        return share

    def _quiet(self, more: bool) -> AbstractContextManager[Any]:
        """Exchange gradients between processes after an update's last part only."""
        return self.accelerator.no_sync(self.model) if more else nullcontext()


class Eager:
    """Updates one after another from the host."""

    burst = 1  # updates between looks at the clock and at signals

    def __init__(self, update: Update, batches: Batches) -> None:
        self.update, self.batches = update, batches
        self.rank, self.world = update.accelerator.process_index, update.accelerator.num_processes

    def begin(self, step: int, count: int) -> None:
        """Get ready for ``count`` updates from ``step`` on."""

    def launch(self, step: int, count: int) -> None:
        """Carry out ``count`` updates."""
        for number in range(step, step + count):
            self.update(self.batches.at(number).chunk(self.world)[self.rank], number)

    def wait(self) -> None:
        """Return when all that was launched is done."""
        if self.update.total.is_cuda:
            torch.cuda.synchronize(self.update.total.device)


class Captured:
    """The update as a CUDA graph on a stream of its own: several runs can share one GPU.

    The graph reads its cases from ``rows`` at a cursor that it moves on itself, so a replay needs nothing from the
    host.
    """

    # Replays of one run before the next run's turn. Twelve convnets side by side took 4.09, 4.12, 4.18 and 4.23 s an
    # epoch with 4, 8, 16 and 64 (H200): it hardly matters; few keep the answer to a signal quick.
    burst = 8
    WARM_UP = 3

    def __init__(self, update: Update, batches: ShuffledBatches, step: int) -> None:
        self.update, self.batches = update, batches
        device = update.total.device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.rows = self._indices(step, 1)
        self.capacity = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def _indices(self, step: int, count: int) -> Tensor:
        return self.batches.stretch(step, count).to(self.update.total.device)

    def begin(self, step: int, count: int) -> None:
        """Put the cases of the next ``count`` updates where the graph reads them."""
        rows = self._indices(step, count)
        if self.graph is None or count > self.capacity:
            self.rows, self.capacity = rows, count
            self._capture()
        else:
            self.rows[:count].copy_(rows)
        self.cursor.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())

    def _one(self) -> None:
        index = self.rows.index_select(0, self.cursor).squeeze(0)
        self.cursor.add_(1)
        self.update(index)

    def _capture(self) -> None:
        """Warm up on copies of all state, so that the warm-up trains nothing, then record one update."""
        kept = self._snapshot()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(self.WARM_UP):
                self.cursor.zero_()
                self._one()
        torch.cuda.synchronize()
        self._restore(kept)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self._one()

    def _tensors(self) -> list[Tensor]:
        state = self.update.optimizer.state
        held = [t for entry in state.values() for t in entry.values() if isinstance(t, Tensor)]
        return [*self.update.model.parameters(), *self.update.model.buffers(), *held, self.update.total, self.cursor]

    def _snapshot(self) -> dict[int, Tensor]:
        return {id(t): t.detach().clone() for t in self._tensors()}

    def _restore(self, kept: dict[int, Tensor]) -> None:
        with torch.no_grad():
            for tensor in self._tensors():
                # optimiser state that the warm-up made starts at zero, as Adam's does
                tensor.copy_(kept[id(tensor)]) if id(tensor) in kept else tensor.zero_()

    def launch(self, step: int, count: int) -> None:
        """Enqueue ``count`` replays."""
        if self.graph is None:
            raise RuntimeError("begin() comes before launch()")
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self.graph.replay()

    def wait(self) -> None:
        """Return when the stream is empty."""
        self.stream.synchronize()
