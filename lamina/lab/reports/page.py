"""Runs and records as one page, RESULTS.md and figures: what the paper claims, what was measured, and on what."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InputError, fail
from ..claims import DIRECTION, INCONCLUSIVE, NOT_REPRODUCED, REPRODUCED, WORDS, Speed, in_words
from ..statistics import Interval, pooled
from . import figures, records, staleness, verdicts
from .records import Record

if TYPE_CHECKING:
    from ..experiment import Figure, Job, Number, Sheet

SYMBOLS = {REPRODUCED: "✓", DIRECTION: "✓", INCONCLUSIVE: "?", NOT_REPRODUCED: "✗"}
_MOST_ROWS = 40  # of a table made from a record of a kind that has no page of its own


class Tally(NamedTuple):
    """Number of claims with each verdict; comparisons that the paper does not make are left out."""

    reproduced: int
    direction: int
    inconclusive: int
    not_reproduced: int

    @classmethod
    def of(cls, claims: Iterable[Mapping[str, Any]]) -> Tally:
        verdict_words = [claim["word"] for claim in claims if claim["claimed"]]
        return cls(*(verdict_words.count(word) for word in WORDS))

    def __str__(self) -> str:
        return ", ".join(f"{count} {word}" for count, word in zip(self, WORDS))


@dataclass(frozen=True)
class Table:
    """A table as text."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """All that page and markdown show of one record."""

    name: str
    title: str
    place: str = ""  # the scale, else the machine
    kind: str = ""
    badge: str = ""
    data: str = ""
    paper: str = ""
    about: str = ""
    took: str = ""
    figures: list[tuple[figures.Drawing, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    raw: list[Table] = field(default_factory=list)
    provenance: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    experiment: str = ""
    explores: str = ""  # the claim whose failure these runs explore; they count in no tally

    @property
    def heading(self) -> str:
        data = self.data.partition(" (")[0]
        return ", ".join(filter(None, (self.title, "" if data in self.title else data, self.place)))

    @property
    def tally(self) -> Tally:
        return Tally.of(self.claims)


@dataclass(frozen=True)
class Report:
    """Paths of the report's files, and its sections."""

    html: Path
    markdown: Path
    figures: tuple[Path, ...]
    records: tuple[Path, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]

    def claims(self, real: bool) -> Tally:
        """Count the verdicts on real data, or on stand-ins."""
        counted = [section for section in self.sections if (section.kind == "real") is real and not section.explores]
        return Tally.of(claim for section in counted for claim in section.claims)

    @property
    def real(self) -> Tally:
        return self.claims(real=True)

    @property
    def stand_in(self) -> Tally:
        return self.claims(real=False)

    def explorations(self, section: Section, claim: str) -> list[Section]:
        """Return the sections that explore why a claim of this section's experiment failed."""
        return [s for s in self.sections if s.explores == claim and s.experiment == section.experiment and s.claims]


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
        out: where all files go; records that lie there grow by the runs.
        markdown: where RESULTS.md goes instead; its links to the figures follow it.
        until: the epoch at which every run is judged, for runs that were stopped at different ends. No record is saved.
    """
    import jinja2  # noqa: F401  (where it is missing, say so before anything is written)

    notes: list[str] = []
    out = Path(out)
    collected, fresh = gather(paths, out, notes)
    if not collected:
        places = ", ".join(str(path) for path in paths) or "(no folder given)"
        reasons = f" ({'; '.join(notes)})" if notes else ""
        raise fail("a report needs runs or records", f"no runs under {places}{reasons}", "Begin with: lamina run mnist")
    saved = () if until else tuple(records.save(record, out) for record in collected if records.name(record) in fresh)
    ordered = sorted(collected if until is None else [records.cut(record, until) for record in collected], key=_place)
    sections = tuple(_section(record, notes) for record in ordered)
    drawn = _save_figures(sections, out / "figures")
    page, text = out / "report.html", Path(markdown) if markdown is not None else out / "RESULTS.md"
    done = Report(page, text, drawn, saved, sections, tuple(notes))
    links = Path(os.path.relpath(out / "figures", text.parent)).as_posix()
    shared = {"report": done, "overall": _overall(ordered), "words": WORDS, "symbols": SYMBOLS}
    records.write(page, rendered("report.html.j2", **shared))
    records.write(text, rendered("results.md.j2", **shared, links=links))
    return done


def _place(record: Record) -> tuple[Any, ...]:
    """Return the order of a record: real data, stand-ins, other kinds; experiments and scales as they are listed."""
    from ..experiments import SHEETS

    if record["kind"] != "experiment":
        return 2, 0, 0, records.name(record)
    known, scales = list(SHEETS), ["paper", "", "laptop", "smoke"]
    rank = known.index(record["experiment"]) if record["experiment"] in known else len(known)
    scale = scales.index(record["scale"]) if record["scale"] in scales else len(scales)
    return int(record["data"]["kind"] != "real"), rank, scale, records.name(record)


def _save_figures(sections: Sequence[Section], folder: Path) -> tuple[Path, ...]:
    drawn = {folder / f"{drawing.name}.svg": drawing.svg for section in sections for drawing, _ in section.figures}
    for path, svg in drawn.items():
        records.write(path, svg)
    return tuple(drawn)


# Which records


def gather(paths: Sequence[str | os.PathLike[str]], out: Path, notes: list[str]) -> tuple[list[Record], set[str]]:
    """Return records from run folders and files, however mixed, and the names of those that ``out`` is to hold.

    Records of experiments that lie there grow by the runs.
    """
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = [records.load(path) for path in paths if not Path(path).is_dir()]
    recorded = [record for folder in folders for record in _records_below(folder, notes)]
    groups: dict[str, list[Record]] = defaultdict(list)
    made = records.collect(folders, notes)
    for record in (*files, *recorded, *made):
        groups[records.name(record)].append(record)
    there = {name: out / f"{name}.json" for name, group in groups.items() if group[0]["kind"] == "experiment"}
    kept = {name for name, file in there.items() if file.exists()}
    for name in kept:
        groups[name].insert(0, records.load(there[name]))
    return [records.joined(group, notes) for _, group in sorted(groups.items())], kept | set(map(records.name, made))


def _records_below(root: Path, notes: list[str]) -> Iterator[Record]:
    for here, files in records.walk(root):
        for file in files if "config.json" not in files else ():
            if file.endswith(".json"):
                try:
                    yield records.load(here / file)
                except InputError as error:
                    notes.append(f"{records.shown_under(root, here / file)}: left out. {error}")


# What a section shows


def _section(record: Record, notes: list[str]) -> Section:
    if record["kind"] != "experiment":
        return _other_section(record)
    data = str(record["data"].get("label", record["data"]["name"]))
    section = Section(records.name(record), record["experiment"], _scale_or_machine(record), record["data"]["kind"])
    section.badge, section.data, section.claims = records.badge(record), data, record["claims"]
    section.experiment = record["experiment"]
    section.notes, section.stale = list(record.get("notes", [])), list(staleness.marks(record))
    section.took, section.commands, section.provenance = _took(record), records.commands(record), _provenance(record)
    sheet = verdicts.find_sheet(record["experiment"])
    if sheet is None:
        notes.append(f"{section.name}: this version knows no experiment {record['experiment']!r}; its summary is shown")
        section.tables = _tables_of(record.get("summary", []), f"Summary: {data}")
        return section
    _fill_from_sheet(section, record, sheet)
    return section


def _scale_or_machine(record: Record) -> str:
    """Return how large the runs are, or where they ran: what tells records of one experiment and data set apart."""
    if verdicts.exploration(record):
        return f"exploration “{record['scale'].replace('_', ' ')}”"
    return f"{record['scale']} scale" if record["scale"] else records.machines(record)


def _took(record: Record) -> str:
    shares = [((run.get("seconds") or 0.0), run.get("side_by_side") or 1) for run in record["runs"]]
    seconds = max([sum(took / beside for took, beside in shares), *(took for took, _ in shares)])
    minutes = f"{seconds / 60:,.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{minutes} of training over all runs, {records.machines(record)}"


def _fill_from_sheet(section: Section, record: Record, sheet: Sheet) -> None:
    section.title, section.paper = sheet.title, sheet.section
    section.about = sheet.described(run["config"] for run in record["runs"])
    if explored := verdicts.exploration(record):
        section.explores, section.about = explored.explores, f"{explored.about[0].upper()}{explored.about[1:]}."
    about_claims = (
        (figures.draw_claims(record, sheet), "Each pair of runs with the same seed, and the verdict that follows."),
        (figures.draw_levels(record, sheet), "The comparison on the way to the target: at shares of the improvement."),
    )
    section.figures = [(drawing, caption) for drawing, caption in about_claims if drawing is not None]
    if not section.explores:
        own = (f for f in sheet.figures if not f.datasets or record["data"]["name"] in f.datasets)
        section.figures += [(figures.draw(record, sheet, figure), _caption(figure)) for figure in own]
    else:
        section.notes.append("These runs explore why a claim did not reproduce. They change no verdict.")
    section.tables = [_number_table(record, sheet), _pair_table(record, sheet)]
    section.raw = [_value_table(record, sheet), _run_table(record, sheet)]
    section.notes += _reading_notes(record, sheet)


def _caption(figure: Figure) -> str:
    """Return the caption, and how to read lines where the figure has some."""
    if not any(panel.kind in ("curve", "profile") for panel in figure.panels):
        return figure.caption
    mean = "geometric mean on logarithmic axes" if any(panel.log for panel in figure.panels) else "mean"
    return f"{figure.caption} Line: {mean} over seeds; band: lowest to highest seed."


def _reading_notes(record: Record, sheet: Sheet) -> list[str]:
    unfinished, mixed = sum(not run["finished"] for run in record["runs"]), verdicts.mixed_settings(record, sheet)
    cut = (
        f"Unfinished runs ({unfinished}) are drawn as far as they go, as thin lines that end in a cross; "
        "they count in no number and no verdict."
    )
    apart = (
        f"Runs of one variant differ in {', '.join(mixed)}: the table keeps them apart, and claims that would pool "
        "them are inconclusive."
    )
    none = "The paper prints no numbers for this experiment: it shows curves or states the outcome in words."
    panels = [panel for figure in sheet.figures for panel in figure.panels]
    printed = any(number.paper for number in sheet.numbers) or any(panel.printed for panel in panels)
    return [text for holds, text in ((unfinished, cut), (mixed, apart), (not printed, none)) if holds]


def _number_table(record: Record, sheet: Sheet) -> Table:
    columns, rows = ["Variant"], []
    for number in sheet.numbers:
        columns += [number.label, *(["In the paper"] if number.paper else [])]
    for settings, runs in verdicts.variants(record, sheet):
        rows.append([label := verdicts.label(sheet, settings)])
        for number in sheet.numbers:
            rows[-1].append(shown_sample(number, verdicts.summarise(number, runs, settings, sheet)))
            rows[-1] += [number.paper.get(label, "not printed")] if number.paper else []
    return Table("Mean ± standard deviation over seeds (number of seeds)", columns, rows)


def shown_sample(number: Number, summary: Mapping[str, Any]) -> str:
    """Return ``0.01840 ± 0.00061 (5)``; says how many seeds have no number."""
    values = [value * number.scale for value in summary["values"] if value is not None]
    n = summary["n"]
    if not n:
        return "no finished run"
    if len(values) == n:
        return f"{figures.with_spread(values)} ({n})"
    never = "not reached" if number.target is not None else "not finite"
    rest = f"; others {figures.with_spread(values)}" if values else ""
    return f"{never} in {n - len(values)} of {n}{rest}"


def _pair_table(record: Record, sheet: Sheet) -> Table:
    """Return every pair, the placebo and the ratios by level, for readers who cannot see the figures."""
    measures = {claim.name: claim.measure for claim in sheet.claims}
    rows = []
    for claim in (claim for claim in record["claims"] if claim["name"] in measures):
        measure = measures[claim["name"]]
        pairs = ", ".join(_shown_effect(measure, value) for value in claim["pairs"].values())
        placebo = in_words(measure, Interval(**claim["placebo"])) if claim["placebo"] else "not measured"
        placebo += f" at {claim['placebo_share']:.0%}" if claim["placebo"] and claim["placebo_share"] < 1 else ""
        levels = [f"{share:.0%}: {_shown_effect(measure, f['estimate'])}" for share, f, _ in claim["levels"] if f]
        rows.append([claim["text"], pairs or "none", placebo, ", ".join(levels) or "none"])
    columns = ["Claim", "Pairs, by seed", "Placebo", "By share of the baseline's improvement"]
    return Table("Pairs, placebo (the baseline against itself, other seeds) and levels", columns, rows)


def _shown_effect(measure: Any, effect: float) -> str:
    if math.isfinite(effect):
        return str(measure.value(effect))
    return "baseline missed" if effect > 0 else "ours missed"


def _value_table(record: Record, sheet: Sheet) -> Table:
    rows = []
    for summary, number in zip(record["summary"], cycle(sheet.numbers)):
        values = ("none" if value is None else f"{value * number.scale:.6g}" for value in summary["values"])
        rows.append([verdicts.label(sheet, summary["variant"]), number.label, ", ".join(values) or "no finished run"])
    return Table("Each seed's value", ["Variant", "Number", "Values by seed"], rows)


def _run_table(record: Record, sheet: Sheet) -> Table:
    rows = []
    for settings, runs in verdicts.variants(record, sheet):
        for run in runs:
            env = run.get("environment", {})
            numbers = [f"{run.get('steps', 0):,}", f"{run.get('seconds') or 0:.1f}", str(run.get("side_by_side", 1))]
            where = [run.get("engine") or "unknown", records.machine(env), str(env.get("commit"))[:12]]
            state = "finished" if run["finished"] else "unfinished"
            rows.append([verdicts.label(sheet, settings), str(run["seed"]), state, *numbers, *where])
    columns = ["Variant", "Seed", "State", "Updates", "Seconds", "Side by side", "Engine", "Machine", "Commit"]
    return Table("Runs", columns, rows)


def _provenance(record: Record) -> list[tuple[str, str]]:
    entries = [pair for env in records.environments(record) for pair in _machine(env)]
    entries.append(("Training time", f"{_took(record)}, {len(record['runs'])} runs; evaluation not counted"))
    return entries + [
        (f"SHA-256 of {f}", str(digest)) for f, digest in sorted(record["data"].get("sha256", {}).items())
    ]


def _machine(env: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine, commit = env.get("machine", {}), env.get("commit")
    parts = [machine.get("gpu"), machine.get("cpu"), f"{machine.get('cores', '?')} cores", machine.get("system")]
    dirty = " with local changes" if env.get("dirty") else ""
    yield "Machine", ", ".join(str(part) for part in parts if part)
    yield "Code", f"lamina {env.get('lamina', '?')}, commit {commit or 'not recorded'}{dirty}"
    versions = ", ".join(f"{key} {value}" for key, value in sorted(env.get("versions", {}).items()))
    yield "Versions", versions or "not recorded"
    yield "Recorded", str(env.get("created", "not recorded"))


# All claims on speed together


def _overall(every: Sequence[Record]) -> list[str]:
    """Return a sentence for each scale that has several claims on speed, on real data."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    experiments = [record for record in every if record["kind"] == "experiment" and record["data"]["kind"] == "real"]
    for record in (one for one in experiments if not verdicts.exploration(one)):
        sheet = verdicts.find_sheet(record["experiment"])
        speed = {claim.name for claim in sheet.claims if isinstance(claim.measure, Speed)} if sheet else set()
        asked = [claim for claim in record["claims"] if claim["name"] in speed and claim["claimed"]]
        groups[_scale_or_machine(record)] += asked
    return [text for place, claims in groups.items() if (text := _pooled_in_words(place, claims))]


