"""The analysis in pictures: each function takes plain numbers and returns a drawing with its caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .drawings import COLOURS, DASHES, INK, MARKERS, Drawing, Key, Part, drawing, plain_ticks, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from .page import Table

TITLES = {"layer": "layer norm", "batch": "batch norm", "none": "no norm", "weight": "weight norm"}
EXACT = 1e-16  # what a difference of nothing is drawn as on a logarithmic scale
_GUIDE: dict[str, Any] = {"color": INK, "linewidth": 0.9, "linestyle": ":"}
_COUNTED: dict[str, Any] = {"color": INK, "alpha": 0.25}

Numbers = Sequence[float]


class Picture(NamedTuple):
    """A drawing, the words under it, and the table that stands below some of them."""

    drawing: Drawing
    caption: str
    table: Table | None = None


def _part(title: str, shows: str, paint: Callable[[Axes], None], height: float = 2.9) -> Part:
    return Part(title, shortened(f"{title}: {shows}."), paint, height)


def _look(norm: str) -> dict[str, Any]:
    """Return the look that a norm has in every picture."""
    place = list(TITLES).index(norm)
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place], "markersize": 4}


def _norm_keys(norms: Mapping[str, Any]) -> list[Key]:
    return [Key(TITLES[norm], _look(norm)) for norm in norms]


def _lines(
    ax: Axes, lines: Mapping[str, tuple[Any, Any]], labels: tuple[str, str], guide: Any = None, scale: str = "loglog"
) -> None:
    """Draw a line (x, y) for each norm, and a dotted one as a guide."""
    for norm, (x, y) in lines.items():
        getattr(ax, scale)(x, y, **{**_look(norm), "markevery": max(1, len(x) // 8)})
    if guide is not None:
        getattr(ax, scale)(*guide, **_GUIDE)
    ax.set(xlabel=labels[0], ylabel=labels[1])
    ax.grid(True)
    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if axis.get_scale() == "log":
            plain_ticks(axis, *limits)


# The pictures


def invariance_map(columns: Sequence[str], rows: Mapping[str, Sequence[tuple[float, bool]]]) -> Picture:
    """Draw Table 1: how far the output moves, and whether the paper calls it invariant; a row a transformation."""

    def paint(ax: Axes) -> None:
        sizes = np.array([[np.log10(max(size, EXACT)) for size, _ in row] for row in rows.values()]).T
        ax.imshow(sizes, cmap="cividis", vmin=-16, vmax=0.5, aspect="auto")
        ax.set_xticks(range(len(rows)), [TITLES[norm].replace(" ", "\n") for norm in rows])
        ax.set_yticks(range(len(columns)), [name[::-1].replace(" ", "\n", 1)[::-1] for name in columns])
        for x, row in enumerate(rows.values()):
            for y, (size, claimed) in enumerate(row):
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
                colour = "#ffffff" if size < 1e-5 else "#101014"
                ax.text(x, y, f"{size:.0e}\n{'invariant' if claimed else 'no'}", color=colour, **look)

    caption = (
        "Each cell shows how much a transformation of the weights or of the data changes the output of one layer, and "
        'below it the paper\'s entry: "invariant" or "no". Blue cells change by rounding errors only (float64, eps = '
        "0). All cells agree with the paper."
    )
    agree = all((size < 1e-9) == claimed for row in rows.values() for size, claimed in row)
    caption = caption if agree else caption.replace("All cells agree", "Not all cells agree")
    part = _part("Change of the output", "norms by transformations, with the paper's entries", paint, 4.3)
    return Picture(drawing("invariances", "Table 1, measured", [part], style="map"), caption)


def fisher_maps(matrices: Mapping[str, NDArray[np.float64]], edges: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Draw absolute values of the Fisher matrices, with the parameters' names along the axes."""
    from matplotlib import colormaps

    caption = (
        "The Fisher information matrix of one layer with logistic outputs under each norm, between weights (W), gains "
        "(g) and biases (b). Without a norm, and with batch or weight norm, units do not interact: the weights form "
        "blocks along the diagonal. Layer norm ties all units together."
    )
    parts = [
        _part(TITLES[norm], "size of each entry", partial(_paint_matrix, matrix=matrix, edges=edges[norm]), 3.6)
        for norm, matrix in matrices.items()
    ]
    colours = colormaps["cividis"](np.linspace(1, 0, 5))
    names = ("the largest entry", "0.1 of it", "0.01", "0.001", "0.0001 or less")
    squares = [{"marker": "s", "markersize": 10, "linestyle": "none", "color": tuple(colour)} for colour in colours]
    keys = [Key(name, look) for name, look in zip(names, squares)]
    return Picture(drawing("fisher", "Fisher matrices of the four models", parts, keys, style="map"), caption)


def _paint_matrix(ax: Axes, matrix: NDArray[np.float64], edges: Sequence[tuple[str, int]]) -> None:
    ax.imshow(np.log10(np.maximum(np.abs(matrix) / np.abs(matrix).max(), 1e-6)), cmap="cividis", vmin=-4, vmax=0)
    ends = np.cumsum([width for _, width in edges])
    for end in ends:
        ax.axhline(end - 0.5, color="#ffffff", linewidth=0.8)
        ax.axvline(end - 0.5, color="#ffffff", linewidth=0.8)
    middles = [end - width / 2 - 0.5 for end, (_, width) in zip(ends, edges)]
    for which in (ax.set_xticks, ax.set_yticks):
        which(middles, [name for name, _ in edges])


