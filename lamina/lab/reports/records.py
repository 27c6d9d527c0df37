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
_BESIDES = ("kind", "seed", "step")  # entries of a line that are no series
_FINGERPRINT = ("lamina", "commit", "dirty", "versions", "machine")


# Reading run folders


def collect(folders: Iterable[str | os.PathLike[str]], notes: list[str] | None = None) -> list[Record]:
    """Return records of all runs under ``folders``, one for each experiment, data set, kind of data and scale.

    What was left out, cut short or found twice is appended to ``notes``, or printed to stderr without it.
    """
    written: list[str] = [] if notes is None else notes
    groups: dict[tuple[str, ...], list[tuple[Record, Runs]]] = defaultdict(list)
    for folder, place in _run_folders(folders):
        header, runs = _read_folder(folder, place, written)
        if header:
            key = header["experiment"], header["data"]["name"], header["data"]["kind"], header.get("scale", "")
            groups[key].append((header, [(run, place) for run in runs]))
    records = [record for _, group in sorted(groups.items()) if (record := _record(group, written))["runs"]]
    for note in written if notes is None else ():
        print(note, file=sys.stderr)
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


def _read_folder(folder: Path, place: str, notes: list[str]) -> tuple[Record, list[dict[str, Any]]]:
    """Return the run's header and a row for each seed; nothing, and a note, where they cannot be read."""
    try:
        header = _read_header(folder)
        lines = _read_metrics(folder, place, notes)
        summary, extras = (_read_optional(folder / f"{file}.json", place, notes) for file in ("summary", "extras"))
        artefacts = {"artefacts": pictures} if (pictures := read_pictures(folder / "artefacts")) else {}
        return header, [_run(header, seed, lines, summary, extras) | artefacts for seed in header["seeds"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error} in its files" if isinstance(error, KeyError) else str(error) or type(error).__name__
        notes.append(f"{place}: left out, {reason}")
        return {}, []


def _read_header(folder: Path) -> dict[str, Any]:
    header = _parse((folder / "config.json").read_bytes(), "config.json")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"config.json is not the header of a run with schema {SCHEMA}: train it anew")
    _check_types(header, {"experiment": str, "config": dict, "seeds": list, "data": dict}, "config.json: ")
    _check_types(header["data"], {"name": str, "kind": str}, "config.json: data.")
    return header


def _check_types(entries: Mapping[str, Any], types: Mapping[str, type], place: str) -> None:
    for key, kind in types.items():
        if not isinstance(entries[key], kind):
            raise ValueError(f"{place}{key} must be a {kind.__name__}")


def _parse(text: bytes, name: str) -> dict[str, Any]:
    """Return the object in a text, empty for other JSON; NaN and infinities stand as null everywhere."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON ({error})") from None
    return value if isinstance(value, dict) else {}


def _read_metrics(folder: Path, place: str, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines up to the first that cannot be read: a run that was killed may have left half a line."""
    path = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            line = _parse(text, "line")
        except ValueError:
            line = {}
        if not line:
            notes.append(f"{place}: metrics.jsonl is read up to line {number}, which is torn")
            break
        lines.append(line)
    return lines


def _read_optional(path: Path, place: str, notes: list[str]) -> dict[str, Any]:
    """Read a file that a half-finished run does not have; a torn one counts as absent, and is noted."""
    try:
        return _parse(path.read_bytes(), path.name) if path.exists() else {}
    except ValueError as error:
        notes.append(f"{place}: {error}; taken as absent")
        return {}


