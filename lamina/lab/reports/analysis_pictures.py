"""The analysis in pictures: each function takes plain numbers and returns a drawing with its caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .drawings import COLOURS, DASHES, INK, MARKERS, Drawing, Key, Part, drawing, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from .page import Table

TITLES = {"layer": "layer norm", "batch": "batch norm", "none": "no norm", "weight": "weight norm"}
EXACT = 1e-16  # what a difference of nothing is drawn as on a logarithmic scale
_GUIDE: dict[str, Any] = {"color": INK, "linewidth": 0.9, "linestyle": ":"}
_LOGARITHMIC = {"xscale": "log", "yscale": "log"}
_COUNTED: dict[str, Any] = {"color": INK, "alpha": 0.25}

Numbers = Sequence[float]


class Picture(NamedTuple):
    """A drawing, the words under it, and the table that stands below some of them."""

    drawing: Drawing
    caption: str
    table: Table | None = None


def _part(title: str, shows: str, paint: Callable[[Axes], None], height: float = 2.9) -> Part:
    return Part(title, f"{title}: {shows}.", paint, height)


def _look(norm: str) -> dict[str, Any]:
    """Return the look that a norm has in every picture."""
    place = list(TITLES).index(norm)
    return {"color": COLOURS[place], "linestyle": DASHES[place], "marker": MARKERS[place], "markersize": 4}


def _norm_keys(norms: Mapping[str, Any]) -> list[Key]:
    return [Key(TITLES[norm], _look(norm)) for norm in norms]


def _curves(
    title: str, shows: str, x: Numbers, lines: Mapping[str, Numbers], guide: Numbers = (), /, **axes: str
) -> Part:
    """Return a line for each norm and a dotted one as a guide, on axes with these labels and scales."""

    def paint(ax: Axes) -> None:
        for norm, y in lines.items():
            ax.plot(x, y, **_look(norm), markevery=max(1, len(x) // 8))
        if guide:
            ax.plot(x, guide, **_GUIDE)
        ax.set(**axes)
        ax.grid(True)
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                plain_ticks(axis)

    return _part(title, shows, paint)


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
                text, colour = "invariant" if claimed else "no", "#ffffff" if size < 1e-5 else "#101014"
                ax.text(x, y, f"{size:.0e}\n{text}", color=colour, ha="center", va="center", fontsize=8.5)

    agree = all((size < 1e-9) == claimed for row in rows.values() for size, claimed in row)
    caption = (
        "Each cell shows how much a transformation of the weights or of the data changes the output of one layer, and "
        'below it the paper\'s entry: "invariant" or "no". Blue cells change by rounding errors only (float64, eps = '
        f"0). {'All' if agree else 'Not all'} cells agree with the paper."
    )
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
        _part(TITLES[norm], "size of each entry", partial(_paint_matrix, matrix, edges[norm]), 3.6)
        for norm, matrix in matrices.items()
    ]
    square = {"marker": "s", "markersize": 10, "linestyle": "none"}
    names = ("the largest entry", "0.1 of it", "0.01", "0.001", "0.0001 or less")
    colours = map(tuple, colormaps["cividis"](np.linspace(1, 0, 5)))
    keys = [Key(name, {**square, "color": colour}) for name, colour in zip(names, colours)]
    return Picture(drawing("fisher", "Fisher matrices of the four models", parts, keys, style="map"), caption)


def _paint_matrix(matrix: NDArray[np.float64], edges: Sequence[tuple[str, int]], ax: Axes) -> None:
    ax.imshow(np.log10(np.maximum(np.abs(matrix) / np.abs(matrix).max(), 1e-6)), cmap="cividis", vmin=-4, vmax=0)
    ends = np.cumsum([width for _, width in edges])
    for end in ends:
        ax.axhline(end - 0.5, color="#ffffff", linewidth=0.8)
        ax.axvline(end - 0.5, color="#ffffff", linewidth=0.8)
    middles, names = [end - width / 2 - 0.5 for end, (_, width) in zip(ends, edges)], [name for name, _ in edges]
    ax.set(xticks=middles, xticklabels=names, yticks=middles, yticklabels=names)


def rates(scales: Numbers, angles: Mapping[str, Mapping[str, Numbers]]) -> Picture:
    """Draw the angle by which one update turns the weights, against their norm, for each optimiser and norm."""
    axes = {**_LOGARITHMIC, "xlabel": "norm of the weights, relative", "ylabel": "angle of one update, radians"}
    shows, parts = "angle of one update, radians against norm of the weights, relative", []
    for lines, title, power in ((angles["sgd"], "gradient descent", 2), (angles["adam"], "Adam", 1)):
        guide = [1.6 * lines["layer"][0] * s**-power for s in scales]
        parts.append(_curves(title, shows, scales, lines, guide, **axes))
    caption = (
        "Larger weights turn less in one update: by 1 over their squared norm with gradient descent, by 1 over their "
        "norm with Adam. The effective learning rate falls as normalised weights grow, while the layer's function "
        "stays the same."
    )
    keys = [*_norm_keys(angles["sgd"]), Key("1 / norm² (gradient descent) or 1 / norm (Adam)", _GUIDE)]
    return Picture(drawing("rates", "Effective learning rate against the norm of the weights", parts, keys), caption)


def training(history: Mapping[str, Mapping[str, Numbers]]) -> Picture:
    """Draw the norm of the weights, and the angle that they turn in an update, along a training run."""
    norms = {name: np.divide(run["norm"], run["norm"][0]).tolist() for name, run in history.items()}
    angles = {name: run["angle"] for name, run in history.items()}
    updates = range(len(norms["layer"]))
    axes = {"xlabel": "update", "ylabel": "angle of one update, radians", "yscale": "log"}
    parts = [
        _curves(
            "norm of the weights", "by update", updates, norms, xlabel="update", ylabel="norm, relative to the first"
        ),
        _curves("how far they turn", "by update", updates[5::10], angles, **axes),
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
    guide = [3 * max(v[0] for v in errors.values()) * s / lengths[0] for s in lengths]
    axes = {**_LOGARITHMIC, "xlabel": "length of the step |d|", "ylabel": "|KL / (1/2 d'Fd) - 1|"}
    part = _curves("Error of the quadratic form", "by length of the step", lengths, errors, guide, **axes)
    caption = (
        "A small step d of the parameters moves the model by a KL divergence of 1/2 d'Fd, with F the Fisher matrix. "
        "The error of this approximation falls in proportion to the step, under every norm."
    )
    keys = [*_norm_keys(errors), Key("in proportion to |d|", _GUIDE)]
    return Picture(drawing("divergence", "KL divergence and the Fisher metric", [part], keys), caption)


def noise(draws: Mapping[int, NDArray[np.float64]]) -> Picture:
    """Draw densities of sigma / sigma~ for batches of N, beside the approximations with variance 2/N and 1/N."""
    parts = [
        _part(f"batches of {size}", "density of sigma / sigma~", partial(_paint_density, size, values))
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


def _paint_density(size: int, values: NDArray[np.float64], ax: Axes) -> None:
    spread = 4 / np.sqrt(2 * size)
    x = np.linspace(max(0.4, 1 - spread), 1 + spread, 300)
    ax.hist(values, bins=60, range=(x[0], x[-1]), density=True, **_COUNTED)
    for variance, place in ((2 / size, 0), (1 / size, 1)):
        z = x**-2.0 - 1  # x = 1 / sqrt(1 + z), z normal
        density = np.exp(-0.5 * z * z / variance) / np.sqrt(2 * np.pi * variance) * 2 * x**-3.0
        ax.plot(x, density, color=COLOURS[place], linestyle=DASHES[place])
    ax.set(xlabel="sigma / sigma~", ylabel="density")
    ax.grid(True)
