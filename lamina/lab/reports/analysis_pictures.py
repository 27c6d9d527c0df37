"""The analysis in pictures: each function takes plain numbers and gives one drawing, for a file and for a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import COLOURS, DASHES, FIRST, GRID, INK, MARKERS, for_file, for_page, plain_style, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

TITLES = {"layer": "layer norm", "batch": "batch norm", "weight": "weight norm", "none": "no norm"}
ON_LIGHT = "#101014"  # words on a light cell: INK would follow the page into its dark theme, and the cell does not
EXACT = 1e-16  # what a difference of nothing is drawn as on a logarithmic scale


@dataclass(frozen=True)
class Picture:
    """One drawing: a file of its own, the same inside a page, and what it shows in words."""

    name: str
    title: str
    caption: str
    svg: str
    page: str


def _picture(
    name: str, title: str, caption: str, size: tuple[float, float], panels: int, paint: Callable[[list[Axes]], None]
) -> Picture:
    """A canvas of ``panels`` axes side by side, painted and rendered."""
    with plain_style():
        from matplotlib.figure import Figure as Canvas

        canvas: Canvas = Canvas(figsize=size, layout="constrained")
        paint([canvas.add_subplot(1, panels, place + 1) for place in range(panels)])
        svg = rendered(canvas)
    alt = f"{title}. {caption}"
    return Picture(name, title, caption, for_file(svg, alt), for_page(svg, f"analysis-{name}", alt))


def _style(norm: str) -> dict[str, Any]:
    """The look that a norm has in every figure."""
    place = FIRST.index(norm)
    return {"color": COLOURS[place][0], "linestyle": DASHES[place], "marker": MARKERS[place], "markersize": 4}


def _named(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, color=GRID, linewidth=0.7)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            _plain_powers(axis)


def _plain_powers(axis: Axis) -> None:
    """Powers of ten as 1e-3: matplotlib's own labels are formulas, which our style does not set."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")))
    axis.set_minor_formatter(NullFormatter())


# The pictures.


def invariance_map(columns: Sequence[str], rows: Mapping[str, Sequence[tuple[float, bool]]]) -> Picture:
    """Table 1: how far the output moves (and whether the paper calls it invariant), norms by transformations."""

    def paint(axes: list[Axes]) -> None:
        ax = axes[0]
        sizes = np.array([[np.log10(max(size, EXACT)) for size, _ in row] for row in rows.values()])
        image = ax.imshow(sizes, cmap="cividis", vmin=-16, vmax=0.5, aspect="auto")
        ax.set_xticks(range(len(columns)), [c.replace(" ", "\n", 1) for c in columns])
        ax.set_yticks(range(len(rows)), [TITLES.get(norm, norm) for norm in rows])
        for y, row in enumerate(rows.values()):
            for x, (size, claimed) in enumerate(row):
                word = f"{size:.0e}\n{'Invariant' if claimed else 'No'}"
                ax.text(
                    x, y, word, ha="center", va="center", fontsize=8.5, color="#ffffff" if size < 1e-5 else ON_LIGHT
                )
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.9)
        bar.set_label("largest change of the output, power of ten")
        ax.set_title("Change of the output; below it the paper's entry", loc="left")

    caption = (
        "Each cell shows how much a transformation of the weights or the data changes the output of one layer of each "
        "kind (float64, eps = 0). Dark cells do not change."
    )
    return _picture("invariances", "Table 1, measured", caption, (10.5, 3.9), 1, paint)


