"""A layer's pass, from its input to its output and back.

W_x x of all steps (``rows``), W_h centred, and the walk through the steps (``launch`` or ``steps``); on a CPU ``cpu``
does all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import launch
from .cpu import layer as cpu
from .forms import Extras, Form, Setting, form_of
from .given import NAMES, STEP, Tensors, there
from .launch import Small
from .precision import Matrix, Product, as_cudnn_multiplies, formed, left_for_later, matrix_gradient

# What a forward pass leaves for backward: nothing, the states alone, all that ``backward`` takes, or all of it for one
# backward pass, which may use its memory.
NOTHING, STATES, ALL, ONCE = "nothing", "states", "all", "once"
WHOLE = ALL, ONCE
C_HIST = 5  # where c of all steps stands in what ``forward`` gives after hist and the final states; first on a CPU


def module(path: str) -> ModuleType:
    """Where ``forward`` and ``backward`` of a path are."""
    if path == "steps":
        from . import steps

        return steps
    return launch


def output(hist: Tensor) -> Tensor:
    """What the layer gives, of all states."""
    return hist[1:]


def input_side(setting: Setting) -> tuple[tuple[int, ...], str]:
    """Which gates of W_x x share statistics, and what is done to it: normed, centred for the norm of the sum, plain."""
    where = setting.where
    if where.sum:
        return where.sum, "centre"
    return (where.ih, "norm") if where.ih else ((form_of(setting).gates,), "plain")


def outer_biases(form: Form, bias_ih: Tensor | None, bias_hh: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What is added to W_x x beforehand: GRU's recurrent bias cannot be, nor any where the sum is normed."""
    if form.site == "sum":
        return None, None
    return bias_ih, None if form.cell == "GRU" else bias_hh


def _inner_bias(form: Form, bias_ih: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
    """The biases that are added after the recurrent product and its norm."""
    if form.site != "sum":
        return bias_hh if form.cell == "GRU" else None
    return bias_hh if bias_ih is None else bias_ih if bias_hh is None else bias_ih + bias_hh


def inner(form: Form, tensors: Tensors) -> Small:
    """gain, bias, gain_cell and bias_cell, as the steps use them; a norm without a gain has a gain of 1."""
    _, _, _, _, matrix, bias_ih, bias_hh, _, gain_hh, gain_sum, gain_cell, bias_cell = tensors[:STEP]
    gain = gain_hh if form.site == "hh" else gain_sum
    rows, hidden = there(matrix).shape
    gain = _or_ones(gain, rows, matrix) if form.site else None
    gain_cell = _or_ones(gain_cell, hidden, matrix) if form.cell_norm else None
    return gain, _inner_bias(form, bias_ih, bias_hh), gain_cell, bias_cell


def _or_ones(gain: Tensor | None, width: int, like: Tensor | None) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device=there(like).device) if gain is None else gain


def forward(setting: Setting, path: str, tensors: Tensors, extras: Tensors, keep: str) -> list[Tensor]:
    """hist, the final h and c, then what backward needs: W_x x, its statistics, x, W_h and its bound, the path's own.

    W_h is centred where its product is normed, and scaled float16 where it has a bound. Of W_x x and x one is empty:
    ``kept_sides``.
    """
    if path == "cpu":
        return cpu.forward(setting, tensors, extras, keep)
    from . import rows

    form, (groups, mode) = form_of(setting), input_side(setting)
    x, h, c, weight_ih, weight_hh, bias_ih, bias_hh, gain_ih = tensors[:8]
    with as_cudnn_multiplies(there(x).dtype):
        summed = torch.nn.functional.linear(there(x), there(weight_ih))
    biases = outer_biases(form, bias_ih, bias_hh)
    prepared, statistics = rows.forward(summed, gain_ih, *biases, groups, mode, setting.eps, setting.eps_mode)
    summed, kept_x = kept_sides(setting, summed, prepared, keep, path)
    normed = setting.where.groups(form.site) if form.site else ()
    matrix = rows.matrix(there(weight_hh), normed, setting.factors == "half")
    hist, h_n, c_n, *kept = module(path).forward(
        form, prepared, matrix, h, c, *inner(form, tensors), Extras(*extras, *tensors[STEP:]), keep in WHOLE
    )
    most = statistics.new_empty(0) if matrix.most is None else matrix.most
    return [hist, h_n, c_n, summed, statistics, kept_x, matrix.values, most, *kept]


