"""The numbers of a call of the CPU's kernels, all of 64 bits: sizes, flags and addresses."""

from __future__ import annotations

FIELDS = (
    "steps", "batch", "hidden", "gates", "cell", "site", "cell_norm", "carry", "relu", "std", "eps",
    "norm_x", "groups", "sizes",  # of the product's norm: how many groups, gates of each
    "groups_x", "sizes_x",
    "begin", "end",  # the steps of this call; backward walks from end - 1 down to begin
    "summed",  # [T, B, W]: W_x x
    "hist", "c_hist", "c_step",  # [T+1, B, H]; c_step: bytes from one step's c to the next's, 0: one place for all
    "xhat", "rstd",  # [T, B, W], [T, B, groups], 0: not kept
    "gain", "bias", "gain_x", "bias_x", "gain_cell", "bias_cell",
    "reset_h", "reset_c",  # [B, H]: the state after a reset; 0: no resets
    "order", "counts", "starts",  # for lengths: cases, longest first [B]; how many of them have a step t [T]; the row
    # where those of step t begin in tensors without padding [T+1]. 0: no lengths
    "resets", "drop", "keep_h", "keep_h_t", "keep_h_b", "keep_c", "keep_c_t", "keep_c_b",  # 0: none
    "weight", "packed", "panels",  # of the product: as it is (one row) or packed
    "z", "z_row",  # where a product goes, [B, z_row]
    "operand",  # [B, H] for h' where it is not the history's
    "scratch", "scratch_size",  # of each thread, in numbers
    "d_out", "dh", "dc", "d_reset_h", "d_reset_c", "past",  # [T, B, H], then [B, H]
    "d_raw", "d_summed",  # [steps of this call, B, W]
    "shares",  # [threads, 4 W + 2 H]: gradients of bias, gain, bias_x, gain_x, bias_cell, gain_cell, of some rows
    "totals",  # float64, of all rows
    "threads", "shared",  # shared: threads take columns of a product, and the first of them all rows
    "left", "rows", "depth", "columns", "turned", "out",  # of a product with many rows, and of packing
    # Batch norm: a thread takes ``each`` units, or rows; bytes from one thread's packed matrix and z to the next's.
    "each", "by_rows", "panel_step", "z_step",
    "ends",  # lengths [B]; 0: none
    # Mean, variance, 1/deviation of a site [T, .]; step: bytes a step, 0: one row for all; live: taken from this batch.
    "mean_z", "var_z", "scale_z", "step_z", "live_z",  # of W_h h, or of the sum
    "mean_xs", "var_xs", "scale_xs", "step_xs", "live_xs",  # of W_x x
    "mean_c", "var_c", "scale_c", "step_c", "live_c",
    # of a single step, whose input [B, D] is ``left``: products are made here
    "packed_x", "streams",  # streams: the state moves to where the next step finds it, and to ``out``
    "weight_x", "packs",  # packs: both matrices are packed here, since nobody knows whether they have changed
    "packed_dx", "dx", "d_weight", "d_weight_x",  # backward: the input's gradient, those of the matrices; 0: not wanted
)  # fmt: skip
PLACES = {name: at for at, name in enumerate(FIELDS)}
