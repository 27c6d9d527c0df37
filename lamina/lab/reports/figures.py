"""Figures of an experiment's runs: curves like the paper's, profiles, bars, tables and galleries of pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..results import series_of
from ..statistics import shown
from . import drawings, records, verdicts
from .claim_figures import draw_claims, draw_levels, title_of
from .drawings import COLOURS, DASHES, INK, MARKERS, WIDTH, Drawing, Key, Part, drawing, plain_ticks, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from ..experiment import Figure, Panel, Sheet

    Array = NDArray[np.float64]
    Points = tuple[Array, Array, Array]
    Run = Mapping[str, Any]
    Limits = tuple[float, float] | None

__all__ = ["Drawing", "draw", "draw_claims", "draw_levels", "panel_lines"]
_X_LABELS = {"update": "updates", "epoch": "epochs"}


@dataclass(frozen=True)
class Line:
    """One variant in one panel: values of finished runs, a row each, and unfinished runs one by one."""

    label: str
    note: str  # "n=5, 1 unfinished"
    look: Mapping[str, Any]
    runs: Sequence[Run]  # the finished ones
    x: Array = field(default_factory=lambda: np.empty(0))
    rows: Array = field(default_factory=lambda: np.empty((0, 0)))
    loose: Sequence[tuple[Array, Array]] = ()

    def mean(self, log: bool) -> Array:
        """Return the mean over seeds: the geometric one for a logarithmic axis."""
        if not log:
            return np.asarray(self.rows.mean(axis=0))
        return np.asarray(np.exp(np.log(np.where(self.rows > 0, self.rows, np.nan)).mean(axis=0)))

    @property
    def title(self) -> str:
        return f"{self.label} ({self.note})"

    @property
    def values(self) -> Array:
        """Return every value that is drawn."""
        return np.concatenate([self.rows.ravel(), *(y for _, y in self.loose)])


def draw(record: records.Record, sheet: Sheet, figure: Figure) -> Drawing:
    """Draw a figure from the record's runs."""
    lines = [panel_lines(record, sheet, panel) for panel in figure.panels]
    panels = [_with_measured_references(panel, group, sheet) for panel, group in zip(figure.panels, lines)]
    limits = shared_limits(panels, lines)
    parts = [_PARTS[panel.kind](panel, *content, sheet) for panel, *content in zip(panels, lines, limits)]
    with_legend = [group for panel, group in zip(panels, lines) if panel.kind in ("curve", "profile")]
    return drawing(f"{records.name(record)}-{figure.name}", title_of(record, sheet), parts, _keys(with_legend))


def _with_measured_references(panel: Panel, lines: Sequence[Line], sheet: Sheet) -> Panel:
    """Add reference lines for metrics of the finished runs, where a run has measured them."""
    runs = [run for line in lines for run in line.runs]
    measured = {label: _at_end(runs, name, panel, sheet) for label, name in panel.measured_references.items()}
    means = {label: fmean(values) for label, values in measured.items() if values}
    return replace(panel, references={**panel.references, **means})


def _keys(panels: Sequence[Sequence[Line]]) -> list[Key]:
    """Return one entry for each variant, whatever the number of panels that show it."""
    notes: dict[str, dict[str, None]] = {}
    looks = {}
    for line in chain(*panels):
        notes.setdefault(line.label, {})[line.note] = None
        looks[line.label] = line.look
    return [Key(f"{label} ({'; '.join(notes[label])})", look) for label, look in looks.items()]


# The runs of a panel


def panel_lines(record: records.Record, sheet: Sheet, panel: Panel) -> list[Line]:
    """Return the lines of one panel, in the sheet's order of variants."""
    groups = verdicts.variants(record, sheet)
    further = list(dict.fromkeys(_further(sheet, settings, panel) for settings, _ in groups))
    lines = []
    for settings, runs in groups:
        chosen = [run for run in runs if all(run["config"].get(k) == v for k, v in panel.where.items())]
        look = _look(sheet, settings, further.index(_further(sheet, settings, panel)))
        lines.append(_line(verdicts.label(sheet, settings, panel.where), look, chosen, panel))
    return [line for line in lines if line is not None]


def _further(sheet: Sheet, settings: Mapping[str, Any], panel: Panel) -> str:
    """Return the settings, besides the first axis', that tell lines of this panel apart."""
    known = {*panel.where, *sheet.vary[:1]}
    return repr({key: value for key, value in settings.items() if key not in known})


