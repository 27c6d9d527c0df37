"""An H200 that is not there: all of the host's work for it is done, Triton's own launcher included, and nothing is run.

    python -m tests.kernels.gpu.pretend

Tensors lie in the CPU's memory and say that they are on cuda:0; kernels are compiled for Hopper and started through a
driver (``driver.c``) that refuses what an H200's would. Numbers are whatever memory held. So a launch with a wrong
number of arguments, one that does not fit, or code that only a GPU's user ever reaches fails here and not there. In a
process of its own: torch is changed for all of it. Needs a C compiler, as Triton does on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PROPERTIES = SimpleNamespace(
    name="H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, total_memory=150_000_000_000, L2_cache_size=60 * 2**20,
)  # fmt: skip
MAKERS = "empty zeros ones full rand randn randint arange tensor empty_like zeros_like ones_like full_like randn_like"


def driver() -> ctypes.CDLL:
    """Built beside nothing else, and loaded before anyone looks for the real one."""
    triton = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__path__[0])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    folder = Path(tempfile.mkdtemp())
    source, library = Path(__file__).with_name("driver.c"), folder / "libcuda.so.1"
    include = Path(triton) / "backends" / "nvidia" / "include"
    command = ["cc", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1", source, "-o", library]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def on_the_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*given: Any, **options: Any) -> Any:
        return make(*given, **(options | {"device": CPU} if options.get("device") is not None else options))

    return made


def moved(to: Any) -> Any:
    def onto(tensor: Any, *given: Any, **options: Any) -> Any:
        """Of where to only the dtype is left."""
        given = tuple(g for g in given if not isinstance(g, (str, torch.device, bool)) and g is not None)
        options = {k: v for k, v in options.items() if k not in ("device", "non_blocking")}
        return to(tensor, *given, **options) if given or options else tensor

    return onto


class Stream:
    cuda_stream, device = 0, CUDA

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


class Graph:
    """Captures nothing: what is launched meanwhile counts as launched."""

    capturing, replayed = False, 0

    def capture_begin(self, *_: Any, **__: Any) -> None:
        Graph.capturing = True

    def capture_end(self) -> None:
        Graph.capturing = False

    def replay(self) -> None:
        Graph.replayed += 1

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def reset(self) -> None: ...


def pretend() -> ctypes.CDLL:
    """Torch believes in an H200 from here on."""
    found = driver()
    for space, names in ((torch, MAKERS), (torch.Tensor, "new_empty new_zeros new_ones new_full")):
        for name in names.split():
            setattr(space, name, on_the_cpu(getattr(space, name)))
    for name, value in (("device", CUDA), ("is_cuda", True), ("is_cpu", False)):
        setattr(torch.Tensor, name, property(lambda _, v=value: v))
    torch.Tensor.to = moved(torch.Tensor.to)
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_capability, cuda.get_device_properties = lambda _=None: (9, 0), lambda _=None: PROPERTIES
    cuda.Stream, cuda.CUDAGraph, cuda.stream = Stream, Graph, lambda stream: stream
    cuda.current_stream, cuda.device, cuda.device_of = lambda _=None: Stream(), Stream, Stream
    cuda.is_current_stream_capturing = lambda: Graph.capturing
    torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda device: 0  # type: ignore[attr-defined]
    torch.mm = torch.bmm = product  # type: ignore[assignment]
    return found


def product(a: Any, b: Any, *, out: Any = None, out_dtype: Any = None) -> Any:
    """Of no numbers that matter, but of the right size; CPUs have no products into another dtype."""
    kind = out_dtype or a.dtype
    if out is None:
        return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=kind)
    if (out.dtype, out.shape) != (kind, (*a.shape[:-1], b.shape[-1])):
        raise TypeError(f"a product of {a.shape} and {b.shape} in {kind} does not go into {out.shape} in {out.dtype}")
    return out


def trained(
    cell: str, shape: tuple[int, ...], dtype: torch.dtype, calls: int = 1, ragged: bool = False, **options: Any
) -> None:
    """Forward and backward of a layer; with lengths and restarts where it is ragged."""
    import lamina

    batch, steps, inputs, hidden = shape
    layer = getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=dtype, **options)
    x = torch.zeros(steps, batch, inputs, dtype=dtype, device="cuda", requires_grad=True)
    acting: dict[str, Any] = {}
    if ragged:
        acting = {"lengths": torch.arange(batch) % (steps + 1), "resets": torch.zeros(steps, batch, dtype=torch.bool)}
    for _ in range(calls):
        layer(x, **acting)[0].sum().backward()


def stepped(cell: str, batch: int, hidden: int, dtype: torch.dtype, calls: int) -> None:
    """Forward and backward of a cell."""
    import lamina

    one = getattr(lamina, f"{cell}Cell")(hidden, hidden, device="cuda", dtype=dtype, backend="triton")
    x = torch.zeros(batch, hidden, dtype=dtype, device="cuda", requires_grad=True)
    for _ in range(calls):
        state = one(x)
        (state[0] if isinstance(state, tuple) else state).sum().backward()


def normed(rows: int, width: int, dtype: torch.dtype, calls: int) -> None:
    import lamina

    layer = lamina.LayerNorm(width, device="cuda", dtype=dtype, backend="triton")
    x = torch.zeros(rows, width, dtype=dtype, device="cuda", requires_grad=True)
    for _ in range(calls):
        layer(x).sum().backward()


def refused() -> None:
    """As many programs as twice the processors would hold: no driver may start them, since each waits for all."""
    from lamina.kernels import plans

    for maker in (plans._cut_for, plans._together, plans._cached_path_for):
        maker.cache_clear()
    count, plans.processors = plans.processors, lambda device: 4 * PROPERTIES.multi_processor_count
    try:
        trained("LSTM", (256, 2, 64, 512), torch.bfloat16)
    except RuntimeError as error:
        if "CUDA error 720" not in str(error):
            raise
    else:
        raise SystemExit("a launch that cannot be resident was not refused")
    plans.processors = count


CASES = {
    "LSTM": lambda: trained("LSTM", (64, 4, 512, 512), torch.bfloat16, 5),
    "GRU": lambda: trained("GRU", (8, 4, 400, 400), torch.float32),
    "both directions": lambda: trained("LSTM", (64, 4, 512, 512), torch.bfloat16, backend="triton", bidirectional=True),
    "ragged": lambda: trained("GRU", (64, 4, 512, 512), torch.bfloat16, 5, True, backend="triton", bidirectional=True),
    "ragged auto": lambda: trained("GRU", (8, 4, 400, 400), torch.bfloat16, 5, True),
    "ragged steps": lambda: trained("LSTM", (128, 3, 640, 2400), torch.bfloat16, 2, True),
    "three layers": lambda: trained("LSTM", (64, 60, 512, 512), torch.bfloat16, backend="triton", num_layers=3),
    "steps": lambda: trained("LSTM", (128, 3, 640, 2400), torch.bfloat16, 2),
    "recompute": lambda: trained("LSTM", (64, 20, 512, 512), torch.bfloat16, recompute=True),
    "cell": lambda: stepped("LSTM", 16, 512, torch.bfloat16, 3),
    "layer norm": lambda: normed(64, 1024, torch.bfloat16, 3),
    "refused": refused,
}


def main() -> None:
    """Of each case: launches, those of programs that wait for each other, replays, and launches by addresses only."""
    found = pretend()
    from lamina.kernels import prepared

    quick, quickly = [], prepared.Launch.quickly
    prepared.Launch.quickly = lambda *given: quickly(*given) and not quick.append(1)  # type: ignore[func-returns-value]

    def counts() -> list[int]:
        driver = [ctypes.c_long.in_dll(found, count).value for count in ("launched", "cooperative")]
        return [*driver, Graph.replayed, len(quick)]

    told = {}
    for name, case in CASES.items():
        before = counts()
        case()
        told[name] = [b - a for a, b in zip(before, counts())]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
