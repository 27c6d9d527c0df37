"""Lab tests train on 8x8 digits, which take an eighth of the embedded set's time, and on the toy experiment."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.datasets import load_digits

from lamina.lab.cli import running, workers
from lamina.lab.data.registry import Dataset
from lamina.lab.experiments import SHEETS, images
from lamina.lab.runs.progress import Reporter
from tests.lab import toy

# A machine with a GPU to test on may lack packages of the extra: what needs them is tested on a CPU alone.
ABSENT = [package for package in ("mlxtend", "pooch") if importlib.util.find_spec(package) is None]
if ABSENT and os.environ.get("LAMINA_TEST_DEVICE") == "cuda":
    collect_ignore = ["test_analysis.py", "test_cli.py", "test_data.py", "test_sheets.py"]


@lru_cache
def digits(name: str, root: str | None = None) -> Dataset:
    found = load_digits()
    pixels, labels = np.rint(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.uint8)
    arrays = {"train_x": pixels[500:], "train_y": labels[500:], "test_x": pixels[:500], "test_y": labels[:500]}
    return Dataset(name, "embedded", "digits 8x8 (embedded stand-in)", arrays, {})


@pytest.fixture
def small_digits(monkeypatch):
    monkeypatch.setattr(images, "_read", digits)


@pytest.fixture
def toy_sheet(monkeypatch):
    """The toy among the experiments: in this process, on the command line and in worker processes."""
    monkeypatch.setitem(SHEETS, "toy", toy.SHEET)
    monkeypatch.setattr(running.run_app, "registered_commands", [*running.run_app.registered_commands])
    running._add_run_command(toy.SHEET)
    monkeypatch.setattr(workers, "PROGRAM", ("-m", "tests.lab.toy", "worker"))
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    return toy.SHEET


@pytest.fixture
def say():
    with Reporter(Console(quiet=True)) as reporter:
        yield reporter
