"""The persistent path: buffers, launches, and the products around them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import interpreted
from .forms import Extras, Form, kept_dtype, power
from .plans import OVERRIDE, Plan, cut_for
from .precision import Matrix, Product, as_cudnn_multiplies, matrix_gradient, multiply, precision, reach
from .start import start

Given = Tensor | None


@cache
def _constants(form: Form, cut: Plan, hidden: int, multiplied: str, half: bool, spin: bool) -> dict[str, Any]:
    return {
        **form.constants(),
        "eps": form.eps,
        "H": hidden,
        "P": cut.members,
        "GP": form.padded_gates,
        "BU": cut.units,
        "BM": cut.rows,
        "K": cut.chunk,
        "NK": -(-cut.members * cut.units // cut.chunk),
        "P2": power(cut.members),
        "SOLO": cut.members == 1,
        "PRECISION": multiplied,
        "HALF": half,
        "SPIN": spin,
        "WARPS": cut.warps,
    }


@cache
def _options(cut: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": 1}
    if cut.members > 1:
        # The driver refuses a launch whose programs cannot all be on the device at once: no hang.
        options["launch_cooperative_grid"] = True
    return options


def _start(kernel: Any, form: Form, cut: Plan, words: int, arguments: dict[str, Any]) -> None:
    """One launch for as many tiles of rows as the device holds groups; groups do not wait for one another.

    ``words`` of 64 bits are each group's for its exchange, all 0 at first.
    """
    x, weight = arguments["x"], arguments["weight"]
    steps, batch, width = x.shape
    half = weight.dtype != arguments["hist"].dtype
    constants = _constants(form, cut, width // form.gates, precision(weight.dtype), half, not interpreted())
    tiles = -(-batch // cut.rows)
    for first in range(0, tiles, cut.groups):
        groups = min(cut.groups, tiles - first)
        space = torch.zeros(groups * words, dtype=torch.int64, device=x.device)
        counts = {"T": steps, "B": batch, "groups": groups, "first": first, "exchange": space}
        start(kernel, (groups * cut.members,), {**constants, **arguments, **counts}, _options(cut))


def _statistics(form: Form) -> int:
    """Numbers a row and step that backward needs of the norms."""
    return (form.sums if form.site else 0) + (2 if form.cell_norm else 0)


def shapes(form: Form, x: Tensor, kind: torch.dtype, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives in a model of dtype ``kind``."""
    (steps, batch, width), wide = x.shape, torch.float32
    hidden = width // form.gates
    lstm = form.cell == "LSTM"
    return [
        ((steps + 1, batch, hidden), kind),
        ((batch, hidden), kind),
        ((batch, hidden) if lstm else (0,), kind),
        ((steps + 1 if lstm else 0, batch, hidden), wide),
        ((steps if keep else 0, batch, width), kept_dtype(kind, hidden)),
        ((steps if keep else 0, _statistics(form), batch), wide),
    ]


def forward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    h: Given,
    c: Given,
    gain: Given,
    bias: Given,
    gain_cell: Given,
    bias_cell: Given,
    extras: Extras,
    keep: bool,
) -> tuple[Tensor, ...]:
    """hist [T+1, B, H], the final h and c, c_hist, x^ and the norms' statistics; the last two only with ``keep``."""
    from . import sequence

    weight = matrix.values
    cut = cut_for(form, weight.shape[1], x.shape[1], weight, False)
    (shape, kind), *others = shapes(form, x, matrix.dtype, keep)
    hist = _awaited(shape, kind, x.device) if cut.members > 1 else x.new_empty(shape, dtype=kind)
    h_last, c_last, c_hist, xhat, stats = (x.new_empty(shape, dtype=dtype) for shape, dtype in others)
    c = c if form.cell == "LSTM" else None
    arguments = {
        "weight": weight, "hist": hist, "h_last": h_last, "c_last": c_last, "c_hist": c_hist, "xhat": xhat,
        "stats": stats, "c_first": x if c is None else c, "HAS_C": c is not None, "TRAIN": keep,
        **_scales(matrix, h, extras),
        **_shared(x, h, gain, bias, gain_cell, bias_cell), **extras.arguments(weight),
    }  # fmt: skip
    words = 2 * cut.members * cut.rows * (form.sums + 2)
    _start(sequence.forward_kernel, form, cut, words, arguments)
    return hist, h_last, c_last, c_hist, xhat, stats


