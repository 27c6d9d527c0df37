"""The same search for every variant: short runs over a grid, the setting with the best validation figure wins.

``lamina run mnist --lr 1e-4,3e-4,1e-3 --epochs 2 --runs runs/tune`` makes the runs, ``lamina tune runs/tune`` chooses,
``lamina run mnist --tuned FILE`` trains with what was chosen. Test cases play no part.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from ...errors import fail
from ..experiment import Config, Sheet, in_words
from ..experiments import find
from ..results import BOOKKEEPING, Metric, Run, series_of
from . import records
from .verdicts import label

NOT_SEARCHED = ("epochs", "updates", *BOOKKEEPING)  # how long and how often, not what


def choose(paths: Iterable[str | os.PathLike[str]], scale: str = "") -> list[dict[str, Any]]:
    """Return a record for each experiment and data set under ``paths``: every combination and the best one.

    scale: the scale whose settings were searched, for the record's name.
    """
    collected = records.collect(paths)
    if not collected:
        received = f"none under {', '.join(map(str, paths))}"
        raise fail("tuning reads run folders", received, "lamina run NAME --lr A,B first.")
    return [_tuned(record, scale) for record in collected]


def _tuned(record: records.Record, scale: str) -> dict[str, Any]:
    sheet = find(record["experiment"])
    searched = _searched(record["runs"], sheet)
    rows = [_row(sheet, searched, runs) for runs in _groups(record["runs"], [*sheet.vary, *searched])]
    return {
        **{key: record[key] for key in ("schema", "experiment", "data")},
        "kind": "tuning",
        "name": "-".join(filter(None, (record["experiment"], record["data"]["name"], scale))),
        "environment": records.environments(record)[0],
        "commands": records.commands(record),
        "metric": f"{'highest' if sheet.headline.higher else 'lowest'} {sheet.headline.name}",
        "searched": searched,
        "rows": rows,
        "chosen": _best(rows, sheet),
    }


def _searched(runs: Iterable[Run], sheet: Sheet) -> list[str]:
    """Return the settings that differ between runs besides those that tell variants apart."""
    configs = [run["config"] for run in runs]
    names = [n for n in configs[0] if n not in (*sheet.vary, *NOT_SEARCHED)]
    return [n for n in names if len({c[n] for c in configs}) > 1] or ["lr"]


def _groups(runs: Iterable[Run], names: list[str]) -> list[list[Run]]:
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[tuple(run["config"][name] for name in names)].append(run)
    return [groups[key] for key in sorted(groups, key=str)]


def _row(sheet: Sheet, searched: list[str], runs: list[Run]) -> dict[str, Any]:
    config, values = runs[0]["config"], [_best_value(run, sheet.headline) for run in runs]
    finite = [value for value in values if value is not None]
    return {
        "variant": {name: config[name] for name in sheet.vary},
        "setting": {name: config[name] for name in searched},
        "epochs": config["epochs"],
        "values": values,
        "n": len(values),
        "mean": fmean(finite) if len(finite) == len(values) else None,  # a seed that diverged rules the setting out
    }


def _best_value(run: Run, metric: Metric) -> float | None:
    """Return the best value of a run that went well; None for one that ended early or was once not finite."""
    _, values = series_of(run, metric) or ((), (math.nan,))
    return metric.best(values) if run["finished"] and all(map(math.isfinite, values)) else None


def _best(rows: list[dict[str, Any]], sheet: Sheet) -> list[dict[str, Any]]:
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for row in rows if row["mean"] is not None):
        known = best.setdefault(tuple(row["variant"].values()), row)
        if sheet.headline.is_better(row["mean"], known["mean"]):
            best[tuple(row["variant"].values())] = row
    return [{**row["variant"], **row["setting"]} for row in best.values()]


def apply(record: Mapping[str, Any], experiment: str, config: Config, given: tuple[str, ...] = ()) -> Config:
    """Return ``config`` with what was chosen for its variant; settings the user gave are not to be overruled."""
    if record.get("kind") != "tuning" or record.get("experiment") != experiment:
        received = f"a record of kind {record.get('kind')!r}, experiment {record.get('experiment')!r}"
        raise fail(f"--tuned needs a tuning record of {experiment}", received, "Make one with lamina tune.")
    dataset = getattr(config, "dataset", record["data"]["name"])
    if record["data"]["name"] != dataset:
        received = f"one of {record['data']['name']} for {dataset}"
        raise fail("--tuned needs a record of the same data set", received, "Tune on that data set.")
    clash = [name for name in record["searched"] if name in given]
    if clash:
        raise fail("--tuned chooses what it searched", f"--{clash[0]} as well", "Pass one of them.")
    vary = find(experiment).vary
    for chosen in record["chosen"]:
        if all(chosen[k] == getattr(config, k) for k in vary):
            return dataclasses.replace(config, **{k: v for k, v in chosen.items() if k not in vary})
    variant = {k: getattr(config, k) for k in vary}
    raise fail("--tuned needs a record that covers every variant", f"none for {variant}", "Tune that variant too.")


def table(record: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return caption, columns and rows: each variant's mean figure at every setting, the chosen one marked."""
    sheet = find(record["experiment"])
    settings = sorted((row["setting"] for row in record["rows"]), key=lambda s: tuple(s.values()))
    columns = list(dict.fromkeys(_in_words(setting) for setting in settings))
    cells: dict[str, dict[str, str]] = {}
    for row in record["rows"]:
        chosen = {**row["variant"], **row["setting"]} in record["chosen"]
        value = "diverged" if row["mean"] is None else f"{row['mean']:.4f}" + (" ← chosen" if chosen else "")
        cells.setdefault(label(sheet, row["variant"]), {})[_in_words(row["setting"])] = value
    caption = f"{record['metric']} in a short run, {record['data']['label']}; the same grid for every variant"
    rows = [[name, *(by_setting.get(column, "-") for column in columns)] for name, by_setting in cells.items()]
    return caption, ["Variant", *columns], rows


def _in_words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {in_words(value)}" for name, value in setting.items())
