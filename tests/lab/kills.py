"""A run killed with SIGKILL at random moments and resumed each time must end as one that was never touched.

``python -m tests.lab.kills --kills 100 --record results/soak.json`` is the long form (``make soak``); test_train runs
the short one. Children are forked from a process that has imported everything, so a kill costs no start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from lamina.lab.experiment import Job
from lamina.lab.experiments.mnist.settings import MnistConfig
from lamina.lab.protocol import module_of
from lamina.lab.reports import records
from lamina.lab.runs.progress import Reporter
from lamina.lab.training.loop import Settings, train

JOB = Job(
    "mnist",
    MnistConfig(norm="batch", hidden=32, epochs=30, batch_size=64, log_every=7, checkpoint_every=11, eval_every=1.5),
    3,
    ("norm",),
)


def run_to_end(runs: Path, job: Job = JOB, *, resume: bool) -> None:
    with Reporter(Console(quiet=True)) as say:
        train([job], Settings(root="embedded", runs=runs, device="cpu", resume=resume), say)


def folder(runs: Path, job: Job = JOB) -> Path:
    data = {"mnist": "mnist-embedded", "toy": "lines-embedded"}[job.experiment]
    return runs / job.experiment / data / job.label


def lines(runs: Path, job: Job = JOB) -> list[dict]:
    """The metrics without their times, the one thing that may differ."""
    path = folder(runs, job) / "metrics.jsonl"
    parsed = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            parsed.append({k: v for k, v in json.loads(line).items() if k != "seconds"})
        except json.JSONDecodeError:
            break  # the torn last line of a process that was killed
    return parsed


def final_state(runs: Path, job: Job = JOB) -> dict[str, bytes]:
    last = max((folder(runs, job) / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in (*last.glob("weights.*"), *last.glob("optimizer.*"))}


def saved_step(runs: Path, job: Job = JOB) -> int:
    steps = [int(p.name.removeprefix("step-")) for p in (folder(runs, job) / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def killed_child(runs: Path, delay: float, job: Job = JOB) -> bool:
    """Whether the kill came before the run's own end."""
    child = os.fork()
    if child == 0:
        try:
            run_to_end(runs, job, resume=True)
            os._exit(0)
        except BaseException as error:
            print(f"child failed: {error!r}", flush=True)
            os._exit(7)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"a resumed run failed with code {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


def soak(kills: int, work: Path, seed: int = 0, job: Job = JOB) -> dict:
    """Kill ``kills`` times, resuming each time (a run that ends is begun anew); compare with one never touched."""
    torch.set_num_threads(1)  # threads of the parent do not survive a fork
    draw = random.Random(seed)
    module_of(job.experiment).load(job.config, "embedded")
    began = time.perf_counter()
    run_to_end(work / "untouched", job, resume=False)
    alone = time.perf_counter() - began
    wanted, wanted_state = lines(work / "untouched", job), final_state(work / "untouched", job)
    done, attempt, lost, ends = 0, 0, [], 0
    while done < kills:
        runs = work / f"killed{attempt}"
        before = saved_step(runs, job)
        if killed_child(runs, draw.uniform(0, 0.9 * alone), job):
            done += 1
            check_prefix(runs, wanted, job, before)
            seen = lines(runs, job)
            lost.append(max((line["step"] for line in seen), default=0) - saved_step(runs, job))
        else:
            attempt, ends = attempt + 1, ends + 1
            check_end(runs, wanted, wanted_state, job)
    run_to_end(runs, job, resume=True)
    check_end(runs, wanted, wanted_state, job)
    return {
        "kills": done, "runs_ended": ends + 1, "seconds_untouched": round(alone, 3), "lines_compared": len(wanted),
        "updates": wanted[-1]["step"], "checkpoint_every": job.config.checkpoint_every,
        "logged_updates_lost": {"most": max(lost), "mean": sum(lost) / len(lost)}, "identical": True,
    }  # fmt: skip


def check_prefix(runs: Path, wanted: list[dict], job: Job, before: int) -> None:
    """What stands after a kill is the beginning of the untouched run, and no checkpoint is lost."""
    seen = lines(runs, job)
    assert seen == wanted[: len(seen)]
    assert saved_step(runs, job) >= before
    assert max((line["step"] for line in seen), default=0) - saved_step(runs, job) <= job.config.checkpoint_every


def check_end(runs: Path, wanted: list[dict], wanted_state: dict[str, bytes], job: Job) -> None:
    assert lines(runs, job) == wanted
    assert final_state(runs, job) == wanted_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = soak(arguments.kills, Path(work), seed=int(time.time()))
    title = f"A run killed {found['kills']} times with SIGKILL and resumed, against one never touched"
    record = {"schema": records.SCHEMA, "kind": "soak", "title": title, "environment": records.environment(), **found,
              "command": f"make soak KILLS={arguments.kills}"}  # fmt: skip
    print(json.dumps(found, indent=2))
    if arguments.record:
        arguments.record.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
