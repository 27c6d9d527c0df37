"""Launches of one kind of call: all that stays the same is prepared once, a call brings addresses.

``start`` looks at every argument of every call to find the compiled kernel. Who knows that a call has the dtypes,
shapes and device of one before keeps a ``Launch`` instead. What is left to be looked at are addresses: kernels are
compiled for multiples of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .given import Given
from .start import start


class Code:
    """What Triton compiled, once that is known. Launches that differ in nothing it specialises on may share it."""

    ready: tuple[Any, ...] | None = None


class Launch:
    """A kernel, its numbers of programs, options and arguments besides tensors, which are its first arguments.

    The tensors of all calls have the same dtypes, and the same of them are None.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        device: torch.device,
        pieces: int = 1,
        code: Code | None = None,
    ) -> None:
        self.kernel, self.grid, self.constants, self.options = kernel, (programs, pieces, 1), constants, options
        self.names = [name for name in kernel.arg_names if name not in constants]
        self.code = code or Code()
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._device = device.index if device.type == "cuda" else None

    def __call__(self, tensors: Sequence[Given]) -> None:
        """Launch with these tensors: past all looks where that can be, else by ``start``."""
        if not self.quickly(tensors):
            start(self.kernel, self.grid, self.arguments(tensors), self.options)
            self.learn(tensors)

    def arguments(self, tensors: Sequence[Given]) -> dict[str, Any]:
        """All arguments, by name."""
        return {**dict(zip(self.names, tensors, strict=True)), **self.constants}

    def quickly(self, tensors: Sequence[Given]) -> bool:
        """Launch with these tensors if that needs no further look; whether it did."""
        ready = self.code.ready
        if ready is None or torch._C._cuda_getDevice() != self._device:
            return False
        run, function, metadata, runtime = ready
        addresses, bits = [], 0
        for tensor in tensors:
            address = 0 if tensor is None else tensor.data_ptr()
            bits |= address
            addresses.append(address)
        if bits & 15 or _hooked(runtime):
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        run(*self.grid, stream, function, metadata, None, None, None, *addresses, *self._values)
        return True

    def learn(self, tensors: Sequence[Given]) -> None:
        """Keep the compiled kernel that Triton found for these tensors, so that calls like theirs are quick."""
        if self._device is None or self.code.ready is not None or torch._C._cuda_getDevice() != self._device:
            return
        if any(t is not None and t.data_ptr() & 15 for t in tensors):
            return
        from triton import knobs

        made = self.kernel.warmup(**self.arguments(tensors), grid=self.grid, **self.options)
        self.code.ready = made.run, made.function, made.packed_metadata, knobs.runtime


def _hooked(runtime: Any) -> bool:
    """Whether somebody, a profiler, wants to be told of launches; Triton's own way does that."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
