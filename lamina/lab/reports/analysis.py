"""Numbers, pictures and tables of ``lamina analyse``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

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
from .page import Table, rendered

NORMS: dict[str, str | None] = {"batch": "batch", "weight": "weight", "layer": "layer", "none": None}
SCALES = (1.0, 2.0, 4.0, 8.0)
LENGTHS = tuple(10.0**-k for k in np.arange(1, 5.5, 0.5))
BATCHES = (8, 64, 256)
UPDATES = 600


def study(seed: int = 0, done: Callable[[str], None] = lambda part: None) -> list[Picture]:
    """Compute all parts one after another, in the order of the page; ``done`` hears of each."""
    parts = []
    for part in (_invariances, _fisher, _divergence, _rates, _training, _noise):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts.append(part(seed))
        done(part.__name__.strip("_"))
    return parts


def write(parts: Sequence[Picture], out: Path, seed: int) -> list[Path]:
    """Write analysis.html and one SVG for each part's picture."""
    page = rendered("analysis.html.j2", pictures=parts, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    files = {"analysis.html": page, **{f"analysis-{drawing.name}.svg": drawing.svg for drawing, _, _ in parts}}
    for name, text in files.items():
        (out / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return [out / name for name in files]


def _layers(inputs: int, units: int) -> dict[str, Linear]:
    """Return one layer of each kind, with the same random weights, and gains and biases near their usual values."""
    weight, gain, bias = torch.randn(units, inputs), 1 + 0.2 * torch.randn(units), 0.3 * torch.randn(units)
    layers = {}
    for name, norm in NORMS.items():
        layers[name] = Linear(inputs, units, norm=norm, eps=0.0, activation="identity", dtype=torch.float64)
        layers[name].load_state_dict({"weight": weight, "gain": gain, "bias": bias}, strict=False)
    return layers


# The parts


def _invariances(seed: int) -> Picture:
    exact, loose = invariance_table(seed=seed), invariance_table(seed=seed, eps=1e-5)
    names = list(dict.fromkeys(e.transform for e in exact.rows))
    cells, rows = {}, []
    for title, norm in NORMS.items():
        entries = [exact.entry(name, norm) for name in names]
        cells[title] = [(e.deviation, e.paper == "invariant") for e in entries]
    for name in names:
        entries = [loose.entry(name, norm) for norm in NORMS.values()]
        changes = (f"{e.deviation:.1e}" + (f" (eps: {e.predicted:.1e})" if e.predicted else "") for e in entries)
        rows.append([name, *changes])
    caption = "The same with eps = 1e-5: the change of the output, and in brackets the largest change that eps explains"
    table = Table(caption, ["", *(TITLES[n] for n in NORMS)], rows)
    return pictures.invariance_map(names, cells)._replace(table=table)


def _fisher(seed: int) -> Picture:
    x = torch.randn(400, 4, dtype=torch.float64)
    short = {"weight": "W", "gain": "g", "bias": "b"}
    matrices, edges, rows = {}, {}, []
    for name, layer in _layers(4, 3).items():
        matrix, printed = (fisher(layer, x, "bernoulli", method) for method in ("jacobian", "printed"))
        matrices[name] = matrix.numpy()
        edges[name] = [(short[parameter], part.stop - part.start) for parameter, part in where(layer).items()]
        eigenvalues = torch.linalg.eigvalsh(matrix)
        null = int((eigenvalues < 1e-10 * eigenvalues[-1]).sum())
        error = float((printed - matrix).norm() / matrix.norm())
        rows.append([TITLES[name], *map(str, (len(matrix), null, null_directions(layer).shape[1])), f"{error:.1e}"])
    columns = ["", "parameters", "null directions found", "null directions derived", "relative error of the printed F"]
    table = Table("One layer of 4 inputs and 3 logistic outputs, 400 cases", columns, rows)
    return pictures.fisher_maps(matrices, edges)._replace(table=table)


def _divergence(seed: int) -> Picture:
    x = torch.randn(100, 5, dtype=torch.float64)
    errors = {}
    for name, layer in _layers(5, 4).items():
        direction = torch.randn(sum(p.numel() for p in layer.parameters()), dtype=torch.float64)
        direction /= direction.norm()
        pairs = [(kl(layer, x, s * direction), metric(layer, x, s * direction)) for s in LENGTHS]
        errors[name] = [abs(float(true / form) - 1) for true, form in pairs]
    return pictures.divergence(LENGTHS, errors)


def _rates(seed: int) -> Picture:
    x, target = torch.randn(64, 6, dtype=torch.float64), torch.randn(64, 5, dtype=torch.float64)
    angles: dict[str, dict[str, Sequence[float]]] = {"sgd": {}, "adam": {}}
    rows = []
    layers = _layers(6, 5)
    del layers["none"]
    for name, layer in layers.items():
        for optimiser in angles:
            rate = effective_rate(layer, x, lambda out: (out - target).square().mean(), SCALES, optimiser, lr=1e-3)
            angles[optimiser][name] = rate.angle
        # The factors are the same for both optimisers.
        rows.append([TITLES[name], *(f"{factors[1]:.4g}" for factors in (rate.weights, rate.gain, rate.gradient))])
    columns = ["", "F among weights", "F between weights and gains", "gradient"]
    caption = "Factors when the weights double: 1/4, 1/2 and 1/2 by theory (the paper prints 1/2 for the first)"
    return pictures.rates(SCALES, angles)._replace(table=Table(caption, columns, rows))


def _training(seed: int) -> Picture:
    images = registry.load("mnist", "embedded")
    x = torch.tensor(images.arrays["train_x"]).flatten(1).double() / 255
    y = torch.tensor(images.arrays["train_y"]).long()
    history, rows = {}, []
    for name, norm in NORMS.items():
        torch.manual_seed(seed)
        hidden = Linear(x.shape[1], 32, norm=norm, eps=0.0, activation="tanh", dtype=torch.float64)
        model = nn.Sequential(hidden, nn.Linear(32, 10, dtype=torch.float64))
        history[name], loss = _trained(model, x, y, torch.Generator().manual_seed(seed))
        norms, angles = history[name]["norm"], history[name]["angle"]
        shorter = f"{sum(after < before for before, after in pairwise(norms))} of {UPDATES}"
        ends = (f"{angles[0]:.4f}", f"{angles[-1]:.4f}", f"{loss:.3f}")
        rows.append([TITLES[name], f"{norms[-1] / norms[0]:.2f}", shorter, *ends])
    columns = ["", "norm at the end, relative", "updates that made it shorter"]
    columns += ["angle, first ten updates", "angle, last ten", "loss, last ten"]
    caption = f"Hidden layer of 32 units, plain gradient descent on {images.label}"
    return pictures.training(history)._replace(table=Table(caption, columns, rows))


def _trained(
    model: nn.Sequential, x: Tensor, y: Tensor, generator: torch.Generator
) -> tuple[dict[str, list[float]], float]:
    """Return norm and angle of the first layer's weight at each update, and the mean of the last losses."""
    optimiser, tracker, losses = torch.optim.SGD(model.parameters(), lr=1.0), Tracker(model, names=["0.weight"]), []
    for _ in range(UPDATES):
        cases = torch.randint(len(x), (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[cases]), y[cases])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        tracker.observe()
        losses.append(loss.item())
    history = tracker.history["0.weight"]
    angles = torch.tensor([observation.angle for observation in history[1:]]).view(-1, 10).mean(1)
    return {"norm": [observation.norm for observation in history], "angle": angles.tolist()}, sum(losses[-10:]) / 10


def _noise(seed: int) -> Picture:
    population = torch.randn(200_000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    draws, rows = {}, []
    for size in BATCHES:
        _, spread = noise.batch_errors(population, size, 4000, generator)
        draws[size] = spread.rsqrt().flatten().numpy()
        measured = noise.measured_noise(population, size, 8000, generator)
        expected = (measured.gaussian_scale_sd, measured.expected_scale_sd(), measured.expected_scale_sd("printed"))
        rows.append([str(size), *(f"{v:.3g}" for v in (measured.scale_sd, *expected, measured.spread_variance))])
    columns = ["batch size N", "deviation of sigma / sigma~", "exact", "by 2/N", "by 1/N, as printed"]
    columns += ["N times the variance of sigma~² / sigma²"]
    caption = "Sampling noise, measured and predicted. Exact: for normal inputs. By 2/N and 1/N: to first order in 1/N"
    return pictures.noise(draws)._replace(table=Table(caption, columns, rows))
