"""Every kernel compiles and assembles for Hopper; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

KERNELS = {
    "cell_kernels": ("products_kernel", "forward_kernel", "backward_kernel"),
    "sequence": ("forward_kernel", "backward_kernel", "norm_backward_kernel"),
    "step_kernels": ("table_kernel", "begin_kernel", "forward_kernel", "backward_kernel", "end_kernel"),
    "rows": ("forward_kernel", "backward_kernel", "matrix_kernel"),
    "layer_norm": ("forward_kernel", "backward_kernel", "wide_forward_kernel", "wide_sums_kernel", "added_up_kernel"),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles them in all other tests")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings the assembler for Linux only")
def test_kernels_become_machine_code():
    told = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.gpu.hopper"]
    found = subprocess.run(command, cwd=Path(__file__).parents[3], env=told, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    counts = json.loads(found.stdout)
    for module, names in KERNELS.items():
        for name in names:
            assert counts.get(f"{module}.{name}"), f"{module}.{name} was not compiled"
