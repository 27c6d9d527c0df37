"""Records that grow a row at a time: a benchmark that is stopped, or fails in one case, loses nothing of the others.

    python benchmarks/speed.py --keep --minutes 9

A record is written after every case. ``--keep`` goes on with it: what it has is not measured again, if the same code
made it on the same machine by the same command. ``--minutes`` begins no case that may not end in time. A case that
fails is noted with its reason, and the next one follows; one during which the process dies is tried once more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lamina.lab.reports import records

Case = dict[str, Any]
DONE, FAILED, LOST, LEFT = 0, 1, 70, 75  # exit status: all measured; some failed; the device is of no use; cases left
TRIES = 2  # processes that may die during a case before it counts as failed
LONG = 20.0  # seconds that a case may take, until a longer one is known
BOOKKEEPING = ("--out", "--minutes", "--workers", "--touch", "--keep", "--compile")  # change nothing that is measured
FLAGS = ("--keep", "--compile")


def arguments(parser: argparse.ArgumentParser, out: str, workers: int = 8) -> None:
    """What every benchmark of many cases is asked."""
    parser.add_argument("--out", default=out)
    parser.add_argument("--keep", action="store_true", help="go on with the record: measure only what it has not")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case that may not end in this time")
    parser.add_argument("--workers", type=int, default=workers, help="processes that compile beforehand; 0: none do")
    parser.add_argument("--compile", action="store_true", help="compile what all cases need, and measure nothing")
    parser.add_argument("--touch", default="", help=argparse.SUPPRESS)  # K/N: this process compiles for these cases


def command(script: str, words: Sequence[str] | None = None) -> str:
    """As it was typed, but for what changes nothing that is measured."""
    given, found = [*(sys.argv[1:] if words is None else words)], [f"python benchmarks/{script}"]
    while given:
        word = given.pop(0)
        name, inline, _ = word.partition("=")
        if name not in BOOKKEEPING:
            found.append(word)
        elif name not in FLAGS and not inline and given:
            given.pop(0)
    return " ".join(found)


class Growing:
    """The record of a benchmark, in which ``tables`` show the rows there are.

    ``head`` is what a record says besides its rows: name, kind, title, command, about.
    """

    def __init__(self, given: argparse.Namespace, head: Case, tables: Callable[[list[Any]], list[Any]]) -> None:
        self.out, self.head, self.tables = Path(given.out), head, tables
        self.until = time.monotonic() + 60 * given.minutes
        self.environment = records.environment()
        self.rows: list[Case] = []
        self.failed: list[Case] = []
        self.begun: Case | None = None
        self.longest = LONG
        if given.keep and self.out.exists():
            self._go_on(_read(self.out))

    def _go_on(self, record: Case) -> None:
        for name, made, value in _differences(record, self.environment, self.head["command"]):
            raise SystemExit(f"{self.out} was made with {name} {made}, this is {value}: delete it and measure again.")
        self.rows, self.failed = record["rows"], record.get("failed", [])
        self.begun, self.longest = record.get("begun"), record.get("longest", LONG)
        if self.begun is not None and self.begun["times"] >= TRIES:
            self._fail(self.begun["case"], f"the process ended during this case, {TRIES} times")

    def left(self, cases: Sequence[Case]) -> list[Case]:
        """Those that are neither in the record nor known to fail."""
        known, kinds = [*self.rows, *(f["case"] for f in self.failed)], {*map(frozenset, cases)}
        keys = {names: {_key(row, names) for row in known if names <= row.keys()} for names in kinds}
        return [case for case in cases if _key(case) not in keys[frozenset(case)]]

    def measure(self, cases: Sequence[Case], measure: Callable[..., Case], show: Callable[[Case], str]) -> int:
        """All cases that are left, as long as there is time; the exit status."""
        try:
            return self._measure_all(cases, measure, show)
        except KeyboardInterrupt:  # asked to stop: the case that was begun did not fail
            print(f"Stopped: {len(self.left(cases))} cases are left. Go on with --keep.", flush=True)
            return self._ended(cases, LEFT)

    def _measure_all(self, cases: Sequence[Case], measure: Callable[..., Case], show: Callable[[Case], str]) -> int:
        for count, case in enumerate(left := self.left(cases)):
            if time.monotonic() + self.longest > self.until:
                print(f"{len(left) - count} cases are left: no time for another. Go on with --keep.", flush=True)
                return self._ended(cases, LEFT)
            self._begin(case, cases)
            try:
                self._measured(case, measure, show, f"{len(cases) - len(left) + count + 1} of {len(cases)}")
            except Exception as error:
                self._fail(case, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                if not _device_answers():
                    return self._ended(cases, LOST)
        return self._ended(cases, FAILED if self.failed else DONE)

    def _measured(self, case: Case, measure: Callable[..., Case], show: Callable[[Case], str], place: str) -> None:
        began = time.monotonic()
        row = {**case, **measure(**case)}
        self.longest = max(self.longest, time.monotonic() - began)
        self.rows.append(row)
        print(f"{place}: {show(row)}", flush=True)

    def _begin(self, case: Case, cases: Sequence[Case]) -> None:
        """Write what is about to be done, so that the next process knows what this one died of."""
        times = self.begun["times"] if self.begun is not None and _is_of(self.begun["case"], case) else 0
        self.begun = {"case": case, "times": times + 1}
        self.write(cases)

    def _fail(self, case: Case, why: str) -> None:
        self.failed.append({"case": case, "why": why})
        print(f"FAILED {case}: {why}", flush=True)

    def _ended(self, cases: Sequence[Case], status: int) -> int:
        self.begun = None
        self.write(cases)
        return status

    def write(self, cases: Sequence[Case]) -> None:
        """Whole or not at all: a process may be killed while it writes."""
        order = {_key(case): at for at, case in enumerate(cases)}
        kinds = {*map(frozenset, cases)}
        end = len(order)  # where rows of other cases stand
        rows = sorted(self.rows, key=lambda row: min((order.get(_key(row, n), end) for n in kinds), default=end))
        now = {"begun": self.begun, "left": len(self.left(cases)), "longest": self.longest}
        record = {
            "schema": records.SCHEMA, "environment": self.environment, **self.head, "rows": rows,
            "tables": [*(self.tables(rows) if rows else []), *_gaps(self.failed, now["left"])], "failed": self.failed,
            **({} if self.begun is None and not now["left"] else now),
        }  # fmt: skip
        write(self.out, record)


def _gaps(failed: list[Case], left: int) -> list[Case]:
    """A table of what a record lacks, so that nobody takes it for whole."""
    lines = [[", ".join(map(str, f["case"].values())), f["why"]] for f in failed]
    lines += [[f"{left} more", "not measured yet"]] if left else []
    return [{"caption": "Not in this record", "columns": ["case", "why"], "rows": lines}] if lines else []


def write(out: Path, record: Case) -> None:
    """A record, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_name(out.name + ".part")
    begun.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    os.replace(begun, out)


