"""Call record: sizes, flags and addresses of one kernel call, as an array of 64-bit integers."""

from __future__ import annotations

FIELDS = (
    "steps", "batch", "hidden", "gates", "cell", "site", "cell_norm", "carry", "relu", "std", "eps",
    "norm_x", "groups", "sizes",  # norm of the recurrent product or the sum: number of groups, gates in each
    "groups_x", "sizes_x",  # norm of W_x x
    "begin", "end",  # steps of this call; backward runs from end - 1 down to begin
    "summed",  # [T, B, W]: W_x x
    "hist", "c_hist", "c_step",  # [T+1, B, H]; c_step: bytes from one step's c to the next's, 0: overwritten in place
    "xhat", "rstd",  # [T, B, W], [T, B, groups]; 0: not saved
    "gain", "bias", "gain_x", "bias_x", "gain_cell", "bias_cell",
    "reset_h", "reset_c",  # [B, H]: state after a reset; 0: no resets
    "order", "counts", "starts",  # lengths: cases, longest first [B]; number of cases that have a step t [T]; first row
    # of step t in tensors without padding [T+1]. 0: no lengths
    "resets", "drop", "keep_h", "keep_h_t", "keep_h_b", "keep_c", "keep_c_t", "keep_c_b",  # 0: absent
    "weight", "packed", "vectors",  # recurrent matrix: unpacked (one row) or as packed panels of so many vectors
    "z", "z_row",  # output of the product, [B, z_row]
    "operand",  # [B, H]: left factor of the product where it is not the history itself
    "scratch", "scratch_size",  # scratch of each thread; its size in numbers, not bytes
    "d_out", "dh", "dc", "d_reset_h", "d_reset_c", "past",  # [T, B, H], then [B, H]
    "d_raw", "d_summed",  # [steps of this call, B, W]
    "shares",  # [threads, 4 W + 2 H]: gradients of bias, gain, bias_x, gain_x, bias_cell, gain_cell, over a block
    "totals",  # float64: the same, summed over all rows
    "threads", "shared",  # shared: threads split the product's columns, not its rows
    "left", "rows", "depth", "columns", "turned", "out",  # products of many rows, and packing
    # Batch norm: threads take ``each`` units, or split rows; bytes from one thread's packed matrix and z to the next's.
    "each", "by_rows", "panel_step", "z_step",
    "ends",  # lengths [B]; 0: none
    # Mean, variance, 1/deviation of a site [T, .]; step: bytes per step, 0: one row for all; live: batch statistics.
    "mean_z", "var_z", "scale_z", "step_z", "live_z",  # W_h h, or the sum
    "mean_xs", "var_xs", "scale_xs", "step_xs", "live_xs",  # W_x x
    "mean_c", "var_c", "scale_c", "step_c", "live_c",
    # A single step, whose input [B, D] is ``left`` and whose products the kernel computes itself.
    "packed_x", "streams",  # streams: copy the new state to where the next step reads it, and to ``out``
    "weight_x", "packs",  # packs: pack both matrices in this call, because they may have changed unnoticed
    "packed_dx", "dx", "d_weight", "d_weight_x",  # backward: gradients of the input and the matrices; 0: not needed
)  # fmt: skip
PLACES = {name: at for at, name in enumerate(FIELDS)}