def _awaited(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Filled with exchange.NOT_YET: members see by it what has not come."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.full(shape, -1, dtype=bits, device=device).view(dtype)


def _scales(matrix: Matrix, h: Given, extras: Extras) -> dict[str, Any]:
    """What scaled float16 factors were or are to be scaled by."""
    bound = reach(matrix, h, extras.drop)
    most = matrix.values if matrix.most is None else matrix.most
    return {"most": most, "reach": most if bound is None else bound, "HAS_REACH": bound is not None}


def backward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    h: Given,
    gain: Given,
    bias: Given,
    gain_cell: Given,
    bias_cell: Given,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_out: Given,
    d_h: Given,
    d_c: Given,
    train_matrix: bool = True,
) -> dict[str, Tensor | Product]:
    """Gradients by name: x, weight (if it is trained), h, c, gain, bias, gain_cell, bias_cell."""
    from . import sequence

    hist, c_hist, xhat, stats = kept
    weight, batch, hidden = matrix.values, x.shape[1], matrix.values.shape[1]
    cut = cut_for(form, hidden, batch, weight, True)
    defer = bool(form.site) and (cut.members > 1 or "defer" in OVERRIDE)
    d_y = torch.empty_like(xhat)
    d_x = torch.empty_like(xhat) if form.cell == "GRU" else d_y
    d_first = x.new_empty(2 if form.cell == "LSTM" else 1, batch, hidden, dtype=torch.float32)
    # Filled, because a thread whose first work is cuBLAS's is warned that it has no CUDA context: autograd's threads.
    shares = x.new_zeros(-(-batch // cut.rows), 2 * (form.gates + 1) * hidden, dtype=torch.float32)
    whole = weight.dtype == torch.float32 and precision(weight.dtype) != "tf32"  # a share is a word then
    size = cut.units * cut.rows // (1 if whole else 2)
    arguments = {
        "weight": weight, "hist": hist, "c_hist": c_hist,
        "xhat": xhat, "stats": stats, "q": _projections(form, xhat, weight) if defer else weight,
        "most": weight if matrix.most is None else matrix.most,
        **_incoming(x, d_out, d_h, d_c), "d_x": d_x, "d_y": d_y, "d_first": d_first, "shares": shares, "DEFER": defer,
        **_shared(x, h, gain, bias, gain_cell, bias_cell), **extras.arguments(weight),
        "PC": max(1, min(power(cut.members), 1024 * cut.warps // size)),
    }  # fmt: skip
    words = 2 * cut.members * (cut.rows * (form.sums + 2) + cut.members * size)
    _start(sequence.backward_kernel, form, cut, words, arguments)
    kinds = {t.dtype for t in (gain, bias, gain_cell, bias_cell) if t is not None}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    found: dict[str, Tensor | Product] = {**_added_up(form, hidden, shares, bias is not None, kind)}
    found.update(zip("hc", d_first.unbind()))
    through = _through_norm(form, d_y, xhat, gain, stats, matrix.dtype) if form.site else d_y.to(matrix.dtype)
    found["x"] = through if form.site == "sum" else d_x
    if train_matrix:
        found["weight"] = matrix_gradient(through, operands(hist, extras))
    return found


def _shared(x: Tensor, h: Given, gain: Given, bias: Given, gain_cell: Given, bias_cell: Given) -> dict[str, Any]:
    """What both kernels read; x stands for what there is not."""
    return {
        "x": x, "h_first": x if h is None else h, "gain": x if gain is None else gain,
        "bias": x if bias is None else bias, "gain_cell": x if gain_cell is None else gain_cell,
        "bias_cell": x if bias_cell is None else bias_cell, "HAS_H": h is not None, "HAS_BIAS": bias is not None,
        "HAS_BIAS_CELL": bias_cell is not None,
    }  # fmt: skip


def _incoming(x: Tensor, d_out: Given, d_h: Given, d_c: Given) -> dict[str, Any]:
    """The gradients that arrive; x stands for what there is not."""
    return {
        "d_out": x if d_out is None else d_out, "d_h": x if d_h is None else d_h, "d_c": x if d_c is None else d_c,
        "HAS_D_OUT": d_out is not None, "HAS_D_H": d_h is not None, "HAS_D_C": d_c is not None,
    }  # fmt: skip


def _added_up(form: Form, hidden: int, shares: Tensor, bias: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of gains and biases from what each tile of rows adds to them, cast in one go."""
    gates = form.gates * hidden
    there = {"bias": bias, "gain": bool(form.site), "bias_cell": form.cell_norm, "gain_cell": form.cell_norm}
    if not any(there.values()):
        return {}
    total = (shares[0] if shares.shape[0] == 1 else shares.sum(0)).to(dtype)
    parts = zip(there, torch.split(total, [gates, gates, hidden, hidden]))
    return {name: part for name, part in parts if there[name]}


def _projections(form: Form, xhat: Tensor, weight: Tensor) -> Tensor:
    """Q = W~' x^ of each statistics group for all steps at once, [groups, T * B, H]; W~ as it is given, scaled or not.

    |x^| is at most the square root of its group's size: float16 holds it without a scale.
    """
    kind, hidden = xhat.dtype, weight.shape[1]
    rows = xhat.flatten(0, 1).to(weight.dtype)
    q = weight.new_empty(form.statistics, rows.shape[0], hidden, dtype=kind)
    with as_cudnn_multiplies(weight.dtype):
        if form.split == 1:
            by_gate = rows.view(-1, form.gates, hidden).transpose(0, 1)
            return multiply(by_gate, weight.view(-1, hidden, hidden), out=q)
        sizes = [rows.shape[1]] if form.split == 0 else [2 * hidden, hidden]
        for out, part, matrix in zip(q, torch.split(rows, sizes, 1), torch.split(weight, sizes)):
            multiply(part, matrix, out=out)
    return q


def operands(hist: Tensor, extras: Extras) -> Tensor:
    """h' as the products saw it, [T, B, H]."""
    before = hist[:-1]
    if extras.resets is not None:
        before = torch.where(extras.resets.unsqueeze(-1), hist[0], before)
    return before if extras.drop is None else (before * extras.drop).to(before.dtype)


def _through_norm(form: Form, d_y: Tensor, xhat: Tensor, gain: Given, stats: Tensor, dtype: torch.dtype) -> Tensor:
    """What the norm passes on to the product."""
    from . import sequence

    steps, batch, width = d_y.shape
    out = torch.empty_like(d_y, dtype=dtype)
    block = power((form.gates, 1, 2)[form.split] * width // form.gates)
    arguments = {
        "d_y": d_y, "xhat": xhat, "gain": gain, "stats": stats, "out": out, "B": batch, "eps": form.eps,
        "H": width // form.gates, "G": form.gates, "NSTAT": _statistics(form), "SPLIT": form.split, "STD": form.std,
        "BLOCK": block,
    }  # fmt: skip
    options = {"num_warps": max(1, min(16, block // 512))}
    start(sequence.norm_backward_kernel, (steps * batch, form.statistics), arguments, options)
    return out
