"""Everything that ``lamina analyse`` shows: the numbers, worked out anew, then pictures and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...analysis import noise
from ...analysis.geometry import null_directions
from ...analysis.information import fisher, kl, metric, where
from ...analysis.invariance import invariance_table
from ...analysis.rates import effective_rate
from ...analysis.training import Tracker
from ...layers import Linear
from ..data import registry
from . import analysis_pictures as pictures
from .analysis_pictures import TITLES, Picture
from .figures import COLOURS
from .page import rendered

NORMS: dict[str, str | None] = {"batch": "batch", "weight": "weight", "layer": "layer", "none": None}
SCALES = (1.0, 2.0, 4.0, 8.0)
LENGTHS = tuple(10.0**-k for k in np.arange(1, 5.5, 0.5))
BATCHES = (8, 64, 256)
UPDATES = 600


@dataclass
class Study:
    """Pictures in the order of the page, and the tables that stand below some of them."""

    pictures: list[Picture] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(
        self, picture: Picture, columns: Sequence[str] = (), rows: Sequence[Sequence[str]] = (), told: str = ""
    ) -> None:
        self.pictures.append(picture)
        if rows:
            self.tables[picture.name] = [{"caption": told, "columns": list(columns), "rows": [list(r) for r in rows]}]


def study(seed: int = 0, done: Callable[[str], None] = lambda part: None) -> Study:
    """All parts, one after another; ``done`` hears of each."""
    found = Study()
    for part in (_invariances, _fisher, _divergence, _rates, _training, _noise):
        torch_state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        try:
            part(found, seed)
        finally:
            torch.random.set_rng_state(torch_state)
        done(part.__name__.strip("_"))
    return found


def write(found: Study, out: Path, seed: int) -> list[Path]:
    """analysis.html and one SVG for each picture."""
    colours = list(enumerate(COLOURS))
    page = rendered("analysis.html.j2", pictures=found.pictures, tables=found.tables, seed=seed, colours=colours)
    out.mkdir(parents=True, exist_ok=True)
    files = {"analysis.html": page, **{f"analysis-{p.name}.svg": p.svg for p in found.pictures}}
    for name, text in files.items():
        (out / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return [out / name for name in files]


def _layers(inputs: int, units: int) -> dict[str, Linear]:
    """One layer of each kind, with the same random weights, and gains and biases near their usual values."""
    found = {}
    weight, gain, bias = torch.randn(units, inputs).double(), 1 + 0.2 * torch.randn(units), 0.3 * torch.randn(units)
    for name, norm in NORMS.items():
        layer = Linear(inputs, units, norm=norm, eps=0.0, activation="identity", dtype=torch.float64)
        with torch.no_grad():
            for own, value in (("weight", weight), ("gain", gain), ("bias", bias)):
                if getattr(layer, own, None) is not None:
                    getattr(layer, own).copy_(value)
        found[name] = layer
    return found


# The parts.


def _invariances(found: Study, seed: int) -> None:
    exact, loose = invariance_table(seed=seed), invariance_table(seed=seed, eps=1e-5)
    names = list(dict.fromkeys(e.transform for e in exact.rows))
    cells = {
        norm: [
            (exact.entry(name, NORMS[norm]).deviation, exact.entry(name, NORMS[norm]).paper == "invariant")
            for name in names
        ]
        for norm in NORMS
    }
    rows = []
    for name in names:
        entries = [loose.entry(name, norm) for norm in NORMS.values()]
        rows.append(
            [name, *(f"{e.deviation:.1e}" + (f" of {e.predicted:.1e}" if e.predicted else "") for e in entries)]
        )
    told = "The same with eps = 1e-5: the change, and the most that eps alone explains"
    found.add(pictures.invariance_map(names, cells), ["", *(TITLES[n] for n in NORMS)], rows, told)


def _fisher(found: Study, seed: int) -> None:
    x = torch.randn(400, 4, dtype=torch.float64)
    layers = _layers(4, 3)
    matrices = {name: fisher(layer, x, "bernoulli") for name, layer in layers.items()}
    short = {"weight": "W", "gain": "g", "bias": "b"}
    edges = {
        name: [(short.get(p, p), part.stop - part.start) for p, part in where(layer).items()]
        for name, layer in layers.items()
    }
    rows = []
    for name, matrix in matrices.items():
        values = torch.linalg.eigvalsh(matrix)
        null = int((values < 1e-10 * values[-1]).sum())
        printed = fisher(layers[name], x, "bernoulli", "printed")
        off = float((printed - matrix).norm() / matrix.norm())
        rows.append(
            [TITLES[name], str(len(matrix)), str(null), str(null_directions(layers[name]).shape[1]), f"{off:.1e}"]
        )
    columns = ["", "parameters", "null directions of F", "known beforehand", "printed formula is off by"]
    drawn = pictures.fisher_maps({name: m.numpy() for name, m in matrices.items()}, edges)
    found.add(drawn, columns, rows, "Logistic outputs, 4 inputs, 3 units, 400 cases")


def _divergence(found: Study, seed: int) -> None:
    x = torch.randn(100, 5, dtype=torch.float64)
    errors = {}
    for name, layer in _layers(5, 4).items():
        direction = torch.randn(sum(p.numel() for p in layer.parameters()), dtype=torch.float64)
        direction /= direction.norm()
        pairs = [(kl(layer, x, s * direction), metric(layer, x, s * direction)) for s in LENGTHS]
        errors[name] = [abs(float(true / form) - 1) for true, form in pairs]
    found.add(pictures.divergence(LENGTHS, errors))


def _rates(found: Study, seed: int) -> None:
    x, target = torch.randn(64, 6, dtype=torch.float64), torch.randn(64, 5, dtype=torch.float64)
    angles: dict[str, dict[str, Sequence[float]]] = {"sgd": {}, "adam": {}}
    rows = []
    layers = {name: layer for name, layer in _layers(6, 5).items() if name != "none"}
    for name, layer in layers.items():
        for optimiser in angles:
            rate = effective_rate(layer, x, lambda out: (out - target).square().mean(), SCALES, optimiser, lr=1e-3)
            angles[optimiser][name] = rate.angle
            if optimiser == "sgd":
                rows.append([TITLES[name], *(f"{v:.4g}" for v in (rate.weights[1], rate.gain[1], rate.gradient[1]))])
    columns = ["", "F of the weights", "F between weights and gain", "gradient"]
    told = "What twice the norm of the weights does: 1/4, 1/2 and 1/2 with a norm (the paper prints 1/2 for the first)"
    found.add(pictures.rates(SCALES, angles), columns, rows, told)


def _training(found: Study, seed: int) -> None:
    images = registry.load("mnist", "embedded").arrays
    x = torch.tensor(images["train_x"]).flatten(1).double() / 255
    y = torch.tensor(images["train_y"]).long()
    history, rows = {}, []
    for name, norm in NORMS.items():
        torch.manual_seed(seed)
        hidden = Linear(x.shape[1], 32, norm=norm, eps=0.0, activation="tanh", dtype=torch.float64)
        model = nn.Sequential(hidden, nn.Linear(32, 10, dtype=torch.float64))
        history[name], loss = _trained(model, x, y, torch.Generator().manual_seed(seed))
        norms, angles = history[name]["norm"], history[name]["angle"]
        rows.append(
            [TITLES[name], f"{norms[-1] / norms[0]:.2f}", f"{angles[0]:.4f}", f"{angles[-1]:.4f}", f"{loss:.3f}"]
        )
    columns = ["", "norm at the end, relative", "angle, first ten updates", "last ten", "loss, last ten"]
    told = "Hidden layer of 32 units, scikit-learn's digits, plain gradient descent"
    found.add(pictures.training(history), columns, rows, told)


def _trained(
    model: nn.Sequential, x: Tensor, y: Tensor, generator: torch.Generator
) -> tuple[dict[str, list[float]], float]:
    """Norm and angle of the first layer's weight at each update, and the last losses."""
    optimiser, tracker, losses = torch.optim.SGD(model.parameters(), lr=1.0), Tracker(model, names=["0.weight"]), []
    for _ in range(UPDATES):
        cases = torch.randint(len(x), (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[cases]), y[cases])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        tracker.observe()
        losses.append(loss.item())
    seen = tracker.history["0.weight"]
    angles = torch.tensor([o.angle for o in seen[1:]]).view(-1, 10).mean(1)
    return {"norm": [o.norm for o in seen], "angle": angles.tolist()}, sum(losses[-10:]) / 10


def _noise(found: Study, seed: int) -> None:
    population = torch.randn(200_000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    draws, rows = {}, []
    for size in BATCHES:
        _, spread = noise.batch_errors(population, size, 4000, generator)
        draws[size] = spread.rsqrt().flatten().numpy()
        seen = noise.measured_noise(population, size, 2000, generator)
        expected = (seen.expected_scale_sd(), seen.expected_scale_sd("printed"))
        numbers = (seen.spread_variance, seen.scale_sd, *expected)
        rows.append([str(size), *(f"{v:.3g}" for v in numbers)])
    columns = ["batch", "N times the variance (2, printed 1)", "deviation of sigma / sigma~", "with 2/N", "as printed"]
    found.add(pictures.noise(draws), columns, rows, "Sampling noise of the deviation")
