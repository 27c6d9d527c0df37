"""Which backend serves a call, and the reason in words. Nothing else is decided anywhere else."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from ..checks import BackendError, one_of, traced

HOPPER = (9, 0)  # the kernels were measured and tested on it; elsewhere they run when asked for by name
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float32, torch.float64)
# Units up to which a cell's step on a CPU is fused when gradients are recorded; twice as many without gradients.
# Time over the reference's, layer norm, 1 to 128 cases (benchmarks/cpu_cell.py, one Zen 4 core), forward and training:
# 128 units 0.33-0.59, 0.48-0.95; 256: 0.47-0.69, 0.59-0.98; 512: 0.56-0.82, 0.65-1.14; 1,024: 0.66-0.89, 0.80-1.27.
SMALL_CELL = 512
COMPILED_CELL = "torch.compile makes kernels of a cell's plain operations and of what is around them"
UNMEASURED_RAGGED = (
    "graphs of short passes with lengths or resets have yet to be measured; backend='triton' captures them"
)
WIDEST_CELL = 8192  # units of a row that a program holds with all its gates

# The names a caller may force; a faster backend is added here and to `choose`.
BACKENDS = {
    "layer_norm": ("auto", "reference", "torch", "triton"),
    "recurrence": ("auto", "reference", "triton", "numba"),
}


@dataclass(frozen=True)
class Request:
    """What the choice depends on."""

    op: str  # "layer_norm" or "recurrence"
    device: torch.device
    dtype: torch.dtype
    eps: float = 1e-5
    eps_mode: str = "var"
    cell: str = ""
    norm: str | None = None
    placement: str = ""
    single_step: bool = False  # a cell, called once a step
    hidden: int = 1  # units; a layer norm's width
    batch: int = 1  # cases; a layer norm's rows
    projection: bool = False
    transformed: bool = False  # inside torch.func or forward-mode differentiation
    nonlinearity: str = "tanh"
    autocast: bool = False  # a layer norm's: recurrences are cast before
    recompute: bool = False  # gates are not kept for the backward pass
    directions: int = 1  # of a layer, and layers of a stack: recurrences that could share launches
    layers: int = 1


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call and why."""

    backend: str
    reason: str
    opaque: bool = False  # runs inside a custom op that a compiler does not look into
    path: str = ""  # of the triton backend: "persistent", "steps" or "cell"; of numba: "cpu"
    sides: int = 1  # recurrences that share a launch
    ragged_eager: bool = False  # a pass with lengths or resets is not captured as a CUDA graph
    missing: str = ""  # package without which plain PyTorch serves what its kernels would

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def choose(request: Request, backend: str = "auto") -> Choice:
    """Pick the backend for a request; a forced one that cannot serve raises BackendError."""
    one_of("backend", backend, BACKENDS[request.op])
    if request.op == "layer_norm":
        return _choose_layer_norm(request, backend)
    return _choose_recurrence(request, backend)


def _choose_layer_norm(request: Request, backend: str) -> Choice:
    if backend == "reference":
        return Choice("reference", "asked for by name")
    if backend == "triton":
        obstacle = _norm_obstacle(request)
        if obstacle:
            raise BackendError(f"backend='triton' cannot serve this layer norm: {obstacle}. Use backend='auto'.")
        why = "asked for by name; one kernel each way; gradients of gradients take the reference's route"
        return Choice("triton", why)
    ours = "; our kernel's speed has yet to be measured: backend='triton' takes it"
    by_name = ours if request.device.type == "cuda" else ""
    if is_torchs_norm(request.eps, request.eps_mode):
        why = "asked for by name" if backend == "torch" else f"torch's own kernel computes this form{by_name}"
        return Choice("torch", why)
    why = f"torch's kernel has no eps_mode={request.eps_mode!r} with eps={request.eps:g}"
    if backend == "torch":
        raise BackendError(f"backend='torch' needs eps_mode='var' and eps > 0; {why}. Use backend='auto'.")
    return Choice("reference", why + by_name)


def is_torchs_norm(eps: float, eps_mode: str) -> bool:
    """Return whether torch's own kernel computes this form of layer norm."""
    return eps_mode == "var" and eps > 0


