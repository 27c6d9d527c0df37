"""Every fused recurrence against the float64 reference on a GPU: outputs, final states and every gradient.

    python benchmarks/verify.py --out results/verify-sequence.json

Hidden sizes, batch sizes, lengths of sequences, dtypes, placements, ragged batches and restarts are paired off so that
each hidden size meets each batch size in each dtype, in the paper's LSTM and GRU; float32 without TF32 at fewer sizes,
and so are recurrences that share launches: two directions, or three layers.
An error is the norm of the difference to the float64 reference, relative to that reference; beside it stands the error
of the reference itself in the precision of the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import growing

from lamina import functional, reference
from lamina.lab.reports import records
from lamina.placements import PLACEMENTS
from lamina.reference import Recurrence
from tests.cases import cast, gradients, leaves, random_call, rounded_products

HIDDEN = (1, 17, 100, 256, 257, 400, 512, 768, 1000, 1024, 2048, 2400)
BATCH = (1, 3, 8, 17, 64, 128)
STEPS = (1, 2, 37)
LONG = ((17, 3), (100, 17), (256, 128), (400, 8), (512, 64), (1024, 8))  # hidden, batch: over 500 steps
# "ieee" is float32 with cuDNN's TF32 switch off, at a few sizes of its own.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "ieee": torch.float32}
ROWS = [(cell, "layer", name) for cell, rows in PLACEMENTS.items() for name in rows]
ROWS += [(cell, None, None) for cell in PLACEMENTS]
MAIN = [("LSTM", "layer", "paper"), ("GRU", "layer", "paper")]
# What an error is measured from: one rounding of a result, which luck may spare the reference.
FLOOR = {"bf16": 2e-3, "fp32": 3e-6, "fp16": 5e-4, "ieee": 3e-7}
ALLOWED = 2.0  # times the reference's own error
DRAWS = 8  # at most
DEVICE = "cuda"
ANYWHERE = 120  # cases
TOGETHER = ((1, 3), (17, 3), (100, 17), (257, 33), (400, 8), (512, 64), (768, 16), (1000, 8))  # hidden, batch
HOW = {"alone": 1, "directions": 2, "stack": 3}  # recurrences of a case


def cases() -> list[dict[str, Any]]:
    """All problems, in a fixed order; those that share kernels follow one another."""
    found = []
    steps, extras, others = itertools.cycle(STEPS), itertools.cycle((1, 2, 3)), itertools.cycle(ROWS)
    for hidden, dtype in itertools.product(HIDDEN, ("bf16", "fp32", "fp16")):
        for row in MAIN:
            found += [_case(row, next(steps), batch, hidden, dtype) for batch in BATCH]
            found += [_case(row, 500, batch, hidden, dtype) for size, batch in LONG if size == hidden]
            found.append(_case(row, 37, 17, hidden, dtype, next(extras)))
        found += [
            _case(row, 2, batch, hidden, dtype, next(extras)) for row, batch in [(next(others), 3), (next(others), 64)]
        ]
    exact = [_case(row, 7, batch, hidden, "ieee") for hidden in HIDDEN for row in MAIN for batch in (3, 64)]
    return found + exact + anywhere() + together()


def together() -> list[dict[str, Any]]:
    """Recurrences that share launches."""
    others, extras = itertools.cycle(ROWS), itertools.cycle((0, 1, 2, 3))
    sizes = itertools.product(TOGETHER, ("directions", "stack"), ("bf16", "fp32", "fp16"))
    return [
        {**_case(row, 37 if row in MAIN else 5, batch, hidden, dtype, next(extras)), "how": how}
        for (hidden, batch), how, dtype in sizes
        for row in (*MAIN, next(others))
    ]


def anywhere() -> list[dict[str, Any]]:
    """Sizes that nobody chose: a compiler's mistake may be in one of them alone."""
    draw = random.Random(0)
    sizes = [(draw.choice(ROWS), draw.randint(1, 1100), draw.randint(1, 128)) for _ in range(ANYWHERE)]
    return [_case(row, 3, batch, hidden, draw.choice(list(DTYPES))) for row, hidden, batch in sizes]


