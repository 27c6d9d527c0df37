"""A few small fused passes, for memory and race checkers.

    compute-sanitizer --tool memcheck python benchmarks/small.py

Every cell over sizes at which groups have several members, forward and backward, plain, ragged and restarted, on both
paths, with small and large tiles, and with our own product.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lamina
from lamina.kernels import plans, replay


def passes(cell: str, hidden: int, dtype: torch.dtype, **override: object) -> None:
    """Forward and backward of one layer, with and without lengths and resets."""
    plans.OVERRIDE.clear()
    plans.OVERRIDE.update(override)
    layer = getattr(lamina, cell)(5, hidden, device="cuda", dtype=dtype)
    x = torch.randn(3, 3, 5, device="cuda", dtype=dtype, requires_grad=True)
    resets = torch.zeros(3, 3, dtype=torch.bool, device="cuda")
    resets[1, 1] = True
    with replay.off():  # checkers look at kernels, not at graphs of them
        layer(x)[0].sum().backward()
        layer(x, lengths=torch.tensor([3, 1, 2], device="cuda"), resets=resets)[0].sum().backward()
    torch.cuda.synchronize()


def main() -> None:
    """All small cases."""
    for cell in ("LSTM", "GRU", "RNN"):
        for hidden, dtype in ((33, torch.bfloat16), (80, torch.bfloat16), (72, torch.float32)):
            for path in ("persistent", "steps"):
                passes(cell, hidden, dtype, path=path)
                print(cell, hidden, dtype, path, flush=True)
        for more in ({"path": "persistent", "rows": 16}, {"path": "steps", "product": True, "parts": 0}):
            passes(cell, 80, torch.bfloat16, **more)
            print(cell, 80, torch.bfloat16, more, flush=True)


if __name__ == "__main__":
    main()
