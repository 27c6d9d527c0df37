"""The persistent path: buffers, launches, and the products around them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .forms import CELLS, SITES, Extras, Form, power
from .plans import OVERRIDE, Plan, cut_for
from .precision import as_cudnn_multiplies, precision
from .start import start


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
