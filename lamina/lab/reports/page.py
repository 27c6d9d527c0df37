"""Runs and records as one page, RESULTS.md and figures: what the paper claims, what was measured, and on what."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InputError, fail
from ..results import Sample
from . import figures, records, staleness, verdicts
from .records import Record

if TYPE_CHECKING:
    from ..experiment import Number, Sheet

SYMBOLS = {True: "✓", False: "✗", None: "?"}
_MOST_ROWS = 40  # of a table made from a record of a kind that has no page of its own


class Tally(NamedTuple):
    """How many claims got which verdict."""

    held: int
    not_held: int
    inconclusive: int

    def __str__(self) -> str:
        return f"{self.held} held, {self.not_held} did not hold, {self.inconclusive} inconclusive"


@dataclass(frozen=True)
class Report:
    """Where the report lies and what it says in short."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    records: tuple[Path, ...]
    real: Tally
    stand_in: Tally
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table as text; ``caption`` names the data the numbers come from."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """All that page and markdown show of one record."""

    name: str
    title: str
    kind: str = ""
    badge: str = ""
    data: str = ""
    paper: str = ""
    about: str = ""
    figures: list[tuple[figures.Drawing, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    raw: list[Table] = field(default_factory=list)
    provenance: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    runs: str = ""

    def count(self, held: bool | None) -> int:
        return sum(claim["held"] is held for claim in self.claims)


def build(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    markdown: str | os.PathLike[str] | None = None,
    until: float | None = None,
) -> Report:
    """Write ``report.html``, RESULTS.md, figures and records under ``out``; the same input gives the same bytes.

    Args:
        paths: folders, searched for runs and for records, and record files, in any mixture.
        out: where all files go.
        markdown: where RESULTS.md goes instead; its links to the figures follow it.
        until: the epoch at which every run is judged, for runs that were stopped at different ends.
    """
    import jinja2  # noqa: F401  (where it is missing, say so before anything is written)

    notes: list[str] = []
    found, fresh = gather(paths, notes)
    if not found:
        places = ", ".join(str(path) for path in paths) or "(no folder given)"
        said = f" ({'; '.join(notes)})" if notes else ""
        raise fail("a report needs runs or records", f"no runs under {places}{said}", "Begin with: lamina run mnist")
    found = found if until is None else [records.cut(record, until) for record in found]
    out = Path(out)
    ordered = _in_order(found)
    sections = [_section(record, notes) for record in ordered]
    for section, record in zip(sections, ordered):
        section.stale = list(staleness.marks(record))
    drawn = _save_figures(sections, out / "figures")
    saved = tuple(records.save(record, out) for record in found if records.name(record) in fresh)
    page, text = out / "report.html", Path(markdown) if markdown is not None else out / "RESULTS.md"
    links = Path(os.path.relpath(out / "figures", text.parent)).as_posix()
    records.write(page, _render("report.html.j2", sections, notes, colours=list(enumerate(figures.COLOURS))))
    records.write(text, _render("results.md.j2", sections, notes, links=links))
    return Report(page, text, drawn, saved, *_tallies(sections), tuple(notes))


def _tallies(sections: Sequence[Section]) -> tuple[Tally, Tally]:
    """Verdicts on real data, and apart from them those on stand-ins."""
    groups = ([s for s in sections if s.kind == "real"], [s for s in sections if s.kind != "real"])
    real, stand_in = (
        Tally(*(sum(section.count(key) for section in group) for key in (True, False, None))) for group in groups
    )
    return real, stand_in


def _in_order(found: Sequence[Record]) -> list[Record]:
    """Experiments in the order of the sheets, real data before stand-ins, other kinds of record at the end."""
    from ..experiments import SHEETS

    known = list(SHEETS)

    def place(record: Record) -> tuple[Any, ...]:
        if record["kind"] != "experiment":
            return len(known) + 1, True, records.name(record)
        experiment = record["experiment"]
        rank = known.index(experiment) if experiment in known else len(known)
        return rank, record["data"]["kind"] != "real", records.name(record)

    return sorted(found, key=place)


def _save_figures(sections: Sequence[Section], folder: Path) -> tuple[Path, ...]:
    drawings = [drawing for section in sections for drawing, _ in section.figures]
    for drawing in drawings:
        records.write(folder / f"{drawing.name}.svg", drawing.svg)
    return tuple(folder / f"{drawing.name}.svg" for drawing in drawings)


# Which records


def gather(paths: Sequence[str | os.PathLike[str]], notes: list[str]) -> tuple[list[Record], set[str]]:
    """Records from run folders and files, however mixed; and the names of those in which run folders had a part."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = [records.load(path) for path in paths if not Path(path).is_dir()]
    fresh = records.collect(folders, notes)
    found = [record for folder in folders for record in _records_below(folder, notes)]
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in (*fresh, *files, *found):
        groups[records.name(record)].append(record)
    return [_joined(group, notes) for _, group in sorted(groups.items())], {records.name(record) for record in fresh}