def _read(out: Path) -> Case:
    try:
        return dict(json.loads(out.read_text()))
    except ValueError as error:
        raise SystemExit(f"{out} is no record ({error}): remove it, or measure without --keep.") from None


def source(record: Case) -> str:
    """Machine, versions and commit of a record, for the README's tables."""
    made = record["environment"]
    machine, versions = made["machine"], made["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{where}, torch {versions['torch']}, commit {made['commit'][:12]}"


def stopped(out: Path, command: str) -> bool:
    """Return whether this very command, at this commit on this machine, was stopped and left its record there."""
    record = _read(out) if out.exists() else {}
    return bool(record.get("left")) and not any(_differences(record, records.environment(), command))


def _differences(record: Case, environment: Case, command: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs between a record's making and now: its name, the record's value and the value now."""
    for name in ("commit", "dirty", "machine"):
        if record["environment"][name] != environment[name]:
            yield name, record["environment"][name], environment[name]
    if record["command"] != command:
        yield "command", record["command"], command


def _key(case: Case, names: Iterable[str] | None = None) -> str:
    """Return a case, or what a row says under the names of one, as text that can be compared."""
    return json.dumps(case if names is None else {name: case.get(name) for name in names}, sort_keys=True)


def _is_of(row: Case, case: Case) -> bool:
    return all(name in row and _key(row[name]) == _key(value) for name, value in case.items())


def _device_answers() -> bool:
    """After a bad access every call of a process fails, whatever the case."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def run(
    given: argparse.Namespace, head: Case, tables: Callable[[list[Any]], list[Any]], cases: Sequence[Case],
    measure: Callable[..., Case], show: Callable[[Case], str], touch: Callable[..., Any],
) -> int:  # fmt: skip
    """Compile what cases need, measure them, write the record; the exit status."""
    record = Growing(given, head, tables)
    left = record.left(cases)
    if given.touch:
        for case in _share(left, given.touch):
            _try(touch, case)
        return DONE
    compile_ahead(min(given.workers, len(left)))
    return DONE if given.compile else record.measure(cases, measure, show)


def compile_ahead(count: int) -> None:
    """This very command in several processes that only compile; they share the compilers' caches."""
    shares = [[sys.executable, *sys.argv, "--touch", f"{k}/{count}"] for k in range(count)]
    for process in [subprocess.Popen(share) for share in shares]:
        process.wait()


def _share(cases: Sequence[Case], which: str) -> Iterator[Case]:
    number, count = map(int, which.split("/"))
    yield from cases[number::count]


def _try(touch: Callable[..., Any], case: Case) -> None:
    try:
        touch(**case)
    except Exception as error:  # told again, and noted, where it is measured
        print(f"{case}: {type(error).__name__}: {error}", flush=True)
