"""Records: what run folders say, as one JSON file for each experiment, data set and scale, small enough to commit.

A record is a list of rows, one for each run: settings, seed, series of metrics, and the commit, machine, versions and
command of that run. Rows of runs made later are added to it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import fail
from ..results import settings_of
from ..runs.environment import environment as environment  # for those who make records
from .drawings import read_pictures
from .verdicts import Record as Record
from .verdicts import find_sheet, judged, label, variant_of
from .verdicts import rounded as rounded

Runs = Sequence[tuple[dict[str, Any], str]]  # each with the place that it was found at
SCHEMA = 2
BADGES = {"real": "REAL DATA", "embedded": "EMBEDDED STAND-IN"}
_BESIDES = ("kind", "seed", "step")  # of a line, what is no series
_FINGERPRINT = ("lamina", "commit", "dirty", "versions", "machine")


# Reading run folders


def collect(folders: Iterable[str | os.PathLike[str]], notes: list[str] | None = None) -> list[Record]:
    """Return records of all runs under ``folders``, one for each experiment, data set, kind of data and scale.

    What was left out, cut short or found twice is appended to ``notes``, or printed to stderr without it.
    """
    said: list[str] = [] if notes is None else notes
    groups: dict[tuple[str, ...], list[tuple[Record, Runs]]] = defaultdict(list)
    for folder, shown in _run_folders(folders):
        header, runs = _read_folder(folder, shown, said)
        if header:
            key = header["experiment"], header["data"]["name"], header["data"]["kind"], header.get("scale", "")
            groups[key].append((header, [(run, shown) for run in runs]))
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
    """Yield folders in a fixed order, not below a run: its ``old-<n>`` hold runs that were begun anew."""
    for here, folders, files in os.walk(root):
        skip = "config.json" in files
        folders[:] = [] if skip else sorted(f for f in folders if not re.fullmatch(r"\..*|old-\d+|checkpoints", f))
        yield Path(here), sorted(files)


def shown_under(root: Path, path: Path) -> str:
    """Return a path as notes show it: below the folder that was searched, for reports must not hold machine paths."""
    return (Path(root.name) / path.relative_to(root)).as_posix()


def _read_folder(folder: Path, shown: str, notes: list[str]) -> tuple[Record, list[dict[str, Any]]]:
    """Return the run's header and a row for each seed; nothing, and a note, where they cannot be read."""
    try:
        header = _read_header(folder)
        lines = _read_metrics(folder, shown, notes)
        summary = _read_optional(folder / "summary.json", shown, notes)
        extras = _read_optional(folder / "extras.json", shown, notes)
        shown_too = {"artefacts": pictures} if (pictures := read_pictures(folder / "artefacts")) else {}
        return header, [_run(header, seed, lines, summary, extras) | shown_too for seed in header["seeds"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error} in its files" if isinstance(error, KeyError) else str(error) or type(error).__name__
        notes.append(f"{shown}: left out, {reason}")
        return {}, []


def _read_header(folder: Path) -> dict[str, Any]:
    header = _parse((folder / "config.json").read_text(encoding="utf-8"), "config.json")
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise ValueError(f"config.json is not the header of a run with schema {SCHEMA}: train it anew")
    for key, kind in {"experiment": str, "config": dict, "seeds": list, "data": dict}.items():
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
    """Return the lines up to the first that cannot be read: a run that was killed may have left half a line."""
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
    """Read a file that a half-finished run does not have; a torn one counts as absent, and is noted."""
    if not path.exists():
        return {}
    try:
        value = _parse(path.read_text(encoding="utf-8"), path.name)
    except ValueError as error:
        notes.append(f"{shown}: {error}; taken as absent")
        return {}
    return value if isinstance(value, dict) else {}


def _run(
    header: Record, seed: int, lines: Sequence[Mapping[str, Any]], summary: Record, extras: Record
) -> dict[str, Any]:
    own = [line for line in lines if line.get("seed", seed) == seed]
    last = own[-1] if own else {}
    seconds = rounded(summary.get("seconds", last.get("seconds", 0.0)))
    beside = summary.get("side_by_side", len(header["seeds"]))
    return {
        "config": dict(header["config"]),
        "seed": seed,
        "finished": summary.get("finished") is True,
        "steps": summary.get("steps", last.get("step", 0)),
        "seconds": seconds,
        "side_by_side": beside,
        "engine": summary.get("engine"),
        "series": _series([line for line in own if line.get("kind") == "eval"]),
        "extras": rounded(extras.get(str(seed), {})),
        "environment": header.get("environment", {}),
        "command": shown_command(header.get("command") or ""),
    }


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return updates and values by metric; of two lines at one update (a resumed run) the later counts."""
    by_step = {line["step"]: line for line in lines}
    series: dict[str, dict[str, list[Any]]] = {}
    for step in sorted(by_step):
        for name in (key for key in by_step[step] if key not in _BESIDES):
            one = series.setdefault(name, {"update": [], "value": []})
            one["update"].append(step)
            one["value"].append(rounded(by_step[step][name]))
    return series


def shown_command(command: str) -> str:
    """Return the command without the folders of the machine it ran on."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return shlex.join(re.sub(r"(^|=)[~/].*?([^/]*)/?$", r"\1\2", word) for word in words)


# Making records


def _record(group: Sequence[tuple[Record, Runs]], notes: list[str]) -> Record:
    first, data = group[0][0], [header["data"] for header, _ in group]
    differ = [key for key in ("sizes", "sha256", "label") if any(d.get(key) != data[0].get(key) for d in data)]
    runs = _without_doubles([run for _, runs in group for run in runs], notes)
    said = [f"The runs did not all read the same data: {', '.join(differ)} differ."] if differ else []
    own = {"experiment": first["experiment"], "scale": first.get("scale", ""), "data": data[0]}
    return judged({"schema": SCHEMA, "kind": "experiment", **own, "runs": runs, "notes": said})


def joined(group: Sequence[Record], notes: list[str]) -> Record:
    """Return records of one name as one: rows are added, and none is lost. The first is the one that grows.

    A row that is there already gives way only to one that got further. Runs with other settings, or of other data,
    are refused: they are another sample.
    """
    first = group[0]
    if any(record["kind"] != "experiment" for record in group):
        if len(group) > 1:
            notes.append(f"{name(first)}: {len(group)} records of this name; the last is shown")
        return group[-1]
    known = first["runs"]
    for record in group[1:]:
        _check_same_sample({**first, "runs": known}, record)
        known = [*known, *record["runs"]]
    places = [name(first) if len(group) == 1 else f"{name(first)} (source {n})" for n in range(1, len(group) + 1)]
    runs = [(run, place) for record, place in zip(group, places) for run in record["runs"]]
    said = list(dict.fromkeys(note for record in group for note in record.get("notes", [])))
    return judged({**first, "runs": _without_doubles(runs, notes), "notes": said})


def _check_same_sample(record: Record, added: Record) -> None:
    remedy = "Write this report into another folder (--out), or delete the record to begin it anew."
    rule = f"runs that are added to the record {name(record)} must have its"
    digests = [one["data"].get("sha256") for one in (record, added)]
    if digests[0] != digests[1]:
        raise fail(f"{rule} data", f"files with other SHA-256 for {added['data'].get('label')}", remedy)
    sheet = find_sheet(record["experiment"])
    if sheet is None:
        return
    known: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in record["runs"]:
        known[variant_of(run, sheet)].append(settings_of(run))
    for run in added["runs"]:
        there, own = known[variant_of(run, sheet)], settings_of(run)
        if there and own not in there:
            other = [key for key in {**own, **there[0]} if own.get(key) != there[0].get(key)]
            told = ", ".join(f"{key} {own.get(key)} in place of {there[0].get(key)}" for key in other)
            raise fail(f"{rule} settings", f"{told} for {label(sheet, {k: own.get(k) for k in sheet.vary})}", remedy)


def _without_doubles(runs: Runs, notes: list[str]) -> list[dict[str, Any]]:
    """Return one run for each setting and seed: the finished one, else the longer. Damaged runs are left out."""
    kept: dict[str, tuple[dict[str, Any], str]] = {}
    lost: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run, shown in _undamaged(runs, notes):
        key = json.dumps([settings_of(run), run["seed"]], sort_keys=True)
        other, place = kept.setdefault(key, (run, shown))
        if run != other:
            better = (run["finished"], run["steps"]) > (other["finished"], other["steps"])
            kept[key] = (run, shown) if better else (other, place)
            lost[(shown, place) if better else (place, shown)].append(str(run["seed"]))
    for (stays, goes), seeds in lost.items():
        told = f"{stays}: seed {', '.join(dict.fromkeys(seeds))}"
        notes.append(f"{told} is in {goes} too, where {len(seeds)} run(s) are left out as no more complete")
    return [run for run, _ in kept.values()]


def _undamaged(runs: Runs, notes: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Leave out finished runs whose last evaluation is not their last update: part of their metrics is lost."""
    for run, shown in runs:
        last = max((one["update"][-1] for one in run["series"].values() if one["update"]), default=0)
        if run["finished"] and run.get("steps", last) != last:
            notes.append(
                f"{shown}: seed {run['seed']} is damaged and left out. It finished at update {run['steps']:,}, but its "
                f"last evaluation is at {last:,}. Train it again with --restart."
            )
        else:
            yield run, shown


def cut(record: Record, until: float) -> Record:
    """Return the record with every run ended at epoch ``until``: runs that stopped at different ends compare there."""
    if record["kind"] != "experiment":
        return record
    runs = [_cut_run(run, until) for run in record["runs"]]
    stopped = sum(now["finished"] and not then["finished"] for now, then in zip(runs, record["runs"]))
    said = f"Every run is drawn and judged up to epoch {until:g}."
    said += f" {stopped} of {len(runs)} were stopped after it, before their last epoch." if stopped else ""
    return judged({**record, "runs": runs, "until_epoch": until, "notes": [*record.get("notes", []), said]})


def _cut_run(run: Mapping[str, Any], until: float) -> dict[str, Any]:
    epochs = run["series"].get("epoch", {"update": [], "value": []})
    inside = [u for u, e in zip(epochs["update"], epochs["value"]) if e <= until + 1e-3]  # the first update past it
    end = max(inside, default=0)
    series = {}
    for key, one in run["series"].items():
        count = sum(update <= end for update in one["update"])
        series[key] = {name: values[:count] for name, values in one.items()}
    reached = run["finished"] or any(epoch >= until for epoch in epochs["value"])
    seconds = {"seconds": series["seconds"]["value"][-1]} if inside and "seconds" in series else {}
    return {**run, **seconds, "steps": end or run["steps"], "series": series, "finished": reached}


# What a record says of itself


def name(record: Record) -> str:
    """Return the record's name in files and links: ``mnist-mnist-laptop``, ``mnist-digits-embedded``."""
    if record["kind"] != "experiment":
        parts = [record["kind"], record.get("name", "")]
    else:
        kind = record["data"]["kind"]
        parts = [record["experiment"], record["data"]["name"], "" if kind == "real" else kind, record.get("scale", "")]
    safe = (re.sub(r"[^A-Za-z0-9_.]+", "_", str(part)).strip("._") for part in parts)
    return "-".join(filter(None, safe)) or "record"


def badge(record: Record) -> str:
    """Return whether the numbers are about the paper's data or about a stand-in, which no reader may miss."""
    kind: str = record["data"]["kind"]
    return BADGES.get(kind, kind.upper())


def environments(record: Record) -> list[Mapping[str, Any]]:
    """Return the environments of a record's rows that differ in more than the time, or that of another record."""
    every = [run.get("environment", {}) for run in record["runs"]] if "runs" in record else [record["environment"]]
    found: dict[str, Mapping[str, Any]] = {}
    for env in every:
        found.setdefault(json.dumps([env.get(key) for key in _FINGERPRINT], sort_keys=True), env)
    return list(found.values())


def commands(record: Record) -> list[str]:
    """Return the commands that made a record's rows, or another record."""
    every = [run.get("command") for run in record["runs"]] if "runs" in record else record.get("commands", [])
    return [command for command in dict.fromkeys(every or [record.get("command")]) if command]


def machines(record: Record) -> str:
    """Return the machines of a record's rows."""
    return " and ".join(dict.fromkeys(map(machine, environments(record))))


def machine(env: Mapping[str, Any]) -> str:
    """Return a machine in a few words: its GPU, else cores and processor."""
    found = env.get("machine", {})
    processor = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", "", str(found.get("cpu", "unknown")))
    cores = found.get("cores", "?")
    return found.get("gpu") or f"{cores} core{'s' * (cores != 1)}, {' '.join(processor.split())}"


# Files


def save(record: Record, folder: str | os.PathLike[str]) -> Path:
    """Write ``<name>.json`` in one move; a line for each list of numbers, so that changes can be read."""
    path = Path(folder) / f"{name(record)}.json"
    write(path, _dump(_finite(record)) + "\n")
    return path


def _finite(value: Any) -> Any:
    """Return what JSON can hold: infinities as words, which ``float`` reads, and text for keys."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
        whole = isinstance(record, dict)
        found = {key: record.get(key) for key in ("schema", "kind")} if whole else type(record).__name__
        raise fail(f"a record must have schema {SCHEMA} and a kind", f"{shown}: {found}", remedy)
    if record["kind"] == "experiment":
        _check_experiment(record, shown, remedy)
    return record


def _check_experiment(record: Record, shown: str, remedy: str) -> None:
    try:
        texts = (record["experiment"], record["data"]["name"], record["data"]["kind"], record.get("scale", ""))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names must be text")
        for run in record["runs"]:
            lengths = [{len(one[key]) for key in ("update", "value")} for one in run["series"].values()]
            if any(len(one) > 1 for one in lengths) or not isinstance(run["config"], dict):
                raise TypeError("a run lacks its settings, or its lists differ in length")
            if "seed" not in run or "finished" not in run:
                raise TypeError("a run lacks seed or finished")
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise fail("a record of an experiment must be whole", f"{shown}: {missing}", remedy) from None
