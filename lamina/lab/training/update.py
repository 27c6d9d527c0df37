"""One update: launched by the host, or captured once as a CUDA graph and replayed."""

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
from .batches import Batches
from .draws import Draws, declared, draws_of_update

ENGINES = ("auto", "eager", "graph")


def choose(name: str, accelerator: Accelerator, config: Config, sheet: Sheet) -> tuple[str, str]:
    """Return the engine and the reason; raise if the requested engine cannot be used."""
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
    """One optimiser update, the same code for every engine. Losses are summed up on the device in ``total``.

    The batch is cut into ``accumulate`` parts for each process, which takes them one by one.
    """

    experiment: Experiment
    config: Config
    model: nn.Module
    optimizer: Any
    data: Any
    accelerator: Accelerator
    total: Tensor  # [], sum of the updates' mean losses
    seed: int
    sampled: bool

    def __call__(self, index: Tensor, step: int = 0) -> None:
        """Train on this process's parts of the cases of ``index``."""
        parts, count = self._own_parts(index)
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (first, part) in enumerate(parts):
            draws = self._draws(step, first, len(part), len(index))
            losses.append(self._backward(part, draws, len(index) / count, len(parts), number))
        self._reduce(losses, len(index), count)
        if self.config.clip > 0:
            self.accelerator.unscale_gradients(self.optimizer)  # of this run only
            clip_gradients(list(self.model.parameters()), self.config.clip, self.config.clip_by)
        self.optimizer.step()

    def _own_parts(self, index: Tensor) -> tuple[list[tuple[int, Tensor]], int]:
        """Return this process's parts of a batch, each with its first case's position, and the number of all parts.

        A small batch, such as the last of an epoch, is cut into fewer parts.
        """
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        parts_here = min(self.config.accumulate, len(index) // world)
        if parts_here == 0:
            received = f"a batch of {len(index)} cases on {world} processes"
            raise fail("every process has a case of each batch", received, "Use fewer, or batches with drop_last.")
        parts = index.tensor_split(parts_here * world)
        first = [sum(map(len, parts[:number])) for number in range(len(parts))]
        return list(zip(first, parts))[rank * parts_here : (rank + 1) * parts_here], len(parts)

    def _draws(self, step: int, first: int, cases: int, of: int) -> Draws:
        if not self.sampled:
            return Draws(None)
        return draws_of_update(self.seed, step, self.accelerator.device, first, cases, of)

    def _backward(self, index: Tensor, draws: Draws, cases: float, parts: int, number: int) -> Loss:
        """Add one part's gradients; return its share of the mean over the batch's cases, and its weight.

        cases: average number of cases in a part. The loss of an undivided batch is divided by its weight at once. Only
        the last part exchanges gradients between processes.
        """
        batch = tree_map_only(Tensor, self._here, self.experiment.batch(self.data, index))
        last = number == parts - 1
        quiet: AbstractContextManager[Any] = nullcontext() if last else self.accelerator.no_sync(self.model)
        with quiet, self.accelerator.autocast():
            loss = self.experiment.loss(self.model, batch, draws)
            whole = parts * self.accelerator.num_processes == 1
            mean = loss.total / (loss.weight if whole else cases) / parts
        self.accelerator.backward(mean)
        return Loss(mean.detach(), loss.weight)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.accelerator.device, non_blocking=True)

    def _reduce(self, found: list[Loss], cases: int, count: int) -> None:
        """Turn means over the cases of all ``count`` parts into means over weights, in gradients and ``total``."""
        share: Tensor | float = 1.0 if count == 1 else cases / self._whole(sum(loss.weight for loss in found))
        if isinstance(share, Tensor) or share != 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        for loss in found:
            self.total.add_(loss.total * share)

    def _whole(self, weight: Tensor | int) -> Tensor | int:
        """Return the weight of the whole batch from that of this process's cases."""
        if self.accelerator.num_processes == 1:
            return weight
        local_weight = torch.as_tensor(weight, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(local_weight, "sum")  # type: ignore[no-any-return]


class Eager:
    """Updates one after another from the host."""

    burst = 1  # updates between looks at the clock and at signals

    def __init__(self, update: Update, batches: Batches) -> None:
        self.update, self.batches = update, batches
        self.watched: AbstractContextManager[None] = nullcontext() if update.sampled else declared()

    def begin(self, step: int, count: int) -> None:
        """Get ready for ``count`` updates from ``step`` on."""

    def launch(self, step: int, count: int) -> None:
        """Carry out ``count`` updates."""
        for number in range(step, step + count):
            with self.watched:
                self.update(self.batches.at(number), number)
            self.watched = nullcontext()  # checking one update is enough

    def wait(self) -> None:
        """Wait until all launched updates are done."""
        if self.update.total.is_cuda:
            torch.cuda.synchronize(self.update.total.device)


class Captured:
    """Update as a CUDA graph on its own stream, so that several runs can share one GPU.

    The graph reads its cases from ``rows`` at a cursor that it advances itself, so a replay needs no input from the
    host.
    """

    # Replays of one run before the next run's turn. Twelve convnets side by side took 4.09, 4.12, 4.18 and 4.23 s an
    # epoch with 4, 8, 16 and 64 (H200): it hardly matters. A small number reacts to signals sooner.
    burst = 8
    WARM_UP = 3

    def __init__(self, update: Update, batches: Batches, step: int) -> None:
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
        """Warm up, restore all state, so that the warm-up trains nothing, then capture one update."""
        state = self._snapshot()
        torch.cuda.synchronize()
        with declared(), torch.cuda.stream(self.stream):
            for _ in range(self.WARM_UP):
                self.cursor.zero_()
                self._one()
        torch.cuda.synchronize()
        self._restore(state)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self._one()

    def _tensors(self) -> list[Tensor]:
        state = self.update.optimizer.state
        moments = [t for entry in state.values() for t in entry.values() if isinstance(t, Tensor)]
        return [*self.update.model.parameters(), *self.update.model.buffers(), *moments, self.update.total, self.cursor]

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
        """Wait until the stream is empty."""
        self.stream.synchronize()
