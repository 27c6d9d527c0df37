"""Starting Triton kernels: once compiled, past Triton's look at every argument.

That look costs the host some 100 microseconds for a kernel of 60 arguments, as much as 20 steps of a recurrence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import interpreted

_compiled: dict[Any, Any] = {}


def start(kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Launch ``kernel`` over ``grid`` on the device of its tensors.

    What Triton's look would decide is in the key: dtypes, constants and the values of whole numbers, except those
    that the kernel does not specialise on. Addresses that are not multiples of 16 take Triton's own way.
    """
    if interpreted():
        kernel[tuple(grid)](**arguments)
        return
    values = [*map(arguments.__getitem__, kernel.arg_names)]
    device = next(v for v in values if isinstance(v, Tensor)).device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, grid, values, options, arguments, device)
    else:
        _start(kernel, grid, values, options, arguments, device)


def _start(
    kernel: Any,
    grid: Sequence[int],
    values: list[Any],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    device: torch.device,
) -> None:
    kinds, misaligned = [*values], 0
    for at, value in enumerate(values):
        if isinstance(value, Tensor):
            kinds[at] = value.dtype
            values[at] = address = value.data_ptr()
            misaligned |= address
    for at in _free(kernel):
        kinds[at] = isinstance(values[at], int) and values[at] >= 2**31  # then 64 bits wide
    key = (kernel, device, *kinds, *options.values())
    found = None if misaligned & 15 else _compiled.get(key)
    if found is not None:
        found[(*grid, 1, 1)[:3]](*values)
        return
    made = kernel[tuple(grid)](**arguments, **options)
    if not misaligned & 15:
        _compiled[key] = made


@cache
def _free(kernel: Any) -> tuple[int, ...]:
    """Where the arguments stand that Triton does not specialise on."""
    free = kernel.do_not_specialize or ()
    return tuple(at for at, name in enumerate(kernel.arg_names) if name in free)