def _look(sheet: Sheet, settings: Mapping[str, Any], dash: int) -> dict[str, Any]:
    """Return colour and marker by the first axis, in its order of labels, and dashes by the others."""
    first = sheet.axes[0]
    labels = list(first.labels)
    value = settings.get(first.setting)
    place = labels.index(value) if value in labels else len(labels)
    look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
    return {**look, "markersize": 4.5, "linestyle": DASHES[dash % len(DASHES)]}


def _line(label: str, look: Mapping[str, Any], runs: Sequence[Run], panel: Panel) -> Line | None:
    done, begun = ([run for run in runs if run["finished"] is state] for state in (True, False))
    if panel.kind not in ("curve", "profile"):
        return Line(label, _note(len(done), len(begun)), look, done) if runs else None
    finished, loose = ([p for run in part if (p := _points(run, panel)) is not None] for part in (done, begun))
    if not finished and not loose:
        return None
    x, rows = _aligned(finished)
    alone = [(x, y) for _, x, y in loose]
    if finished and not x.size:  # evaluated at different updates, so there is no mean to draw
        note = f"{_note(len(finished), len(loose))}, no common times"
        return Line(label, note, look, done, loose=[(x, y) for _, x, y in finished] + alone)
    broken = int(np.sum(~np.isfinite(rows).all(axis=1)))
    return Line(label, _note(len(finished), len(loose), broken), look, done, x, rows, alone)


def _note(finished: int, begun: int, broken: int = 0) -> str:
    parts = [f"n={finished}"] if finished else []
    if begun:
        parts.append(f"{begun} unfinished" if finished else f"unfinished, {begun} begun")
    return ", ".join(parts + ([f"{broken} not finite"] if broken else []))


def _points(run: Run, panel: Panel) -> Points | None:
    """Return (place, x, y) of one run: the place, an update or an index, is what seeds are averaged at."""
    if panel.kind == "profile":
        x, y = (np.array(run["extras"].get(key) or [], dtype=np.float64) for key in (panel.x, panel.y))
        place = x
    else:
        series, other = (run["series"].get(name) or {"update": [], "value": []} for name in (panel.y, panel.x))
        place, y = (np.array(series[key], dtype=np.float64) for key in ("update", "value"))  # None becomes NaN
        known = dict(zip(other["update"], other["value"]))  # such as the epochs of updates
        x = place if panel.x == "update" else np.array([known.get(u) for u in series["update"]], dtype=np.float64)
    return (place, x, y) if x.shape == y.shape and np.isfinite(x).any() else None


def _aligned(runs: Sequence[Points]) -> tuple[Array, Array]:
    """Return mean x, and y with a row for each run, at the places that all runs have."""
    if not runs:
        return np.empty(0), np.empty((0, 0))
    shared = sorted(set.intersection(*(set(place.tolist()) for place, _, _ in runs)))
    picks = [np.isin(place, shared) for place, _, _ in runs]
    x, y = (np.array([run[part][pick] for run, pick in zip(runs, picks)]) for part in (1, 2))
    return x.mean(axis=0), y


# Curves and profiles


