"""``lamina evaluate RUN --suite sentences``: a table of the sentence tasks for an encoder and its controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import fail, one_of
from ..options import Settings
from .screen import KINDS, say, show_notes, table

if TYPE_CHECKING:  # torch takes seconds to import
    from ..experiments.skip_thoughts.suite import Suite

SUITES = ("sentences",)
ROWS = {
    "model": "this run",
    "untrained": "the same encoder, untrained",
    "words": "mean of the run's word vectors",
    "majority": "majority",
    "tfidf": "TF-IDF",
}
# By measure: the column's name behind the task, and the decimals
MEASURES = {"pearson": (" r", 4), "spearman": (" rho", 4), "mse": (" MSE", 4), "accuracy": ("", 1)}


def checked(suite: str | None, tasks: str | None, protocol: str | None, vectors: str | None) -> list[str] | None:
    """Return the names of --tasks, None for all. Refuse options of a suite where none is asked for."""
    if suite is None:
        options = {"--tasks": tasks, "--protocol": protocol, "--vectors": vectors}
        if given := [name for name, value in options.items() if value is not None]:
            raise fail(f"{given[0]} needs --suite", "none", "Pass --suite sentences.")
        return None
    one_of("--suite", suite, SUITES)
    if tasks is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    if not all(names):
        raise fail("--tasks must be names with commas between them", repr(tasks), "Pass MR,CR.")
    return names


def evaluate_sentences(
    run: Path, settings: Settings, names: Sequence[str] | None, protocol: str, vectors: str | None
) -> None:
    """Evaluate a run's sentence vectors and print the table."""
    from ..experiments.skip_thoughts.suite import evaluated
    from ..runs.progress import Reporter

    with Reporter() as reporter:
        path = None if vectors is None else Path(vectors)
        found = evaluated(run, settings, names, protocol, path, reporter.line)
    say(f"tasks: {KINDS[found.data.kind]}: {found.data.label}; protocol {protocol}")
    trained = f"{KINDS[found.books['kind']]}: {found.books['label']}"
    expanded = f"; vocabulary expanded from {vectors}" if vectors else ""
    say(f"training: {trained}; checkpoint at update {found.update:,}{expanded}")
    _show(found)


def _show(found: Suite) -> None:
    cells: dict[str, dict[str, str]] = {name: {} for name in ROWS}
    for line in found.lines:
        cells[line["row"]] |= _cells(line)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [[ROWS[name], *(row[column] for column in columns)] for name, row in cells.items()]
    table("Accuracy in percent; SICK: correlations and mean squared error", ["Encoder", *columns], rows)
    failed = sum(line.get("unsolved") or 0 for line in found.lines)
    show_notes([f"{failed} regressions did not converge"] if failed else [])
    say(f"results: {found.folder}")


def _cells(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of one task by column; a correlation with constant predictions is a dash."""
    measures = {name: told for name, told in MEASURES.items() if name in line}
    return {
        line["task"] + suffix: "-" if line[name] is None else f"{line[name]:.{decimals}f}"
        for name, (suffix, decimals) in measures.items()
    }
