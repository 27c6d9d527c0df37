"""A call's tensors, in the order in which they travel through kernels and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..reference import Recurrence

NAMES = (
    "input", "h", "c", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "gain_ih", "gain_hh", "gain_sum", "gain_cell",
    "bias_cell", "reset_h", "reset_c",
)  # fmt: skip
EXTRAS = ("lengths", "resets", "keep_h", "keep_c", "drop")
COUNT = len(NAMES)
STEP = NAMES.index("reset_h")  # of a single step, which knows no resets
Given = Tensor | None
Tensors = Sequence[Given]


def zero_unless(valid: Tensor, x: Tensor) -> Tensor:
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))  # padding may hold NaN


def tensors_of(call: Recurrence, valid: Tensor | None) -> list[Tensor | None]:
    """The call's tensors in the order of NAMES."""
    x = call.input if valid is None else zero_unless(valid, call.input)
    w = reference.effective_weights(call)
    where = call.placement
    sites = (where.ih, where.hh, where.sum, where.cell) if call.norm in ("layer", "batch") else ((),) * 4
    # A gain without a norm to stand behind is not looked at; weight norm has used its own.
    gains = [g if site else None for g, site in zip((w.gain_ih, w.gain_hh, w.gain_sum, w.gain_cell), sites)]
    state = (*call.state, None)[:2]
    anew = (*call.reset_state[: len(call.state)], None)[:2] if call.resets is not None else (None, None)
    found = (x, *state, w.weight_ih, w.weight_hh, w.bias_ih, w.bias_hh, *gains, w.bias_cell, *anew)
    return [None if t is None else t.contiguous() for t in found]


def extras_of(call: Recurrence) -> list[Tensor | None]:
    """Zoneout as tensors [T, B, H]; a rate is one number, expanded."""
    found: list[Tensor | None] = [call.lengths, call.resets]
    masks = (*call.zoneout[: len(call.state)], None)[:2]
    for mask, hidden in zip(masks, (call.weights.weight_hh.shape[1],) * 2):
        if mask is not None and not isinstance(mask, Tensor):
            dtype = torch.promote_types(call.input.dtype, torch.float32)
            mask = torch.full((), float(mask), dtype=dtype, device=call.input.device)
            mask = mask.expand(*call.input.shape[:2], hidden)
        found.append(mask)
    lengths, resets, keep_h, keep_c = found
    drop = None if call.recurrent_mask is None else call.recurrent_mask.contiguous()
    lengths, resets = (None if t is None else t.contiguous() for t in (lengths, resets))
    return [lengths, resets, keep_h, keep_c, drop]


def there(tensor: Tensor | None) -> Tensor:
    """A tensor that every call has."""
    if tensor is None:
        raise TypeError("a recurrence needs its input and its matrices, got None.")
    return tensor
