"""Which backend serves a call, and the reason in words. Nothing else is decided anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import BackendError, one_of

# The names a caller may force; a faster backend is added here and to `choose`.
BACKENDS = {
    "layer_norm": ("auto", "reference", "torch"),
    "recurrence": ("auto", "reference"),
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


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call and why."""

    backend: str
    reason: str
    opaque: bool = False  # runs inside a custom op that a compiler does not look into

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def choose(request: Request, backend: str = "auto") -> Choice:
    """Pick the backend for a request; a forced one that cannot serve raises BackendError."""
    one_of("backend", backend, BACKENDS[request.op])
    if request.op == "layer_norm":
        return _choose_layer_norm(request, backend)
    return _choose_recurrence(request, backend)


def _choose_layer_norm(request: Request, backend: str) -> Choice:
    native = request.eps_mode == "var" and request.eps > 0
    if backend == "reference":
        return Choice("reference", "asked for by name")
    if native:
        why = "asked for by name" if backend == "torch" else "torch's own kernel computes this form"
        return Choice("torch", why)
    why = f"torch's kernel has no eps_mode={request.eps_mode!r} with eps={request.eps:g}"
    if backend == "torch":
        raise BackendError(f"backend='torch' needs eps_mode='var' and eps > 0; {why}. Use backend='auto'.")
    return Choice("reference", why)


def _choose_recurrence(request: Request, backend: str) -> Choice:
    if backend == "reference":
        return Choice("reference", "asked for by name: plain PyTorch, one step after another")
    if torch.onnx.is_in_onnx_export():
        return Choice("reference", "ONNX export: the steps are written out so that ONNX needs no custom operator")
    if torch.compiler.is_compiling() and not request.single_step:
        why = "inside one opaque operator, so that torch.compile and torch.export do not unroll the steps"
        return Choice("reference", why, opaque=True)
    name = f"{request.cell} ({'no' if request.norm is None else request.norm} norm"
    name += f", placement {request.placement!r})" if request.placement not in ("", "none") else ")"
    return Choice("reference", f"plain PyTorch serves {name} on {request.device.type}; no fused kernel exists yet")