def _case(
    row: tuple[str, str | None, str | None], steps: int, batch: int, hidden: int, dtype: str, more: int = 0
) -> dict[str, Any]:
    """``more``: 1 for lengths, 2 for resets, 3 for both, backwards in time."""
    return {"row": row, "shape": (steps, batch, 33, hidden), "dtype": dtype, "more": more, "how": "alone"}


def problem(case: dict[str, Any]) -> list[Recurrence]:
    """The recurrences of a case: one, two directions, or three layers, of which the upper ones' inputs mean nothing."""
    steps, batch, inputs, hidden = case["shape"]
    more: dict[str, Any] = {}
    if case["more"] & 1:
        more["lengths"] = torch.randint(0, steps + 1, (batch,), device=DEVICE)
    if case["more"] & 2:
        more["resets"] = torch.rand(steps, batch, device=DEVICE) < 0.2
    backwards = {"alone": [case["more"] == 3], "directions": [False, True], "stack": [False] * 3}[case["how"]]
    widths = [inputs, *[hidden if case["how"] == "stack" else inputs] * (len(backwards) - 1)]
    return [
        recurrence(case["row"], (steps, batch, width, hidden), reverse=back, **more)
        for width, back in zip(widths, backwards)
    ]


def recurrence(row: tuple[Any, ...], shape: tuple[int, ...], **more: Any) -> Recurrence:
    """Random weights and input; recurrent matrices of the usual size, since with large ones errors grow at will."""
    steps, _, _, hidden = shape
    call = random_call(*row, shape, device=DEVICE, **more)
    w = call.weights
    small = {"weight_hh": 1 / hidden**0.5, **({"gain_hh": 0.4, "gain_sum": 0.4} if steps > 100 else {})}
    scaled = {
        name: (getattr(w, name).detach() * factor).requires_grad_()
        for name, factor in small.items()
        if getattr(w, name) is not None
    }
    return dataclasses.replace(call, weights=w._replace(**scaled))


def one_after_another(calls: list[Recurrence], how: str) -> list[torch.Tensor]:
    """Outputs and final states by the reference."""
    found: list[torch.Tensor] = []
    below: torch.Tensor | None = None
    for call in calls:
        given = call if below is None else dataclasses.replace(call, input=below)
        result = reference.evaluate(given)
        below = result.output if how == "stack" else None
        found += [*([] if how == "stack" and call is not calls[-1] else [result.output]), *result.state]
    return found


def at_once(calls: list[Recurrence], how: str) -> list[torch.Tensor]:
    """The same by the kernels."""
    if how == "stack":
        output, states = functional.run_stack(calls, [None] * (len(calls) - 1))
        *lower, last = [[*state] for state in states]
        return [t for state in lower for t in state] + [output, *last]
    results = functional.run_directions(calls, "triton")
    return [t for result in results for t in (result.output, *result.state)]


