"""Both products of a step in one launch: for which calls, and how they are cut.

A launch less is worth more than a better product where matrices are small. Counted and not yet measured: at
D = H = 512 an LSTM's two matrices of 16 bits have 4 MB. In tiles of 32 columns that is 128 programs, one on each of a
Hopper GPU's multiprocessors, each with 32 KB of weights and, at B = 16, 16 KB of x or h. All 48 KB are on their way
before the first of them is waited for, so that the product takes about one trip to the cache.

Every program reads all of x or of h again. Up to 32 rows that is at most as much as its own share of the matrix (with
tiles of 32 columns and more); above, it shall not take longer than the launch that is saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import plans
from .forms import power

FEW, MOST = 32, 64  # rows: served at any size, and where x and h are small
AGAIN = 16 * 2**20  # bytes of x and h that programs may read above FEW rows: some 3 us from the cache
BLOCK = 256  # bytes of a column of the matrix, and of a row of x or h, that are fetched at a time
UNDER_WAY = 96 * 1024  # bytes that a program has on their way: what a multiprocessor's share of the cache can bring


class Sizes(NamedTuple):
    """Of both products."""

    batch: int
    inputs: int
    hidden: int
    width: int  # of either result: all gates
    itemsize: int
    stateless: bool  # the state is 0 and has no product
    device: torch.device


class Cut(NamedTuple):
    """A program's columns, rows and numbers of the contraction at a time, its blocks on their way and its warps."""

    columns: int
    rows: int
    depth: int
    stages: int
    warps: int


def cut(sizes: Sizes) -> Cut | None:
    """How one launch forms both products; None where the library does."""
    wanted = plans.OVERRIDE.get("cell_product")
    if sizes.batch > MOST or wanted is False:
        return None
    columns = _columns(sizes)
    tiles = -(-sizes.width // columns)
    again = tiles * sizes.batch * sizes.itemsize * (sizes.inputs + sizes.hidden * (not sizes.stateless))
    if sizes.batch > FEW and again > AGAIN and not wanted:
        return None
    rows, depth = max(16, power(sizes.batch)), BLOCK // sizes.itemsize
    blocks = -(-max(sizes.inputs, sizes.hidden) // depth)
    room = min(UNDER_WAY, plans.shared_memory(sizes.device)) // (BLOCK * (columns + rows))
    return Cut(columns, rows, depth, max(2, min(blocks + 1, room)), plans.OVERRIDE.get("cell_warps", 4))


def _columns(sizes: Sizes) -> int:
    """As few as leave no multiprocessor with two programs: each has less to wait for; at most 64."""
    products, programs = 1 if sizes.stateless else 2, plans.processors(sizes.device)
    fitting = (n for n in (16, 32) if products * -(-sizes.width // n) <= programs)
    return int(plans.OVERRIDE.get("cell_columns") or next(fitting, 64))


def launch(sizes: Sizes, cut: Cut) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Programs, arguments besides tensors and options of ``products_kernel``."""
    tiles = -(-sizes.width // cut.columns)
    constants = {
        "B": sizes.batch, "D": sizes.inputs, "H": sizes.hidden, "N": sizes.width, "COLUMNS": cut.columns,
        "DEPTH": cut.depth, "ROWS": cut.rows, "STAGES": cut.stages,
    }  # fmt: skip
    return tiles if sizes.stateless else 2 * tiles, constants, {"num_warps": cut.warps}
