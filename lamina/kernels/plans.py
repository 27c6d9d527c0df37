"""How a problem is cut to a device: rows, units, programs, and which way it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import Request, interpreted
from .forms import Form, power
from .precision import halves, precision

RESERVED = 28 * 1024  # bytes of shared memory that are left to the compiler
OVERRIDE: dict[str, Any] = {}  # fields of a plan that a tuner tries
# Rows of a tile: as few as groups allow, since each step's work is by rows; with more, the cell's registers spill.
FEWEST_ROWS, MOST_ROWS = 8, 32
# Programs of a multiprocessor, at most, where recurrences share a launch. Backward, a third would leave each thread 168
# registers: at B = 64, H = 512 388 bytes are spilled for an LSTM, 704 for a GRU. Forward none are.
RESIDENTS, RESIDENTS_BACKWARD = 3, 2


@dataclass(frozen=True)
class Plan:
    """How a problem is cut: rows and units of a program, programs of a group, groups of a launch."""

    rows: int
    units: int
    members: int
    groups: int
    chunk: int  # of the contraction (forward) or of the outputs (backward)
    warps: int
    residents: int = 1  # programs of a multiprocessor

    @property
    def narrow(self) -> bool:
        """Whether a forward pass has memory for one chunk of h at a time only."""
        return self.residents > 2


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; the interpreter has one, and programs that wait for none but themselves."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes of a program's shared memory for weights and operand; the interpreter has any number."""
    if device.type != "cuda":
        return 2**40
    properties, hopper = torch.cuda.get_device_properties(device), 227 * 1024
    return int(getattr(properties, "shared_memory_per_block_optin", hopper)) - RESERVED


def memory_beside(device: torch.device, residents: int) -> int:
    """The same for programs of which several share a multiprocessor.

    Where three do, no more is left to the compiler than it takes for plans of 16 rows.
    """
    if residents == 1:
        return shared_memory(device)
    if device.type != "cuda":
        return 2**40
    properties, hopper = torch.cuda.get_device_properties(device), 228 * 1024
    whole = int(getattr(properties, "shared_memory_per_multiprocessor", hopper))
    return whole // residents - 1024 - (RESERVED if residents == 2 else 2048)  # a program takes 1 KiB for itself


