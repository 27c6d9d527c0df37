"""compute-sanitizer over small passes of every cell: no bad memory access, no race in shared memory.

python benchmarks/sanitize.py --out results/sanitize-sequence.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  (without it a record does not know the GPU)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lamina.lab.reports import records

TOOLS = {"memcheck": ["--tool", "memcheck"], "racecheck": ["--tool", "racecheck", "--racecheck-report", "hazard"]}
SMALL = Path(__file__).with_name("small.py")


def tool() -> str:
    """compute-sanitizer on the PATH, or beside the CUDA compiler."""
    places = [
        os.environ.get("PATH", ""),
        *(f"{root}/bin" for root in sorted(map(str, Path("/usr/local").glob("cuda*")))),
    ]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise SystemExit("compute-sanitizer was not found. It comes with the CUDA toolkit: put it on the PATH.")
    return found


def compile_ahead(processes: int = 6) -> None:
    """Every kernel, so that the checkers find it ready."""
    shares = [[sys.executable, str(SMALL), str(k), str(processes)] for k in range(processes)]
    for process in [subprocess.Popen(share, stdout=subprocess.DEVNULL) for share in shares]:
        process.wait()


def check(name: str, limit: float) -> dict[str, object]:
    """One tool over all small cases: how many it saw and what it found."""
    ran = subprocess.run(
        [tool(), *TOOLS[name], sys.executable, str(SMALL)], capture_output=True, text=True, timeout=limit
    )
    text = ran.stdout + ran.stderr
    summary = re.findall(r"SUMMARY: (.*)", text)
    cases = re.findall(r"^((?:LSTM|GRU|RNN|LayerNorm) .*)$", text, flags=re.M)
    errors = [int(n) for n in re.findall(r"(\d+) errors?", summary[-1])] if summary else [-1]
    return {"tool": name, "cases": cases, "summary": summary[-1] if summary else text[-500:], "errors": errors[-1]}


def main() -> None:
    """Both tools, printed and recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="results/sanitize-sequence.json")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each tool")
    given = parser.parse_args()
    compile_ahead()
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        rows = list(pool.map(lambda name: check(name, given.limit), TOOLS))
    for row in rows:
        print(f"{row['tool']}: {len(row['cases'])} cases, {row['summary']}")
    lines = [[row["tool"], str(len(row["cases"])), str(row["errors"]), row["summary"]] for row in rows]
    record = {
        "schema": records.SCHEMA, "kind": "sanitize", "name": "sequence", "environment": records.environment(),
        "title": "compute-sanitizer over small passes of the fused recurrences", "rows": rows,
        "command": "python benchmarks/sanitize.py", "passed": all(row["errors"] == 0 for row in rows),
        "about": "Every cell at 33, 80 (bfloat16) and 72 (float32) units, both paths and single steps, layer norm of "
        "33 to 40,000 numbers, forward and backward, with and without lengths and resets.",
        "tables": [{"caption": "What each tool found", "columns": ["Tool", "Cases", "Errors", "In its words"],
                    "rows": lines}],
    }  # fmt: skip
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
