"""Launches as Triton's own launcher makes them, refused where an H200 would refuse them; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from lamina.kernels import wavefront

HEADERS = Path(sysconfig.get_path("include")) / "Python.h"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU starts them in all other tests")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings the assembler for Linux only")
@pytest.mark.skipif(not shutil.which("cc") or not HEADERS.exists(), reason="Triton's launcher needs a C compiler")
def test_launches_reach_the_driver(tmp_path):
    told = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.gpu.pretend"]
    found = subprocess.run(command, cwd=Path(__file__).parents[3], env=told, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    launched, waiting, replayed, quick = zip(*json.loads(found.stdout).values())
    names = [*json.loads(found.stdout)]
    assert all(launched[:-1])
    # A pass is one launch of programs that wait for each other, whatever is captured or shares it; five training steps
    # are captured on the way; a part of a sequence goes forward once more on the way back. Three layers fit at once
    # forward, two backward.
    parts = [*wavefront.launches(3, 60, 3, False), *wavefront.launches(3, 60, 2, True)]
    assert dict(zip(names, waiting)) == {
        "LSTM": 2 * 2 + 2 + 1, "GRU": 2, "both directions": 2, "ragged": 2 * 2 + 2 + 1,
        "ragged auto": 5 * 2, "ragged steps": 0,
        "three layers": len(parts), "steps": 0, "recompute": 1 + 2 * 4, "cell": 0, "layer norm": 0, "refused": 0,
    }  # fmt: skip
    # Forward from the third call on, backward from the fourth.
    assert replayed[names.index("LSTM")] == replayed[names.index("ragged")] == 3 + 2
    assert replayed[names.index("ragged auto")] == 0
    assert (launched[names.index("cell")], quick[names.index("cell")]) == (3 * 3, 2 * 3)
    assert launched[names.index("layer norm")] - quick[names.index("layer norm")] == 3