def _records_below(root: Path, notes: list[str]) -> Iterator[Record]:
    for here, files in records.walk(root):
        for file in files if "config.json" not in files else ():
            if file.endswith(".json"):
                try:
                    yield records.load(here / file)
                except InputError as error:
                    notes.append(f"{records.shown_under(root, here / file)}: left out. {error}")


def _joined(group: Sequence[Record], notes: list[str]) -> Record:
    """Records of one experiment and data as one, judged by today's sheet."""
    if any(record["kind"] != "experiment" for record in group):
        if len(group) > 1:
            notes.append(f"{records.name(group[0])}: {len(group)} records of this name; the last is shown")
        return group[-1]
    places = [f"{records.name(record)} (source {number})" for number, record in enumerate(group, start=1)]
    runs = [(run, place) for record, place in zip(group, places) for run in record["runs"]]
    environments = [env for r in group for env in (r.get("environments") or [r.get("environment", {})])]
    said = [note for record in group for note in record.get("notes", [])]
    joined: Record = {
        **group[0],
        "environments": records.distinct(environments),
        "commands": list(dict.fromkeys(command for record in group for command in record.get("commands", []))),
        "runs": records.without_doubles(runs, notes),
        "notes": list(dict.fromkeys(said + records.data_notes([record["data"] for record in group]))),
    }
    return verdicts.judged(joined)


# What a section shows


def _section(record: Record, notes: list[str]) -> Section:
    if record["kind"] != "experiment":
        return _other_section(record)
    kind, data = record["data"]["kind"], str(record["data"].get("label", record["data"]["name"]))
    badge = records.badge(record)
    section = Section(records.name(record), record["experiment"], kind, badge, data)
    section.claims = [_shown_claim(claim) for claim in record["claims"]]
    section.notes = list(record.get("notes", []))
    section.provenance, section.commands = _provenance(record), list(record.get("commands", []))
    done = sum(run["finished"] for run in record["runs"])
    section.runs = f"{done}" if done == len(record["runs"]) else f"{done} (+{len(record['runs']) - done} unfinished)"
    sheet = verdicts.find_sheet(record["experiment"])
    if sheet is None:
        notes.append(f"{section.name}: this version knows no experiment {record['experiment']!r}; its summary is shown")
        section.tables = _tables_of(record.get("summary", []), f"Summary, {badge}: {data}")
        return section
    _fill_from_sheet(section, record, sheet)
    return section


def _fill_from_sheet(section: Section, record: Record, sheet: Sheet) -> None:
    section.title, section.paper = sheet.title, sheet.section
    section.about = sheet.described(run["config"] for run in record["runs"])
    section.figures = [(figures.draw(record, sheet, figure), figure.caption) for figure in sheet.figures]
    section.tables = [_number_table(section, record, sheet)]
    section.raw = [_value_table(section, record, sheet), _run_table(section, record, sheet)]
    section.notes += _reading_notes(record, sheet)


def _reading_notes(record: Record, sheet: Sheet) -> list[str]:
    notes = []
    unfinished = sum(not run["finished"] for run in record["runs"])
    if unfinished:
        notes.append(
            f"Unfinished runs ({unfinished}) are drawn as far as they go, as thin lines that end in a cross; "
            "they count in no number and no verdict."
        )
    mixed = verdicts.mixed_settings(record, sheet)
    if mixed:
        notes.append(
            f"Runs of one variant differ in {', '.join(mixed)}: the table keeps them apart, and claims that would pool "
            "them are inconclusive."
        )
    if not any(number.paper for number in sheet.numbers):
        notes.append("The paper prints no numbers for this experiment: it shows curves or states the outcome in words.")
    return notes