# Units from which the stepwise path keeps x beside W_x x in bfloat16: at 2,400 units to make it anew would be 42 us at
# memory's speed, 2% of a training step that the record has at 0.90 of cuDNN's time and 1.41 of its peak memory.
WIDE = 2048


def kept_sides(setting: Setting, summed: Tensor, prepared: Tensor, keep: str, path: str = "") -> tuple[Tensor, Tensor]:
    """Of W_x x and of x as the steps take it what backward is left: not both, which are as large as all gates.

    A norm's backward pass needs W_x x, of which x can be made anew; elsewhere x is enough. The one that is not kept
    is given back empty, so that its memory is free before the steps, or after them. What is kept for one pass back is
    both: the gradients of x take the place of x.
    """
    if keep not in WHOLE:
        return summed.new_empty(0), prepared.new_empty(0)
    if input_side(setting)[1] != "norm":
        return summed.new_empty(0), prepared
    wide = summed.shape[-1] // form_of(setting).gates >= WIDE
    both = path == "steps" and wide and summed.dtype == torch.bfloat16
    return summed, prepared if both or keep == ONCE else prepared.new_empty(0)


def prepared_again(setting: Setting, tensors: Tensors, summed: Tensor, out: Tensor | None = None) -> Tensor:
    """x as the steps take it, made anew from W_x x."""
    from . import rows

    (groups, mode), biases = input_side(setting), outer_biases(form_of(setting), *tensors[5:7])
    return rows.forward(summed, tensors[7], *biases, groups, mode, setting.eps, setting.eps_mode, out)[0]


def backward(
    setting: Setting, path: str, tensors: Tensors, extras: Tensors, kept: Iterable[Tensor], grads: Tensors,
    needed: Sequence[bool], once: bool = False,
) -> list[Tensor | Product | None]:  # fmt: skip
    """Gradients in the order and the dtypes of ``tensors``; ``grads`` are those of output, h_n and c_n.

    Those of large matrices as products that are still to be formed. What was kept ``once`` is of no use afterwards.
    """
    if path == "cpu":
        return [*cpu.backward(setting, tensors, extras, [*kept], grads, needed)]
    form = form_of(setting)
    hist, summed, statistics, prepared, values, most, *rest = kept
    anew = not prepared.numel()
    if anew:
        prepared = prepared_again(setting, tensors, summed)
    matrix = Matrix(values, hist.dtype, most if most.numel() else None)
    arriving = [None if g is None else g.contiguous() for g in grads]
    lent = once and _lends_its_input(setting, path, there(tensors[4]))
    found = module(path).backward(
        form, prepared, matrix, *inner(form, tensors), Extras(*extras, *tensors[STEP:]), (hist, *rest), *arriving,
        train_matrix=needed[4], overwrite=anew or once, **({"place": summed} if lent else {}),
    )  # fmt: skip
    del prepared, matrix, values, rest
    if path == "steps" and "weight" in found:  # as soon as W_h may be gone, so that its factor goes too
        found["weight"] = found["weight"]()
    if lent:
        with as_cudnn_multiplies(hist.dtype):
            torch.mm(there(tensors[0]).flatten(0, 1), there(tensors[3]).t(), out=summed.flatten(0, 1))
    return outer_gradients(setting, tensors, found, summed, statistics, needed, once)


