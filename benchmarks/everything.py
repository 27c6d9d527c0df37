"""All records of the GPU kernels, as many as time allows; the next run goes on where this one was stopped.

    python benchmarks/everything.py --out results --minutes 9

First what may share the GPU: errors, stress and the sanitizer, and beside them everything is compiled that the others
will need. Then what is timed, one after another, with nothing else running. A job whose record is whole is not done
again, if the same code made it on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (without it the environment does not know the GPU)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import growing

from lamina.lab.reports import records

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """A benchmark, the record it makes, and how it is started."""

    record: str
    words: tuple[str, ...]
    alone: bool = True  # it is timed
    grows: bool = True  # it can be stopped and go on, and can compile beforehand


JOBS = (
    Job("verify-sequence", ("verify.py", "--workers", "10"), alone=False),
    Job("stress-sequence", ("stress.py",), alone=False, grows=False),
    Job("sanitize-sequence", ("sanitize.py",), alone=False, grows=False),
    Job("bench-sequence", ("speed.py",)),
    Job("bench-layers", ("speed.py", "--op", "layers")),
    Job("bench-cell", ("speed.py", "--op", "cell")),
    Job("bench-norm", ("speed.py", "--op", "layer_norm", "--compiled")),
    Job("bench-rssm", ("rssm.py",)),
    Job("bench-first", ("first.py",), grows=False),
)
BESIDE = 3  # processes that compile while others work
MARGIN = 5.0  # seconds at the end, for what is still to be written


class Session:
    """Jobs that run until a time, into a folder."""

    def __init__(self, out: Path, minutes: float, jobs: tuple[Job, ...] = JOBS, root: Path = HERE) -> None:
        self.out, self.jobs, self.root = out, jobs, root
        self.until = time.monotonic() + 60 * minutes - MARGIN
        self.environment = records.environment()
        self.told: dict[str, str] = {}
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """What may run together, then what is timed; the exit status."""
        missing = [job for job in self.jobs if not self.is_whole(job)]
        beside = [job for job in missing if not job.alone]
        ahead = [job for job in missing if job.alone and job.grows]
        with ThreadPoolExecutor(max(1, len(beside) + 1)) as pool:
            count = BESIDE if beside else os.cpu_count() or BESIDE
            compiling = pool.submit(lambda: [self.compile_for(job, count) for job in ahead])
            for done in [compiling, *(pool.submit(self.do, job) for job in beside)]:
                done.result()
        for job in missing:
            if job.alone:
                self.do(job)
        return self._tell()

    def compile_for(self, job: Job, count: int) -> None:
        self._start(job, ["--compile", "--workers", str(count), *self._keep(job)], f"{job.record}-compile")

    def _keep(self, job: Job) -> list[str]:
        """Not what other code has made. Of ``verify.py``'s parts, which are no record yet, it says itself."""
        return ["--keep"] if self.record(job) or not job.alone else []

    def do(self, job: Job) -> None:
        """The job, again as long as a process dies and has still got further; a dead device needs a new process."""
        while True:
            before, left = self.progress(job), (self.until - time.monotonic()) / 60
            grows = [*self._keep(job), f"--minutes={left}", *(["--workers", "0"] if job.alone else [])]
            status = self._start(job, grows if job.grows else [], job.record)
            again = job.grows and status not in (growing.DONE, growing.FAILED, growing.LEFT)
            if not again or self.progress(job) == before or time.monotonic() > self.until:
                return

    def _start(self, job: Job, more: list[str], name: str) -> int:
        """Run it with all its children, no longer than there is time; its words are in a file."""
        left = self.until - time.monotonic()
        if left <= 0:
            return growing.LEFT
        words = [sys.executable, str(self.root / job.words[0]), *job.words[1:]]
        words += ["--out", str(self.out / f"{job.record}.json"), *more]
        began = time.monotonic()
        with (self.out / "logs" / f"{name}.log").open("a") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(None if math.isinf(left) else left + MARGIN / 2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        self.told[name] = f"{time.monotonic() - began:.0f} s, status {status}"
        print(f"{name}: {self.told[name]}", flush=True)
        return status

    def record(self, job: Job) -> dict[str, Any]:
        """What there is of it, by this very code on this machine."""
        place = self.out / f"{job.record}.json"
        try:
            found = dict(json.loads(place.read_text()))
        except (OSError, ValueError):
            return {}
        alike = all(found["environment"].get(k) == self.environment[k] for k in ("commit", "dirty", "machine"))
        return found if alike else {}

    def is_whole(self, job: Job) -> bool:
        found = self.record(job)
        return bool(found) and not found.get("left")

    def progress(self, job: Job) -> int:
        found, begun = self.record(job), self.record(job).get("begun") or {"times": 0}
        return 1000 * (len(found.get("rows", [])) + len(found.get("failed", []))) + int(begun["times"])

    def _tell(self) -> int:
        """A line for each job; records of other code than this are no use and are told as missing."""
        left = 0
        for job in self.jobs:
            found = self.record(job)
            failed, missing = len(found.get("failed", [])), found.get("left", 0 if found else "all")
            left += bool(missing)
            print(f"{job.record}: {missing or 'nothing'} left, {failed} failed; {self.told.get(job.record, 'kept')}")
        if left:
            print(f"{left} of {len(self.jobs)} records are not whole: run this again to go on.")
        failed = any(self.record(job).get("failed") for job in self.jobs)
        return growing.LEFT if left else growing.FAILED if failed else growing.DONE


def main() -> int:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results", help="folder of the records")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before this time is over")
    parser.add_argument("--only", default="", help="names of records, as in bench-layers,bench-cell")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if unknown := [name for name in only if name not in {job.record for job in JOBS}]:
        known = ", ".join(job.record for job in JOBS)
        parser.error(f"--only takes names of records, got {', '.join(unknown)}. There are {known}.")
    jobs = tuple(job for job in JOBS if not only or job.record in only)
    return Session(Path(given.out), given.minutes, jobs).run()


if __name__ == "__main__":
    sys.exit(main())
