"""What a first call costs: seconds for each kernel that Triton compiles, with an empty cache.

    python benchmarks/first.py --out results/bench-first.json

A training step of a new layer is timed twice; between the two lies what was compiled and loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = (("LSTM", "bfloat16", 1024), ("LSTM", "float32", 512), ("GRU", "bfloat16", 512), ("LSTM", "bfloat16", 2400))
ALLOWED = 3.0  # seconds a kernel


def measure(cell: str, dtype: str, hidden: int, cache: Path) -> dict[str, Any]:
    """First and second training step of a layer, and how many kernels the first has compiled."""
    import torch

    import lamina

    kind = getattr(torch, dtype)
    layer = getattr(lamina, cell)(64, hidden, device="cuda", dtype=kind)
    x = torch.randn(5, 16, 64, device="cuda", dtype=kind, requires_grad=True)
    before, seconds = len(list(cache.rglob("*.cubin"))), []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        layer(x)[0].sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    kernels = len(list(cache.rglob("*.cubin"))) - before
    each = (seconds[0] - seconds[1]) / max(kernels, 1)
    return {
        "cell": cell, "dtype": dtype, "hidden": hidden, "first": seconds[0], "second": seconds[1],
        "kernels": kernels, "seconds_a_kernel": each,
    }  # fmt: skip


def main() -> None:
    """Every case in one process; matrix products of every dtype come first, so that no library is loaded in between."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/bench-first.json")
    out = Path(parser.parse_args().out)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        import torch

        from lamina.lab.reports import records

        for kind in (torch.float32, torch.bfloat16, torch.float16):
            square = torch.randn(64, 64, device="cuda").to(kind).requires_grad_()
            (square @ square).sum().backward()
        rows = [measure(*case, Path(cache)) for case in CASES]
    for r in rows:
        print(f"{r['cell']} {r['dtype']} {r['hidden']}: {r['kernels']} kernels, {r['seconds_a_kernel']:.2f} s each")
    columns = ["Cell", "dtype", "Units", "Kernels", "First call, s", "Second, s", "Seconds a kernel"]
    lines = [
        [r["cell"], r["dtype"], str(r["hidden"]), str(r["kernels"]), f"{r['first']:.2f}", f"{r['second']:.3f}",
         f"{r['seconds_a_kernel']:.2f}"]
        for r in rows
    ]  # fmt: skip
    record = {
        "schema": records.SCHEMA, "kind": "bench", "name": "first", "environment": records.environment(),
        "title": "What the first call of a layer costs on a GPU", "command": "python benchmarks/first.py",
        "passed": all(r["seconds_a_kernel"] <= ALLOWED for r in rows), "rows": rows,
        "tables": [{"caption": "Forward and backward with an empty cache", "columns": columns, "rows": lines}],
        "about": f"Allowed: {ALLOWED:g} s a kernel. Triton keeps what it has compiled, for later processes too.",
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