def shared_limits(panels: Sequence[Panel], lines: Sequence[Sequence[Line]]) -> list[Limits]:
    """Return the vertical limits of each panel; panels of one metric share theirs, for they are to be compared."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for panel, group in zip(panels, lines):
        values = np.concatenate([*(line.values for line in group), [*panel.references.values()]])
        usable = np.isfinite(values) & ((values > 0) | (not panel.log))
        groups[panel.kind, panel.y, panel.log] += values[usable].tolist()
    return [panel.y_limits or _around(groups[panel.kind, panel.y, panel.log], panel.log) for panel in panels]


def _around(values: Sequence[float], log: bool) -> Limits:
    if not values:
        return None
    low, high = np.log([min(values), max(values)]) if log else (min(values), max(values))
    margin = max(0.05 * (high - low), 0.01 * abs(high)) or 1.0
    return (math.exp(low - margin), math.exp(high + margin)) if log else (low - margin, high + margin)


def _curves(panel: Panel, lines: Sequence[Line], limits: Limits, sheet: Sheet) -> Part:
    x_label = panel.x_label or _X_LABELS.get(panel.x, panel.x)
    scale = ", logarithmic axis" if panel.log else ""
    ends = [f"{line.label} ends at {line.mean(panel.log)[-1]:.3g}" for line in lines if line.rows.size]
    ends = [end.replace("ends at nan", "ends with a value that is not finite") for end in ends]
    described = "; ".join(ends + [line.label for line in lines if not line.rows.size]) or "no runs yet"
    alt = f"{panel.title}: {panel.y_label} against {x_label}{scale}. {described}."
    return Part(panel.title, alt, partial(_paint, panel, lines, limits, x_label))


def _paint(panel: Panel, lines: Sequence[Line], limits: Limits, x_label: str, ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.set(xlabel=x_label, ylabel=wrapped(panel.y_label, 26))
    ax.grid(True)
    if not lines:
        ax.text(0.5, 0.5, "no runs yet", transform=ax.transAxes, ha="center")
        return
    for place, line in enumerate(lines):
        _draw_line(ax, line, place, panel.log)
    if panel.log_x:
        ax.set_xscale("log", nonpositive="mask")
        plain_ticks(ax.xaxis)
    else:
        whole = all(np.array_equal(x, np.round(x)) for line in lines for x in (line.x, *(x for x, _ in line.loose)))
        nbins = 6 if ax.get_xlim()[1] < 50_000 else 4  # long numbers must not touch
        ax.locator_params("x", nbins=nbins, integer=whole)  # no 2.5th epoch, no pixel 0.75 from the border
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: drawings.plain_number(value)))
    _draw_vertical_axis(ax, panel, limits)


def _draw_vertical_axis(ax: Axes, panel: Panel, limits: Limits) -> None:
    """Set scale and limits, and draw the reference lines with their names."""
    if limits is not None:
        if panel.log:
            ax.set_yscale("log", nonpositive="mask")
        ax.set_ylim(*limits)
        if panel.log:
            plain_ticks(ax.yaxis)
    for label, value in panel.references.items():
        ax.axhline(value, color=INK, linewidth=1, linestyle=":")
        ax.annotate(label, (1, value), (-2, 2), ("axes fraction", "data"), "offset points", ha="right", fontsize=8.5)


def _draw_line(ax: Axes, line: Line, place: int, log: bool) -> None:
    look, colour = dict(line.look), line.look["color"]
    if line.rows.size:
        gap = max(1, len(line.x) // 8)
        look["markevery"] = (place % gap, gap)  # markers at different points, or lines on each other hide one another
        ax.fill_between(line.x, line.rows.min(axis=0), line.rows.max(axis=0), color=colour, alpha=0.16, linewidth=0)
        ax.plot(line.x, line.mean(log), linewidth=1.8, **look)
    for x, y in line.loose:
        ax.plot(x, y, color=colour, linewidth=0.9, linestyle=look["linestyle"], alpha=0.8)
        ax.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=7, linestyle="none")


# Bars


def _at_end(runs: Sequence[Run], name: str, panel: Panel, sheet: Sheet) -> list[float]:
    """Return each finished run's value of a metric, at its last evaluation or at its best; finite ones only."""
    metric = sheet.metric(name)
    series = [values for run in runs for _, values in [series_of(run, metric) or ((), ())] if values]
    results = (metric.best(values) if panel.at == "best" else values[-1] for values in series)
    return [*filter(math.isfinite, results)]


def _bars(panel: Panel, lines: Sequence[Line], limits: Limits, sheet: Sheet) -> Part:
    bars = {line.title: _at_end(line.runs, panel.y, panel, sheet) for line in lines}
    described = "; ".join(f"{title} {with_spread(values)}" for title, values in bars.items()) or "no runs yet"
    paint = partial(_paint_bars, panel, bars, [line.look["color"] for line in lines])
    return Part(panel.title, f"{panel.title}: {panel.y_label}. {described}.", paint, 1.1 + 0.42 * max(len(bars), 2))