def _pooled_in_words(place: str, claims: Sequence[Mapping[str, Any]]) -> str:
    with_ratio = [claim for claim in claims if claim["interval"]]
    if len(with_ratio) < 2:
        return ""
    interval = pooled([list(claim["nearest"].values()) for claim in with_ratio])
    effects = [effect for claim in with_ratio for effect in claim["pairs"].values()]
    low = -math.inf if -math.inf in effects else interval.low
    high = math.inf if math.inf in effects else interval.high
    left = f" {len(claims) - len(with_ratio)} more have no ratio." if len(claims) > len(with_ratio) else ""
    estimate = interval.estimate if math.isfinite(high - low) else math.inf
    speed = Speed("").words(Interval(estimate, low, high, interval.n))
    return (
        f"All {len(with_ratio)} claims on speed with a ratio, {place}, with equal weights: the variant that the paper "
        f"calls faster is {speed}.{left} This mean is about these tasks only."
    )


# What a command shows after its runs


def run_tables(
    sheet: Sheet, jobs: Sequence[Job], home: Path, notes: list[str]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and a row for each variant of the jobs whose runs lie in ``home``."""
    there = [home / job.label for job in jobs if (home / job.label / "config.json").exists()]
    for record in records.collect(there, notes):
        table = _number_table(record, sheet)
        runs = [_folders(jobs, settings) for settings, _ in verdicts.variants(record, sheet)]
        title = f"{sheet.title}, {records.badge(record)}: {record['data']['label']}; mean ± std (seeds); runs in {home}"
        yield title, [*table.columns, "Run"], [[*row, run] for row, run in zip(table.rows, runs)]


def _folders(jobs: Sequence[Job], settings: Mapping[str, Any]) -> str:
    own = [job.label for job in jobs if all(getattr(job.config, k) == v for k, v in settings.items())]
    return own[0] + (f" and {len(own) - 1} more" if len(own) > 1 else "") if own else "-"


# Records of other kinds: no page of their own, so what is flat in them is shown


def _other_section(record: Record) -> Section:
    if record["kind"] == "tuning" and verdicts.find_sheet(record["experiment"]) is not None:
        record = _with_tuning_table(record)
    section = Section(records.name(record), str(record.get("title", records.name(record).replace("-", " "))))
    section.commands, section.stale = records.commands(record), list(staleness.marks(record))
    section.about = f"A record of kind “{record['kind']}”."
    if isinstance(record.get("environment"), dict):
        section.provenance, section.took = list(_machine(record["environment"])), records.machine(record["environment"])
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


def _with_tuning_table(record: Record) -> Record:
    from .tuning import table

    title = f"Step sizes: {record['experiment']} on {record['data']['label']}"
    about = "What was tried before the runs above, on validation cases only."
    shown = dict(zip(("caption", "columns", "rows"), table(record)))
    return {**record, "title": title, "about": about, "tables": [shown]}


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


def rendered(template: str, **values: Any) -> str:
    """Return one of the package's templates, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    page = template.endswith(".html.j2")
    env = Environment(loader=loader, autoescape=page, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["md"], env.filters["code"] = _markdown, _code
    return env.get_template(template).render(**values).rstrip() + "\n"


def _markdown(text: object) -> str:
    """Return text that markdown shows as it is, in a table cell too."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", re.sub(r"\s+", " ", plain))


def _code(command: str) -> str:
    """Return a command as markdown's code, in a table cell too."""
    return "`" + re.sub(r"\s+", " ", command).replace("`", "'").replace("|", "\\|") + "`"
