"""Figures of the claims: every pair with its interval, and ratios by level of the baseline's improvement."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..claims import DIRECTION, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED
from . import records
from .drawings import COLOURS, DASHES, GREY, INK, MARKERS, Drawing, Key, Part, drawing, plain_ticks, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from ..claims import Claim
    from ..experiment import Sheet

    Array = NDArray[np.float64]
    Limits = tuple[float, float]

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
    """One claim as the plot shows it; effects lie above 0 where they favour the claim, ratios as logarithms."""

    claim: Claim
    verdict: Mapping[str, Any]

    @property
    def unit(self) -> str | None:
        """Return the unit of a difference; None for a ratio."""
        return None if self.claim.measure.ratio else self.claim.measure.unit

    def effects(self, *values: Any) -> Array:
        """Return effects in the claim's unit; a record holds infinite ones as words."""
        return np.array(values, dtype=np.float64) * (1.0 if self.unit is None else self.claim.measure.scale)

    @property
    def pairs(self) -> Array:
        return self.effects(*self.verdict["pairs"].values())

    def interval(self, name: str) -> Array:
        """Return low end, estimate and high end of an interval of the verdict."""
        return self.effects(*ends(self.verdict[name]))

    def on_axis(self, effects: Array) -> Array:
        """Return effects as the axis has them: ratios in place of logarithms."""
        return np.exp(effects) if self.unit is None else effects

    @property
    def text(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines of the claim and of the verdict, each with its look."""
        verdict = self.verdict
        claim = verdict["text"] + ("" if verdict["claimed"] else " (Not a claim of the paper.)")
        measured = verdict["measured"] if verdict["interval"] else verdict["reason"]
        word = f"{verdict['word']} (indicative)" if verdict.get("indicative") else verdict["word"]
        outcome = wrapped(f"{word}: {measured}".replace(" = ", "\u00a0=\u00a0"), 52)
        bold = {"color": _VERDICTS[verdict["word"]], "weight": "bold"}
        return [(line, {}) for line in wrapped(claim, 58).split("\n")] + [(line, bold) for line in outcome.split("\n")]


def ends(interval: Mapping[str, Any]) -> Array:
    """Return an interval of a record as (low, estimate, high)."""
    return np.array([interval[end] for end in ("low", "estimate", "high")], dtype=np.float64)


def title_of(record: records.Record, sheet: Sheet) -> str:
    """Return experiment and data, which the label calls real or a stand-in."""
    return f"{sheet.title}: {record['data'].get('label', record['data']['name'])}"


def draw_claims(record: records.Record, sheet: Sheet) -> Drawing | None:
    """Draw every pair of every claim with its interval; None where no pair was measured."""
    claims = {claim.name: claim for claim in sheet.claims}
    judged = [verdict for verdict in record["claims"] if verdict["name"] in claims and verdict["pairs"]]
    rows = [_Row(claims[verdict["name"]], verdict) for verdict in judged]
    if not rows:
        return None
    units = dict.fromkeys(row.unit for row in rows)
    parts = [_forest([row for row in rows if row.unit == unit], unit) for unit in units]
    title = f"How sure the verdicts are. {title_of(record, sheet)}"
    return drawing(f"{records.name(record)}-claims", title, parts, _claim_keys(rows), columns=min(2, len(parts)))


def _claim_keys(rows: Sequence[_Row]) -> list[Key]:
    keys = [Key("one pair of runs", _PAIR), Key("mean, 95 % t interval", _INTERVAL), Key("no effect", _NO_EFFECT)]
    if any(row.verdict["placebo"] for row in rows):
        keys.append(Key("baseline against itself, other seeds", _PLACEBO))
    if any(row.claim.expected for row in rows):
        keys.append(Key("the paper's ratio", _PAPER))
    if any(row.claim.margin for row in rows):
        keys.append(Key("least that the claim asks for", _ASKED))
    return keys


def _forest(rows: Sequence[_Row], unit: str | None) -> Part:
    title = "Ratios" if unit is None else f"Differences{unit and f' in {unit}'}"
    outcomes = "; ".join("{name} {word}, {measured}".format_map(row.verdict) for row in rows)
    height = sum(len(row.text) * _LINE + _MARKS for row in rows) + 0.8
    return Part(title, f"{title}, every pair and interval. {outcomes}.", partial(_paint_forest, rows), height)


def _paint_forest(rows: Sequence[_Row], ax: Axes) -> None:
    intervals = [row.interval(name) for row in rows for name in ("interval", "placebo") if row.verdict[name]]
    points = [effect for row in rows for effect in (*row.pairs, *row.effects(row.claim.margin))]
    points += [math.log(row.claim.expected) for row in rows if row.claim.expected]
    limits = _limits(intervals, points)
    ax.set_xlim(*rows[0].on_axis(np.array(limits)))
    if rows[0].unit is None:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis, "x")
    ax.set(xlabel=f"right of {'1x' if rows[0].unit is None else '0'} favours the claim", yticks=[])
    ax.spines["left"].set_visible(False)
    top = 0.0
    for row in rows:
        top = _paint_row(ax, row, top, limits)
    ax.set_ylim(top, 0)


def _paint_row(ax: Axes, row: _Row, top: float, limits: Limits) -> float:
    """Draw words, pairs, interval and placebo below each other; return where the next row begins."""
    for number, (text, look) in enumerate(row.text):
        words = ax.text(0, top + 0.05 + number * _LINE, text, va="top", fontsize=9, **look)
        words.set(transform=ax.get_yaxis_transform(), in_layout=False)  # or they would make the axes narrow
    y = top + len(row.text) * _LINE + 0.14
    ax.plot(row.on_axis(np.clip(row.pairs, *limits)), [y] * len(row.pairs), clip_on=False, alpha=0.7, **_PAIR)
    _paint_interval(ax, row, "interval", y + 0.13, limits, {**_INTERVAL, "color": _VERDICTS[row.verdict["word"]]})
    _paint_interval(ax, row, "placebo", y + 0.26, limits, _PLACEBO)
    if row.claim.expected:
        ax.plot([row.claim.expected], [y + 0.13], **_PAPER)
    ax.plot(row.on_axis(row.effects(0, 0)), [y - 0.08, y + 0.34], **_NO_EFFECT)
    if row.claim.margin:
        ax.plot(row.on_axis(row.effects(*[row.claim.margin] * 2)), [y - 0.08, y + 0.34], **_ASKED)
    return top + len(row.text) * _LINE + _MARKS


def _paint_interval(ax: Axes, row: _Row, name: str, y: float, limits: Limits, look: Mapping[str, Any]) -> None:
    """Draw an interval; an end beyond the axis becomes an arrow."""
    if not row.verdict[name]:
        return
    interval = row.interval(name)
    clipped = np.clip(interval, *limits)
    low, middle, high = row.on_axis(clipped)
    ax.plot([low, high], [y, y], solid_capstyle="butt", color=look["color"], linewidth=look["linewidth"])
    if limits[0] < clipped[1] < limits[1]:
        ax.plot([middle], [y], **look)
    for end, beyond, marker in ((low, clipped[0] > interval[0], "<"), (high, clipped[2] < interval[2], ">")):
        if beyond:
            ax.plot([end], [y], marker=marker, color=look["color"], markersize=6, clip_on=False)


def _limits(intervals: Sequence[Array], points: Sequence[float] = ()) -> Limits:
    """Return limits around 0, points and estimates; ends of intervals count up to 1.5 times the distance of these."""
    low_ends, middles, high_ends = np.array(intervals).T if intervals else ((), (), ())
    points = [0.0, *filter(math.isfinite, (*points, *middles))]
    edges = [*filter(math.isfinite, (*low_ends, *high_ends))]
    low, high = min(points), max(points)
    reach = 1.5 * (high - low) or max(map(abs, edges), default=1.0)
    low, high = max(min([low, *edges]), low - reach), min(max([high, *edges]), high + reach)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


# Levels


def draw_levels(record: records.Record, sheet: Sheet) -> Drawing | None:
    """Draw the ratios at each share of the baseline's improvement; None where no claim on speed has any."""
    claims = [claim for claim in record["claims"] if any(interval for _, interval, _ in claim["levels"])]
    if not claims:
        return None
    keys = [Key(claim["text"], _level_look(place)) for place, claim in enumerate(claims)]
    keys.append(Key("no effect", _NO_EFFECT))
    if any(placebo for claim in claims for _, _, placebo in claim["levels"]):
        band = {**_PLACEBO, "linewidth": 6, "alpha": 0.4}
        keys.append(Key("baseline against itself, other seeds: widest interval", band))
    alt = "Ratio of updates by share of the baseline's improvement. " + "; ".join(map(_described, claims))
    part = Part("Fewer updates, by level", alt, partial(_paint_levels, claims), 3.2)
    return drawing(f"{records.name(record)}-levels", f"Speed by level. {title_of(record, sheet)}", [part], keys)


def _described(claim: Mapping[str, Any]) -> str:
    ratios = [f"{math.exp(ends(level)[1]):.2g}x at {share:.0%}" for share, level, _ in claim["levels"] if level]
    return f"{claim['name']} {', '.join(ratios)}"


def _level_look(place: int) -> dict[str, Any]:
    sets = ((COLOURS, "color"), (MARKERS, "marker"), (DASHES, "linestyle"))
    return {"markersize": 5, **{name: values[place % len(values)] for values, name in sets}}


def _paint_levels(claims: Sequence[Mapping[str, Any]], ax: Axes) -> None:
    limits = _limits([ends(one) for claim in claims for _, *both in claim["levels"] for one in both if one])
    _paint_placebo(ax, claims, limits)
    for place, claim in enumerate(claims):
        levels = {share: ends(interval) for share, interval, _ in claim["levels"] if interval}
        x = 100 * np.array([*levels]) + 1.4 * (place - (len(claims) - 1) / 2)
        low, middle, high = np.exp(np.clip([*levels.values()], *limits)).T
        look = _level_look(place)
        ax.vlines(x, low, high, color=look["color"], linewidth=1.6, alpha=0.6)
        ax.plot(x, middle, linewidth=1.8, **look)
    ax.axhline(1, **_NO_EFFECT)
    ax.set(yscale="log", ylim=np.exp(limits), ylabel="updates: baseline's / ours")
    ax.set(xticks=[20, 40, 60, 80, 100], xlabel="percent of the baseline's improvement")
    ax.grid(True)
    plain_ticks(ax.yaxis, "x")


def _paint_placebo(ax: Axes, claims: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    """Shade the widest placebo interval at each level."""
    intervals: dict[float, list[Array]] = defaultdict(list)
    for share, placebo in ((share, placebo) for claim in claims for share, _, placebo in claim["levels"] if placebo):
        intervals[100 * share].append(ends(placebo))
    x = sorted(intervals)
    low, high = ([widest(intervals[share]) for share in x] for widest in (np.min, np.max))
    ax.fill_between(x, *np.exp(np.clip([low, high], *limits)), color=GREY, alpha=0.25, linewidth=0)