def _paint_bars(panel: Panel, bars: Mapping[str, Sequence[float]], colours: Sequence[str], ax: Axes) -> None:
    ax.set_xlabel(panel.y_label)
    ax.grid(True, axis="x")
    for place, (values, colour) in enumerate(zip(bars.values(), colours)):
        if values:
            ax.barh(place, fmean(values), 0.62, color=colour, alpha=0.55)
            ax.plot(values, [place] * len(values), "o", color=INK, markersize=3.5, alpha=0.75)
    ax.set_yticks(range(len(bars)), [wrapped(title, 20) for title in bars], fontsize=8.5)
    ax.invert_yaxis()
    if panel.y_limits:
        ax.set_xlim(*panel.y_limits)
    for label, value in panel.references.items():
        ax.axvline(value, color=INK, linewidth=1, linestyle=":")
        ax.annotate(label, (value, 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center", fontsize=8.5)


def with_spread(values: Sequence[float]) -> str:
    """Return ``0.01840 ± 0.00061``, with two significant digits of the standard deviation."""
    spread = stdev(values) if len(values) > 1 else 0.0
    mean = shown(fmean(values), spread) if values else "not measured"
    return f"{mean} ± {shown(spread, spread)}" if len(values) > 1 else mean


# Tables


def _table(panel: Panel, lines: Sequence[Line], limits: Limits, sheet: Sheet) -> Part:
    names = panel.y.split()
    head = ["", *(sheet.metric(name).label for name in names)]
    cells = [[_at_end(line.runs, name, panel, sheet) for name in names] for line in lines]
    scaled = [[with_spread([panel.scale * value for value in values]) for values in row] for row in cells]
    rows = [[line.title, *row] for line, row in zip(lines, scaled)]
    rows += [[label, *values] for label, values in panel.printed.items()]
    alt = f"{panel.title}. " + "; ".join(" ".join(row) for row in rows)
    widths = [0.3 + 0.077 * max(map(len, column)) for column in zip(head, *rows)]  # inches that hold the longest cell
    paint, html = partial(_paint_table, head, rows, widths), table_html(panel.title, head, rows)
    return Part(panel.title, alt, paint, 0.5 + 0.26 * (len(rows) + 1), max(WIDTH, sum(widths)), html)


def _paint_table(head: list[str], rows: list[list[str]], widths: Sequence[float], ax: Axes) -> None:
    ax.set_axis_off()
    shares = [width / sum(widths) for width in widths]
    table = ax.table(rows, None, "left", shares, colLabels=head, loc="upper left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(8.5)
    for cell in table.get_celld().values():
        cell.set(edgecolor=INK, linewidth=0.4)


def table_html(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a page, which scrolls by itself where it is wider than the page."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    table = f"<caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody>"
    region = f'class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"'
    return f'<div {region}><table class="numbers">{table}</table></div>'


# Pictures


class _Tile(NamedTuple):
    label: str
    source: str
    box: tuple[float, float, float, float] = (0, 0, 1, 1)  # left, bottom, width, height in the axes


def _gallery(panel: Panel, lines: Sequence[Line], limits: Limits, sheet: Sheet) -> Part:
    tiles = _placed([row for line in lines if (row := list(_tiles(line, panel)))])
    alt = f"{panel.title}: {'; '.join(tile.label for tile in tiles) or 'no pictures yet'}"
    html = "".join(
        f'<figure><img alt="" src="{escape(tile.source)}"><figcaption>{escape(tile.label)}</figcaption></figure>'
        for tile in tiles
    )
    html = f'<div class="gallery"><p>{escape(panel.title)}</p>{html or "<p>no pictures yet</p>"}</div>'
    _, _, wide, high = tiles[0].box if tiles else (0, 0, 0.1, 1)  # all are of one size
    pictures = tuple((tile.source, tile.box) for tile in tiles)
    return Part(panel.title, alt, partial(_paint_labels, tiles), 0.4 + 0.9 * WIDTH * wide / high, WIDTH, html, pictures)


def _tiles(line: Line, panel: Panel) -> Iterator[_Tile]:
    """Yield the pictures of the first finished run that has any."""
    pictures: Mapping[str, str] = next((run["artefacts"] for run in line.runs if run.get("artefacts")), {})
    names = [name for name in sorted(pictures) if fnmatch(name, panel.y) and pictures[name].startswith("data:image/")]
    for name in names:
        more = f", {Path(name).stem.replace('_', ' ')}" if len(names) > 1 else ""
        yield _Tile(line.label + more, pictures[name])


def _placed(rows: list[list[_Tile]]) -> list[_Tile]:
    """Give each variant a row; variants with one picture each share rows of three."""
    if all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows[first : first + 3]] for first in range(0, len(rows), 3)]
    wide, high = 1 / max(map(len, rows), default=1), 1 / max(len(rows), 1)
    return [
        tile._replace(box=(column * wide, 1 - (row + 1) * high, 0.96 * wide, 0.86 * high))
        for row, tiles in enumerate(rows)
        for column, tile in enumerate(tiles)
    ]


def _paint_labels(tiles: Sequence[_Tile], ax: Axes) -> None:
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    for tile in tiles:
        left, bottom, wide, high = tile.box
        ax.text(left, bottom + high, wrapped(tile.label, int(60 * wide)), fontsize=8, va="bottom")
    if not tiles:
        ax.text(0.5, 0.5, "no pictures yet", ha="center")


_PARTS: dict[str, Callable[..., Part]]
_PARTS = {"curve": _curves, "profile": _curves, "bars": _bars, "table": _table, "gallery": _gallery}