def plan(
    gates: int, hidden: int, batch: int, size: int, programs: int, memory: int, backward: bool, residents: int = 1
) -> Plan | None:
    """Cut a problem for ``programs`` that can be on the device at once; None when its weights do not fit on chip.

    ``size`` is that of an element of the product's operands, ``memory`` a program's shared memory, in bytes, of which
    there are as many ``residents`` on a multiprocessor.
    """
    units = OVERRIDE.get("units", 64 // gates)
    while -(-hidden // units) > programs:
        units *= 2
        if units * gates > 256 and programs > 1:
            return None
    members = -(-hidden // units)
    groups = max(1, min(programs // members, -(-batch // FEWEST_ROWS)))
    rows = OVERRIDE.get("rows") or min(MOST_ROWS, max(FEWEST_ROWS, power(-(-batch // groups))))
    groups = min(groups, -(-batch // rows))
    span = members * units
    narrow = residents > 2 and not backward
    if narrow and size != 2:
        return None
    chunk = OVERRIDE.get("chunk") or (max(16, power(span) // 4) if narrow else _chunk(span, rows, size, backward))
    weights = size * gates * units * -(-span // chunk) * chunk
    operand = gates * units if backward else chunk * (1 if narrow else -(-span // chunk) if rows <= 16 else 2)
    if weights + size * rows * operand > memory:
        return None
    # Odd sizes poll h number by number: with 4 warps and tiles of 16 rows, ptxas 12.8 makes code for some of them (GRU,
    # 257 and 301 units, float32) whose matrix instructions read outside shared memory; with 8, 257 units were sound.
    many = rows > 16 or (backward and rows > 8 and span > 512) or (not backward and rows > 8 and hidden % 4 != 0)
    warps = OVERRIDE.get("warps") or (8 if many else 4)
    return Plan(rows, units, members, groups, chunk, warps, residents)


def plan_together(
    gates: int, hidden: int, batch: int, size: int, device: torch.device, backward: bool, sides: int
) -> Plan | None:
    """The plan of each of several recurrences that share a launch; None where the device does not hold them all.

    Each on processors of its own, or where tiles are smaller then, several programs on a multiprocessor, of which one
    computes while the others wait. That takes 4 warps a program: 8 of them may need all registers.
    """
    usual = RESIDENTS_BACKWARD if backward else RESIDENTS
    programs, most = processors(device), OVERRIDE.get("residents", usual if sides > 1 else 1)
    found = []
    for residents in range(1, most + 1):
        share, memory = max(1, residents * programs // sides), memory_beside(device, residents)
        cut = plan(gates, hidden, batch, size, share, memory, backward, residents)
        if cut is not None and (residents == 1 or cut.warps <= 4) and (sides == 1 or _one_launch(cut, batch)):
            found.append(cut)
    return min(found, key=lambda cut: (cut.rows, cut.residents), default=None)


def _one_launch(cut: Plan, batch: int) -> bool:
    return interpreted() or -(-batch // cut.rows) <= cut.groups


def together(request: Request, sides: int) -> int:
    """How many of ``sides`` recurrences like this one can share a launch; 1 if each needs its own."""
    gates = 1 if request.cell == "RNN" else 4
    size = 2 if halves(request.dtype, request.nonlinearity) else _operand_size(request.dtype)
    given = gates, request.hidden, request.batch, size, request.device, sides
    return min(_together(*given, backward, tuple(OVERRIDE.items())) for backward in (False, True))


def at_once(form: Form, hidden: int, batch: int, weight: Tensor, sides: int, backward: bool) -> int:
    """The same one way, for recurrences of a form, with matrices like this one."""
    given = form.padded_gates, hidden, batch, _operand_size(weight.dtype), weight.device, sides
    return _together(*given, backward, tuple(OVERRIDE.items()))


@cache
def _together(
    gates: int, hidden: int, batch: int, size: int, device: torch.device, sides: int, backward: bool, override: object
) -> int:
    for count in range(min(sides, OVERRIDE.get("at_once", sides)), 1, -1):
        if plan_together(gates, hidden, batch, size, device, backward, count):
            return count
    return 1


def path_for(request: Request) -> tuple[str, str]:
    """ "persistent" or "steps", and why: one launch where the weights stay on chip, else one product a step.

    Measured on an H200 (LSTM, us a step, forward and backward): weights read from L2 in every step 40 against 30
    (float32, B = 32, H = 1024), two launches after one another 60 against 34 (bfloat16, B = 128, H = 1024).
    """
    gates, device = 1 if request.cell == "RNN" else 4, request.device
    size = 2 if halves(request.dtype, request.nonlinearity) else _operand_size(request.dtype)
    if torch.compiler.is_compiling():  # for a batch of any size
        return _path_for(gates, request.hidden, 0, size, device, "")
    return _cached_path_for(gates, request.hidden, request.batch, size, device, OVERRIDE.get("path", ""))


def _path_for(gates: int, hidden: int, batch: int, size: int, device: torch.device, forced: str) -> tuple[str, str]:
    memory, programs = shared_memory(device), processors(device)
    batches = (batch,) if batch else (1, 2**16)  # few rows and many are cut differently
    found = [plan(gates, hidden, n, size, programs, memory, b) for n in batches for b in (False, True)]
    cuts = [p for p in found if p is not None]
    steps = "one matrix product and one fused kernel a step: "
    if forced == "steps" or (not forced and len(cuts) < len(found)):
        return "steps", f"{steps}the weights of {hidden} units do not fit on chip"
    launches = max([-(-batch // (p.rows * p.groups)) for p in cuts], default=1)
    if not forced and launches > 1 and not interpreted():
        return "steps", f"{steps}{batch} cases of {hidden} units are too many for one launch"
    return "persistent", "one kernel for all steps, forward and backward"


_cached_path_for = cache(_path_for)


def _operand_size(dtype: torch.dtype) -> int:
    """Bytes of an element of the product's operands; TF32 in three products keeps high and low parts."""
    return dtype.itemsize * (2 if precision(dtype) == "tf32x3" else 1)


def _chunk(span: int, rows: int, size: int, backward: bool) -> int:
    """How much of the contraction (forward) or of the outputs (backward) one matrix instruction sequence takes."""
    most = (16384 if size == 2 else 2048) // rows if not backward else 4096 // rows  # more would spill registers
    if size == 8 and not backward:  # three TF32 products: their sums are kept short
        most = 64
    whole, padding = max(16, power(span)), 5 / 4 if backward else 1.3
    if whole <= most and whole <= span * padding:  # in one go
        return whole
    return max(16, min(most, whole // 4))


def cut_for(form: Form, hidden: int, batch: int, weight: Tensor, backward: bool, sides: int = 1) -> Plan:
    """The plan of a launch on the weight's device, for each of ``sides`` recurrences."""
    size = _operand_size(weight.dtype)
    return _cut_for(form, hidden, batch, size, weight.device, backward, sides, tuple(OVERRIDE.items()))


@cache
def _cut_for(
    form: Form, hidden: int, batch: int, size: int, device: torch.device, backward: bool, sides: int, override: object
) -> Plan:
    found = plan_together(form.padded_gates, hidden, batch, size, device, backward, sides)
    if found is None:
        raise RuntimeError(f"no plan for {sides} of {form} with {hidden} units")  # `choose` asks before
    return found