def _run(
    header: Record, seed: int, lines: Sequence[Mapping[str, Any]], summary: Record, extras: Record
) -> dict[str, Any]:
    lines = [line for line in lines if line.get("seed", seed) == seed]
    last = lines[-1] if lines else {}
    return {
        "config": dict(header["config"]),
        "seed": seed,
        "finished": summary.get("finished") is True,
        "steps": summary.get("steps", last.get("step", 0)),
        "seconds": rounded(summary.get("seconds", last.get("seconds", 0.0))),
        "side_by_side": summary.get("side_by_side", len(header["seeds"])),
        "engine": summary.get("engine"),
        "series": _series([line for line in lines if line.get("kind") == "eval"]),
        "extras": rounded(extras.get(str(seed), {})),
        "environment": header.get("environment", {}),
        "command": shown_command(header.get("command") or ""),
    }


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return updates and values by metric; of two values at one update (a resumed run) the later counts."""
    by_step: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in lines:
        by_step[line["step"]] |= line
    series: dict[str, dict[str, list[Any]]] = {}
    for step, line in sorted(by_step.items()):
        for name in (key for key in line if key not in _BESIDES):
            points = series.setdefault(name, {"update": [], "value": []})
            points["update"].append(step)
            points["value"].append(rounded(line[name]))
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
    remarks = [f"The runs did not all read the same data: {', '.join(differ)} differ."] if differ else []
    identity = {"experiment": first["experiment"], "scale": first.get("scale", ""), "data": data[0]}
    return judged({"schema": SCHEMA, "kind": "experiment", **identity, "runs": runs, "notes": remarks})


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
    runs: list[tuple[dict[str, Any], str]] = []
    for source, record in enumerate(group, start=1):
        _check_same_sample({**first, "runs": [run for run, _ in runs]}, record)
        place = name(first) if len(group) == 1 else f"{name(first)} (source {source})"
        runs += [(run, place) for run in record["runs"]]
    remarks = list(dict.fromkeys(note for record in group for note in record.get("notes", [])))
    return judged({**first, "runs": _without_doubles(runs, notes), "notes": remarks})


def _check_same_sample(record: Record, added: Record) -> None:
    remedy = "Write this report into another folder (--out), or delete the record to begin it anew."
    rule = f"runs that are added to the record {name(record)} must have its"
    if record["data"].get("sha256") != added["data"].get("sha256"):
        raise fail(f"{rule} data", f"files with other SHA-256 for {added['data'].get('label')}", remedy)
    sheet = find_sheet(record["experiment"])
    if sheet is None:
        return
    known: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in record["runs"]:
        known[variant_of(run, sheet)].append(settings_of(run))
    for run in added["runs"]:
        settings, known_settings = settings_of(run), known[variant_of(run, sheet)]
        if known_settings and settings not in known_settings:
            pairs = {key: (settings.get(key), known_settings[0].get(key)) for key in {**settings, **known_settings[0]}}
            received = ", ".join(f"{key} {new} in place of {old}" for key, (new, old) in pairs.items() if new != old)
            variant = label(sheet, {key: settings.get(key) for key in sheet.vary})
            raise fail(f"{rule} settings", f"{received} for {variant}", remedy)


def _without_doubles(runs: Runs, notes: list[str]) -> list[dict[str, Any]]:
    """Return one run for each setting and seed: the finished one, else the longer. Damaged runs are left out."""
    best: dict[str, tuple[dict[str, Any], str]] = {}
    left_out: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run, place in _undamaged(runs, notes):
        key = json.dumps([settings_of(run), run["seed"]], sort_keys=True)
        known_run, known_place = best.setdefault(key, (run, place))
        if run != known_run:
            pair = (run, place), (known_run, known_place)
            worse, best[key] = sorted(pair, key=lambda one: (one[0]["finished"], one[0]["steps"]))
            left_out[best[key][1], worse[1]].append(str(run["seed"]))
    for (place, other_place), seeds in left_out.items():
        double = f"{place}: seed {', '.join(dict.fromkeys(seeds))} is in {other_place} too"
        notes.append(f"{double}, where {len(seeds)} run(s) are left out as no more complete")
    return [run for run, _ in best.values()]


def _undamaged(runs: Runs, notes: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Leave out finished runs whose last evaluation is not their last update: part of their metrics is lost."""
    for run, place in runs:
        last = max((points["update"][-1] for points in run["series"].values() if points["update"]), default=0)
        if not run["finished"] or run.get("steps", last) == last:
            yield run, place
            continue
        notes.append(
            f"{place}: seed {run['seed']} is damaged and left out. It finished at update {run['steps']:,}, but its "
            f"last evaluation is at {last:,}. Train it again with --restart."
        )


def cut(record: Record, until: float) -> Record:
    """Return the record with every run ended at epoch ``until``: runs that stopped at different ends compare there."""
    if record["kind"] != "experiment":
        return record
    runs = [_cut_run(run, until) for run in record["runs"]]
    stopped = sum(now["finished"] and not then["finished"] for now, then in zip(runs, record["runs"]))
    remark = f"Every run is drawn and judged up to epoch {until:g}."
    remark += f" {stopped} of {len(runs)} were stopped after it, before their last epoch." if stopped else ""
    return judged({**record, "runs": runs, "until_epoch": until, "notes": [*record.get("notes", []), remark]})


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
    different: dict[str, Mapping[str, Any]] = {}
    for env in every:
        different.setdefault(json.dumps([env.get(key) for key in _FINGERPRINT], sort_keys=True), env)
    return list(different.values())


def commands(record: Record) -> list[str]:
    """Return the commands that made a record's rows, or another record."""
    every = [run.get("command") for run in record["runs"]] if "runs" in record else record.get("commands", [])
    return [command for command in dict.fromkeys(every or [record.get("command")]) if command]


def machines(record: Record) -> str:
    """Return the machines of a record's rows."""
    return " and ".join(dict.fromkeys(map(machine, environments(record))))


def machine(env: Mapping[str, Any]) -> str:
    """Return a machine in a few words: its GPU, else cores and processor."""
    parts = env.get("machine", {})
    processor = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", "", str(parts.get("cpu", "unknown")))
    cores = parts.get("cores", "?")
    return parts.get("gpu") or f"{cores} core{'s' * (cores != 1)}, {' '.join(processor.split())}"


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
    name, remedy = Path(path).name, f"Make it anew with {command}."
    try:
        record = _parse(Path(path).read_bytes(), "the file")
    except (OSError, ValueError) as error:
        raise fail("a record must be a readable JSON file", f"{name}: {error}", remedy) from error
    if record.get("schema") != SCHEMA or not isinstance(record.get("kind"), str):
        received = {key: record.get(key) for key in ("schema", "kind")}
        raise fail(f"a record must have schema {SCHEMA} and a kind", f"{name}: {received}", remedy)
    try:
        _check_whole(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise fail("a record of an experiment must be whole", f"{name}: {reason}", remedy) from None
    return record


def _check_whole(record: Record) -> None:
    if record["kind"] != "experiment":
        return
    _check_types({"scale": "", **record}, {"experiment": str, "scale": str}, "")
    _check_types(record["data"], {"name": str, "kind": str}, "data.")
    for run in record["runs"]:
        _check_types(run, {"config": dict, "seed": object, "finished": object}, "a run's ")
        if any(len(points["update"]) != len(points["value"]) for points in run["series"].values()):
            raise ValueError("a run's lists differ in length")
