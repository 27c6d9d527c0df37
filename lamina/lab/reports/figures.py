"""Figures like the paper's: one line for each variant, mean over seeds, band from the lowest seed to the highest."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import records, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    from ..experiment import Figure, Panel, Sheet

    Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]

# Okabe and Ito's colours, told apart under every common colour blindness; the second of each pair is for dark pages.
COLOURS = (
    ("#0072b2", "#5ab0ee"),
    ("#d55e00", "#ff8c42"),
    ("#009e73", "#2ec9a0"),
    ("#cc79a7", "#eaa6cb"),
    ("#7a6a00", "#d8c64a"),
    ("#5b5b5b", "#b9b9b9"),
)
FIRST = ("layer", "batch", "none", "weight")  # these look the same in every experiment; others take what is left
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1.5, 1.5, 1.5, 1.5, 1.5)), (0, (10, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# Stand-ins that no other part of a drawing uses: a page's style sheet takes their place there.
INK, GRID = "#1b1b1d", "#d9d9de"
# Text stays text: files are a third of the size, readers can search and select it, and screen readers see it. DejaVu,
# which the layout is measured with, is wider than what browsers fall back to, so nothing overlaps where it is absent.
FONT = "'DejaVu Sans', Verdana, 'Segoe UI', sans-serif"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lamina",  # element names, random otherwise: the same record must give the same bytes
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Line:
    """One variant in one panel: the mean of finished runs with its band, and unfinished runs one by one."""

    label: str
    norm: int
    x: NDArray[np.float64]
    runs: NDArray[np.float64]  # one row for each finished seed
    loose: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=list)
    dash: int = 0


@dataclass(frozen=True)
class Drawing:
    """A figure as one file, and as panels for a page, where they may stand below each other."""

    name: str
    title: str
    alt: str
    svg: str
    panels: tuple[str, ...]


def draw(record: records.Record, sheet: Sheet, figure: Figure) -> Drawing:
    """The figure of the record's runs; every part carries the label of the data."""
    name = f"{records.name(record)}-{figure.name}"
    data = str(record["data"].get("label", record["data"]["name"]))
    title = f"{sheet.title}: {data}"
    badge = records.badge(record)
    lines = [panel_lines(record, sheet, panel) for panel in figure.panels]
    alts = [_describe(panel, drawn, data) for panel, drawn in zip(figure.panels, lines)]
    with plain_style():
        row = _canvas(figure.panels, lines, f"{title} [{badge}]")
        limits = _share_limits(row, figure.panels)
        single = [_canvas([panel], [drawn], "", f"{badge}: {data}") for panel, drawn in zip(figure.panels, lines)]
        for canvas, limit in zip(single, limits):
            canvas.axes[0].set_ylim(limit)
        for ax in (ax for canvas in (row, *single) for ax in canvas.axes if ax.get_yscale() == "log"):
            _log_ticks(ax)  # now that the limits stand
        whole, parts = rendered(row), [rendered(canvas) for canvas in single]
    panels = tuple(for_page(svg, f"{name}-{i}", alt) for i, (svg, alt) in enumerate(zip(parts, alts)))
    alt = f"{title} [{badge}]. " + " ".join(alts)
    return Drawing(name, title, alt, for_file(whole, alt), panels)


# What is drawn


def panel_lines(record: records.Record, sheet: Sheet, panel: Panel) -> list[Line]:
    """The lines of one panel, in the sheet's order of norms."""
    lines: list[Line] = []
    norms = [*FIRST, *(norm for norm in sheet.norms if norm not in FIRST)]
    for settings, runs in verdicts.variants(record, sheet):
        chosen = [run for run in runs if all(run["config"].get(k) == v for k, v in panel.where.items())]
        norm = norms.index(settings["norm"]) if settings.get("norm") in norms else len(norms)
        line = _line(verdicts.label(sheet, settings, panel.where), norm, chosen, panel)
        lines += [line] if line is not None else []
    return _dashed(lines)


def _dashed(lines: Sequence[Line]) -> list[Line]:
    """Colour and marker tell norms apart; dashes do too, or tell a norm's lines apart where it has several."""
    seen: Counter[int] = Counter()
    if len({line.norm for line in lines}) == len(lines):
        return [replace(line, dash=line.norm) for line in lines]
    dashed = []
    for line in lines:
        dashed.append(replace(line, dash=seen[line.norm]))
        seen[line.norm] += 1
    return dashed