def _shown_claim(claim: Mapping[str, Any]) -> dict[str, Any]:
    return {**claim, "symbol": SYMBOLS[claim["held"]], "word": verdicts.in_words(claim)}


def _number_table(section: Section, record: Record, sheet: Sheet) -> Table:
    columns = ["Variant"]
    for number in sheet.numbers:
        columns += [number.label, *(["In the paper"] if number.paper else [])]
    rows = []
    for settings, runs in verdicts.variants(record, sheet):
        row = [verdicts.label(sheet, settings)]
        for number in sheet.numbers:
            row.append(shown_sample(number, verdicts.summarise(number, runs, settings)))
            row += [_printed(number, settings, sheet)] if number.paper else []
        rows.append(row)
    return Table(
        f"Results on {section.badge}: {section.data}. Mean ± standard deviation over seeds (n).", columns, rows
    )


def _printed(number: Number, settings: Mapping[str, Any], sheet: Sheet) -> str:
    """The paper's number: by the variant's words, by its folder's name, or by its norm alone."""
    variant = {key: settings[key] for key in sheet.vary}
    folder = "-".join(str(v) if isinstance(v, str) else f"{k}{v:g}" for k, v in variant.items())
    names = (verdicts.label(sheet, variant), folder, str(settings.get("norm")))
    return next((number.paper[name] for name in names if name in number.paper), "not printed")


def shown_sample(number: Number, summary: Mapping[str, Any]) -> str:
    """``0.0184 ± 0.0006 (5)``; says how many seeds have no number."""
    values = [value * number.scale for value in summary["values"] if value is not None]
    n = summary["n"]
    if not n:
        return "no finished run"
    if len(values) == n:
        return f"{_mean_and_spread(values, number.digits)} ({n})"
    never = "not reached" if number.target is not None else "not finite"
    rest = f"; others {_mean_and_spread(values, number.digits)}" if values else ""
    return f"{never} in {n - len(values)} of {n}{rest}"


def _mean_and_spread(values: Sequence[float], digits: int) -> str:
    sample = Sample(tuple(values))
    small = digits >= 3 and 0 < abs(sample.mean) < 10.0 ** (1 - digits)  # as decimals it would keep a single digit
    parts = (sample.mean, sample.std) if sample.n > 1 else (sample.mean,)
    return " ± ".join(f"{part:.1e}" if small else shown_number(part, digits) for part in parts)


def shown_number(value: float, digits: int) -> str:
    """``digits`` decimals; none, but a comma, from a thousand on."""
    return f"{value:,.{digits if abs(value) < 1000 else 0}f}"


def _value_table(section: Section, record: Record, sheet: Sheet) -> Table:
    rows = []
    for settings, runs in verdicts.variants(record, sheet):
        for number in sheet.numbers:
            values = verdicts.summarise(number, runs, settings)["values"]
            shown = ", ".join("none" if value is None else f"{value * number.scale:.6g}" for value in values)
            rows.append([verdicts.label(sheet, settings), number.label, shown or "no finished run"])
    return Table(f"Each seed's value, {section.badge}: {section.data}", ["Variant", "Number", "Values by seed"], rows)


def _run_table(section: Section, record: Record, sheet: Sheet) -> Table:
    rows = []
    for settings, runs in verdicts.variants(record, sheet):
        for run in sorted(runs, key=lambda run: run["seed"]):
            state = "finished" if run["finished"] else "unfinished"
            side = str(run.get("side_by_side", 1))
            numbers = [
                f"{run.get('steps', 0):,}",
                f"{run.get('seconds') or 0:.1f}",
                side,
                run.get("engine") or "unknown",
            ]
            rows.append([verdicts.label(sheet, settings), str(run["seed"]), state, *numbers])
    columns = ["Variant", "Seed", "State", "Updates", "Seconds of training", "Seeds side by side", "Engine"]
    return Table(f"Runs, {section.badge}: {section.data}", columns, rows)


