"""Layers one above another as a wavefront: a layer begins while the one below is still at it.

The steps are cut into parts. Once a layer has walked a part, the layer above can walk it too, beside the layer's next
part, in one launch; between launches the products W_x x of the parts that came out. Backward the same from the last
part of the uppermost layer on. ``sides`` says how tensors of several recurrences lie; what stands there as the input
of an upper layer is the mask that its input, the output of the layer below, is multiplied by, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import launch, rows, sides, walk
from .forms import Extras, Form, Setting, form_of
from .given import EXTRAS, STEP, Given, Tensors, there
from .launch import Found, Part
from .plans import OVERRIDE, at_once
from .precision import Matrix, Product, as_cudnn_multiplies, matrix_gradient

OVERHEAD = 5  # steps' time that a launch and the products around it cost: counted, still to be measured
MOST_PARTS = 64


class Piece(NamedTuple):
    """Some steps of a layer."""

    layer: int
    begin: int
    end: int


def count_of_parts(steps: int, layers: int, most: int) -> int:
    """So many that the launches, their steps and what is between them take least."""
    return int(OVERRIDE.get("parts_of_stack") or _best_count(steps, layers, most))


@cache
def _best_count(steps: int, layers: int, most: int) -> int:
    def cost(parts: int) -> float:
        return sum(1 for _ in schedule(layers, parts, most)) * (steps / parts + OVERHEAD)

    return min(range(1, min(steps, MOST_PARTS) + 1), key=cost)


def schedule(layers: int, parts: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Layer and part of what each launch walks: at most so many pieces, each after the one it builds upon.

    First come the layers with most before them, so that none is left to itself at the end; a launch's pieces lie at
    equal distances, as the kernels want them.
    """
    done = [0] * layers
    while done[-1] < parts:
        ready = [at for at in range(layers) if done[at] < parts and (at == 0 or done[at - 1] > done[at])]
        chosen = sorted(sorted(ready, key=lambda at: done[at])[:most])
        picked = [(at, done[at]) for at in chosen]
        while not _even(picked):
            picked.pop()
        for at, _ in picked:
            done[at] += 1
        yield picked


def _even(picked: Sequence[tuple[int, int]]) -> bool:
    apart = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(picked)}
    return len(apart) <= 1