def _line(label: str, norm: int, runs: Sequence[Mapping[str, Any]], panel: Panel) -> Line | None:
    finished = [pair for run in runs if run["finished"] and (pair := _points(run, panel)) is not None]
    loose = [pair[1:] for run in runs if not run["finished"] and (pair := _points(run, panel)) is not None]
    if not finished and not loose:
        return None
    x, rows = _aligned(finished)
    if finished and not x.size:  # evaluated at different times, so there is no mean to draw
        return Line(
            f"{label} ({_count(finished, loose)}, no common times)",
            norm,
            x,
            rows,
            [p[1:] for p in finished] + loose,
        )
    return Line(f"{label} ({_count(finished, loose, rows)})", norm, x, rows, loose)


def _count(finished: Sequence[Any], loose: Sequence[Any], rows: NDArray[np.float64] | None = None) -> str:
    parts = [f"n={len(finished)}"] if finished else []
    if loose:
        parts.append(f"{len(loose)} unfinished" if finished else f"unfinished, {len(loose)} begun")
    broken = 0 if rows is None else int(np.sum(~np.isfinite(rows).all(axis=1))) if rows.size else 0
    return ", ".join(parts + ([f"{broken} not finite"] if broken else []))


def _points(run: Mapping[str, Any], panel: Panel) -> Points | None:
    """(place, x, y) of one run: the place, step or index, is what seeds are averaged at."""
    source = run["curve"] if panel.kind == "curve" else run["extras"]
    x, y = (np.array(source.get(key) or [], dtype=np.float64) for key in (panel.x, panel.y))  # None becomes NaN
    if not x.size or x.shape != y.shape or x.ndim != 1:
        return None
    place = np.array(source["step"], dtype=np.float64) if panel.kind == "curve" else x
    return place, x, y


