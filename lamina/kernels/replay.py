"""Loops of like steps as CUDA graphs: the host launches 32 steps at once.

A step must be the same launches every time: on the same memory, the number of the step and the tensors of the call
looked up on the device. What is kept for that belongs to a stream and stays for further calls of the same kind: a copy
of the weight (shared by all loops of a stream over weights of that shape), one step's scratch memory, cuBLAS's
workspace (32 MiB on Hopper) and the graphs.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .switch import Switch

LIMIT = 8  # kinds of calls that are kept, over all devices
LONGEST = 32  # steps of a graph
LOCK = threading.RLock()  # whoever fills the memory of a loop runs it before anyone else does

_entries: OrderedDict[Hashable, Any] = OrderedDict()
_copies: weakref.WeakValueDictionary[Hashable, Copy] = weakref.WeakValueDictionary()
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
# No graphs in this thread: for callers whose memory allocator would not like what is kept between calls.
off = Switch()


def serves(tensor: Tensor) -> bool:
    """Whether a loop on this tensor's device may be replayed: nobody captures the stream, nobody said ``off``."""
    if not tensor.is_cuda or off:
        return False
    return not torch.cuda.is_current_stream_capturing()


def stream_of(tensor: Tensor) -> tuple[torch.device, int]:
    """Where work on a tensor is launched. Two streams must not share the memory of a loop."""
    return tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def multiplication(dtype: torch.dtype) -> object:
    """How torch.mm multiplies now: a graph goes on as it was captured."""
    matmul: Any = torch.backends.cuda.matmul
    if dtype == torch.float32:
        return matmul.fp32_precision
    if dtype == torch.float16:
        return matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_accumulation
    return matmul.allow_bf16_reduced_precision_reduction


class Copy:
    """A weight where graphs find it, and whose values it holds."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = torch.empty_like(weight)
        self.source: Callable[[], Tensor | None] = lambda: None
        self.version = -1

    def hold(self, weight: Tensor, again: bool) -> None:
        """Take over the values; ``again``: not if this very tensor was held last, as forward leaves it to backward."""
        version = -1 if weight.is_inference() else weight._version
        if again and version >= 0 and self.source() is weight and self.version == version:
            return
        self.tensor.copy_(weight)
        self.source, self.version = weakref.ref(weight), version


def copy_for(weight: Tensor) -> Copy:
    """The copy that all loops of a stream share for weights of this shape."""
    key = (stream_of(weight), weight.shape, weight.dtype)
    found = _copies.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = _copies[key] = Copy(weight)
    return found


def entry(key: Hashable, make: Callable[[], Any]) -> Any:
    """What is kept under ``key``; it has a ``loop``. The one that was not used for longest makes room."""
    if key in _entries:
        _entries.move_to_end(key)
        return _entries[key]
    while len(_entries) >= LIMIT:
        _entries.popitem(last=False)[1].loop.close()
    with torch.inference_mode(False):  # what outlives a call must be of use in any mode
        found = _entries[key] = make()
    return found


def clear() -> None:
    """Give back everything that is kept."""
    with LOCK:
        while _entries:
            _entries.popitem()[1].loop.close()


class Loop:
    """A step that is run many times: one by one in the first call, from then on in graphs of 1, 2, 4 ... steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm = False  # kernels are compiled and loaded, the library's too
        self.refused = False
        self.stream: torch.cuda.Stream | None = None

    def run(self, step: Callable[[], None], steps: int) -> None:
        """That many steps on the current stream; ``step`` is the same in every call."""
        for size in blocks(steps):
            graph = self._graph(step, size)
            if graph is not None:
                graph.replay()
            else:
                for _ in range(size):
                    step()
        self.warm = self.device.type == "cuda"

    def _graph(self, step: Callable[[], None], size: int) -> torch.cuda.CUDAGraph | None:
        if self.warm and not self.refused and size not in self.graphs:
            try:
                self.graphs[size] = self._captured(step, size)
            except RuntimeError as error:
                warnings.warn(f"steps are launched one by one: they could not be captured ({error})", stacklevel=2)
                self.close()
                self.refused = True
        return self.graphs.get(size)

    def _captured(self, step: Callable[[], None], size: int) -> torch.cuda.CUDAGraph:
        """The stream and the memory pool are this loop's own.

        cuBLAS's workspace is torch's, one for each stream, and its address is part of the graph. On a stream where
        nothing was multiplied before, it is made during capture, in the graphs' pool, and lives as long as they do.
        """
        if self.stream is None:
            self.stream = take_stream(self.device)
        pool = next((graph.pool() for graph in self.graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may do what they like
            try:
                for _ in range(size):
                    step()
            finally:
                graph.capture_end()
        return graph

    def close(self) -> None:
        """Give back graphs, pool and stream; a graph that is running is let to its end by the driver."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs = {}
        if self.stream is not None:
            give_stream(self.device, self.stream)
            self.stream = None


def blocks(steps: int) -> list[int]:
    """Sizes of graphs that make up that many steps."""
    longest, rest = divmod(steps, LONGEST)
    powers = [1 << k for k in reversed(range(LONGEST.bit_length() - 1))]
    return [LONGEST] * longest + [size for size in powers if rest & size]


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to capture on that no other graphs have; of the priority that others hardly ever ask for.

    cuBLAS's workspace belongs to a stream: graphs captured on one stream must not run at the same time.
    """
    free, make = _streams.setdefault(device, []), getattr(torch.cuda, "Stream")  # noqa: B009  (untyped in torch)
    with LOCK:
        return free.pop() if free else make(device, priority=-3)


def give_stream(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Back to those that may be taken."""
    _streams[device].append(stream)
