"""Variants of a record, their numbers, and the verdicts on the paper's claims."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ...errors import not_installed
from ..claims import INCONCLUSIVE, Verdict, judge
from ..results import Results, settings_of

if TYPE_CHECKING:
    from ..claims import Claim
    from ..experiment import Number, Scale, Sheet

Record = dict[str, Any]

UNJUDGED = "could not be judged"


def find_sheet(experiment: str) -> Sheet | None:
    """Return the experiment's sheet; None for a name this version does not know."""
    from ..experiments import SHEETS

    return SHEETS.get(experiment)


def exploration(record: Record) -> Scale | None:
    """Return the scale of a record whose runs explore why a claim failed; None for any other record."""
    sheet = find_sheet(record["experiment"])
    scale = sheet.scales.get(record["scale"]) if sheet else None
    return scale if scale and scale.explores else None


def variants(record: Record, sheet: Sheet) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the settings that tell the record's variants apart, each with its runs, in the sheet's order.

    Runs that the sheet takes for one variant but that differ in another setting (two step sizes, say) are not one
    sample: the setting then tells variants apart too.
    """
    keys = (*sheet.vary, *mixed_settings(record, sheet))
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for run in sorted(record["runs"], key=lambda run: run["seed"]):
        settings = {key: run["config"].get(key) for key in keys}
        groups.setdefault(json.dumps(settings), (settings, []))[1].append(run)
    orders = {axis.setting: list(axis.labels) for axis in sheet.axes}
    return sorted(groups.values(), key=lambda group: [_rank(orders.get(k, []), v) for k, v in group[0].items()])


def mixed_settings(record: Record, sheet: Sheet) -> list[str]:
    """Return settings beyond ``sheet.vary`` in which runs of one variant differ."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in record["runs"]:
        for key, value in settings_of(run).items():
            values[variant_of(run, sheet), key].add(json.dumps(value))
    return sorted({key for (_, key), several in values.items() if len(several) > 1 and key not in sheet.vary})


def variant_of(run: Mapping[str, Any], sheet: Sheet) -> str:
    """Return the settings that tell the run's variant apart, as a key."""
    return json.dumps([run["config"].get(key) for key in sheet.vary])


def _rank(order: Sequence[Any], value: Any) -> tuple[int, float, str]:
    if value in order:
        return 0, order.index(value), ""
    return (1, float(value), "") if isinstance(value, (int, float)) else (2, 0.0, str(value))


def label(sheet: Sheet, settings: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Return a variant in words: ``layer norm, batch size 4``; without the settings that are known from elsewhere."""
    names = {axis.setting: axis.labels for axis in sheet.axes}
    left = {key: value for key, value in settings.items() if key not in known} or settings
    return ", ".join(names.get(key, {}).get(value) or _in_words(sheet, key, value) for key, value in left.items())


def _in_words(sheet: Sheet, key: str, value: Any) -> str:
    if isinstance(value, str) and key == sheet.vary[0]:
        return value
    return f"{key.replace('_', ' ')} {value:g}" if isinstance(value, (int, float)) else f"{key} {value}"


def results(runs: Sequence[Mapping[str, Any]]) -> Results:
    """Return the finished runs: the last value of a run that was cut short is not what the run was for."""
    return Results(run for run in runs if run["finished"])


def judged(record: Record) -> Record:
    """Return the record with its summary and claims worked out by today's sheet; as it is where there is none."""
    sheet = find_sheet(record["experiment"])
    if sheet is None:
        return {"summary": [], "claims": [], **record}
    groups, explored = variants(record, sheet), exploration(record)
    finished = results([run for _, runs in groups for run in runs])
    claims = [claim for claim in sheet.claims if explored is None or claim.name == explored.explores]
    return {
        **record,
        "runs": [run for _, runs in groups for run in runs],
        "summary": [summarise(number, runs, settings, sheet) for settings, runs in groups for number in sheet.numbers],
        "claims": [_told(claim, _verdict(claim, finished, sheet)) for claim in claims],
    }


def summarise(
    number: Number, runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], sheet: Sheet
) -> dict[str, Any]:
    """Return mean and spread over seeds; None among the values stands for "never" or "not finite"."""
    done, metric, target = results(runs), sheet.metric(number.metric), number.target
    if target is not None:
        by_seed = done.crossings(metric, target)
    else:
        by_seed = (done.best if number.at == "best" else done.final)(metric)
    values = [rounded(value) for value in by_seed.values()]
    finite = [value for value in values if value is not None]
    return {
        "variant": dict(settings),
        "metric": number.metric,
        "at": number.at if target is None else f"updates to {target:g}",
        "values": values,
        "n": len(values),
        # A seed that never got there has no number, so the sample has no mean; the values say how many did.
        "mean": rounded(fmean(finite)) if values and len(finite) == len(values) else None,
        "std": rounded(stdev(finite)) if len(finite) == len(values) > 1 else None,
    }


def _verdict(claim: Claim, finished: Results, sheet: Sheet) -> Verdict:
    try:
        return judge(claim, finished, sheet.metric)
    except ModuleNotFoundError as missing:
        return Verdict(INCONCLUSIVE, not_installed(missing.name), UNJUDGED)
    except Exception as error:  # one claim that cannot be judged must not cost the reader the rest
        return Verdict(INCONCLUSIVE, f"{type(error).__name__}: {error}", UNJUDGED)


def _told(claim: Claim, verdict: Verdict) -> dict[str, Any]:
    """Return what a record keeps of a verdict: six digits, infinities as they are."""
    statement = {key: getattr(claim, key) for key in ("name", "text", "paper", "claimed", "doubt")}
    judgement = {**dataclasses.asdict(verdict), "indicative": verdict.indicative}
    if verdict.items is None:  # most claims are not about test cases
        del judgement["items"]
    return {**statement, **rounded(judgement, infinite=True)}


def rounded(value: Any, infinite: bool = False) -> Any:
    """Return floats to six digits, more than seeds agree on; not finite becomes None, or stays (``infinite``)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if infinite or math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item, infinite) for key, item in value.items()}
    return [rounded(item, infinite) for item in value] if isinstance(value, (list, tuple)) else value
