"""Several recurrences of one form at once, such as the directions of a layer: ``walk`` for their stacked tensors.

What comes in is a list of all tensors of the first, then of the second; what goes out and what is kept has an axis of
sides before the others. Around the common launches every side has its own products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import launch, rows, walk
from .forms import Extras, Setting, form_of, kept_dtype, statistics_shape
from .given import COUNT, EXTRAS, STEP, Given, Tensors, there
from .launch import Part, Small
from .precision import Matrix, Product, as_cudnn_multiplies


def of_each(given: Tensors, size: int = COUNT) -> Iterator[list[Given]]:
    """What each side has of a list of all sides' tensors."""
    return (list(given[at : at + size]) for at in range(0, len(given), size))


def stacked(tensors: Sequence[Given]) -> Given:
    """The sides' tensors on a first axis, or None; a number that was expanded stays one number for each side."""
    there_are = [t for t in tensors if t is not None]
    if not there_are:
        return None
    if there_are[0].dim() == 3 and not any(any(t.stride()) for t in there_are):
        return torch.stack([t[0, 0, 0] for t in there_are]).view(-1, 1, 1, 1).expand(-1, *there_are[0].shape)
    return torch.stack(there_are)


def extras_of(each: Sequence[Sequence[Given]], extras: Tensors) -> Extras:
    """What acts on all sides, stacked; ``each``: the tensors of each side."""
    acting = [[*own, *tensors[STEP:]] for own, tensors in zip(of_each(extras, len(EXTRAS)), each)]
    return Extras(*map(stacked, zip(*acting)))


def output(hist: Tensor) -> Tensor:
    """What the recurrences give, of all states."""
    return hist[:, 1:]


def forward(setting: Setting, path: str, tensors: Tensors, extras: Tensors, keep: str) -> list[Tensor]:
    """As ``walk.forward``, of all sides."""
    form, each = form_of(setting), [*of_each(tensors)]
    normed = setting.where.groups(form.site) if form.site else ()
    summed, prepared, statistics = _input_side(setting, each)
    summed, kept_x = walk.kept_sides(setting, summed, prepared, keep)
    matrix = matrices([rows.matrix(there(t[4]), normed, setting.factors == "half") for t in each])
    h, c = (stacked([t[at] for t in each]) for at in (1, 2))
    small = small_of([walk.inner(form, t) for t in each])
    walking, found = launch.forward_walk(
        form, prepared, matrix, h, c, small, extras_of(each, extras), keep in walk.WHOLE, len(each)
    )
    walking.go(Part(len(each), prepared.shape[1]))
    hist, h_n, c_n, *kept = found
    most = statistics.new_empty(0) if matrix.most is None else matrix.most
    return [hist, h_n.to(hist.dtype), c_n, summed, statistics, kept_x, matrix.values, most, *kept]


def _input_side(setting: Setting, each: Sequence[Sequence[Given]]) -> tuple[Tensor, Tensor, Tensor]:
    """W_x x, x as the steps take it, and its statistics, of all sides."""
    found = empty_input_side(setting, each)
    for tensors, *mine in zip(each, *found):
        project(setting, tensors, there(tensors[0]), *mine)
    return found


def empty_input_side(setting: Setting, each: Sequence[Sequence[Given]]) -> tuple[Tensor, Tensor, Tensor]:
    """Where ``project`` leaves what it finds."""
    (groups, mode), like, width = walk.input_side(setting), there(each[0][0]), there(each[0][4]).shape[0]
    summed = like.new_empty(len(each), *like.shape[:2], width)
    prepared = torch.empty_like(summed, dtype=kept_dtype(summed.dtype, width // form_of(setting).gates))
    statistics = summed.new_empty(statistics_shape(summed, groups, mode), dtype=torch.float32)
    return summed, prepared, statistics


def project(
    setting: Setting, tensors: Sequence[Given], x: Tensor, summed: Tensor, prepared: Tensor, statistics: Tensor
) -> None:
    """W_x x of some steps of a recurrence with these tensors, and what the steps take of it."""
    (groups, mode), form = walk.input_side(setting), form_of(setting)
    weight_ih, bias_ih, bias_hh, gain_ih = (tensors[at] for at in (3, 5, 6, 7))
    with as_cudnn_multiplies(x.dtype):
        torch.mm(x.flatten(0, 1), there(weight_ih).t(), out=summed.flatten(0, 1))
    biases = walk.outer_biases(form, bias_ih, bias_hh)
    rows.forward(summed, gain_ih, *biases, groups, mode, setting.eps, setting.eps_mode, prepared, statistics)


def matrices(each: Sequence[Matrix]) -> Matrix:
    most = stacked([m.most for m in each])
    return Matrix(torch.stack([m.values for m in each]), each[0].dtype, most)


def small_of(each: Sequence[Small]) -> Small:
    gain, bias, gain_cell, bias_cell = (stacked(kind) for kind in zip(*each))
    return gain, bias, gain_cell, bias_cell


def prepared_again(
    setting: Setting, each: Sequence[Sequence[Given]], summed: Tensor, prepared: Tensor, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """x as the steps take it, of all sides, and whether it was made anew."""
    if prepared.numel():
        return prepared, False
    prepared = torch.empty_like(summed, dtype=dtype)
    for tensors, *mine in zip(each, summed, prepared):
        walk.prepared_again(setting, tensors, *mine)
    return prepared, True


def _at(summed: Tensor, side: int) -> Tensor:
    return summed[side] if summed.numel() else summed


def backward(
    setting: Setting, path: str, tensors: Tensors, extras: Tensors, kept: Sequence[Tensor], grads: Tensors,
    needed: Sequence[bool], once: bool = False,
) -> list[Tensor | Product | None]:  # fmt: skip
    """As ``walk.backward``, of all sides."""
    form, each, wanted = form_of(setting), [*of_each(tensors)], [*of_each(needed)]  # type: ignore[arg-type]
    hist, summed, statistics, prepared, values, most, *rest = kept
    prepared, anew = prepared_again(setting, each, summed, prepared, rest[1].dtype)
    matrix = Matrix(values, hist.dtype, most if most.numel() else None)
    d_out, d_h, d_c = (None if g is None else g.contiguous() for g in grads)
    inner = [walk.inner(form, t) for t in each]
    walking, found = launch.backward_walk(
        form, prepared, matrix, small_of(inner), extras_of(each, extras), (hist, *rest), d_out, d_h, d_c, anew or once,
        len(each),
    )  # fmt: skip
    walking.go(Part(len(each), prepared.shape[1]))
    del walking, prepared  # and what only the steps needed
    gradients: list[Tensor | Product | None] = []
    for side, (own, own_extras) in enumerate(zip(each, of_each(extras, len(EXTRAS)))):
        need = [bool(n) for n in wanted[side]]
        named = launch.gradients(
            form, hist.dtype, inner[side], Extras(*own_extras, *own[STEP:]), hist[side], rest[1][side],
            rest[2][side], found.at(side), need[4],
        )  # fmt: skip
        gradients += walk.outer_gradients(setting, own, named, _at(summed, side), statistics[side], need, once)
    return gradients
