"""Consistency checks of the tensors of a recurrence; checks of single values are in ``checks``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import autocast_dtype, describe, epsilon, fail, one_of, readable
from .placements import GATES, STATES
from .reference import EPS_MODES, CellWeights, Recurrence


def check_recurrence(call: Recurrence, lengths_known: bool = False) -> None:
    """Raise InputError unless shapes, dtypes, devices and values of a recurrence are consistent.

    ``lengths_known`` skips the range check of the lengths: reading their values synchronises with the GPU.
    """
    epsilon(call.eps)
    one_of("eps_mode", call.eps_mode, EPS_MODES)
    _check_types(call)
    _check_weights(call)
    _check_input(call)
    _check_states(call)
    _check_same_kind(call)
    if not lengths_known:
        check_lengths(call.lengths, call.input.shape[0], call.input.shape[1])
    check_resets(call.resets, (call.input.shape[0], call.input.shape[1]))
    _check_masks(call)


def _check_types(call: Recurrence) -> None:
    x: Any = call.input
    weights: Any = call.weights
    if not isinstance(x, Tensor):
        raise TypeError(f"{call.cell} needs a tensor, got {describe(x)}. Convert it with torch.as_tensor.")
    if not isinstance(weights, CellWeights):
        remedy = "Pass lamina.reference.CellWeights(weight_ih, weight_hh, ...)."
        raise TypeError(f"{call.cell} needs its weights as CellWeights, got {describe(weights)}. {remedy}")


def _check_weights(call: Recurrence) -> None:
    w, gates = call.weights, GATES[call.cell]
    rows = w.weight_ih.shape[0]
    if w.weight_ih.dim() != 2 or rows % gates or w.weight_hh.dim() != 2 or w.weight_hh.shape[0] != rows:
        rule = f"{call.cell} weights must be weight_ih [{gates}*H, D] and weight_hh [{gates}*H, P]"
        raise fail(rule, f"{describe(w.weight_ih)} and {describe(w.weight_hh)}", "Pass torch's weight layout.")
    if w.bias_cell is not None and not call.placement.cell:
        rule = f"bias_cell needs a norm of c, which placement {call.placement.name!r} does not have"
        raise fail(rule, describe(w.bias_cell), "Pass None, or choose a placement with that norm.")
    for site in call.placement.sites():
        gain, width = getattr(w, f"gain_{site}"), rows // gates if site == "cell" else rows
        if gain is not None and tuple(gain.shape) != (width,):
            raise fail(f"gain_{site} must have shape [{width}]", describe(gain), "Pass one gain for each unit.")


def _check_input(call: Recurrence) -> None:
    x, shape = call.input, list(call.weights.weight_ih.shape)
    size = shape[1]
    if x.dim() != 3:
        raise fail(f"{call.cell} needs an input [T, B, {size}]", describe(x), "Add the missing axes.")
    if x.shape[0] == 0:
        raise fail("a sequence must have at least one step", describe(x), "Skip empty sequences.")
    if x.shape[2] != size:
        rule = f"{call.cell} with weight_ih {shape} needs an input whose last axis is {size}"
        raise fail(rule, describe(x), "Check the feature axis.")


def _check_states(call: Recurrence) -> None:
    if len(call.state) != STATES[call.cell]:
        raise fail(f"{call.cell} needs {STATES[call.cell]} state(s)", len(call.state), "Pass (h, c) to an LSTM, or h.")
    for role, states in (("initial", call.state), ("reset", call.reset_state)):
        for name, state, shape in zip("hc", states, call.state_shapes()):
            if state is not None and tuple(state.shape) != shape:
                rule = f"the {role} {name} must have shape {list(shape)}"
                raise fail(rule, describe(state), "Match the batch size and the state size.")


def _check_masks(call: Recurrence) -> None:
    """Raise unless masks have the shapes of their states and lie on the input's device, like lengths and resets."""
    steps = call.input.shape[0]
    if len(call.zoneout) < len(call.state):
        rule = f"zoneout needs an entry for each of the {len(call.state)} states of {call.cell}"
        raise fail(rule, f"{len(call.zoneout)} entries", "Pass None for a state without zoneout.")
    shapes = call.state_shapes()
    masks = (call.lengths, call.resets, call.recurrent_mask, *call.zoneout)
    if all(mask is None for mask in masks):
        return
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {"recurrent_mask": (call.recurrent_mask, shapes[0])}
    for name, mask, shape in zip("hc", call.zoneout, shapes):
        if isinstance(mask, Tensor):
            expected[f"the zoneout mask of {name}"] = (mask, (steps, *shape))
    for what, (tensor, needed) in expected.items():
        if tensor is not None and tuple(tensor.shape) != needed:
            raise fail(f"{what} must have shape {list(needed)}", describe(tensor), "Pass one entry for each unit.")
    on_device = {"lengths": call.lengths, "resets": call.resets, **{k: m for k, (m, _) in expected.items()}}
    for what, tensor in on_device.items():
        if tensor is not None and tensor.device != call.input.device:
            raise fail(f"{what} must be on the input's device", describe(tensor), "Move it with .to(device).")


def _check_same_kind(call: Recurrence) -> None:
    """Raise unless input, states and matrices share one device and, outside autocast, one dtype."""
    mixed_ok = autocast_dtype(call.input) is not None
    states = (*zip("hc", call.state), *zip(("reset h", "reset c"), call.reset_state))
    for name, tensor in (("weight_ih", call.weights.weight_ih), *states):
        if tensor is None:
            continue
        if tensor.device != call.input.device:
            rule = "input, states and weights must be on one device"
            remedy = "Move them together with .to(device)."
            raise fail(rule, f"input on {call.input.device} and {name} on {tensor.device}", remedy)
        if tensor.dtype != call.input.dtype and not mixed_ok:
            rule = "input, states and weights must have one dtype"
            remedy = "Cast one of them, or use torch.autocast."
            raise fail(rule, f"input {call.input.dtype} and {name} {tensor.dtype}", remedy)
    if not call.input.is_floating_point():
        raise fail("the input must be floating point", describe(call.input), "Embed or cast integer input.")


def check_lengths(lengths: Tensor | None, steps: int, batch: int) -> None:
    if lengths is None:
        return
    if lengths.dim() != 1 or lengths.shape[0] != batch or lengths.is_floating_point() or lengths.dtype == torch.bool:
        rule = f"lengths must be {batch} whole numbers, one for each case"
        raise fail(rule, describe(lengths), "Pass a 1-D int tensor.")
    if batch and readable(lengths):
        low, high = torch.stack(torch.aminmax(lengths)).tolist()  # one read: each one synchronises with the GPU
        if low < 0 or high > steps:
            rule = f"lengths must lie between 0 and the {steps} steps of the input"
            raise fail(rule, f"values from {low} to {high}", "Pass the number of valid steps of each case.")


def check_resets(resets: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless ``resets`` is None or a bool tensor, of shape ``shape`` if one is given."""
    if resets is None:
        return
    if not isinstance(resets, Tensor):
        remedy = "Convert it with torch.as_tensor(resets, dtype=torch.bool)."
        raise TypeError(f"resets must be a bool tensor, got {describe(resets)}. {remedy}")
    if resets.dtype != torch.bool:
        raise fail("resets must be bool", describe(resets), "Convert it with resets.bool().")
    if shape is not None and tuple(resets.shape) != shape:
        rule = f"resets must have shape {list(shape)} (steps and cases in the order of the input)"
        raise fail(rule, describe(resets), "Set each step that begins a new segment to True.")
