"""Figures of the claims: every pair with its interval, and ratios by level of the baseline's improvement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..claims import DIRECTION, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED
from . import records
from .drawings import COLOURS, DASHES, GREY, INK, MARKERS, Drawing, Key, Part, drawing, plain_ticks, shortened, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..claims import Claim
    from ..experiment import Sheet

_VERDICTS = {REPRODUCED: COLOURS[2], DIRECTION: COLOURS[2], INCONCLUSIVE: COLOURS[5], NOT_REPRODUCED: COLOURS[1]}
_LINE, _MARKS = 0.17, 0.62  # inches: a line of text, and the marks under it
_PAIR: dict[str, Any] = {"marker": "o", "markersize": 4, "color": INK, "linestyle": "none"}
_INTERVAL: dict[str, Any] = {"marker": "s", "markersize": 5, "linewidth": 2.4, "color": INK}
_PLACEBO: dict[str, Any] = {"marker": "s", "markersize": 4, "linewidth": 2.4, "color": GREY}
_PAPER: dict[str, Any] = {"marker": "D", "markersize": 7, "markerfacecolor": "none", "color": INK, "linestyle": "none"}
_ASKED: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2, "color": COLOURS[3]}
_NO_EFFECT: dict[str, Any] = {"linestyle": ":", "linewidth": 1.2, "color": INK}


@dataclass(frozen=True)
class _Row:
    """One claim as the plot shows it; effects lie above 0 where they favour the claim."""

    claim: Claim
    told: Mapping[str, Any]

    @property
    def unit(self) -> str | None:
        """Return the unit of a difference; None for a ratio."""
        return None if self.claim.measure.ratio else self.claim.measure.unit

    def shown(self, effect: float) -> float:
        """Return an effect on the axis: a log ratio as a ratio, a difference in the claim's unit."""
        return math.exp(min(effect, 700)) if self.unit is None else self.claim.measure.scale * effect

    @property
    def pairs(self) -> list[float]:
        return [self.shown(_number(value, math.nan)) for value in self.told["pairs"].values()]

    @property
    def expected(self) -> float | None:
        return self.claim.expected if self.unit is None else None

    def interval(self, name: str) -> tuple[float, float, float] | None:
        """Return (low, estimate, high), or None."""
        found = self.told[name]
        return None if found is None else tuple(map(self.shown, ends(found)))  # type: ignore[return-value]

    @property
    def text(self) -> list[str]:
        found = self.told["measured"] if self.told["interval"] else self.told["reason"]
        indicative = " (indicative)" if self.told.get("indicative") else ""
        told = f"{self.told['word']}{indicative}: {found}".replace(" = ", "\u00a0=\u00a0")
        return [*self.words, *wrapped(told, 52).split("\n")]

    @property
    def words(self) -> list[str]:
        aside = "" if self.told["claimed"] else " (Not a claim of the paper.)"
        return wrapped(self.told["text"] + aside, 58).split("\n")


def _number(value: Any, missing: float) -> float:
    """Return a number of a record, in which an infinite one is null or a word."""
    return missing if value is None else float(value)