def _provenance(record: Record) -> list[tuple[str, str]]:
    shown = [pair for env in record.get("environments") or [record.get("environment", {})] for pair in _machine(env)]
    longest = max((run.get("seconds") or 0.0 for run in record["runs"]), default=0.0)
    most = max((run.get("side_by_side") or 1 for run in record["runs"]), default=1)
    together = f", up to {most} side by side" if most > 1 else ""
    took = f"{longest:,.0f} s the longest of {len(record['runs'])} runs{together}; evaluation not counted"
    shown.append(("Training time", took))
    shown += [(f"SHA-256 of {file}", str(digest)) for file, digest in sorted(record["data"].get("sha256", {}).items())]
    return shown


def _machine(env: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine, commit = env.get("machine", {}), env.get("commit")
    parts = [machine.get("gpu"), machine.get("cpu"), f"{machine.get('cores', '?')} cores", machine.get("system")]
    dirty = " with local changes" if env.get("dirty") else ""
    yield "Machine", ", ".join(str(part) for part in parts if part)
    yield "Code", f"lamina {env.get('lamina', '?')}, commit {commit or 'not recorded'}{dirty}"
    yield (
        "Versions",
        ", ".join(f"{key} {value}" for key, value in sorted(env.get("versions", {}).items())) or "not recorded",
    )
    yield "Recorded", str(env.get("created", "not recorded"))


# Records of other kinds: no page of their own, so what is flat in them is shown


def _other_section(record: Record) -> Section:
    if record["kind"] == "tuning" and verdicts.find_sheet(record["experiment"]) is not None:
        return _tuning_section(record)
    section = Section(records.name(record), str(record.get("title", records.name(record).replace("-", " "))))
    section.about = f"A record of kind “{record['kind']}”."
    if isinstance(record.get("environment"), dict):
        section.provenance = list(_machine(record["environment"]))
    if isinstance(record.get("tables"), list):  # the record says itself how it is read
        section.about = str(record.get("about", section.about))
        section.tables = [Table(str(t["caption"]), list(t["columns"]), list(t["rows"])) for t in record["tables"]]
        return section
    known = ("schema", "kind", "name", "title")
    flat = [[k, _cell(v)] for k, v in sorted(record.items()) if k not in known and not isinstance(v, (dict, list))]
    section.tables = [Table(section.title, ["Entry", "Value"], flat)] if flat else []
    for key, value in sorted(record.items()):
        if isinstance(value, dict) and key != "environment":
            section.tables.append(Table(key, ["Entry", "Value"], [[k, _cell(v)] for k, v in sorted(value.items())]))
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            section.tables += _tables_of(value, key)
    return section


def _tuning_section(record: Record) -> Section:
    from .tuning import table

    section = Section(records.name(record), f"Step sizes: {record['experiment']} on {record['data']['label']}")
    section.about = "What was tried before the runs above, on validation cases only."
    section.tables = [Table(*table(record))]
    section.provenance, section.commands = list(_machine(record["environment"])), list(record.get("commands", []))
    return section


def _tables_of(rows: Sequence[Mapping[str, Any]], caption: str) -> list[Table]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    more = f" (the first {_MOST_ROWS} of {len(rows)} rows)" if len(rows) > _MOST_ROWS else ""
    return [Table(caption + more, columns, [[_cell(row.get(key)) for key in columns] for row in rows[:_MOST_ROWS]])]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


# Templates


def _render(template: str, sections: Sequence[Section], notes: Sequence[str], **values: Any) -> str:
    real, stand_in = _tallies(sections)
    return rendered(template, sections=sections, notes=notes, real=real, stand_in=stand_in, **values)


def rendered(template: str, **values: Any) -> str:
    """One of the package's templates, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    page = template.endswith(".html.j2")
    env = Environment(loader=loader, autoescape=page, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["md"] = _markdown
    return env.get_template(template).render(**values).rstrip() + "\n"


def _markdown(text: object) -> str:
    """Text that markdown shows as it is, in a table cell too."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", re.sub(r"\s+", " ", plain))
