"""Facts about this machine (versions, devices, backends), and its training speed: each norm against none."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState

from ...functional import explain
from ...layers import LayerNorm
from ...optim import Adam
from ...recurrent import GRU, LSTM
from ..data import registry
from ..experiments import images
from ..experiments.mnist.settings import NORMS, MnistConfig
from ..protocol import module_of
from ..reports import records
from ..training import update as engine
from .workers import cores

# name: pixels on a side, units. Time does not depend on what the images show, so they are random.
SIZES = {"small": (8, 256), "paper": (28, 1000)}
COLUMNS = ("Size", "Norm", "Engine", "Milliseconds", "Ratio to none")
BATCH, CASES = 128, 2048


Case = tuple[str, str, str]  # size, engine, norm


def measure(device: str, quick: bool, say: Callable[[str], None]) -> records.Record:
    """Return a record of kind "bench"; each round takes all cases in turn, so that a slow minute slows all of them."""
    accelerator = Accelerator(cpu=device == "cpu")
    cuda = accelerator.device.type == "cuda"
    rounds, updates = (7, 5) if quick else (7, 60 if cuda else 20)
    engines, sizes = ("eager", "graph") if cuda else ("eager",), ("small",) if quick else tuple(SIZES)
    cases = {case: _prepare(*case, accelerator, updates) for case in itertools.product(sizes, engines, NORMS)}
    milliseconds: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case, steps in cases.items():
            milliseconds[case].append(_milliseconds(steps, updates))
        say(f"round {number + 1} of {rounds}")
    return {
        "schema": records.SCHEMA,
        "kind": "bench",
        "name": "train",
        "title": "Training speed: milliseconds an update",
        "environment": records.environment(),
        "experiment": "mnist",
        "device": accelerator.device.type,
        "threads": torch.get_num_threads(),
        "batch_size": BATCH,
        "rounds": rounds,
        "updates_a_round": updates,
        "rows": [_row(case, milliseconds) for case in cases],
    }


def _prepare(size: str, engine_name: str, norm: str, accelerator: Accelerator, updates: int) -> Any:
    """Return an engine after a few updates, so that nothing built on first use is measured."""
    side, hidden = SIZES[size]
    config = MnistConfig(norm=norm, hidden=hidden, batch_size=BATCH)
    experiment = module_of("mnist")
    data = images.split(_random_images(side), config).to(accelerator.device)
    torch.manual_seed(0)
    model: Any = experiment.build(config, data).to(accelerator.device)
    optimizer: Any = Adam(model.parameters(), config.lr)
    captured = engine_name != "eager"
    if not captured:
        model, optimizer = accelerator.prepare(model, optimizer)
    total = torch.zeros((), device=accelerator.device)
    batches = experiment.batches(config, data, 0)
    update = engine.Update(experiment, config, model, optimizer, data, accelerator, total, seed=0, sampled=False)
    steps = engine.Captured(update, batches, 0) if captured else engine.Eager(update, batches)
    _milliseconds(steps, min(3, updates))
    return steps


def _random_images(side: int) -> registry.Dataset:
    draw = np.random.default_rng(0)
    arrays = {
        f"{part}_{axis}": draw.integers(0, top, shape, dtype=np.uint8)
        for part in ("train", "test")
        for axis, top, shape in (("x", 256, (CASES, side, side)), ("y", 10, (CASES,)))
    }
    return registry.Dataset("mnist", "random", f"random images {side}x{side}", arrays, {})


def _milliseconds(steps: Any, updates: int) -> float:
    steps.begin(0, updates)
    steps.wait()
    began = time.perf_counter()
    steps.launch(0, updates)
    steps.wait()
    return 1000 * (time.perf_counter() - began) / updates


def _row(case: Case, milliseconds: Mapping[Case, Sequence[float]]) -> dict[str, Any]:
    size, engine_name, norm = case
    ratios = [ours / theirs for ours, theirs in zip(milliseconds[case], milliseconds[size, engine_name, "none"])]
    names = {"size": size, "norm": norm, "engine": engine_name}
    return {**names, "milliseconds": _summary(milliseconds[case]), "ratio_to_none": _summary(ratios)}


def _summary(values: Sequence[float]) -> Any:
    """Return every round's value, their median and quartiles, which one slow round does not move."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return records.rounded({"values": values, "n": len(values), "median": median, "quartiles": [low, high]})


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row under ``COLUMNS``."""
    return [row["size"], row["norm"], row["engine"], _text(row["milliseconds"], 3), _text(row["ratio_to_none"], 2)]


def _text(summary: dict[str, Any], digits: int) -> str:
    """Return a summary such as ``1.43 (1.40 to 1.52)``."""
    median, low, high = (f"{value:,.{digits}f}" for value in (summary["median"], *summary["quartiles"]))
    return f"{median} ({low} to {high})"


def machine() -> dict[str, str]:
    """Return versions, devices, the backend of each layer and the reason, and the folder of the data."""
    env = records.environment()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = {"LSTM": LSTM(8, 8), "GRU": GRU(8, 8), "LayerNorm": LayerNorm(8)}
    named = "set" if os.environ.get(registry.ROOT_VARIABLE) else "not set"
    return {
        "lamina": f"{env['lamina']}, commit {env['commit'] or 'not known'}",
        "versions": ", ".join(f"{name} {version}" for name, version in env["versions"].items()),
        "machine": "{cpu}, {usable} of {cores} cores, {system}".format(usable=cores(), **env["machine"]),
        "GPU": ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())) or "none",
        **{f"lamina.{name}": str(explain(layer.to(device))) for name, layer in layers.items()},
        "data": f"{registry.asked_root() or registry.default_root()} ({registry.ROOT_VARIABLE} is {named})",
        "processes": str(PartialState().num_processes),
    }
