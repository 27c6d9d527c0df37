"""What runs say on the screen: the sheet's numbers over seeds, and how fast they converged. No torch in this room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import fail, one_of
from ..experiments import Job, Sheet, steps_to_best, steps_to_target
from ..results import Results, Sample
from . import records
from .records import Record

BESIDES = ("step", "epoch", "seconds")  # of a curve, what is no metric
COLUMNS = ("Experiment", "Data", "Variant", "Metric", "Steps to best", "Ratio", "Target", "Steps to target", "Ratio")
Steps = dict[int, float]  # by seed


def results(
    sheet: Sheet, jobs: Sequence[Job], home: Path, notes: list[str]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and a row for each variant of the jobs whose runs lie in ``home``, with the paper's numbers."""
    from .page import shown_sample

    printed = [number for number in sheet.numbers if number.paper]
    there = [home / job.label for job in jobs if (home / job.label / "config.json").exists()]
    for record in records.collect(there, notes):
        rows = []
        for settings, runs in records.variants(record, sheet):
            label = records.label(sheet, settings)
            row = [label, *(shown_sample(n, records.summarise(n, runs, settings)) for n in sheet.numbers)]
            row += [n.paper.get(label, n.paper.get(str(settings["norm"]), "-")) for n in printed]
            rows.append([*row, _folders(jobs, settings)])
        title = f"{sheet.title}, {records.badge(record)}: {record['data']['label']}; mean ± std (seeds); runs in {home}"
        yield (
            title,
            ["Variant", *(n.label for n in sheet.numbers), *(f"paper: {n.label}" for n in printed), "Run"],
            rows,
        )


def _folders(jobs: Sequence[Job], settings: Mapping[str, Any]) -> str:
    own = [job.label for job in jobs if all(getattr(job.config, k) == v for k, v in settings.items())]
    return own[0] + (f" and {len(own) - 1} more" if len(own) > 1 else "") if own else "-"


# Speed of convergence


def analyse(record: Record, metric: str | None, target: float | None, baseline: str) -> list[dict[str, Any]]:
    """One row for each variant of a record; finished runs alone count.

    Args:
        record: of an experiment that has a sheet.
        metric: lower is better; the sheet's headline by default.
        target: the value to reach; by default the worst of the baseline's best values, which it reaches in every seed.
        baseline: the norm that ratios are taken to, at the same other settings.
    """
    sheet = records.find_sheet(record["experiment"])
    if sheet is None:
        return []
    one_of("--baseline", baseline, sheet.norms)
    metric = metric or sheet.headline
    _check_metric(record, metric)
    variants = [(settings, records.results(runs)) for settings, runs in records.variants(record, sheet)]
    rows = []
    for settings, runs in variants:
        rivals = _rivals(variants, settings, baseline)
        goal = _goal(rivals, metric) if target is None else target
        rows.append(_row(sheet, record, settings, metric, goal, runs, rivals))
    return rows


def _check_metric(record: Record, metric: str) -> None:
    known = sorted({name for run in record["runs"] for name in run["curve"] if name not in BESIDES})
    if not known:
        raise fail("convergence needs evaluations", f"none in {records.name(record)}", "Let a run get to its first.")
    one_of("--metric", metric, known)


def _rivals(variants: Sequence[tuple[Mapping[str, Any], Results]], settings: Mapping[str, Any], norm: str) -> Results:
    wanted = {**settings, "norm": norm}
    return next((runs for others, runs in variants if others == wanted), Results([]))


def _goal(rivals: Results, metric: str) -> float | None:
    best = [value for value in rivals.best(metric).values if math.isfinite(value)]
    return max(best, default=None)


def _row(
    sheet: Sheet,
    record: Record,
    settings: Mapping[str, Any],
    metric: str,
    target: float | None,
    runs: Results,
    rivals: Results,
) -> dict[str, Any]:
    ours, theirs = _to_best(runs, metric), _to_best(rivals, metric)
    row = {
        "experiment": record["experiment"],
        "data": record["data"]["name"],
        "kind": record["data"]["kind"],
        "variant": records.label(sheet, settings),
        "settings": dict(settings),
        "metric": metric,
        "target": target,
        "seeds": sorted(ours),
        "steps_to_best": summary(list(ours.values())),
        "steps_to_best_ratio": summary(_ratios(ours, theirs)),
    }
    if target is not None:
        ours, theirs = _to_target(runs, metric, target), _to_target(rivals, metric, target)
        row["steps_to_target"] = summary(list(ours.values()))
        row["steps_to_target_ratio"] = summary(_ratios(ours, theirs))
    return row


def _to_best(runs: Results, metric: str) -> Steps:
    return {run["seed"]: steps_to_best(run["curve"], metric) for run in runs if run["curve"].get(metric)}


def _to_target(runs: Results, metric: str, target: float) -> Steps:
    return {run["seed"]: steps_to_target(run["curve"], metric, target) for run in runs if run["curve"].get(metric)}


def _ratios(ours: Steps, theirs: Steps) -> list[float]:
    """Seed by seed, for those that both have; a baseline that never got there gives no ratio."""
    shared = [seed for seed in ours if math.isfinite(theirs.get(seed, math.inf))]
    return [ours[seed] / theirs[seed] for seed in shared]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Every value, and mean and spread where all are finite; None among the values is "never"."""
    finite = Sample(tuple(value for value in values if math.isfinite(value)))
    whole = finite.n == len(values) > 0
    return {
        "values": [records.rounded(value) for value in values],
        "n": len(values),
        "mean": records.rounded(finite.mean) if whole else None,
        "std": records.rounded(finite.std) if whole and finite.n > 1 else None,
    }


def shown(found: Mapping[str, Any] | None, digits: int = 0) -> str:
    """``1,234 ± 56 (3)``, or in how many seeds it was never reached."""
    if found is None or not found["n"]:
        return "-"
    never = sum(value is None for value in found["values"])
    if never:
        return f"never in {never} of {found['n']}"
    parts = [found["mean"]] if found["std"] is None else [found["mean"], found["std"]]
    return " ± ".join(f"{part:,.{digits}f}" for part in parts) + f" ({found['n']})"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row under ``COLUMNS``."""
    target = "-" if row["target"] is None else f"{row['target']:.4g}"
    best, to_target = shown(row["steps_to_best"]), shown(row.get("steps_to_target"))
    ratios = shown(row["steps_to_best_ratio"], 2), shown(row.get("steps_to_target_ratio"), 2)
    data = f"{row['data']} ({row['kind']})"
    return [row["experiment"], data, row["variant"], row["metric"], best, ratios[0], target, to_target, ratios[1]]
