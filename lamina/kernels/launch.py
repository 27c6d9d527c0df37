"""How the sequence kernels are cut to a problem and a device, and started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..placements import GATES, Placement
from ..reference import Recurrence
from . import Request, interpreted
from .start import start

RESERVED = 28 * 1024  # bytes of shared memory that are left to the compiler
CELLS = {"RNN": 0, "LSTM": 1, "GRU": 2, "DREAMER": 3}
SITES = {"": 0, "hh": 1, "sum": 2}
OVERRIDE: dict[str, Any] = {}  # fields of a plan that a tuner tries
MOST_ROWS = 32  # of a tile: with more, the cell's registers spill


@dataclass(frozen=True)
class Form:
    """What a recurrence computes, as far as the kernels care: their compile-time choices."""

    cell: str
    site: str
    split: int
    cell_norm: bool
    carry: bool
    relu: bool
    std: bool
    eps: float

    def encode(self) -> str:
        """As text, for operators that take no Python objects."""
        return ",".join(map(str, astuple(self)))

    @classmethod
    def decode(cls, text: str) -> Form:
        """The inverse of ``encode``."""
        cell, site, split, *words, eps = text.split(",")
        cell_norm, carry, relu, std = (word == "True" for word in words)
        return cls(cell, site, int(split), cell_norm, carry, relu, std, float(eps))

    def placement(self) -> Placement:
        """The recurrent part of a placement; the norm of W_x x has been taken."""
        gates = {0: (self.gates,), 1: (1,) * self.gates, 2: (2, 1)}[self.split]
        cell = (1,) if self.cell_norm else ()
        hh, total = (gates if self.site == s else () for s in ("hh", "sum"))
        return Placement("", "", "", (), hh, total, cell, self.carry, self.cell == "DREAMER")

    @property
    def gates(self) -> int:
        return 3 if self.cell == "DREAMER" else GATES[self.cell]

    @property
    def padded_gates(self) -> int:
        return 1 if self.cell == "RNN" else 4

    @property
    def sums(self) -> int:
        """Sums a row: one for each group of gates with statistics of its own, in a power of two."""
        return power(self.statistics)

    @property
    def statistics(self) -> int:
        """Groups of gates with statistics of their own."""
        return (1, self.gates, 2)[self.split]


def form_of(call: Recurrence) -> Form:
    """The form of a call; its norm is "layer" or none."""
    where = call.placement
    site = "hh" if where.hh else "sum" if where.sum else ""
    groups = where.groups(site) if site else ()
    split = 0 if len(groups) <= 1 else 2 if groups == (2, 1) else 1
    return Form(
        "DREAMER" if where.dreamer else call.cell, site, split, bool(where.cell), where.carry,
        call.nonlinearity == "relu", call.eps_mode == "std", call.eps,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How a problem is cut: rows and units of a program, programs of a group, groups of a launch."""

    rows: int
    units: int
    members: int
    groups: int
    chunk: int  # of the contraction (forward) or of the outputs (backward)
    resident: bool
    warps: int
    stages: int
    ahead: int  # products whose operands are on their way

    def __str__(self) -> str:
        kind = "in shared memory" if self.resident else "from L2 each step"
        return f"{self.groups} x {self.members} programs of {self.rows} rows x {self.units} units, weights {kind}"


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one, and programs that wait for none but themselves."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes of a program's shared memory for weights and operand; the interpreter's are an H200's."""
    hopper = 227 * 1024
    if device.type != "cuda":
        return hopper - RESERVED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", hopper)) - RESERVED


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def plan(form: Form, hidden: int, batch: int, size: int, programs: int, memory: int, backward: bool) -> Plan | None:
    """Cut a problem for ``programs`` that can be on the device at once; None when it does not fit.

    ``size`` is that of an element of the product's operands, ``memory`` a program's shared memory, in bytes.
    """
    gates = form.padded_gates
    units = OVERRIDE.get("units", 64 // gates)
    while -(-hidden // units) > programs:
        units *= 2
        if units * gates > 256 and programs > 1:
            return None
    members = -(-hidden // units)
    groups = max(1, min(programs // members, -(-batch // 16)))
    rows = OVERRIDE.get("rows") or min(MOST_ROWS, max(16, power(-(-batch // groups))))
    groups = min(groups, -(-batch // rows))
    span = members * units
    chunk = _chunk(span, rows, size, backward)
    weights = size * gates * units * -(-span // chunk) * chunk
    operand = gates * units if backward else chunk * (-(-span // chunk) if rows <= 16 else 2)
    resident = weights + size * rows * operand <= memory
    if not resident:
        chunk = min(chunk, 64 if size >= 4 else 128)
    warps = OVERRIDE.get("warps") or (8 if backward or rows > 16 or span > 512 else 4)
    ahead = -(-span // chunk) if rows <= 16 else 1
    return Plan(rows, units, members, groups, chunk, resident, warps, 1 if resident else 4, ahead)


def path_for(request: Request) -> tuple[str, str]:
    """ "persistent" or "steps", and why: one launch where each member's units are few, else one product a step."""
    gates = 1 if request.cell == "RNN" else 4
    programs = processors(request.device)
    forced = OVERRIDE.get("path", "")
    if forced == "steps" or (not forced and -(-request.hidden // (64 // gates)) > programs and not interpreted()):
        return "steps", f"one matrix product and one fused kernel a step: {request.hidden} units do not fit on chip"
    return "persistent", "one kernel for all steps, forward and backward"


def _chunk(span: int, rows: int, size: int, backward: bool) -> int:
    """How much of the contraction (forward) or of the outputs (backward) one matrix instruction sequence takes."""
    most = (16384 if size == 2 else 2048) // rows if not backward else 4096 // rows  # more would spill registers
    whole = max(16, power(span))
    if whole <= most and whole * 4 <= span * 5:  # little padding: in one go
        return whole
    return max(16, min(most, whole // 4))


@dataclass
class Extras:
    """What may act on a recurrence besides its weights."""

    lengths: Tensor | None = None  # [B]
    resets: Tensor | None = None  # bool [T, B]
    keep_h: Tensor | None = None  # [T, B, H] or expanded
    keep_c: Tensor | None = None
    drop: Tensor | None = None  # [B, H]

    def arguments(self, nothing: Tensor) -> dict[str, Any]:
        """Kernel arguments; ``nothing`` stands for what there is not and is not read."""
        names = ("lengths", "resets", "keep_h", "keep_c", "drop")
        tensors = {name: getattr(self, name) for name in names}
        flags = {f"HAS_{name.upper()}": tensor is not None for name, tensor in tensors.items()}
        strides = {
            f"{name}_{axis}": 0 if tensors[name] is None else tensors[name].stride(d)
            for name in ("keep_h", "keep_c")
            for d, axis in enumerate("tbu")
        }
        return {**{name: nothing if t is None else t for name, t in tensors.items()}, **strides, **flags}


def tf32_wanted() -> bool:
    """float32 products follow the switch that nn.LSTM follows."""
    return str(getattr(torch.backends.cudnn, "rnn").fp32_precision) == "tf32"  # noqa: B009  (mypy knows no such name)


def precision(dtype: torch.dtype) -> str:
    """How Triton multiplies: three TF32 products where float32 shall be kept."""
    if interpreted():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 and not tf32_wanted() else "tf32"


@contextmanager
def as_cudnn_multiplies(dtype: torch.dtype) -> Iterator[None]:
    """torch.mm in float32 follows the switch that nn.LSTM follows.

    ``fp32_precision`` and not ``allow_tf32``: setting the old switch also overwrites float32_matmul_precision, which
    could not be put back as it was.
    """
    matmul: Any = torch.backends.cuda.matmul
    if dtype != torch.float32 or (matmul.fp32_precision == "tf32") == tf32_wanted():
        yield
        return
    before, wanted = matmul.fp32_precision, tf32_wanted()
    matmul.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _constants(form: Form, cut: Plan, multiply: str) -> dict[str, Any]:
    return {
        "CELL": CELLS[form.cell],
        "SITE": SITES[form.site],
        "SPLIT": form.split,
        "CELL_NORM": form.cell_norm,
        "CARRY": form.carry,
        "RELU": form.relu,
        "STD": form.std,
        "G": form.gates,
        "GP": form.padded_gates,
        "BU": cut.units,
        "BM": cut.rows,
        "K": cut.chunk,
        "NK": -(-cut.members * cut.units // cut.chunk),
        "P2": power(cut.members),
        "RESIDENT": cut.resident,
        "SOLO": cut.members == 1,
        "PRECISION": multiply,
        "STAGES": cut.stages,
        "AHEAD": cut.ahead,
    }


def _start(kernel: Any, form: Form, cut: Plan, batch: int, words: dict[str, int], arguments: dict[str, Any]) -> None:
    """One launch for as many tiles of rows as the device holds groups; groups do not wait for one another."""
    constants = dict(_constants(form, cut, precision(arguments["weight"].dtype)))
    if "PC" in arguments:
        del constants["AHEAD"]
    tiles, x = -(-batch // cut.rows), arguments["x"]
    arguments = {
        **arguments, **constants, "T": x.shape[0], "B": batch, "H": x.shape[2] // form.gates, "P": cut.members,
        "eps": form.eps,
    }  # fmt: skip
    for first in range(0, tiles, cut.groups):
        groups = min(cut.groups, tiles - first)
        space = {**_exchange(cut, words, x.device), "groups": groups, "first": first}
        start(kernel, (groups * cut.members,), {**arguments, **space}, _options(cut))


def _options(cut: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": 1}
    if cut.members > 1:
        # The driver refuses a launch whose programs cannot all be on the device at once: no hang.
        options["launch_cooperative_grid"] = True
    return options


def _exchange(cut: Plan, columns: dict[str, int], device: torch.device) -> dict[str, Tensor]:
    """Words and counters through which members speak, all 0: one allocation, one launch."""
    members = 2 * cut.groups * cut.members * cut.rows
    sizes = {name: members * n for name, n in columns.items()}
    space = torch.zeros(sum(sizes.values()) + cut.groups, dtype=torch.int64, device=device)
    *parts, counters = torch.split(space, [*sizes.values(), cut.groups])
    return {**dict(zip(sizes, parts)), "counters": counters.view(torch.int32)}


def cut_for(form: Form, hidden: int, batch: int, weight: Tensor, backward: bool) -> Plan:
    """The plan of a launch on the weight's device."""
    size = weight.element_size() * (2 if precision(weight.dtype) == "tf32x3" else 1)  # which keeps high and low parts
    return _cut_for(form, hidden, batch, size, weight.device, backward, tuple(OVERRIDE.items()))


@cache
def _cut_for(
    form: Form, hidden: int, batch: int, size: int, device: torch.device, backward: bool, override: object
) -> Plan:
    found = plan(form, hidden, batch, size, processors(device), shared_memory(device), backward)
    if found is None:
        raise RuntimeError(f"no plan for {form} with {hidden} units")  # `choose` asks before
    return found


def shapes(form: Form, x: Tensor, weight: Tensor, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives."""
    (steps, batch, width), hidden, wide = x.shape, weight.shape[1], torch.float32
    return [
        ((steps + 1, batch, hidden), weight.dtype),
        ((steps + 1 if form.cell == "LSTM" else 0, batch, hidden), wide),
        ((steps if keep else 0, batch, width), weight.dtype),
        ((steps if keep and form.site else 0, form.sums, batch), wide),
        *[((steps if keep and form.cell_norm else 0, batch), wide)] * 2,
    ]


def forward(
    form: Form,
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    keep: bool,
) -> tuple[Tensor, ...]:
    """hist [T+1, B, H], c_hist, xhat, rstds and the cell norm's mean and rstd; without ``keep`` the last are empty."""
    from . import sequence

    batch, hidden = x.shape[1], weight.shape[1]
    hist, c_hist, xhat, rstds, mean, rstd = (
        x.new_empty(shape, dtype=dtype) for shape, dtype in shapes(form, x, weight, keep)
    )
    hist[0] = h
    if c is not None:
        c_hist[0] = c
    arguments = {
        "weight": weight, "hist": hist, "c_hist": c_hist, "xhat": xhat, "rstds": rstds, "cell_mean": mean,
        "cell_rstd": rstd, **_shared(x, h, gain, bias, gain_cell, bias_cell), **extras.arguments(weight),
        "TRAIN": keep,
    }  # fmt: skip
    cut = cut_for(form, hidden, batch, weight, False)
    _start(sequence.forward_kernel, form, cut, batch, {"sums": form.sums, "moments": 2}, arguments)
    return hist, c_hist, xhat, rstds, mean, rstd


def backward(
    form: Form,
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_hist: Tensor,
    d_c: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by name: x, weight, h, c, gain, bias, gain_cell, bias_cell."""
    from . import sequence

    hist, c_hist, xhat, rstds, mean, rstd = kept
    batch, hidden = x.shape[1], weight.shape[1]
    cut = cut_for(form, hidden, batch, weight, True)
    defer = bool(form.site) and (cut.members > 1 or "defer" in OVERRIDE)
    with as_cudnn_multiplies(weight.dtype):
        q = _projections(form, xhat, weight) if defer else weight
    d_y = torch.empty_like(xhat)
    d_x = torch.empty_like(xhat) if form.cell == "GRU" else d_y
    d_h, d_first = (h.new_empty(batch, hidden) for _ in range(2))
    shares = x.new_empty(-(-batch // cut.rows), 2 * (form.gates + 1) * hidden)
    members = 2 * cut.groups * cut.members
    arguments = {
        "weight": weight if cut.resident else _packed(form, cut, weight), "hist": hist, "c_hist": c_hist,
        "xhat": xhat, "rstds": rstds, "cell_mean": mean, "cell_rstd": rstd, "q": q, "d_hist": d_hist,
        "d_c": x if d_c is None else d_c.contiguous(), "HAS_D_C": d_c is not None, "d_x": d_x, "d_y": d_y,
        "d_h_first": d_h, "d_c_first": d_first, "shares": shares, "DEFER": defer,
        "partials": weight.new_empty(members * cut.members * cut.units * cut.rows),
        "sums": x.new_empty(members * form.sums * cut.rows), **_shared(x, h, gain, bias, gain_cell, bias_cell),
        **extras.arguments(weight),
        "PC": max(1, min(power(cut.members), 2048 * cut.warps // (cut.units * cut.rows))),
    }  # fmt: skip
    _start(sequence.backward_kernel, form, cut, batch, {"cell_sums": 2}, arguments)
    kinds = {t.dtype for t in (gain, bias, gain_cell, bias_cell) if t is not None}
    added = _added_up(form, hidden, shares, bias is not None, kinds.pop() if len(kinds) == 1 else torch.float32)
    found = {"h": d_h, "c": d_first, **added}
    through = _through_norm(form, d_y, xhat, gain, rstds) if form.site else d_y
    found["x"] = (through if form.site == "sum" else d_x).to(x.dtype)
    with as_cudnn_multiplies(weight.dtype):
        found["weight"] = through.flatten(0, 1).t() @ operands(hist, extras).flatten(0, 1)
    return found


def _shared(
    x: Tensor, h: Tensor, gain: Tensor | None, bias: Tensor | None, gain_cell: Tensor | None, bias_cell: Tensor | None
) -> dict[str, Any]:
    """What both kernels read; x stands for what there is not."""
    tensors = {"x": x, "h_first": h, "gain": gain, "bias": bias, "gain_cell": gain_cell, "bias_cell": bias_cell}
    flags = {"HAS_BIAS": bias is not None, "HAS_BIAS_CELL": bias_cell is not None}
    return {**{name: x if t is None else t for name, t in tensors.items()}, **flags}


def _added_up(form: Form, hidden: int, shares: Tensor, bias: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of gains and biases from what each tile of rows adds to them, cast in one go."""
    gates = form.gates * hidden
    total = (shares[0] if shares.shape[0] == 1 else shares.sum(0)).to(dtype)
    parts = dict(zip(("bias", "gain", "bias_cell", "gain_cell"), torch.split(total, [gates, gates, hidden, hidden])))
    there = {"bias": bias, "gain": bool(form.site), "bias_cell": form.cell_norm, "gain_cell": form.cell_norm}
    return {name: part for name, part in parts.items() if there[name]}


def _packed(form: Form, cut: Plan, weight: Tensor) -> Tensor:
    """W~' as each member reads it, [members, units of all, gates * own units]: in order, every byte once."""
    hidden, span = weight.shape[1], cut.members * cut.units
    parts = weight.view(form.gates, hidden, hidden)
    if (form.padded_gates, span) != (form.gates, hidden):
        parts = weight.new_zeros(form.padded_gates, span, span)
        parts[: form.gates, :hidden, :hidden] = weight.view(form.gates, hidden, hidden)
    return parts.view(form.padded_gates, cut.members, cut.units, span).permute(1, 3, 0, 2).contiguous()


def _projections(form: Form, xhat: Tensor, weight: Tensor) -> Tensor:
    """Q = W~' x^ of each statistics group for all steps at once, [T, B, groups, H]."""
    if form.split == 0:
        return xhat @ weight
    sizes = [2 * weight.shape[1], weight.shape[1]] if form.split == 2 else [weight.shape[1]] * form.gates
    pairs = zip(torch.split(xhat, sizes, -1), torch.split(weight, sizes))
    return torch.stack([part @ matrix for part, matrix in pairs], 2)


def operands(hist: Tensor, extras: Extras) -> Tensor:
    """h' as the products saw it, [T, B, H]."""
    before = hist[:-1]
    if extras.resets is not None:
        before = torch.where(extras.resets.unsqueeze(-1), hist[0], before)
    return before if extras.drop is None else (before * extras.drop).to(before.dtype)


def _through_norm(form: Form, d_y: Tensor, xhat: Tensor, gain: Tensor | None, rstds: Tensor) -> Tensor:
    """What the norm passes on to the product."""
    from . import sequence

    steps, batch, width = d_y.shape
    out = torch.empty_like(d_y)
    block = power((form.gates, 1, 2)[form.split] * width // form.gates)
    arguments = {
        "d_y": d_y, "xhat": xhat, "gain": gain, "rstds": rstds, "out": out, "B": batch, "H": width // form.gates,
        "eps": form.eps, "G": form.gates, "NS": form.sums, "SPLIT": form.split, "STD": form.std, "BLOCK": block,
    }  # fmt: skip
    options = {"num_warps": max(1, min(16, block // 512))}
    start(sequence.norm_backward_kernel, (steps * batch, form.statistics), arguments, options)
    return out