def _norm_obstacle(request: Request) -> str:
    """Why the fused layer norm cannot serve; empty when it can."""
    obstacle = _device_obstacle(request, forced=True) or missing_triton()
    if obstacle:
        return obstacle
    if request.autocast:
        return "autocast computes layer norms in float32, by torch's own"
    if torch.compiler.is_compiling():
        return "torch.compile makes a kernel of torch's own layer norm and of what is around it"
    if request.transformed:
        return "torch.func transforms and forward-mode gradients need plain operations"
    return "the input is empty" if request.batch * request.hidden == 0 else ""


def _choose_recurrence(request: Request, backend: str) -> Choice:
    if backend == "reference" and request.recompute:
        raise BackendError(
            "backend='reference' keeps what autograd needs and knows no recompute=True. Drop one of them."
        )
    if backend == "reference":
        return Choice("reference", "asked for by name: plain PyTorch, one step after another")
    if backend == "auto" and torch.onnx.is_in_onnx_export():
        return Choice("reference", "ONNX export: the steps are written out so that ONNX needs no custom operator")
    forced = backend != "auto"
    wanted = backend if forced else "numba" if request.device.type == "cpu" else "triton"
    obstacle = {"triton": _triton_obstacle, "numba": _numba_obstacle}[wanted](request, forced)
    if forced and obstacle:
        raise BackendError(f"backend={wanted!r} cannot serve {_name(request)}: {obstacle}. Use backend='auto'.")
    if not obstacle:
        return _fused(request, wanted, forced)
    missing = {NO_NUMBA: "numba", NO_TRITON: "triton"}.get(obstacle, "")
    why = f"plain PyTorch serves {_name(request)} on {request.device.type}: {obstacle}"
    why += "; recompute=True changes nothing there" if request.recompute else ""
    if torch.compiler.is_compiling() and not request.single_step:
        why += "; inside one opaque operator, so that torch.compile and torch.export do not unroll the steps"
        return Choice("reference", why, opaque=True, missing=missing)
    return Choice("reference", why, missing=missing)


def _name(request: Request) -> str:
    name = f"{request.cell} ({'no' if request.norm is None else request.norm} norm"
    return name + (f", placement {request.placement!r})" if request.placement not in ("", "none") else ")")


HAS_TRITON = importlib.util.find_spec("triton") is not None  # nothing is imported
HAS_NUMBA = importlib.util.find_spec("numba") is not None
NO_TRITON = "Triton is not installed"
NO_NUMBA = "numba is not installed (pip install numba)"
JIT_IS_OFF = os.environ.get("NUMBA_DISABLE_JIT", "0").strip() not in ("", "0")  # as numba reads it, at import


def interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, slowly: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_obstacle(request: Request, forced: bool) -> str:
    """Why the fused kernels cannot serve a recurrence on a GPU; empty when they can."""
    obstacle = _device_obstacle(request, forced) or _cell_obstacle(request, forced)
    if not obstacle and request.norm == "batch":
        obstacle = "recurrent batch norm mixes the cases of a batch"
    return obstacle or _common_obstacle(request) or missing_triton()


def missing_triton() -> str:
    """Why no kernel of Triton's can run in this process; empty where they can."""
    return "" if HAS_TRITON else NO_TRITON


def _cell_obstacle(request: Request, forced: bool) -> str:
    if not request.single_step:
        return ""
    if torch.compiler.is_compiling():
        return COMPILED_CELL
    if request.hidden > WIDEST_CELL:
        return f"a fused cell has at most {WIDEST_CELL} units, this one has {request.hidden}"
    return "" if forced else "a cell's fused step has yet to be measured; backend='triton' takes it"


def _device_obstacle(request: Request, forced: bool) -> str:
    if request.device.type != "cuda" and not (forced and interpreted()):
        return "the fused kernels run on CUDA devices only"
    if request.dtype not in FUSED_DTYPES:
        return f"the kernels compute in float32, bfloat16 and float16, not {str(request.dtype).removeprefix('torch.')}"
    if request.device.type == "cuda" and not forced and torch.cuda.get_device_capability(request.device) < HOPPER:
        return "the fused kernels are tested on Hopper GPUs; backend='triton' tries them here"
    return ""


