"""Drawings for a file and for a page: one look, one legend a figure, the same bytes from the same numbers."""

from __future__ import annotations

import base64
import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, told apart under every common colour blindness. A dark page inverts their lightness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#5b5b5b")
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1.5, 1.5, 1.5, 1.5, 1.5)), (0, (10, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY = "#1b1b1d", "#8a8a90"
WIDTH = 4.0  # inches of one panel: a phone shows it whole, with letters large enough to read
MOST_ALT = 199  # characters; screen readers read longer descriptions without a pause
_PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}
_ENTRY = 44  # characters in a line of the legend
# Text stays text, a third of the size of outlines. DejaVu, which the layout is measured with, is wider than what
# browsers fall back to, so nothing overlaps where it is absent.
_FONT = "'DejaVu Sans', Verdana, 'Segoe UI', sans-serif"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lamina",  # element names, random otherwise: the same record must give the same bytes
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.14,  # in place of a light grey, which a dark page would turn into an unseen dark one
    "grid.linewidth": 0.7,
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Key:
    """One entry of a legend: its words, and how matplotlib draws its line."""

    label: str
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """One set of axes. A page shows ``html`` in its place, where there is some; ``pictures`` go over the axes."""

    title: str
    alt: str
    paint: Callable[[Axes], None]
    height: float = 2.9
    width: float = WIDTH
    html: str = ""
    pictures: tuple[tuple[str, tuple[float, float, float, float]], ...] = ()  # address; left, bottom, width, height


@dataclass(frozen=True)
class Drawing:
    """A figure as one file, and as HTML for a page, where its panels may stand below each other."""

    name: str
    title: str
    alt: str
    svg: str
    panels: tuple[str, ...] = field(repr=False)  # the last one is the legend, where there is one


def drawing(
    name: str, title: str, parts: Sequence[Part], keys: Sequence[Key] = (), columns: int = 0, style: str = "drawing"
) -> Drawing:
    """Draw the parts side by side for a file, and one by one for a page.

    style: "drawing", which a dark page inverts, or "map" for scales of colour, which stay on white.
    """
    import matplotlib.style

    columns = columns or (len(parts) if len(parts) < 4 else 2)  # four in a row are too small to read
    alt = shortened(f"{title}. {'; '.join(part.title or part.alt for part in parts)}")
    # A user's matplotlibrc must not change a report: matplotlib's own defaults, then ours.
    with matplotlib.style.context("default"), matplotlib.rc_context(_STYLE):
        canvas = _canvas(parts, columns, title, keys)
        whole = _with_pictures(_svg(canvas, alt), canvas, parts)
        panels = [part.html or _image(_svg(_canvas([part]), "", True), shortened(part.alt), style) for part in parts]
        panels += _page_legend(keys, style)
    return Drawing(name, title, alt, whole, tuple(panels))


def shortened(text: str) -> str:
    """Return a description that is short enough to be read out."""
    return textwrap.shorten(text, MOST_ALT, placeholder=" …")


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text


def _canvas(parts: Sequence[Part], columns: int = 1, title: str = "", keys: Sequence[Key] = ()) -> Canvas:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = math.ceil(len(parts) / columns)
    heights = [max(part.height for part in parts[row * columns : (row + 1) * columns]) for row in range(rows)]
    wide = any(len(key.label) > 22 for key in keys)
    entries = max(1, min(len(keys), columns if wide else 2 * columns))
    legend = 0.2 * sum(1 + len(key.label) // _ENTRY for key in keys) / entries
    widths = [max(part.width for part in parts[column::columns]) for column in range(columns)]
    spaced = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    canvas = Canvas(figsize=(sum(widths), sum(heights) + legend + (0.35 if title else 0)), layout=spaced)
    grid = canvas.add_gridspec(rows, columns, height_ratios=heights, width_ratios=widths)
    for place, part in enumerate(parts):
        cell = grid[place // columns, place % columns]
        rest = heights[place // columns] - part.height
        ax = canvas.add_subplot(cell.subgridspec(2, 1, height_ratios=(part.height, rest))[0] if rest else cell)
        ax.set_title(wrapped(part.title, 42))
        part.paint(ax)
    if title:
        canvas.suptitle(wrapped(title, int(11 * sum(widths))), fontsize=11.5)
    if keys:
        labels = [wrapped(key.label, _ENTRY) for key in keys]
        look: dict[str, Any] = {"ncols": entries, "fontsize": 9, "handlelength": 4}
        canvas.legend([_handle(key) for key in keys], labels, loc="outside lower center", **look)
    return canvas


def _handle(key: Key) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([0.1, 0.5, 0.9], [0.5] * 3, markevery=[1], **{"linewidth": 1.8, **key.look})


def _page_legend(keys: Sequence[Key], style: str) -> list[str]:
    """Return the legend as a list, whose words wrap as the page is narrow or wide."""
    entries = [f"<li>{_image(_swatch(key), '', style)} {escape(key.label)}</li>" for key in keys]
    return [f'<ul class="legend">{"".join(entries)}</ul>'] if keys else []


def _swatch(key: Key) -> str:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(0.5, 0.2))
    ax = canvas.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.add_line(_handle(key))
    return _svg(canvas, "", True)


# Axes


def plain_ticks(axis: Axis, unit: str = "") -> None:
    """Label a logarithmic axis on any range with plain numbers: matplotlib does so at powers of ten only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if high < 30 * low:
        subs = (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 5, 7)
        narrow = MaxNLocator(5, steps=(1, 2, 5, 10))  # with 1, where the axis has it
        axis.set_major_locator(LogLocator(subs=subs) if high > 2 * low else narrow)
    elif high > 1e6 * low:
        axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value) + unit))
    axis.set_minor_locator(NullLocator())


def plain_number(value: float) -> str:
    """Return ``0.002``, ``5,000``, ``1e-7``."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


# From drawing to file and page


def _svg(canvas: Canvas, alt: str, transparent: bool = False) -> str:
    text = io.StringIO()
    nothing: dict[str, str | None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.savefig(text, format="svg", metadata=nothing | ({"Title": alt} if alt else {}), transparent=transparent)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans'", _FONT)
    # Matplotlib names clip paths and markers by a hash of their corners, whose last bit varies between processes.
    for number, name in enumerate(dict.fromkeys(re.findall(r'id="([mp][0-9a-f]{10})"', svg))):
        svg = svg.replace(name, f"shape{number}")
    return "\n".join(line.strip() for line in svg.splitlines())


def _with_pictures(svg: str, canvas: Canvas, parts: Sequence[Part]) -> str:
    """Lay each part's pictures over its axes."""
    width, height = 72 * canvas.get_size_inches()
    images = []
    for ax, part in zip(canvas.axes, parts):
        box = ax.get_position()
        for source, (left, bottom, wide, high) in part.pictures:
            x, y = (box.x0 + left * box.width) * width, (1 - box.y0 - (bottom + high) * box.height) * height
            size = f'width="{wide * box.width * width:.2f}" height="{high * box.height * height:.2f}"'
            images.append(f'<image x="{x:.2f}" y="{y:.2f}" {size} xlink:href="{source}"/>\n')
    return svg.replace("</svg>", f"{''.join(images)}</svg>")


def _image(svg: str, alt: str, style: str) -> str:
    """Return an image that brings its own data: names inside it cannot meet those of another."""
    return f'<img class="{style}" alt="{escape(alt)}" src="{address("image/svg+xml", svg.encode())}">'


def address(kind: str, content: bytes) -> str:
    """Return a data address, which a page or a drawing shows without a further file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read_pictures(folder: Path) -> dict[str, str]:
    """Return the pictures in a run's folder of artefacts, as data addresses by file name."""
    files = sorted(path for path in folder.glob("*") if path.suffix in _PICTURES)
    return {path.name: address(_PICTURES[path.suffix], path.read_bytes()) for path in files}
