"""What a recurrence computes, as far as the kernels care, and what may act on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..placements import GATES, PLACEMENTS, PLAIN, Placement
from ..reference import Recurrence
from .precision import halves

CELLS = {"RNN": 0, "LSTM": 1, "GRU": 2, "DREAMER": 3}
SITES = {"": 0, "hh": 1, "sum": 2}


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

    def constants(self) -> dict[str, Any]:
        """Kernel arguments that every kernel of a recurrence takes."""
        return {
            "CELL": CELLS[self.cell],
            "SITE": SITES[self.site],
            "SPLIT": self.split,
            "CELL_NORM": self.cell_norm,
            "CARRY": self.carry,
            "RELU": self.relu,
            "STD": self.std,
            "G": self.gates,
        }

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


@dataclass(frozen=True)
class Setting:
    """A recurrence without its tensors: what a call was asked to compute, forwards in time."""

    cell: str
    norm: str  # "layer", "batch" or "none"
    placement: str
    eps: float
    eps_mode: str
    nonlinearity: str
    factors: str  # of the recurrent products: "same" (of the model's dtype) or "half" (precision.halves)

    def encode(self) -> tuple[str, float]:
        """As text and eps, for operators that take no Python objects; a compiler may not know what number eps is."""
        words = (self.cell, self.norm, self.placement, self.eps_mode, self.nonlinearity, self.factors)
        return ",".join(words), self.eps

    @classmethod
    def decode(cls, text: str, eps: float) -> Setting:
        """The inverse of ``encode``."""
        cell, norm, placement, *others = text.split(",")
        return cls(cell, norm, placement, eps, *others)

    @property
    def where(self) -> Placement:
        return PLAIN if self.norm == "none" else PLACEMENTS[self.cell][self.placement]


def setting_of(call: Recurrence, path: str = "") -> Setting:
    """The setting of a call whose norm is "layer", "batch" or none; weight norm is taken before the kernels."""
    norm = call.norm if call.norm in ("layer", "batch") else "none"
    half = path != "cpu" and halves(call.weights.weight_hh.dtype, call.nonlinearity)
    factors = "half" if half else "same"
    return Setting(call.cell, norm, call.placement.name, call.eps, call.eps_mode, call.nonlinearity, factors)


@cache
def form_of(setting: Setting) -> Form:
    """What the kernels need to know of a setting."""
    where = setting.where
    site = "hh" if where.hh else "sum" if where.sum else ""
    groups = where.groups(site) if site else ()
    split = 0 if len(groups) <= 1 else 2 if groups == (2, 1) else 1
    return Form(
        "DREAMER" if where.dreamer else setting.cell, site, split, bool(where.cell), where.carry,
        setting.nonlinearity == "relu", setting.eps_mode == "std", setting.eps,
    )  # fmt: skip


@dataclass
class Extras:
    """What may act on a recurrence besides its weights; of stacked recurrences with an axis before."""

    lengths: Tensor | None = None  # [B]
    resets: Tensor | None = None  # bool [T, B]
    keep_h: Tensor | None = None  # [T, B, H] or expanded
    keep_c: Tensor | None = None
    drop: Tensor | None = None  # [B, H]
    reset_h: Tensor | None = None  # [B, H], the state after a reset; None is 0
    reset_c: Tensor | None = None

    def reset_states(self, like: Tensor, batch: int) -> tuple[Tensor | None, Tensor | None]:
        """h and c after a reset [B, H], zeros where none is given; None without resets. ``like``: [.., H]."""
        if self.resets is None:
            return None, None
        shape = (*self.resets.shape[:-2], batch, like.shape[-1])
        zeros = like.new_zeros(shape, dtype=torch.float32)
        return zeros if self.reset_h is None else self.reset_h, zeros if self.reset_c is None else self.reset_c

    def arguments(self, nothing: Tensor, batch: int) -> dict[str, Any]:
        """Kernel arguments; ``nothing``, [.., H], stands for what there is not and is not read."""
        names = ("lengths", "resets", "keep_h", "keep_c", "drop")
        tensors = {name: getattr(self, name) for name in names}
        flags = {f"HAS_{name.upper()}": tensor is not None for name, tensor in tensors.items()}
        masks = {name: tensors[name] for name in ("keep_h", "keep_c")}
        strides = {
            f"{name}_{axis}": 0 if mask is None or mask.dim() < -d else mask.stride(d)
            for name, mask in masks.items()
            for d, axis in zip((-4, -3, -2, -1), "stbu")
        }
        tensors |= zip(("reset_h", "reset_c"), self.reset_states(nothing, batch))
        return {**{name: nothing if t is None else t for name, t in tensors.items()}, **strides, **flags}


FEW = 16  # units: over fewer, a norm's gradient is a small difference of large terms that must not be rounded


def kept_dtype(dtype: torch.dtype, hidden: int) -> torch.dtype:
    """Of what a model of some dtype keeps of each step, W_x x and x^."""
    return torch.float32 if hidden < FEW else dtype


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def statistics_shape(summed: Tensor, groups: tuple[int, ...], mode: str) -> tuple[int, ...]:
    """Shape of the mean and 1/deviation of each part of W_x x; only "norm" keeps them."""
    return (*summed.shape[:-1], 2, len(groups) if mode == "norm" else 0)
