"""Programs that wait for each other, in Triton's interpreter: the programs of a launch as threads.

The interpreter runs one program after another; here each has a thread, so that groups of several members meet as they
do on a GPU. What a member reads before it was written it must wait for, or the numbers are wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import threading
import time

import pytest
import torch

from lamina.kernels import fused, plans
from tests.kernels.gpu import test_sides, test_stack
from tests.kernels.gpu.test_sequence import assert_as_good, cast, problem

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")

PATIENCE = 120  # seconds: a program that waits longer waits for ever
WAITING = ("forward_kernel", "backward_kernel")
OTHERS = [("LSTM", "layer", "gate"), ("LSTM", "layer", "carry"), ("GRU", "layer", "joint"), ("GRU", None, None)]
MANY = [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", "layer", "paper"), ("LSTM", None, None)]


class _Here(threading.local):
    """Which program a thread runs."""

    at = None


def _in_threads(interpreter):
    """What the interpreter calls for a launch, with a thread for every program; and the place of the caller's."""
    here = _Here()

    def program(executor, place, arguments, failures):
        here.at = place
        try:
            executor.fn(**arguments)
        except Exception as failure:
            failures.append(failure)

    def run(executor, arguments, grid):
        places = [(x, y, 0) for x in range(grid[0]) for y in range(grid[1])]
        failures, until = [], time.monotonic() + PATIENCE
        if executor.fn.__name__ not in WAITING:
            for place in places:
                program(executor, place, arguments, failures)
        else:
            threads = [threading.Thread(target=program, args=(executor, p, arguments, failures), daemon=True)
                       for p in places]  # fmt: skip
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and not failures and time.monotonic() < until:
                    thread.join(0.05)
            if not failures:
                assert not any(thread.is_alive() for thread in threads), "a program waits for ever"
        if failures:  # the others may wait for the one that failed
            raise failures[0]

    def call(executor, *given, **named):
        named = {k: v for k, v in named.items() if k in inspect.getfullargspec(executor.fn).args}
        given_here, named_here = executor._init_args_hst(given, named)
        scope = interpreter._patch_lang(executor.fn)
        try:
            arguments = inspect.getcallargs(executor.fn, *given_here, **named_here)
            arguments = {
                name: a if name in executor.constexprs else interpreter._implicit_cvt(a)
                for name, a in arguments.items()
            }
            grid = (*executor.grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            run(executor, arguments, grid)
        finally:
            scope.restore()
        executor._restore_args_dev(given, given_here, named, named_here)

    return call, property(lambda _: here.at, lambda _, value: None)


def _made_ready(interpreter):
    """The interpreter writes functions anew when they are first called, which threads cannot do at the same time."""
    for module in ("exchange", "formulas", "rows", "sequence"):
        for value in list(vars(importlib.import_module(f"lamina.kernels.{module}")).values()):
            if isinstance(value, interpreter.InterpretedFunction):
                value.rewrite()


@pytest.fixture(autouse=True)
def _members(monkeypatch):
    """Six programs fit on the device: with 16 units each (an RNN's: 64), two groups of three members."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _made_ready(interpreter)
    call, place = _in_threads(interpreter)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    monkeypatch.setattr(type(interpreter.interpreter_builder), "grid_idx", place, raising=False)
    monkeypatch.setattr(plans, "processors", lambda device: 6)
    monkeypatch.setitem(plans.OVERRIDE, "rows", 16)
    plans._cut_for.cache_clear()
    plans._together.cache_clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
    plans._cut_for.cache_clear()
    plans._together.cache_clear()


def three_members(row) -> int:
    """Hidden units for three members, the last of which has five."""
    return 2 * (64 if row[0] == "RNN" else 16) + 5


@pytest.mark.slow
@pytest.mark.parametrize("row", [*MANY, *OTHERS], ids=str)
def test_members_meet(row, device):
    assert_as_good(lambda: problem(row, (3, 18, 3, three_members(row)), device), torch.float32, "persistent")


@pytest.mark.slow
@pytest.mark.parametrize("row", MANY, ids=str)
def test_more_rows_than_fit_at_once(row, device):
    """Three tiles for two groups: a second launch, whose words start anew."""
    assert_as_good(lambda: problem(row, (3, 34, 3, three_members(row)), device), torch.float32, "persistent")


@pytest.mark.parametrize("row", MANY, ids=str)
def test_ragged_restarted_and_masked(row, device):
    hidden, states = three_members(row), 2 if row[0] == "LSTM" else 1
    lengths = torch.tensor([4, 1, 3, 0], device=device)
    resets = torch.zeros(4, 4, dtype=torch.bool, device=device)
    resets[0, 1] = resets[2, 0] = resets[2, 2] = resets[3, 0] = True
    masks = tuple((torch.rand(4, 4, hidden, device=device) < 0.4).float() for _ in range(states))
    drop = (torch.rand(4, hidden, device=device) < 0.7).float() / 0.7
    more = {"lengths": lengths, "resets": resets, "zoneout": masks, "recurrent_mask": drop}
    assert_as_good(lambda: problem(row, (4, 4, 3, hidden), device, **more), torch.float32, "persistent")


@pytest.mark.usefixtures("bfloat16_is_rounded")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", MANY[:2], ids=str)
def test_half_precision(row, dtype, device):
    assert_as_good(lambda: problem(row, (4, 3, 7, three_members(row)), device), dtype, "persistent")


def test_a_nan_is_a_value_like_others(device):
    """h is polled until it is not NOT_YET, which is a NaN too."""
    call = cast(problem(MANY[0], (3, 4, 4, three_members(MANY[0])), device), torch.float32, torch.float32)
    x = call.input.detach().clone()
    x[0, 2] = float("nan")
    out = fused.run(dataclasses.replace(call, input=x), "persistent").output
    assert torch.isnan(out[:, 2]).all()
    assert not torch.isnan(out[:, [0, 1, 3]]).any()


def test_a_first_state_with_the_bits_of_not_yet(device):
    """A NaN that has them all: it goes out as another NaN, and nobody waits for it."""
    call = cast(problem(MANY[1], (2, 3, 4, three_members(MANY[1])), device), torch.float32, torch.float32)
    h = call.state[0].detach().clone()
    h[1, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    out = fused.run(dataclasses.replace(call, state=(h,)), "persistent").output
    assert torch.isnan(out[:, 1]).all()
    assert not torch.isnan(out[:, [0, 2]]).any()


@pytest.mark.slow
@pytest.mark.parametrize("row", MANY, ids=str)
def test_directions_meet_among_themselves(row, device):
    """Two sides with a group of three members each, on all six processors: the numbers of each alone."""
    calls = [cast(problem(row, (4, 5, 3, three_members(row)), device), torch.float32, torch.float32) for _ in range(2)]
    apart = test_sides.everything(calls, test_sides.apart)
    together = test_sides.everything(calls, test_sides.together)
    assert all(torch.equal(together[name], apart[name]) for name in apart)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "parts"), [("LSTM", 3), ("GRU", 2), ("RNN", 3)])
def test_layers_meet_among_themselves(cell, parts, device, monkeypatch):
    """Two of three layers at once, in parts: words start anew in every launch, states and shares go on."""
    monkeypatch.setitem(plans.OVERRIDE, "parts_of_stack", parts)
    monkeypatch.setitem(plans.OVERRIDE, "at_once", 2)
    hidden = three_members((cell,))
    test_stack.assert_as_good(cell, torch.float32, device, (5, 4, 3, hidden), lengths=torch.tensor([5, 2, 3, 1]))
