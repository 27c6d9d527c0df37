"""Records: what run folders say, as one JSON file for each experiment and data set, small enough to commit."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import fail
from ..results import BOOKKEEPING
from ..runs.environment import environment
from .verdicts import Record, find_sheet, judged, label, results, rounded, summarise, variants

__all__ = [
    # reading and making
    "collect",
    "data_notes",
    "distinct",
    "shown_command",
    "shown_under",
    "walk",
    "without_doubles",
    # one record
    "Record",
    "SCHEMA",
    "badge",
    "load",
    "name",
    "save",
    "write",
    # from environment and verdicts, so that a reader of records needs one import
    "environment",
    "find_sheet",
    "label",
    "results",
    "rounded",
    "summarise",
    "variants",
]

SCHEMA = 1
BADGES = {"real": "REAL DATA", "embedded": "EMBEDDED STAND-IN"}
_NOT_METRICS = ("kind", "seed")
_FINGERPRINT = ("lamina", "commit", "dirty", "versions", "machine")


# Reading run folders


@dataclass(frozen=True)
class _Folder:
    """One run folder that could be read."""

    shown: str
    header: Mapping[str, Any]
    runs: list[dict[str, Any]]


def collect(folders: Iterable[str | os.PathLike[str]], notes: list[str] | None = None) -> list[Record]:
    """Records of all runs found under ``folders``, one for each experiment, data set and kind of data.

    What was left out, cut short or found twice is appended to ``notes``, or printed to stderr without it.
    """
    said: list[str] = [] if notes is None else notes
    groups: dict[tuple[str, str, str], list[_Folder]] = defaultdict(list)
    for folder, shown in _run_folders(folders):
        read = _read_folder(folder, shown, said)
        if read is not None:
            data = read.header["data"]
            groups[read.header["experiment"], data["name"], data["kind"]].append(read)
    records = [record for _, group in sorted(groups.items()) if (record := _record(group, said))["runs"]]
    if notes is None:
        print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
    return records


def _run_folders(roots: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[Path, str]]:
    for root in map(Path, roots):
        if not root.is_dir():
            raise fail("runs are looked for in folders", f"{str(root)!r}", "Pass the folder that holds the runs.")
        for here, files in walk(root):
            if "config.json" in files:
                yield here, shown_under(root, here)


def walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders in a fixed order, not below a run: its ``old-<n>`` hold runs that were begun anew."""
    for here, folders, files in os.walk(root):
        skip = "config.json" in files
        folders[:] = [] if skip else sorted(f for f in folders if not re.fullmatch(r"\..*|old-\d+|checkpoints", f))
        yield Path(here), sorted(files)


def shown_under(root: Path, path: Path) -> str:
    """A path as notes show it: below the folder that was searched, for reports must not hold machine paths."""
    return (Path(root.name) / path.relative_to(root)).as_posix()


def _read_folder(folder: Path, shown: str, notes: list[str]) -> _Folder | None:
    try:
        header = _read_header(folder)
        lines = _read_metrics(folder, shown, notes)
        summary = _read_optional(folder / "summary.json", shown, notes)
        extras = _read_optional(folder / "extras.json", shown, notes)
        runs = [_run(header, seed, lines, summary, extras) for seed in header["seeds"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error} in its files" if isinstance(error, KeyError) else str(error) or type(error).__name__
        notes.append(f"{shown}: left out, {reason}")
        return None
    return _Folder(shown, header, runs)


def _read_header(folder: Path) -> dict[str, Any]:
    header = _parse((folder / "config.json").read_text(encoding="utf-8"), "config.json")
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise ValueError(f"config.json is not the header of a run with schema {SCHEMA}")
    wanted = {"experiment": str, "config": dict, "seeds": list, "data": dict}
    for key, kind in wanted.items():
        if not isinstance(header[key], kind):
            raise ValueError(f"config.json: {key} must be a {kind.__name__}")
    for key in ("name", "kind"):
        if not isinstance(header["data"][key], str):
            raise ValueError(f"config.json: data.{key} must be a str")
    return header


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)  # NaN and infinities stand as null everywhere
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not valid JSON ({error})") from None