def ends(interval: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return an interval of a record as (low, estimate, high)."""
    low, high = _number(interval["low"], -math.inf), _number(interval["high"], math.inf)
    return low, _number(interval["estimate"], low if math.isinf(high) else high), high


def title_of(record: records.Record, sheet: Sheet) -> str:
    """Return experiment and data, which the label calls real or a stand-in."""
    return f"{sheet.title}: {record['data'].get('label', record['data']['name'])}"


def draw_claims(record: records.Record, sheet: Sheet) -> Drawing | None:
    """Draw every pair of every claim with its interval; None where no pair was measured."""
    claims = {claim.name: claim for claim in sheet.claims}
    rows = [_Row(claims[told["name"]], told) for told in record["claims"] if told["name"] in claims and told["pairs"]]
    if not rows:
        return None
    units = dict.fromkeys(row.unit for row in rows)
    parts = [_forest([row for row in rows if row.unit == unit], unit) for unit in units]
    title = f"How sure the verdicts are. {title_of(record, sheet)}"
    return drawing(f"{records.name(record)}-claims", title, parts, _claim_keys(rows), columns=min(2, len(parts)))


def _claim_keys(rows: Sequence[_Row]) -> list[Key]:
    keys = [Key("one pair of runs", _PAIR), Key("mean, 95 % t interval", _INTERVAL), Key("no effect", _NO_EFFECT)]
    if any(row.told["placebo"] for row in rows):
        keys.append(Key("baseline against itself, other seeds", _PLACEBO))
    if any(row.expected for row in rows):
        keys.append(Key("the paper's ratio", _PAPER))
    if any(row.claim.margin for row in rows):
        keys.append(Key("least that the claim asks for", _ASKED))
    return keys


def _forest(rows: Sequence[_Row], unit: str | None) -> Part:
    title = "Ratios" if unit is None else f"Differences{unit and f' in {unit}'}"
    told = "; ".join(f"{row.told['name']} {row.told['word']}, {row.told['measured']}" for row in rows)
    height = sum(len(row.text) * _LINE + _MARKS for row in rows) + 0.8
    return Part(title, shortened(f"{title}, every pair and interval. {told}."), partial(_paint_forest, rows), height)


def _paint_forest(rows: Sequence[_Row], ax: Axes) -> None:
    ratio = rows[0].unit is None
    low, high = _limits(rows, ratio)
    if ratio:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis, low, high, "x")
    ax.set(xlim=(low, high), xlabel=f"right of {'1x' if ratio else '0'} favours the claim", yticks=[])
    ax.spines["left"].set_visible(False)
    top = 0.0
    for row in rows:
        top = _paint_row(ax, row, top, (low, high))
    ax.set_ylim(top, 0)


def _paint_row(ax: Axes, row: _Row, top: float, limits: tuple[float, float]) -> float:
    """Draw words, pairs, interval and placebo below each other; return where the next row begins."""
    colour = _VERDICTS[row.told["word"]]
    for number, text in enumerate(row.text):
        bold: dict[str, Any] = {"color": colour, "weight": "bold"} if number >= len(row.words) else {}
        words = ax.text(0, top + 0.05 + number * _LINE, text, va="top", fontsize=9, **bold)
        words.set(transform=ax.get_yaxis_transform(), in_layout=False)  # or they would make the axes narrow
    y = top + len(row.text) * _LINE + 0.14
    pairs = np.clip(row.pairs, *limits)
    ax.plot(pairs, [y] * len(pairs), clip_on=False, alpha=0.7, **_PAIR)
    _bar(ax, row.interval("interval"), y + 0.13, limits, {**_INTERVAL, "color": colour})
    _bar(ax, row.interval("placebo"), y + 0.26, limits, _PLACEBO)
    if row.expected:
        ax.plot([row.expected], [y + 0.13], **_PAPER)
    ax.plot([row.shown(0.0)] * 2, [y - 0.08, y + 0.34], **_NO_EFFECT)
    if row.claim.margin:
        ax.plot([row.shown(row.claim.margin)] * 2, [y - 0.08, y + 0.34], **_ASKED)
    return top + len(row.text) * _LINE + _MARKS


def _bar(
    ax: Axes, found: tuple[float, float, float] | None, y: float, limits: tuple[float, float], look: Mapping[str, Any]
) -> None:
    """Draw an interval; an end beyond the axis becomes an arrow."""
    if found is None:
        return
    low, middle, high = np.clip(found, *limits)
    plain = {key: look[key] for key in ("color", "linewidth")}
    ax.plot([low, high], [y, y], solid_capstyle="butt", **plain)
    if limits[0] < middle < limits[1]:
        ax.plot([middle], [y], **look)
    for end, real, marker in ((low, found[0], "<"), (high, found[2], ">")):
        if end != real:
            ax.plot([end], [y], marker=marker, color=look["color"], markersize=6, clip_on=False)


def _limits(rows: Sequence[_Row], ratio: bool) -> tuple[float, float]:
    """Return limits that show every pair and estimate, and as much of the intervals as leaves these readable."""
    turned: Callable[[float], float] = math.log if ratio else float
    intervals = [found for row in rows for name in ("interval", "placebo") if (found := row.interval(name))]
    points = [value for row in rows for value in row.pairs] + [middle for _, middle, _ in intervals]
    points += [row.expected or 1.0 for row in rows if ratio] + [row.shown(row.claim.margin) for row in rows]
    edges = [end for low, _, high in intervals for end in (low, high)]
    low, high = around(*([turned(v) for v in values if _usable(v, ratio)] for values in (points, edges)))
    return (math.exp(low), math.exp(high)) if ratio else (low, high)


def _usable(value: float, ratio: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not ratio) and value < 1e300


def around(points: Sequence[float], edges: Sequence[float]) -> tuple[float, float]:
    """Return limits around 0 and all points; edges count up to one and a half times the distance of the points."""
    low, high = min([0.0, *points]), max([0.0, *points])
    reach = 1.5 * (high - low) or max(map(abs, edges), default=1.0)
    low, high = max(min([low, *edges]), low - reach), min(max([high, *edges]), high + reach)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


# Levels


def draw_levels(record: records.Record, sheet: Sheet) -> Drawing | None:
    """Draw the ratios at each share of the baseline's improvement; None where no claim on speed has any."""
    told = [claim for claim in record["claims"] if any(found for _, found, _ in claim["levels"])]
    if not told:
        return None
    keys = [Key(claim["text"], _level_look(place)) for place, claim in enumerate(told)]
    keys.append(Key("no effect", _NO_EFFECT))
    if any(placebo for claim in told for _, _, placebo in claim["levels"]):
        band = {**_PLACEBO, "linewidth": 6, "alpha": 0.4}
        keys.append(Key("baseline against itself, other seeds: widest interval", band))
    alt = shortened("Ratio of updates by share of the baseline's improvement. " + "; ".join(map(_described, told)))
    part = Part("Fewer updates, by level", alt, partial(_paint_levels, told), 3.2)
    return drawing(f"{records.name(record)}-levels", f"Speed by level. {title_of(record, sheet)}", [part], keys)


def _described(claim: Mapping[str, Any]) -> str:
    at = [f"{math.exp(ends(found)[1]):.2g}x at {share:.0%}" for share, found, _ in claim["levels"] if found]
    return f"{claim['name']} {', '.join(at)}"


def _level_look(place: int) -> dict[str, Any]:
    sets = ((COLOURS, "color"), (MARKERS, "marker"), (DASHES, "linestyle"))
    return {"markersize": 5, **{name: values[place % len(values)] for values, name in sets}}


def _paint_levels(told: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    found = [ends(interval) for claim in told for _, *both in claim["levels"] for interval in both if interval]
    points = [middle for _, middle, _ in found if math.isfinite(middle)]
    edges = [end for low, _, high in found for end in (low, high) if math.isfinite(end)]
    low, high = around(points, edges)
    _paint_placebo(ax, told, (low, high))
    for place, claim in enumerate(told):
        levels = [(share, ends(interval)) for share, interval, _ in claim["levels"] if interval]
        x = np.array([100 * share for share, _ in levels]) + 1.4 * (place - (len(told) - 1) / 2)
        values = np.exp(np.clip([interval for _, interval in levels], low, high))
        look = _level_look(place)
        ax.vlines(x, values[:, 0], values[:, 2], color=look["color"], linewidth=1.6, alpha=0.6)
        ax.plot(x, values[:, 1], linewidth=1.8, **look)
    ax.axhline(1, **_NO_EFFECT)
    ax.set(yscale="log", ylim=(math.exp(low), math.exp(high)), ylabel="updates: baseline's / ours")
    ax.set(xticks=[20, 40, 60, 80, 100], xlabel="percent of the baseline's improvement")
    ax.grid(True)
    plain_ticks(ax.yaxis, *ax.get_ylim(), "x")


def _paint_placebo(ax: Axes, told: Sequence[Mapping[str, Any]], limits: tuple[float, float]) -> None:
    """Shade the widest placebo interval at each level."""
    found = [(100 * share, ends(placebo)) for claim in told for share, _, placebo in claim["levels"] if placebo]
    x = sorted({share for share, _ in found})
    bands = [np.array([interval for at, interval in found if at == share]) for share in x]
    low, high = ([pick(band) for band in bands] for pick in (np.min, np.max))
    ax.fill_between(x, *(np.exp(np.clip(side, *limits)) for side in (low, high)), color=GREY, alpha=0.25, linewidth=0)