def _aligned(runs: Sequence[Points]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean x, and y with a row for each run, at the places that all runs have."""
    if not runs:
        return np.empty(0), np.empty((0, 0))
    shared = sorted(set.intersection(*(set(place.tolist()) for place, _, _ in runs)))
    picks = [np.isin(place, shared) for place, _, _ in runs]
    x = np.array([x[pick] for (_, x, _), pick in zip(runs, picks)]).reshape(len(runs), -1)
    y = np.array([y[pick] for (_, _, y), pick in zip(runs, picks)]).reshape(len(runs), -1)
    return x.mean(axis=0), y


def _describe(panel: Panel, lines: Sequence[Line], data: str) -> str:
    """What a reader who cannot see the panel should know."""
    scale = ", logarithmic axis" if panel.log else ""
    ends = [f"{line.label} ends at {line.runs[:, -1].mean():.3g}" for line in lines if line.runs.size]
    ends = [end.replace("ends at nan", "ends with a value that is not finite") for end in ends]
    begun = [line.label for line in lines if not line.runs.size]
    told = "; ".join(ends + begun) or "no runs yet"
    return f"{panel.title}: {panel.y_label} against {panel.x_label}{scale}, {data}. {told}."


# How it is drawn


@contextmanager
def plain_style() -> Iterator[None]:
    """Matplotlib's own defaults and ours: a user's matplotlibrc must not change a report."""
    import matplotlib
    from matplotlib import style

    with style.context("default"), matplotlib.rc_context(_STYLE):
        yield


def _canvas(panels: Sequence[Panel], lines: Sequence[Sequence[Line]], title: str, note: str = "") -> Canvas:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = len(panels) if len(panels) < 4 else 2  # four in a row are too small to read in a column of text
    rows = math.ceil(len(panels) / columns)
    height = 3.1 + 0.22 * max(len(drawn) for drawn in lines) + 0.14 * _wrapped(note, 52).count("\n")
    spaced = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    canvas = Canvas(figsize=(4.5 * columns, height * rows + (0.35 if title else 0.0)), layout=spaced)
    if title:
        canvas.suptitle(_wrapped(title, 60 * columns), fontsize=11.5)
    for place, (panel, drawn) in enumerate(zip(panels, lines), start=1):
        ax = canvas.add_subplot(rows, columns, place)
        _name(ax, panel.title, note)
        _fill(ax, panel, drawn)
    return canvas


def _name(ax: Axes, title: str, note: str) -> None:
    """The title, and under it, smaller, the note."""
    below = _wrapped(note, 52)
    ax.set_title(title + "\n" * (below.count("\n") + 1 if note else 0), loc="left")
    if note:
        small = ax.annotate(below, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8.5)
        small.set_in_layout(False)  # a long label may stand over the margin, but not make the axes narrow


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text


def _share_limits(canvas: Canvas, panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """Panels of one metric get one vertical axis: they stand side by side to be compared."""
    shared: dict[tuple[str, str, bool], list[Axes]] = {}
    for ax, panel in zip(canvas.axes, panels):
        if panel.y_limits is None and ax.lines:
            shared.setdefault((panel.kind, panel.y, panel.log), []).append(ax)
    for group in shared.values():
        ends = [ax.get_ylim() for ax in group]
        for ax in group:
            ax.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return [ax.get_ylim() for ax in canvas.axes]


def _fill(ax: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(_wrapped(panel.y_label, 26))
    ax.grid(True, color=GRID, linewidth=0.7)
    if not lines:
        ax.text(0.5, 0.5, "no runs yet", transform=ax.transAxes, ha="center")
        return
    for line in lines:
        _draw_line(ax, line)
    if all(np.array_equal(x, np.round(x)) for line in lines for x in (line.x, *(x for x, _ in line.loose))):
        ax.locator_params("x", integer=True)  # no 2.5th epoch, no pixel 0.75 from the border
    if panel.log and any(np.any(part > 0) for line in lines for part in (line.runs, *(y for _, y in line.loose))):
        ax.set_yscale("log", nonpositive="mask")
    if panel.y_limits is not None:
        ax.set_ylim(*panel.y_limits)
    _legend(ax)


def _legend(ax: Axes) -> None:
    """Below the axis label, by a distance that does not change with the height of the axes."""
    from matplotlib.transforms import ScaledTranslation

    below = ax.transAxes + ScaledTranslation(0, -0.5, ax.figure.dpi_scale_trans)
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 4}
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, borderaxespad=0, **look)


def _draw_line(ax: Axes, line: Line) -> None:
    colour = COLOURS[line.norm % len(COLOURS)][0]
    look: dict[str, Any] = {
        "color": colour,
        "linestyle": DASHES[line.dash % len(DASHES)],
        "marker": MARKERS[line.norm % len(MARKERS)],
        "markersize": 4.5,
    }
    places = max(len(line.x), *(len(x) for x, _ in line.loose), 1)
    gap = max(1, places // 8)
    if line.runs.size:
        ax.fill_between(line.x, line.runs.min(axis=0), line.runs.max(axis=0), color=colour, alpha=0.16, linewidth=0)
    # Markers of different norms start at different points, or lines that lie on each other hide one another.
    ax.plot(
        line.x,
        _mean(line.runs),
        label=_wrapped(line.label, 48),
        linewidth=1.8,
        markevery=(line.norm % gap, gap),
        **look,
    )
    for x, y in line.loose:
        ax.plot(x, y, color=colour, linewidth=0.9, linestyle=look["linestyle"], alpha=0.8)
        ax.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=7, linestyle="none")


def _mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(rows.mean(axis=0)) if rows.size else np.empty(0)


def _log_ticks(ax: Axes) -> None:
    """Labels on any range, where matplotlib has them at powers of ten only; a curve may stay between two of these."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = ax.get_ylim()
    if high < 30 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("e-0", "e-")))
    ax.yaxis.set_minor_locator(NullLocator())


# From drawing to file and page


def rendered(canvas: Canvas) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.savefig(text, format="svg", metadata=nothing, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans'", FONT)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"[ \t]*\n[ \t]*", "\n", svg)


def for_file(svg: str, alt: str) -> str:
    """A file of its own, on white: where it will be shown, and in which theme, is not known."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    paper = f'<rect width="{size[1]}" height="{size[2]}" fill="#ffffff"/>\n' if size else ""
    head = f'role="img" aria-label="{_escaped(alt)}">\n<title>{_escaped(alt)}</title>\n{paper}'
    return re.sub(r"(<svg[^>]*)>\s*", lambda match: f"{match[1]} {head}", svg, count=1)


def for_page(svg: str, prefix: str, alt: str) -> str:
    """Inline in a page: its own element names, colours from the page's style sheet, size from its box."""
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{_escaped(alt)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg).replace("url(#", f"url(#{prefix}-")
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', svg)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    for index, (light, _) in enumerate(COLOURS):
        svg = svg.replace(light, f"var(--line-{index})")
    return svg


def _escaped(text: str) -> str:
    from html import escape

    return escape(text, quote=True)