def _lends_its_input(setting: Setting, path: str, matrix: Tensor) -> bool:
    """Whether W_x x lends its memory to the gradients of W_h h' and is multiplied again once they have been used.

    For LSTMs of the stepwise path, which would take 1.6 times cuDNN's memory in a captured pass (B = 128, H = 1024);
    3% of its time there. Not where the matrix's gradient is formed later: it needs them that long.
    """
    normed = setting.cell == "LSTM" and input_side(setting)[1] == "norm"
    return path == "steps" and normed and not left_for_later(matrix.numel())


def outer_gradients(
    setting: Setting, tensors: Tensors, found: dict[str, Any], summed: Tensor, statistics: Tensor,
    needed: Sequence[bool], once: bool = False,
) -> list[Tensor | Product | None]:  # fmt: skip
    """Gradients in the order and the dtypes of ``tensors``, from those that the steps have found, by name.

    What is in ``found`` goes when it was used: these are the largest tensors of a pass, and few at a time are enough.
    W_x x, if it was kept ``once``, makes way for its gradient where rows allow that.
    """
    from . import rows

    form, (groups, mode) = form_of(setting), input_side(setting)
    bias_ih, bias_hh, gain_ih = tensors[5:8]
    x, outer = there(tensors[0]), any(b is not None for b in outer_biases(form, bias_ih, bias_hh))
    place = summed if once and makes_way(setting, summed) else None
    d_summed, small = rows.backward(
        found.pop("x"), summed, gain_ih, statistics, groups, mode, setting.eps, setting.eps_mode, outer, place
    )
    if callable(found.setdefault("weight", None)):
        found["weight"] = found["weight"]()  # no other name: it holds a tensor as large as all gates
    return assembled(setting, tensors, x, found, d_summed, small, needed)


def makes_way(setting: Setting, summed: Tensor) -> bool:
    """Whether the gradient of W_x x may take its place."""
    from . import rows

    groups, mode = input_side(setting)
    return mode == "norm" and rows.in_place(summed.shape[-1], groups)


def assembled(
    setting: Setting, tensors: Tensors, x: Tensor, found: dict[str, Any], d_summed: Tensor, small: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | Product | None]:  # fmt: skip
    """All gradients, in order: ``small`` are those of gain and biases of W_x x, whose factor was x."""
    form, weight_ih = form_of(setting), there(tensors[3])
    bias_ih, bias_hh, gain_ih = tensors[5:8]
    outer = any(b is not None for b in outer_biases(form, bias_ih, bias_hh))
    with as_cudnn_multiplies(x.dtype):
        d_input = torch.matmul(d_summed, weight_ih) if needed[0] else None
    d_weight = matrix_gradient(d_summed, x) if needed[3] else None
    before = small[-1] if outer else None
    after = found.get("bias")
    sides = (after, after) if form.site == "sum" else (before, after if form.cell == "GRU" else before)
    given = {
        "input": d_input, "weight_ih": d_weight, "weight_hh": found["weight"], "h": found["h"], "c": found.get("c"),
        "bias_ih": sides[0], "bias_hh": sides[1], "gain_ih": small[0] if gain_ih is not None else None,
        "gain_hh": found.get("gain"), "gain_sum": found.get("gain"), "gain_cell": found.get("gain_cell"),
        "bias_cell": found.get("bias_cell"), **{name: found.get(name) for name in NAMES[STEP:]},
    }  # fmt: skip
    return _in_kind(given, tensors)


def _in_kind(given: dict[str, Tensor | Product | None], tensors: Tensors) -> list[Tensor | Product | None]:
    """Gradients in the dtypes of their tensors; one that two tensors share is cast once."""
    cast: dict[tuple[int, torch.dtype], Tensor] = {}
    found: list[Tensor | Product | None] = []
    for name, tensor in zip(NAMES, tensors):
        gradient = given[name]
        if tensor is None or gradient is None or gradient.dtype == tensor.dtype:
            found.append(None if tensor is None else gradient)
            continue
        key = (id(gradient), tensor.dtype)
        if key not in cast:
            cast[key] = there(formed(gradient)).to(tensor.dtype)
        found.append(cast[key])
    return found
