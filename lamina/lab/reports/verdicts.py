"""What the runs of a record come to: its variants, their numbers, and the verdicts on the paper's claims."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ...errors import not_installed
from ..results import BOOKKEEPING, Results

if TYPE_CHECKING:
    from ..experiment import Claim, Number, Sheet

Record = dict[str, Any]

WORDS = {True: "held", False: "did not hold", None: "inconclusive"}
UNJUDGED = "could not be judged"


def find_sheet(experiment: str) -> Sheet | None:
    """The experiment's sheet; None for a name this version does not know."""
    from ..experiments import SHEETS

    return SHEETS.get(experiment)


def variants(record: Record, sheet: Sheet) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The settings that tell the record's variants apart, each with its runs, in the sheet's order.

    Runs that the sheet takes for one variant but that differ in another setting (two step sizes, say) are not one
    sample: the setting then tells variants apart too.
    """
    keys = (*sheet.vary, *mixed_settings(record, sheet))
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for run in record["runs"]:
        settings = {key: run["config"].get(key) for key in keys}
        groups.setdefault(json.dumps(settings), (settings, []))[1].append(run)
    return sorted(groups.values(), key=lambda group: [_rank(sheet, key, value) for key, value in group[0].items()])


def mixed_settings(record: Record, sheet: Sheet) -> list[str]:
    """Settings beyond ``sheet.vary`` in which runs of one variant differ."""
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in record["runs"]:
        variant = json.dumps([run["config"].get(key) for key in sheet.vary])
        for key, value in run["config"].items():
            if key not in sheet.vary and key not in BOOKKEEPING:
                values[key][variant].add(json.dumps(value))
    return sorted(key for key, found in values.items() if any(len(each) > 1 for each in found.values()))


def _rank(sheet: Sheet, key: str, value: Any) -> tuple[int, float, str]:
    norms = list(sheet.norms)
    if key == "norm" and value in norms:
        return 0, norms.index(value), ""
    return (1, float(value), "") if isinstance(value, (int, float)) else (2, 0.0, str(value))


def label(sheet: Sheet, settings: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """A variant in words: ``layer norm, batch size 4``; without the settings that are known from elsewhere."""
    words = []
    for key, value in settings.items():
        if key == "norm":
            words.append(str(sheet.norms.get(value, value)))
        elif key not in known:
            words.append(f"{key.replace('_', ' ')} {value:g}" if isinstance(value, (int, float)) else str(value))
    return ", ".join(words)


def results(runs: Sequence[Mapping[str, Any]]) -> Results:
    """Finished runs as claims read them: a value that was not finite counts as infinitely bad."""
    return Results([{**run, "curve": _filled(run["curve"])} for run in runs if run["finished"]])


def _filled(curve: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    return {key: [math.inf if value is None else value for value in values] for key, values in curve.items()}


def judged(record: Record) -> Record:
    """The record with its summary and claims worked out by today's sheet; as it is where there is none.

    Both rest on finished runs alone: the last value of a run that was cut short is not what the run was for.
    """
    sheet = find_sheet(record["experiment"])
    if sheet is None:
        return {"summary": [], "claims": [], **record}
    groups = variants(record, sheet)
    finished = results([run for _, runs in groups for run in runs])
    summary = [summarise(number, runs, settings) for settings, runs in groups for number in sheet.numbers]
    return {
        **record,
        "runs": [run for _, runs in groups for run in sorted(runs, key=lambda run: run["seed"])],
        "summary": summary,
        "claims": [_judge(claim, finished) for claim in sheet.claims],
    }


def summarise(number: Number, runs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and spread over seeds; None among the values stands for "never" or "not finite"."""
    done = results(runs)
    if number.target is not None:
        sample, at = done.steps_to(number.metric, number.target), f"updates to {number.target:g}"
    else:
        sample, at = (done.best if number.at == "best" else done.last)(number.metric), number.at
    values = [value if math.isfinite(value) else None for value in sample.values]
    finite = [value for value in values if value is not None]
    return {
        "variant": dict(settings),
        "metric": number.metric,
        "at": at,
        "values": values,
        "n": len(values),
        # A seed that never got there has no number, so the sample has no mean; the values say how many did.
        "mean": rounded(fmean(finite)) if values and len(finite) == len(values) else None,
        "std": rounded(stdev(finite)) if len(finite) == len(values) > 1 else None,
    }


def _judge(claim: Claim, finished: Results) -> dict[str, Any]:
    try:
        verdict = claim.judge(finished)
        held, measured, reason = verdict.held, verdict.measured, verdict.reason
    except ModuleNotFoundError as missing:
        held, measured, reason = None, not_installed(missing.name), UNJUDGED
    except Exception as error:  # one claim that cannot be judged must not cost the reader the rest
        held, measured, reason = None, f"{type(error).__name__}: {error}", UNJUDGED
    told = {"held": held, "measured": measured, "reason": reason}
    return {"name": claim.name, "text": claim.text, "paper": claim.paper, **told}


def in_words(claim: Mapping[str, Any]) -> str:
    """The verdict on a record's claim, with the reason where it is inconclusive."""
    word = WORDS[claim["held"]]
    return f"{word}: {claim['reason']}" if claim.get("reason") else word


def rounded(value: Any) -> Any:
    """Floats to six significant digits, which is more than seeds agree on; not finite becomes None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
