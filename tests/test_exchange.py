"""Programs that wait for each other, in Triton's interpreter: the programs of a launch as threads.

The interpreter runs one program after another; here each has a thread, so that groups of several members meet as they
do on a GPU. What a member reads before it was written it must wait for, or the numbers are wrong.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading

import pytest
import torch

from lamina.kernels import plans
from tests.test_sequence import FUSED, assert_as_good, problem

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")

PATIENCE = 60  # seconds: a program that waits longer waits for ever


class _Here(threading.local):
    """Which program a thread runs."""

    at = None


def _in_threads(interpreter):
    """What the interpreter calls for a launch, with a thread for every program."""
    here = _Here()

    def program(executor, x, arguments, failures):
        here.at = (x, 0, 0)
        try:
            executor.fn(**arguments)
        except Exception as failure:
            failures.append(failure)

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
            failures = []
            cells = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
            if grid[1] > 1:  # programs that wait for nobody
                for x, y in cells:
                    here.at = (x, y, 0)
                    executor.fn(**arguments)
            else:
                threads = [
                    threading.Thread(target=program, args=(executor, x, arguments, failures), daemon=True)
                    for x in range(grid[0])
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(PATIENCE)
                assert not any(thread.is_alive() for thread in threads), "a program waits for ever"
            if failures:
                raise failures[0]
        finally:
            scope.restore()
        executor._restore_args_dev(given, given_here, named, named_here)

    return call, property(lambda _: here.at, lambda _, value: None)


@pytest.fixture
def _members(monkeypatch):
    """Six programs fit on the device, each of 16 units: groups of up to six members."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    call, place = _in_threads(interpreter)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    monkeypatch.setattr(type(interpreter.interpreter_builder), "grid_idx", place, raising=False)
    monkeypatch.setattr(plans, "processors", lambda device: 6)
    monkeypatch.setitem(plans.OVERRIDE, "rows", 16)
    plans._cut_for.cache_clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
    plans._cut_for.cache_clear()


@pytest.mark.usefixtures("_members")
@pytest.mark.parametrize("row", FUSED, ids=str)
def test_members_meet(row, device):
    """Three members, the last with fewer units; two groups."""
    units = 64 if row[0] == "RNN" else 16
    assert_as_good(problem(row, (3, 18, 3, 2 * units + 5), device), torch.float32, "persistent")