def _numba_obstacle(request: Request, forced: bool) -> str:
    """The same for a CPU."""
    if request.device.type != "cpu":
        return "numba's kernels run on CPUs only"
    if request.dtype not in CPU_DTYPES:
        return f"the kernels compute in float32 and float64, not {str(request.dtype).removeprefix('torch.')}"
    obstacle = _cpu_cell_obstacle(request, forced) or _common_obstacle(request)
    return obstacle or _cpu_batch_norm_obstacle(request) or missing_numba()


def _cpu_batch_norm_obstacle(request: Request) -> str:
    if request.norm != "batch":
        return ""
    if torch.compiler.is_compiling():
        return "under torch.compile batch norm's moments travel with the reference's operator only"
    return "the layer has no units" if request.hidden == 0 else ""


def missing_numba() -> str:
    """Why no kernel of numba's can run in this process; empty where they can."""
    if not HAS_NUMBA:
        return NO_NUMBA
    return "NUMBA_DISABLE_JIT is set, and the kernels run compiled only" if JIT_IS_OFF else ""


def _cpu_cell_obstacle(request: Request, forced: bool) -> str:
    if not request.single_step:
        return ""
    if torch.compiler.is_compiling():
        return COMPILED_CELL
    training = torch.is_grad_enabled()
    limit = SMALL_CELL if training else 2 * SMALL_CELL
    if not forced and request.hidden > limit:
        when = "a training step" if training else "an inference step"
        return f"{when} of more than {limit} units is mostly products, which torch computes as fast"
    return ""


def _common_obstacle(request: Request) -> str:
    if traced():
        return "torch.jit.trace records plain operations; of a kernel it would keep the numbers of one call"
    if request.projection:
        return "proj_size is not fused"
    if request.transformed:
        return "torch.func transforms and forward-mode gradients need plain operations"
    if request.batch == 0:
        return "the batch is empty"
    return "the layer has no units" if request.hidden == 0 else ""


def _fused(request: Request, backend: str, forced: bool) -> Choice:
    again = "; gradients of gradients take the reference's route"
    if request.recompute:
        ignored = "torch.compile" if torch.compiler.is_compiling() else "batch norm" if request.norm == "batch" else ""
        again += (
            f"; recompute=True changes nothing under {ignored}"
            if ignored
            else "; gates are made anew in the backward pass, a part of the sequence at a time"
        )
    named = "asked for by name; " if forced else ""
    if backend == "numba":
        what = "a step and its products" if request.single_step else "all steps and products"
        return Choice("numba", f"{named}{what} in compiled kernels on torch's threads{again}", path="cpu")
    if request.single_step:
        return Choice(
            "triton", f"{named}two products, of few rows in one kernel, and one kernel for the rest{again}", path="cell"
        )
    from .plans import path_for
    from .precision import halves

    path, why = path_for(request)
    if halves(request.dtype, request.nonlinearity):
        why += "; recurrent products with TF32's digits, as scaled float16"
    sides, how = _sides(request, path, forced)
    if not forced:
        how += f"; {UNMEASURED_RAGGED}"
    return Choice("triton", f"{named}{why}{how}{again}", path=path, sides=sides, ragged_eager=not forced)


def _sides(request: Request, path: str, forced: bool) -> tuple[int, str]:
    """How many directions of a layer, or layers of a stack, share a launch; in words too."""
    several = request.directions if request.directions > 1 else request.layers
    if several == 1:
        return 1, ""
    obstacle, both = _obstacle_to_sides(request, path, forced, several), request.directions > 1
    if obstacle:
        return 1, f"; {'directions one after the other' if both else 'layer after layer'}: {obstacle}"
    from .plans import together

    count = together(request, several)
    return count, f"; {'both directions' if both else f'parts of {count} layers'} in one launch"


def _obstacle_to_sides(request: Request, path: str, forced: bool, several: int) -> str:
    from .plans import together

    if path != "persistent":
        return "each step is launched by itself"
    if torch.compiler.is_compiling():
        return "under torch.compile each is an operator"
    if request.recompute:
        return "recompute=True goes back and forth in each"
    if together(request, several) < 2:
        return "the device does not hold two at once"
    return "" if forced else "common launches have yet to be measured; backend='triton' takes them"
