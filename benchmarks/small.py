"""A few small fused passes, for memory and race checkers.

    compute-sanitizer --tool memcheck python benchmarks/small.py

Every cell over sizes at which groups have several members, forward and backward, plain, ragged and restarted, on both
paths, with small and large tiles, and with our own product; both directions and three layers in common launches; single
steps of cells; layer norm by itself.
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
    several = {"directions": {"bidirectional": True}, "stack": {"num_layers": 3}}.get(str(override["path"]), {})
    plans.OVERRIDE.clear()
    plans.OVERRIDE.update({"path": "persistent", "parts_of_stack": 2} if several else override)
    options = {**several, "backend": "triton"} if several else {}
    layer = getattr(lamina, cell)(5, hidden, device="cuda", dtype=dtype, **options)
    x = torch.randn(3, 3, 5, device="cuda", dtype=dtype, requires_grad=True)
    resets = torch.zeros(3, 3, dtype=torch.bool, device="cuda")
    resets[1, 1] = True
    with replay.off():  # checkers look at kernels, not at graphs of them
        layer(x)[0].sum().backward()
        layer(x, lengths=torch.tensor([3, 1, 2], device="cuda"), resets=resets)[0].sum().backward()
    torch.cuda.synchronize()


def cell_steps(cell: str, hidden: int, dtype: torch.dtype) -> None:
    """Three steps of a cell, forward and backward."""
    layer = getattr(lamina, f"{cell}Cell")(5, hidden, device="cuda", dtype=dtype, backend="triton")
    x, state = torch.randn(3, 5, device="cuda", dtype=dtype), None
    for _ in range(3):
        state = layer(x, state)
    h = state[0] if isinstance(state, tuple) else state
    h.sum().backward()
    torch.cuda.synchronize()


def layer_norms(width: int, dtype: torch.dtype) -> None:
    """Rows that are read once, and rows in pieces."""
    x = torch.randn(37, width, device="cuda", dtype=dtype, requires_grad=True)
    norm = lamina.LayerNorm(width, device="cuda", dtype=dtype, activation="silu", backend="triton")
    sum(t.sum() for t in norm(x, x.detach())).backward()
    torch.cuda.synchronize()


def cases() -> list[tuple[str, int, torch.dtype, dict[str, object]]]:
    """Cell, units, dtype, and how the problem is cut."""
    sizes = ((33, torch.bfloat16), (80, torch.bfloat16), (72, torch.float32))
    cuts: tuple[dict[str, object], ...] = (
        {"path": "persistent", "rows": 16}, {"path": "steps", "product": True, "parts": 0}
    )  # fmt: skip
    found: list[tuple[str, int, torch.dtype, dict[str, object]]] = []
    for cell in ("LSTM", "GRU", "RNN"):
        found += [(cell, *size, {"path": path}) for size in sizes for path in ("persistent", "steps")]
        found += [(cell, 80, torch.bfloat16, cut) for cut in cuts]
        found += [(cell, *size, {"path": "cell"}) for size in sizes]
        found += [(cell, 80, torch.bfloat16, {"path": path}) for path in ("directions", "stack")]
    found += [("LayerNorm", width, torch.bfloat16, {"path": "norm"}) for width in (33, 1000, 40000)]
    return found


def main() -> None:
    """All small cases, or of N shares the K-th: ``small.py K N``."""
    first, count = (int(word) for word in sys.argv[1:]) if len(sys.argv) > 1 else (0, 1)
    for cell, hidden, dtype, cut in cases()[first::count]:
        if cut["path"] == "cell":
            cell_steps(cell, hidden, dtype)
        elif cut["path"] == "norm":
            layer_norms(hidden, dtype)
        else:
            passes(cell, hidden, dtype, **cut)
        print(cell, hidden, dtype, *cut.values(), flush=True)


if __name__ == "__main__":
    main()
