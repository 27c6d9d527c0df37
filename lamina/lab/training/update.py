"""How one update is carried out: step by step, or captured once as a CUDA graph and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...errors import fail, one_of
from ...optim import clip_gradients
from ..experiments import Config, Sheet
from ..protocol import Experiment, Split
from .batches import Batches
from .stack import Stack

ENGINES = ("auto", "eager", "graph", "compile")
RUNS_COMPILED = 1024  # in one process
COMPILE_PAYS = 50_000  # updates after which compiling is earned back: some 6 s a run, 0.15 ms an update (H200, MNIST)


def choose(name: str, accelerator: Accelerator, config: Config, sheet: Sheet, updates: int) -> tuple[str, str]:
    """The engine and the reason; one that was asked for and cannot serve raises."""
    one_of("--engine", name, ENGINES)
    obstacle = _obstacle(accelerator, config, sheet)
    if name in ("graph", "compile") and obstacle:
        raise fail(f"--engine {name} needs one process on a GPU with fixed shapes", obstacle, "Use --engine auto.")
    if name != "auto":
        return name, "asked for"
    if obstacle:
        return "eager", obstacle
    if updates >= COMPILE_PAYS:
        return "compile", f"compiled and captured as a CUDA graph: shapes are fixed and {updates:,} updates pay for it"
    return "graph", "captured as a CUDA graph: shapes are fixed"


def _obstacle(accelerator: Accelerator, config: Config, sheet: Sheet) -> str:
    """Why an update cannot be captured; empty when it can."""
    if accelerator.device.type != "cuda":
        return f"no CUDA graphs on {accelerator.device.type}"
    if accelerator.num_processes > 1:
        return f"{accelerator.num_processes} processes exchange gradients from hooks"
    if config.precision == "fp16":
        return "fp16's loss scale is decided on the host"
    return "" if sheet.fixed_shapes else "shapes change from batch to batch"


def _prepare_compiler() -> None:
    """Every run of a command compiles the same method: past the limit of 8, the ninth would run uncompiled, and slower.

    Whether matrix products may round to TF32 is what --precision says; the compiler's advice on it is not for us.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RUNS_COMPILED)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, RUNS_COMPILED)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)


@dataclass
class Update:
    """One optimiser update, the same code for every engine.

    ``index`` is [batch], or [members, batch] for a stack. Losses are summed up on the device in ``total`` [members].
    """

    experiment: Experiment
    config: Config
    model: nn.Module
    optimizer: Any
    train: Split
    accelerator: Accelerator
    total: Tensor
    compiled: bool = False

    def __post_init__(self) -> None:
        self.members = self.model.members if isinstance(self.model, Stack) else 0
        self._losses: Callable[[Tensor], Tensor] = self._plain_losses
        if self.compiled:
            _prepare_compiler()
            self._losses = torch.compile(self._plain_losses, dynamic=False)

    def _plain_losses(self, index: Tensor) -> Tensor:
        batch = self.experiment.batch(self.train, index)
        if isinstance(self.model, Stack):
            return self.model.losses(self.experiment.loss, batch)
        return self.experiment.loss(self.model, batch).reshape(1)

    def __call__(self, index: Tensor) -> None:
        parts = index.chunk(self.config.accumulate, dim=-1)
        self.optimizer.zero_grad(set_to_none=True)
        for number, part in enumerate(parts, 1):
            with self._quiet(number < len(parts)), self.accelerator.autocast():
                losses = self._losses(part) / len(parts)
            self.accelerator.backward(losses.sum())
            self.total.add_(losses.detach())
        if self.config.clip > 0:
            self.accelerator.unscale_gradients(self.optimizer)  # its own, not every run's
            clip_gradients(list(self.model.parameters()), self.config.clip, self.config.clip_by, self.members)
        self.optimizer.step()

    def _quiet(self, more: bool) -> AbstractContextManager[Any]:
        """Processes exchange gradients after an update's last part only."""
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
        """Carry out, or enqueue, ``count`` updates."""
        for number in range(step, step + count):
            index = self.batches.indices(number)[0]
            share = index.chunk(self.world, dim=-1)[self.rank]
            self.update(share if self.update.members else share[0])

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

    def __init__(self, update: Update, batches: Batches, step: int) -> None:
        self.update, self.batches = update, batches
        device = update.total.device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)
        self.rows = self._indices(step, 1)
        self.capacity = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def _indices(self, step: int, count: int) -> Tensor:
        rows = self.batches.indices(step, count)
        return (rows if self.update.members else rows[:, 0]).to(self.update.total.device)

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