def rates(scales: Numbers, angles: Mapping[str, Mapping[str, Numbers]]) -> Picture:
    """Draw the angle by which one update turns the weights, against their norm, for each optimiser and norm."""
    names = {"sgd": ("gradient descent", 2), "adam": ("Adam", 1)}
    labels = ("norm of the weights, relative", "angle of one update, radians")
    parts = []
    for optimiser, lines in angles.items():
        title, power = names[optimiser]
        guide = scales, [1.6 * lines["layer"][0] * s**-power for s in scales]
        drawn = {norm: (scales, values) for norm, values in lines.items()}
        paint = partial(_lines, lines=drawn, labels=labels, guide=guide)
        parts.append(_part(title, f"{labels[1]} against {labels[0]}", paint))
    caption = (
        "Larger weights turn less in one update: by 1 over their squared norm with gradient descent, by 1 over their "
        "norm with Adam. The effective learning rate falls as normalised weights grow, while the layer's function "
        "stays the same."
    )
    guide_key = Key("1 / norm² (gradient descent) or 1 / norm (Adam)", _GUIDE)
    keys = [*_norm_keys(angles["sgd"]), guide_key]
    return Picture(drawing("rates", "Effective learning rate against the norm of the weights", parts, keys), caption)


def training(history: Mapping[str, Mapping[str, Numbers]]) -> Picture:
    """Draw the norm of the weights, and the angle that they turn in an update, along a training run."""
    norms = {
        norm: (range(len(seen["norm"])), np.divide(seen["norm"], seen["norm"][0])) for norm, seen in history.items()
    }
    angles = {norm: (np.arange(len(seen["angle"])) * 10 + 5, seen["angle"]) for norm, seen in history.items()}
    labels = ("update", "norm, relative to the first"), ("update", "angle of one update, radians")
    parts = [
        _part("norm of the weights", "by update", partial(_lines, lines=norms, labels=labels[0], scale="plot")),
        _part("how far they turn", "by update", partial(_lines, lines=angles, labels=labels[1], scale="semilogy")),
    ]
    caption = (
        "The hidden layer of a small classifier of digits, trained by plain gradient descent; angles are means over "
        "ten updates. With a norm the gradient is orthogonal to the weights, so no update can make them shorter. "
        "Without a norm nothing rules that out, but weights mostly grow too: growth alone does not tell the models "
        "apart. In every model the weights turn less and less."
    )
    return Picture(drawing("training", "Norm growth and rotation during training", parts, _norm_keys(history)), caption)


def divergence(lengths: Numbers, errors: Mapping[str, Numbers]) -> Picture:
    """Draw |KL / (1/2 d' F d) - 1| against the length of the step d."""
    guide = lengths, [3 * max(v[0] for v in errors.values()) * s / lengths[0] for s in lengths]
    labels = ("length of the step |d|", "|KL / (1/2 d'Fd) - 1|")
    drawn = {norm: (lengths, values) for norm, values in errors.items()}
    paint = partial(_lines, lines=drawn, labels=labels, guide=guide)
    part = _part("Error of the quadratic form", "by length of the step", paint)
    caption = (
        "A small step d of the parameters moves the model by a KL divergence of 1/2 d'Fd, with F the Fisher matrix. "
        "The error of this approximation falls in proportion to the step, under every norm."
    )
    keys = [*_norm_keys(errors), Key("in proportion to |d|", _GUIDE)]
    return Picture(drawing("divergence", "KL divergence and the Fisher metric", [part], keys), caption)


def noise(draws: Mapping[int, NDArray[np.float64]]) -> Picture:
    """Draw densities of sigma / sigma~ for batches of N, beside the approximations with variance 2/N and 1/N."""
    parts = [
        _part(f"batches of {size}", "density of sigma / sigma~", partial(_paint_density, size=size, values=values))
        for size, values in draws.items()
    ]
    caption = (
        "Batch norm divides by the deviation of a batch (sigma~) in place of the population's (sigma). Their ratio "
        "varies from batch to batch; the inputs here are normal. The paper gives the batch variance a relative "
        "variance of 1/N; right is 2/N. Both curves assume that this error is normal, which holds for large batches: "
        "in a batch of 8 the variance is often far too small, so the measured ratio has a longer right tail, and its "
        "deviation (first number in the table) exceeds the one that 2/N predicts."
    )
    keys = [
        Key("batches, measured", {**_COUNTED, "linewidth": 7}),
        Key("variance 2/N", {"color": COLOURS[0]}),
        Key("variance 1/N, as printed", {"color": COLOURS[1], "linestyle": DASHES[1]}),
    ]
    return Picture(drawing("noise", "Sampling noise of batch norm", parts, keys), caption)


def _paint_density(ax: Axes, size: int, values: NDArray[np.float64]) -> None:
    spread = 4 / np.sqrt(2 * size)
    x = np.linspace(max(0.4, 1 - spread), 1 + spread, 300)
    ax.hist(values, bins=60, range=(x[0], x[-1]), density=True, **_COUNTED)
    for variance, place in ((2 / size, 0), (1 / size, 1)):
        z = x**-2.0 - 1  # x = 1 / sqrt(1 + z), z normal
        density = np.exp(-0.5 * z * z / variance) / np.sqrt(2 * np.pi * variance) * 2 * x**-3.0
        ax.plot(x, density, color=COLOURS[place], linestyle=DASHES[place])
    ax.set(xlabel="sigma / sigma~", ylabel="density")
    ax.grid(True)