def fisher_maps(matrices: Mapping[str, NDArray[np.float64]], edges: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Absolute values of the Fisher matrices, with the parameters' names along the axes."""

    def paint(axes: list[Axes]) -> None:
        for ax, (norm, matrix) in zip(axes, matrices.items()):
            sizes = np.log10(np.maximum(np.abs(matrix) / np.abs(matrix).max(), 1e-6))
            image = ax.imshow(sizes, cmap="cividis", vmin=-4, vmax=0)
            begin = 0
            ticks = []
            for name, width in edges[norm]:
                ticks.append((begin + width / 2 - 0.5, name))
                begin += width
                for line in (ax.axhline, ax.axvline):
                    line(begin - 0.5, color="#ffffff", linewidth=0.8)
            for which in (ax.set_xticks, ax.set_yticks):
                which([place for place, _ in ticks], [name for _, name in ticks])
            ax.set_title(TITLES[norm], loc="left")
        axes[-1].figure.colorbar(image, ax=axes, shrink=0.7, label="size, power of ten of the largest")

    caption = (
        "The Fisher information of one layer with logistic outputs under each norm. Without a norm, and with batch or "
        "weight norm, neurons do not interact (blocks along the diagonal of the weights); layer norm ties all rows."
    )
    return _picture("fisher", "Fisher matrices of the four models", caption, (13, 3.6), len(matrices), paint)


def rates(scales: Sequence[float], angles: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """The angle one update turns the weights by, against their norm, for each optimiser and norm."""

    def paint(axes: list[Axes]) -> None:
        for ax, (optimiser, lines) in zip(axes, angles.items()):
            for norm, values in lines.items():
                ax.loglog(scales, values, label=TITLES[norm], **_style(norm))
            power = 2 if optimiser == "sgd" else 1
            start = lines["layer"][0]
            ax.loglog(scales, [1.6 * start * s**-power for s in scales], color=INK, linewidth=0.9, linestyle=":",
                      label=f"1 / norm^{power}" if power > 1 else "1 / norm")  # fmt: skip
            _named(ax, {"sgd": "gradient descent", "adam": "Adam"}[optimiser], "norm of the weights, relative",
                   "angle of one update, radians")  # fmt: skip
            ax.set_xticks(list(scales), [f"{s:g}" for s in scales])
            ax.legend(frameon=False, fontsize=8.5)

    caption = (
        "Larger weights turn less: by gradient descent like 1 over the squared norm, with Adam like 1 over the norm. "
        "The effective learning rate falls as weights grow, while the function stays the same (with a norm)."
    )
    return _picture("rates", "Effective learning rate against the norm of the weights", caption, (10, 4), 2, paint)


def training(history: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Norm of the weights and angle turned per update along a training run."""

    def paint(axes: list[Axes]) -> None:
        for norm, seen in history.items():
            look = {**_style(norm), "marker": ""}
            axes[0].plot(range(len(seen["norm"])), np.array(seen["norm"]) / seen["norm"][0], label=TITLES[norm], **look)
            axes[1].semilogy(np.arange(len(seen["angle"])) * 10 + 5, seen["angle"], label=TITLES[norm], **look)
        _named(axes[0], "norm of the weights", "update", "norm, relative to the first")
        _named(axes[1], "how far they turn", "update", "angle of one update, radians")
        for ax in axes:
            ax.legend(frameon=False, fontsize=8.5)

    caption = (
        "The hidden layer of a small classifier of digits, trained by plain gradient descent; angles are means over "
        "ten updates. With a norm the gradient is orthogonal to the weights: their norm can only grow, and they turn "
        "less."
    )
    return _picture("training", "Norm growth and rotation during training", caption, (10, 4), 2, paint)


def divergence(lengths: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """|KL / (1/2 d' F d) - 1| against the length of the step."""

    def paint(axes: list[Axes]) -> None:
        ax = axes[0]
        for norm, values in errors.items():
            ax.loglog(lengths, values, label=TITLES[norm], **_style(norm))
        ax.loglog(lengths, [3 * max(v[0] for v in errors.values()) * s / lengths[0] for s in lengths], color=INK,
                  linewidth=0.9, linestyle=":", label="in proportion to |d|")  # fmt: skip
        _named(ax, "KL divergence against its quadratic form", "length of the step |d|", "|KL / (1/2 d'Fd) - 1|")
        ax.legend(frameon=False, fontsize=8.5)

    caption = (
        "The divergence between the model and its neighbour approaches half the Fisher form; what is left falls in "
        "proportion to the step."
    )
    return _picture("divergence", "KL and the Fisher metric", caption, (6.4, 4.2), 1, paint)


def noise(draws: Mapping[int, NDArray[np.float64]]) -> Picture:
    """Densities of sigma / sigma~ of batches of N, beside the approximation with variance 2/N and the printed 1/N."""

    def paint(axes: list[Axes]) -> None:
        for ax, (size, values) in zip(axes, draws.items()):
            spread = 4 / np.sqrt(2 * size)
            x = np.linspace(max(0.4, 1 - spread), 1 + spread, 300)
            ax.hist(values, bins=60, range=(x[0], x[-1]), density=True, color=GRID, label="batches, measured")
            for variance, colour, dash, label in ((2 / size, 0, 0, "2/N"), (1 / size, 1, 1, "1/N, as printed")):
                z = x**-2.0 - 1  # x = 1 / sqrt(1 + z), z normal
                density = np.exp(-0.5 * z * z / variance) / np.sqrt(2 * np.pi * variance) * 2 * x**-3.0
                ax.plot(x, density, color=COLOURS[colour][0], linestyle=DASHES[dash], label=f"variance {label}")
            _named(ax, f"batches of {size}", "deviation of the population over the batch's", "density")
            ax.legend(frameon=False, fontsize=8)

    caption = (
        "How the deviation that batch norm divides by varies from batch to batch, for normal summed inputs. The sample "
        "variance has relative variance 2/N, not 1/N."
    )
    return _picture("noise", "Sampling noise of batch norm", caption, (4.2 * len(draws), 3.7), len(draws), paint)
