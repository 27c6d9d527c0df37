"""Launches of one kind of call: all that stays the same is prepared once, a call brings addresses.

``start`` looks at every argument of every call to find the compiled kernel. Who knows that a call has the dtypes,
shapes and device of one before keeps a ``Launch`` instead. What is left to be looked at are addresses: kernels are
compiled for multiples of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from .given import Given


class Launch:
    """A kernel, its number of programs, options and arguments besides tensors, which are its first arguments.

    The tensors of all calls have the same dtypes, and the same of them are None.
    """

    def __init__(
        self, kernel: Any, programs: int, constants: Mapping[str, Any], options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.kernel, self.grid, self.constants, self.options = kernel, (programs, 1, 1), constants, options
        self.names = [name for name in kernel.arg_names if name not in constants]
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._device = device.index if device.type == "cuda" else None
        self._compiled: tuple[Any, ...] | None = None

    def arguments(self, tensors: Sequence[Given]) -> dict[str, Any]:
        """All arguments, by name."""
        return {**dict(zip(self.names, tensors, strict=True)), **self.constants}

    def quickly(self, tensors: Sequence[Given]) -> bool:
        """Launch with these tensors if that needs no further look; whether it did."""
        if self._compiled is None or torch._C._cuda_getDevice() != self._device:
            return False
        run, function, metadata, runtime = self._compiled
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        if reduce(or_, addresses) & 15 or _hooked(runtime):
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        run(*self.grid, stream, function, metadata, None, None, None, *addresses, *self._values)
        return True

    def learn(self, tensors: Sequence[Given]) -> None:
        """Keep the compiled kernel that Triton found for these tensors, so that calls like theirs are quick."""
        if self._device is None or self._compiled is not None or torch._C._cuda_getDevice() != self._device:
            return
        if any(t is not None and t.data_ptr() & 15 for t in tensors):
            return
        from triton import knobs

        made = self.kernel.warmup(**self.arguments(tensors), grid=self.grid, **self.options)
        self._compiled = made.run, made.function, made.packed_metadata, knobs.runtime


def _hooked(runtime: Any) -> bool:
    """Whether somebody, a profiler, wants to be told of launches; Triton's own way does that."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
