"""A pass that keeps little: the outputs, and the state at a few places, from which the gates are made anew.

Backward walks through the sequence a part at a time, from the last to the first: the part's forward pass once more,
from the state that was kept at its beginning, then its backward pass. What a pass needs besides inputs and outputs is
then there for one part only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from . import walk
from .forms import Setting
from .given import Given, Tensors, there
from .precision import Product, formed, formed_at_once

PARTS = 4  # of a sequence: a part's buffers are then smaller than all inputs and outputs
FEW = 1024  # rows, steps times cases, that are not worth parts
MOST = 4096  # rows of a part


def parts(steps: int, batch: int) -> list[tuple[int, int]]:
    """First step and end of each part."""
    rows = steps * batch
    count = 1 if rows <= FEW else min(steps, max(PARTS, -(-rows // MOST)))
    each = -(-steps // count)
    return [(begin, min(begin + each, steps)) for begin in range(0, steps, each)]


def forward(setting: Setting, path: str, tensors: Tensors, extras: Tensors) -> list[Tensor]:
    """hist, the final h and c, and c at the beginning of each part but the first, [parts - 1, B, H]."""
    hist, h_n, c_n, *others = walk.forward(setting, path, tensors, extras, walk.STATES)
    steps, batch = there(tensors[0]).shape[:2]
    begins = [begin for begin, _ in parts(steps, batch)[1:]]
    kept = others[0 if path == "cpu" else walk.C_HIST]
    lstm = setting.cell == "LSTM"
    found = kept[begins] if lstm and begins else kept.new_empty(0, *hist.shape[1:])
    return [hist, h_n, c_n, found]


def backward(
    setting: Setting, path: str, tensors: Tensors, extras: Tensors, kept: Sequence[Tensor], grads: Tensors,
    needed: Sequence[bool],
) -> list[Given]:  # fmt: skip
    """As ``walk.backward``, from what ``forward`` kept: hist and c at the parts' beginnings."""
    hist, cells = kept
    x, (d_out, d_h, d_c) = there(tensors[0]), grads
    total = _Total(x if needed[0] else None)

    def walk_part(number: int, begin: int, end: int) -> tuple[Given, Given]:
        """A function, so that what a part needed is gone before the next: a third of the peak at 2,400 units."""
        some = _part(tensors, hist, cells, number, begin, end, setting.cell == "LSTM")
        others = _extras_of(extras, begin, end)
        made = walk.forward(setting, path, some, others, walk.ALL)
        del made[1:3]  # the part's last state
        arriving = (None if d_out is None else d_out[begin:end], d_h, d_c)
        with nullcontext() if total.weights else formed_at_once():  # at first there is nothing to add products to
            found = walk.backward(setting, path, some, others, _taken_from(made), arriving, needed)
        return total.add(found, begin, end)

    for number, (begin, end) in reversed([*enumerate(parts(x.shape[0], x.shape[1]))]):
        d_h, d_c = walk_part(number, begin, end)
    return total.result(d_h, d_c, tensors)


def _taken_from(made: list[Tensor]) -> Iterator[Tensor]:
    """One by one: who takes them decides how long they stay."""
    while made:
        yield made.pop(0)


def _part(tensors: Tensors, hist: Tensor, cells: Tensor, number: int, begin: int, end: int, lstm: bool) -> list[Given]:
    """The tensors of one part; its first state in float32, so that its gradient is not rounded on the way."""
    x, h, c, *weights = tensors
    if number:
        h = hist[begin].to(torch.promote_types(hist.dtype, torch.float32))
        c = cells[number - 1] if lstm else None
    return [there(x)[begin:end], h, c, *weights]


def _extras_of(extras: Tensors, begin: int, end: int) -> list[Given]:
    lengths, resets, keep_h, keep_c, drop = extras
    lengths = None if lengths is None else (lengths - begin).clamp(min=0)
    return [lengths, *(None if t is None else t[begin:end] for t in (resets, keep_h, keep_c)), drop]


class _Total:
    """Gradients, part by part."""

    def __init__(self, x: Given) -> None:
        self.d_input = None if x is None else torch.empty_like(x)
        self.weights: list[Given] = []

    def add(self, found: Sequence[Tensor | Product | None], begin: int, end: int) -> tuple[Given, Given]:
        """One part's; gives back those of its first state, which the part before needs."""
        d_x, d_h, d_c, *weights = found
        if self.d_input is not None:
            self.d_input[begin:end] = there(formed(d_x))
        if not self.weights:
            # A gradient that serves two tensors is added to for each of them.
            self.weights = [None if w is None else formed(w) for w in weights]
            seen: set[int] = set()
            for at, w in enumerate(self.weights):
                if w is not None and (id(w) in seen or seen.add(id(w))):  # type: ignore[func-returns-value]
                    self.weights[at] = w.clone()
        else:
            for mine, part in zip(self.weights, weights):
                _add(mine, part)
        return formed(d_h), formed(d_c)

    def result(self, d_h: Given, d_c: Given, tensors: Tensors) -> list[Given]:
        state = [
            None if d is None or t is None else d.to(t.dtype) for d, t in zip((d_h, d_c), tensors[1:3])
        ]  # fmt: skip
        return [self.d_input, *state, *self.weights]


def _add(total: Given, part: Tensor | Product | None) -> None:
    """To ``total``, without a second tensor of a large matrix's size."""
    if total is None or part is None:
        return
    if isinstance(part, Product) and total.dtype == part.dtype:
        part.add_to(total)
    else:
        total.add_(there(formed(part)))