def everything(calls: list[Recurrence], how: str, run: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of all calls, by name."""
    outputs = run(calls, how)
    named = {
        f"{name} of {at}" if at else name: leaf
        for at, call in enumerate(calls)
        for name, leaf in leaves(call).items()
        if not (how == "stack" and at and name == "input")
    }
    found = {f"output {at}": output for at, output in enumerate(outputs)}
    return found | {f"d {name}": g for name, g in zip(named, gradients(outputs, list(named.values())))}


def errors(case: dict[str, Any], draw: int) -> dict[str, tuple[float, float]]:
    """By name of each tensor, our error and that of the reference, for one draw of random numbers."""
    torch.manual_seed(zlib.crc32(repr((case["row"], case["shape"], case["dtype"], draw)).encode()))
    calls, dtype, how = problem(case), DTYPES[case["dtype"]], case["how"]
    truth = everything([cast(call, torch.float64, dtype) for call in calls], how, one_after_another)
    exact, given = case["dtype"] == "ieee", [cast(call, dtype, dtype) for call in calls]
    with nullcontext() if exact else rounded_products():
        plain = everything(given, how, one_after_another)
    with torch.backends.cudnn.flags(allow_tf32=not exact):
        ours = everything(given, how, at_once)
    found = {}
    for name, want in truth.items():
        size = max(want.norm().item(), 1e-2 * want.numel() ** 0.5)  # what is 0 but for eps has no digits to compare
        error, allowed = ((got[name].double() - want).norm().item() / size for got in (ours, plain))
        found[name] = error, allowed
    return found


def worst(case: dict[str, Any], draws: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """The tensor that does worst: which, errors over the draws, their ratio less one rounding.

    Errors of a recurrence are products of many factors: a few draws are far above the rest, of ours and of the
    reference. So their mean is the geometric one.
    """
    found = []
    for name in draws[0]:
        error, allowed = (_typical([d[name][k] for d in draws]) for k in (0, 1))
        apart = error - FLOOR[case["dtype"]]
        ratio = math.inf if math.isnan(apart) else max(0.0, apart) / max(allowed, 1e-12)
        found.append({"tensor": name, "error": error, "reference": allowed, "ratio": ratio})
    return {
        **case,
        **max(found, key=lambda f: f["ratio"]),
        "draws": len(draws),
    }


def _typical(errors: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(e, 1e-30)) for e in errors))


def verify(case: dict[str, Any]) -> dict[str, Any]:
    """One draw; where the ratio is above what is allowed, more: the reference's error may be small by luck."""
    draws = [errors(case, 0)]
    if not worst(case, draws)["ratio"] <= ALLOWED:
        draws += [errors(case, n) for n in range(1, DRAWS)]
    return worst(case, draws)


def part(number: int, workers: int) -> list[dict[str, Any]]:
    """Every ``workers``-th stretch of cases, from ``number`` on."""
    stretch = 8
    return [case for at, case in enumerate(cases()) if at // stretch % workers == number]


def share(number: int, workers: int, out: str, minutes: float) -> None:
    """A part of the cases, one line each; those in ``out`` are done already.

    After a case that failed, the device may be of no use to this process: it ends, and another goes on.
    """
    until, longest = time.monotonic() + 60 * minutes, 0.0
    with Path(out).open("a+") as file:
        for case in part(number, workers)[_whole_lines(file) :]:
            began = time.monotonic()
            if began + longest > until:
                os._exit(growing.LEFT)
            try:
                row = verify(case)
            except Exception as error:
                row = failed(case, str(error).split("\n")[0])
            longest = max(longest, time.monotonic() - began)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if math.isinf(row["ratio"]):
                os._exit(1)


def _whole_lines(file: TextIO) -> int:
    """How many there are; what a killed process left of another goes."""
    file.seek(0)
    text = file.read()
    whole = text[: text.rfind("\n") + 1]
    file.truncate(len(whole.encode()))
    return whole.count("\n")


def failed(case: dict[str, Any], why: str) -> dict[str, Any]:
    """The row of a case that gave no numbers."""
    return {**case, "tensor": why, "error": math.inf, "reference": 0.0, "ratio": math.inf, "draws": 1}


def all_cases(workers: int, folder: Path, minutes: float) -> list[dict[str, Any]] | None:
    """In several processes at once: most of the time goes into compiling and into the reference's steps.

    What they find stays in ``folder`` until all is there; None where time was too short for that.
    """
    until = time.monotonic() + 60 * minutes
    outs = [folder / f"{k}.json" for k in range(workers)]
    command = [sys.executable, __file__, "--workers", str(workers)]
    starts = [[*command, "--share", str(k), "--out", str(out)] for k, out in enumerate(outs)]
    running = [subprocess.Popen([*start, "--minutes", str(minutes)]) for start in starts]
    left = False
    for number, (start, out, process) in enumerate(zip(starts, outs, running)):
        code = process.wait()
        while code not in (growing.DONE, growing.LEFT):
            if code != 1:  # killed in the midst of a case
                _note_killed(out, part(number, workers), code)
            code = subprocess.run([*start, "--minutes", str((until - time.monotonic()) / 60)]).returncode
        left |= code == growing.LEFT
    return None if left else [json.loads(line) for out in outs for line in out.read_text().splitlines()]


def parts_of(out: Path, keep: bool, workers: int) -> Path:
    """The folder of what processes have found so far, by this very code; else an empty one."""
    folder, environment = out.with_name(out.name + ".parts"), records.environment()
    made = {**{k: environment[k] for k in ("commit", "dirty", "machine")}, "workers": workers}
    told = folder / "made.json"
    if keep and told.exists() and json.loads(told.read_text()) == made:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told.write_text(json.dumps(made))
    return folder


def _note_killed(out: Path, mine: list[dict[str, Any]], code: int) -> None:
    """Write the case that a process died of, so that the next one goes on after it."""
    done = out.read_text().splitlines() if out.exists() else []
    if len(done) == len(mine):
        raise RuntimeError(f"a process that verifies ended with {code} after its last case")
    with out.open("a") as file:
        file.write(json.dumps(failed(mine[len(done)], f"the process ended with {code}")) + "\n")


def tables(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record as people read it."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        some = [row for row in rows if row["dtype"] == dtype]
        ratios = sorted(row["ratio"] for row in some)
        worst = max(row["error"] for row in some)
        beyond = sum(r > ALLOWED for r in ratios)
        again = sum(row["draws"] > 1 for row in some)  # one draw was above the bound
        lines.append([dtype, str(len(some)), f"{worst:.1e}", f"{ratios[len(ratios) // 2]:.2f}", f"{ratios[-1]:.2f}",
                      str(again), str(beyond)])  # fmt: skip
    columns = ["", "cases", "largest error", "median ratio", "largest ratio", "of several draws",
               f"ratios above {ALLOWED:g}"]  # fmt: skip
    caption = "Errors against float64; ratios to the reference's own error in the same precision"
    return [{"caption": caption, "columns": columns, "rows": lines}]


def main() -> int:
    """Verify, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="results/verify-sequence.json")
    parser.add_argument("--keep", action="store_true", help="go on with what an earlier run has left")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case that may not end in this time")
    given = parser.parse_args()
    if given.share >= 0:
        share(given.share, given.workers, given.out, given.minutes)
        os._exit(0)  # an autograd thread that lets go of Python objects as Python ends would abort the process
    out = Path(given.out)
    folder = parts_of(out, given.keep, given.workers)
    rows = all_cases(given.workers, folder, given.minutes)
    if rows is None:
        print(f"Cases are left: no time for another. Go on with --keep; {folder.name} has what was found.")
        return growing.LEFT
    growing.write(out, record(rows))
    shutil.rmtree(folder)
    for line in tables(rows)[0]["rows"]:
        print("  ".join(line))
    for row in sorted(rows, key=lambda r: -r["ratio"])[:12]:
        print(row)
    return growing.FAILED if any(not row["ratio"] <= ALLOWED for row in rows) else growing.DONE


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": records.SCHEMA, "kind": "verify", "name": "sequence",
        "title": "Fused recurrences against the float64 reference", "environment": records.environment(),
        "command": "python benchmarks/verify.py", "rows": rows, "tables": tables(rows),
        "about": "The worst of output, final states and every gradient of each case; over "
        f"{DRAWS} draws (geometric mean) where a single one is above the bound. Hidden sizes "
        f"{', '.join(map(str, HIDDEN))}; batches {', '.join(map(str, BATCH))}; 1, 2, 37 and 500 steps; all placements.",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