def _read_metrics(folder: Path, shown: str, notes: list[str]) -> list[dict[str, Any]]:
    """Lines up to the first that cannot be read: a run that was killed may have left half a line."""
    path = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = _parse(text.decode("utf-8"), "line")
            if not isinstance(line, dict):
                raise ValueError("not an object")
        except ValueError:
            notes.append(f"{shown}: metrics.jsonl is read up to line {number}, which is torn")
            break
        lines.append(line)
    return lines


def _read_optional(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    """A file that a half-finished run does not have; a torn one counts as absent, and is noted."""
    if not path.exists():
        return {}
    try:
        value = _parse(path.read_text(encoding="utf-8"), path.name)
    except ValueError as error:
        notes.append(f"{shown}: {error}; taken as absent")
        return {}
    return value if isinstance(value, dict) else {}


def _run(
    header: Mapping[str, Any],
    seed: int,
    lines: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    extras: Mapping[str, Any],
) -> dict[str, Any]:
    own = [line for line in lines if line.get("seed", seed) == seed]
    last = own[-1] if own else {}
    return {
        "config": dict(header["config"]),
        "seed": seed,
        "finished": summary.get("finished") is True,
        "steps": summary.get("steps", last.get("step", 0)),
        "seconds": rounded(summary.get("seconds", last.get("seconds", 0.0))),
        "side_by_side": summary.get("side_by_side", len(header["seeds"])),
        "engine": summary.get("engine"),
        "curve": _curve([line for line in own if line.get("kind") == "eval"]),
        "extras": rounded(extras.get(str(seed), {})),
    }


def _curve(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Lists of equal length; of two evaluations at one step (a resumed run) the later counts."""
    by_step = {line["step"]: line for line in lines}
    ordered = [by_step[step] for step in sorted(by_step)]
    names = dict.fromkeys(key for line in ordered for key in line if key not in _NOT_METRICS)
    return {name: [rounded(line.get(name)) for line in ordered] for name in names}


# Making records


def _record(group: Sequence[_Folder], notes: list[str]) -> Record:
    first = group[0].header
    record: Record = {
        "schema": SCHEMA,
        "kind": "experiment",
        "experiment": first["experiment"],
        "data": first["data"],
        "environment": first.get("environment", {}),
        "environments": distinct(folder.header.get("environment", {}) for folder in group),
        "commands": list(dict.fromkeys(shown_command(f.header["command"]) for f in group if f.header.get("command"))),
        "runs": without_doubles([(run, folder.shown) for folder in group for run in folder.runs], notes),
        "notes": data_notes([folder.header["data"] for folder in group]),
    }
    return judged(record)


def distinct(environments: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Environments that differ in more than the time; empty when there is but one."""
    found = {json.dumps([env.get(key) for key in _FINGERPRINT], sort_keys=True): env for env in environments}
    return list(found.values()) if len(found) > 1 else []


def shown_command(command: str) -> str:
    """The command without the folders of the machine it ran on."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return shlex.join(re.sub(r"(^|=)[~/].*?([^/]*)/?$", r"\1\2", word) for word in words)


def data_notes(data: Sequence[Mapping[str, Any]]) -> list[str]:
    differ = [key for key in ("sizes", "sha256", "label") if any(d.get(key) != data[0].get(key) for d in data)]
    return [f"The runs did not all read the same data: {', '.join(differ)} differ."] if differ else []


def without_doubles(runs: Sequence[tuple[dict[str, Any], str]], notes: list[str]) -> list[dict[str, Any]]:
    """Return one run for each setting and seed: the finished one, else the longer. Damaged runs are left out."""
    kept: dict[str, tuple[dict[str, Any], str]] = {}
    for run, shown in _undamaged(runs, notes):
        settings = {key: value for key, value in run["config"].items() if key not in BOOKKEEPING}
        key = json.dumps([settings, run["seed"]], sort_keys=True)
        if key not in kept:
            kept[key] = (run, shown)
        elif run != kept[key][0]:
            other, place = kept[key]
            better = (run["finished"], run["steps"]) > (other["finished"], other["steps"])
            kept[key] = (run, shown) if better else (other, place)
            lost = place if better else shown
            notes.append(
                f"{kept[key][1]}: seed {run['seed']} is in {lost} too, which is left out (not finished or shorter)"
            )
    return [run for run, _ in kept.values()]


def _undamaged(runs: Iterable[tuple[dict[str, Any], str]], notes: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Leave out finished runs whose last evaluation is not their last update: part of their metrics is lost."""
    for run, shown in runs:
        last = (run["curve"].get("step") or [0])[-1]
        if run["finished"] and run.get("steps", last) != last:
            notes.append(
                f"{shown}: seed {run['seed']} is damaged and left out. It finished at update {run['steps']:,}, but its "
                f"last evaluation is at {last:,}. Train it again with --restart."
            )
        else:
            yield run, shown


def cut(record: Record, until: float) -> Record:
    """The record with every run ended at epoch ``until``: runs that were stopped at different ends compare there."""
    if record["kind"] != "experiment":
        return record
    runs = [_cut_run(run, until) for run in record["runs"]]
    stopped = sum(now["finished"] and not then["finished"] for now, then in zip(runs, record["runs"]))
    said = f"Every run is drawn and judged up to epoch {until:g}."
    said += f" {stopped} of {len(runs)} were stopped after it, before their last epoch." if stopped else ""
    return judged({**record, "runs": runs, "until_epoch": until, "notes": [*record.get("notes", []), said]})


def _cut_run(run: Mapping[str, Any], until: float) -> dict[str, Any]:
    epochs = run["curve"].get("epoch", [])
    count = sum(epoch <= until + 1e-3 for epoch in epochs)  # an evaluation falls on the first update past its epoch
    curve = {key: values[:count] for key, values in run["curve"].items()}
    reached = run["finished"] or any(epoch >= until for epoch in epochs)
    shorter = {"steps": curve["step"][-1], "seconds": curve["seconds"][-1]} if count else {}
    return {**run, **shorter, "curve": curve, "finished": reached}


def name(record: Record) -> str:
    """The record's name in files and links: ``mnist-mnist``, ``mnist-digits-embedded``."""
    if record["kind"] != "experiment":
        parts = [record["kind"], record.get("name", "")]
    else:
        kind = record["data"]["kind"]
        parts = [record["experiment"], record["data"]["name"], "" if kind == "real" else kind]
    return (
        "-".join(filter(None, (re.sub(r"[^A-Za-z0-9_.]+", "_", str(part)).strip("._") for part in parts))) or "record"
    )


def badge(record: Record) -> str:
    """What no reader may miss: whether the numbers are about the paper's data or about a stand-in."""
    kind: str = record["data"]["kind"]
    return BADGES.get(kind, kind.upper())


# Files


def save(record: Record, folder: str | os.PathLike[str]) -> Path:
    """Write ``<name>.json`` in one move; a line for each list of numbers, so that changes can be read."""
    path = Path(folder) / f"{name(record)}.json"
    write(path, _dump(record) + "\n")
    return path


def write(path: Path, text: str) -> None:
    """Write a file in one move: a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _dump(value: Any, indent: str = "") -> str:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_dump(value[key], inner)}" for key in sorted(value)]
    else:
        parts = [_dump(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def load(path: str | os.PathLike[str], command: str = "lamina report") -> Record:
    """Read a record from its file; an error names the command that makes such records."""
    shown, remedy = Path(path).name, f"Make it anew with {command}."
    try:
        record = _parse(Path(path).read_text(encoding="utf-8"), "the file")
    except (OSError, ValueError) as error:
        raise fail("a record must be a readable JSON file", f"{shown}: {error}", remedy) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("kind"), str):
        found = (
            {key: record.get(key) for key in ("schema", "kind")} if isinstance(record, dict) else type(record).__name__
        )
        raise fail(f"a record must have schema {SCHEMA} and a kind", f"{shown}: {found}", remedy)
    if record["kind"] == "experiment":
        _check_experiment(record, shown, remedy)
    return record


def _check_experiment(record: Record, shown: str, remedy: str) -> None:
    try:
        if not all(
            isinstance(text, str) for text in (record["experiment"], record["data"]["name"], record["data"]["kind"])
        ):
            raise TypeError("names must be text")
        for run in record["runs"]:
            lengths = {len(values) for values in run["curve"].values()}
            if len(lengths) > 1 or not isinstance(run["config"], dict) or "seed" not in run or "finished" not in run:
                raise TypeError("a run lacks config, seed or finished, or its lists differ in length")
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise fail("a record of an experiment must be whole", f"{shown}: {missing}", remedy) from None