def launches(layers: int, steps: int, most: int, backward: bool) -> Iterator[tuple[Part, list[Piece]]]:
    """What is walked, launch after launch."""
    span = -(-steps // count_of_parts(steps, layers, most))
    parts = -(-steps // span)
    for picked in schedule(layers, parts, most):
        if backward:
            picked = [(layers - 1 - at, parts - 1 - part) for at, part in reversed(picked)]
        (first, part), (second, other) = picked[0], picked[min(1, len(picked) - 1)]
        walked = Part(len(picked), span, first, second - first, part * span, (part - other) * span)
        yield walked, [Piece(at, n * span, min(steps, (n + 1) * span)) for at, n in picked]


def output(hist: Tensor) -> Tensor:
    """What the uppermost layer gives, of all states."""
    return hist[-1, 1:]


def _input_of(layer: int, each: Sequence[Sequence[Given]], hist: Tensor, begin: int, end: int) -> Tensor:
    """What a layer is given in some steps."""
    given = each[layer][0]
    if layer == 0:
        return there(given)[begin:end]
    below = hist[layer - 1, begin + 1 : end + 1]
    return below if given is None else (below * given[begin:end]).to(below.dtype)


def forward(setting: Setting, path: str, tensors: Tensors, extras: Tensors, keep: str) -> list[Tensor]:
    """As ``sides.forward``, of layers."""
    form, each = form_of(setting), [*sides.of_each(tensors)]
    normed = setting.where.groups(form.site) if form.site else ()
    matrix = sides.matrices([rows.matrix(there(t[4]), normed, setting.factors == "half") for t in each])
    summed, prepared, statistics = sides.empty_input_side(setting, each)
    steps, batch, width = prepared.shape[1:]
    most = at_once(form, width // form.gates, batch, matrix.values, len(each), False)
    h, c = (sides.stacked([t[at] for t in each]) for at in (1, 2))
    small = sides.small_of([walk.inner(form, t) for t in each])
    walking, found = launch.forward_walk(
        form, prepared, matrix, h, c, small, sides.extras_of(each, extras), keep in walk.WHOLE, most
    )
    hist, h_n, c_n, *kept = found
    sides.project(setting, each[0], there(each[0][0]), summed[0], prepared[0], statistics[0])
    for part, pieces in launches(len(each), steps, most, False):
        for layer, begin, end in pieces:
            if layer > 0:
                x = _input_of(layer, each, hist, begin, end)
                sides.project(setting, each[layer], x, *(t[layer, begin:end] for t in (summed, prepared, statistics)))
        walking.go(part)
    summed, kept_x = walk.kept_sides(setting, summed, prepared, keep)
    bound = statistics.new_empty(0) if matrix.most is None else matrix.most
    return [hist, h_n.to(hist.dtype), c_n, summed, statistics, kept_x, matrix.values, bound, *kept]


def backward(
    setting: Setting, path: str, tensors: Tensors, extras: Tensors, kept: Sequence[Tensor], grads: Tensors,
    needed: Sequence[bool], once: bool = False,
) -> list[Tensor | Product | None]:  # fmt: skip
    """As ``sides.backward``, of layers."""
    form, each, wanted = form_of(setting), [*sides.of_each(tensors)], [*sides.of_each(needed)]  # type: ignore[arg-type]
    hist, summed, statistics, prepared, values, bound, *rest = kept
    _, xhat, stats = rest
    prepared, anew = sides.prepared_again(setting, each, summed, prepared, xhat.dtype)
    matrix = Matrix(values, hist.dtype, bound if bound.numel() else None)
    inner = [walk.inner(form, t) for t in each]
    steps, batch, width = prepared.shape[1:]
    most = at_once(form, width // form.gates, batch, values, len(each), True)
    d_out, (d_h, d_c) = _arriving(hist, grads[0]), (None if g is None else g.contiguous() for g in grads[1:])
    walking, found = launch.backward_walk(
        form, prepared, matrix, sides.small_of(inner), sides.extras_of(each, extras), (hist, *rest), d_out, d_h, d_c,
        anew or once, most,
    )  # fmt: skip
    way = Descent(setting, form, each, found, xhat, stats, summed, statistics, hist.dtype, once)
    for part, pieces in launches(len(each), steps, most, True):
        walking.go(part)
        for piece in pieces:
            if piece.layer > 0:
                way.passed(piece, d_out)
    way.passed(Piece(0, 0, steps), d_out)
    gradients: list[Tensor | Product | None] = []
    for layer, own_extras in enumerate(sides.of_each(extras, len(EXTRAS))):
        x = _input_of(layer, each, hist, 0, steps)
        need = [bool(n) and (at > 0 or layer == 0) for at, n in enumerate(wanted[layer])]
        acting = Extras(*own_extras, *each[layer][STEP:])
        gradients += way.gradients(layer, x, hist[layer], acting, need)
    return gradients


def _arriving(hist: Tensor, d_output: Given) -> Tensor:
    """Gradients of all layers' outputs; those of the lower ones are still to come."""
    layers, steps = hist.shape[0], hist.shape[1] - 1
    d_out = hist.new_empty(layers, steps, *hist.shape[2:])
    if d_output is None:
        d_out[-1].zero_()
    else:
        d_out[-1].copy_(d_output)
    return d_out


class Descent:
    """The way of the gradients from layer to layer, and what is left of them for the parameters."""

    def __init__(
        self, setting: Setting, form: Form, each: Sequence[Sequence[Given]], found: Found, xhat: Tensor, stats: Tensor,
        summed: Tensor, statistics: Tensor, dtype: torch.dtype, once: bool,
    ) -> None:  # fmt: skip
        self.setting, self.form, self.each, self.found, self.dtype = setting, form, each, found, dtype
        self.xhat, self.stats, self.summed, self.statistics = xhat, stats, summed, statistics
        in_place = once and walk.makes_way(setting, summed)
        self.d_summed = summed if in_place else torch.empty_like(found.d_x, dtype=dtype)
        # To the products W~ h': in the place of those to the normalised ones, which are used before.
        self.raw = found.d_y if found.d_y.dtype == dtype else torch.empty_like(found.d_y, dtype=dtype)
        self.inner = [walk.inner(form, t) for t in each]
        self.small: list[list[Tensor]] = [[] for _ in each]  # of each layer's gain and biases of W_x x, part by part

    def passed(self, piece: Piece, d_out: Tensor) -> None:
        """Steps were walked: their gradients go to W_x x and, but for the lowest layer, to the output below."""
        layer, begin, end = piece
        here, tensors = (layer, slice(begin, end)), self.each[layer]
        if self.form.site == "sum":
            self._through(here)
        d_x = self.raw if self.form.site == "sum" else self.found.d_x
        (groups, mode), (bias_ih, bias_hh, gain_ih) = walk.input_side(self.setting), tensors[5:8]
        outer = any(b is not None for b in walk.outer_biases(self.form, bias_ih, bias_hh))
        summed = self.summed[here] if self.summed.numel() else self.d_summed[here]  # read by a norm only
        _, small = rows.backward(
            d_x[here], summed, gain_ih, self.statistics[here], groups, mode, self.setting.eps, self.setting.eps_mode,
            outer, self.d_summed[here],
        )  # fmt: skip
        self.small[layer].append(small)
        if layer > 0:
            below = d_out[layer - 1, begin:end]
            with as_cudnn_multiplies(self.dtype):
                torch.mm(self.d_summed[here].flatten(0, 1), there(tensors[3]), out=below.flatten(0, 1))
            if tensors[0] is not None:
                below.mul_(tensors[0][begin:end])

    def _through(self, here: tuple[int, slice]) -> None:
        layer, form = here[0], self.form
        d_y, xhat, stats = (t[here] for t in (self.found.d_y, self.xhat, self.stats))
        found = launch.through_norm(form, d_y, xhat, self.inner[layer][0], stats, self.dtype)
        if found.data_ptr() != self.raw[here].data_ptr():
            self.raw[here].copy_(found)

    def gradients(
        self, layer: int, x: Tensor, hist: Tensor, extras: Extras, needed: Sequence[bool]
    ) -> list[Tensor | Product | None]:
        """All of a layer's, whose input was x."""
        found = launch.gradients_of_small(self.form, self.inner[layer], hist.shape[-1], self.found.at(layer))
        if self.form.site == "hh":
            self._through((layer, slice(0, x.shape[0])))
        elif not self.form.site and self.raw is not self.found.d_y:
            self.raw[layer].copy_(self.found.d_y[layer])
        found["weight"] = matrix_gradient(self.raw[layer], launch.operands(hist, extras)) if needed[4] else None
        small = torch.stack(self.small[layer]).sum(0)
        return walk.assembled(self.setting, self.each[layer], x, found, self.d_summed[layer], small, needed)
