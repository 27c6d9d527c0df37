"""Settings, signals and clock of a training process, and accelerate's view of its device."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ...errors import RunError, fail
from ..options import Settings

MIXED = {"float32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


class Diverged(RunError):
    """Loss of a run is not finite. It ends that run only."""


class Interrupted(Exception):
    """Training ended by a signal, after every run saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: checkpoint saved, go on with --resume")
        self.exit_code = 128 + number


@dataclass
class Stop:
    """Remember the first SIGINT or SIGTERM; a second one ends the process at once."""

    number: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Stop:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
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
    """Training time, without the time that evaluations and checkpoints take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


def accelerator_for(settings: Settings, precision: str) -> Accelerator:
    """Return accelerate's view of device and processes, for one precision of products."""
    cuda = torch.cuda.is_available()
    if settings.device not in ("auto", "cpu", "cuda"):
        raise fail("--device must be auto, cpu or cuda", repr(settings.device), "Leave it at auto.")
    if settings.device == "cuda" and not cuda:
        raise fail("--device cuda needs a CUDA device", "none found", "Use --device auto.")
    if precision == "fp16" and (settings.device == "cpu" or not cuda):
        raise fail("--precision fp16 needs a CUDA device", "the CPU", "Use bf16 or float32.")
    # Accelerate keeps one state for the process; runs of another precision or device begin with a fresh one. Under a
    # launcher the process group stays.
    AcceleratorState._reset_state(reset_partial_state="WORLD_SIZE" not in os.environ)
    accelerator = Accelerator(mixed_precision=MIXED[precision], cpu=settings.device == "cpu" or not cuda)
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return accelerator
