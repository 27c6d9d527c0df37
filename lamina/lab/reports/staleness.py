"""Which code a record covers, and whether that code has changed since the commit that the record was made at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from ..runs.environment import changed_since


@dataclass(frozen=True)
class Code:
    """A part of the package: how a reader calls it, and its files as git's pathspecs below ``lamina/``."""

    name: str
    files: tuple[str, ...]


_RECURRENT = ("functional.py", "opaque.py", "recurrent.py", "recurrent_module.py", "cells.py")
_TRAINING = (
    *("lab/training", "lab/experiments/*/model.py", "lab/experiments/images.py", "lab/data", "optim.py"),
    *("layers.py", "baselines.py", "population_statistics.py"),
)
GPU = Code("the GPU kernels or the layers that call them", (*_RECURRENT, "layers.py", "kernels", ":!kernels/cpu*.py"))
CPU = Code(
    "the CPU kernels or the layers that call them",
    (*_RECURRENT, "streaming.py", "kernels/__init__.py", "kernels/fused.py", "kernels/given.py", "kernels/cpu*.py"),
)
TRAINING = Code("the training code or the layers that it trains", _TRAINING)
RUNS = Code("the training code or what saves its runs", (*_TRAINING, "lab/runs"))
PACKAGE = Code("the package", (".",))

# The first pattern that fits "kind name" counts. Claims are not covered: a report judges them anew.
COVERED = {
    "experiment *": TRAINING,
    "tuning *": TRAINING,
    "bench train": TRAINING,
    "soak *": RUNS,
    "bench cpu": CPU,
    **dict.fromkeys(("bench *", "verify *", "stress *", "sanitize *"), GPU),
    "*": PACKAGE,
}


def covered(record: Mapping[str, Any]) -> Code:
    """Return the code that a record's numbers are about."""
    name = f"{record['kind']} {record.get('name', '')}"
    return next(code for pattern, code in COVERED.items() if fnmatch(name, pattern))


def marks(record: Mapping[str, Any]) -> Iterator[str]:
    """Say for each commit of a record that its code has changed since, or that git cannot tell."""
    environments = record.get("environments") or [record.get("environment") or {}]
    code = covered(record)
    for commit in dict.fromkeys(str(env["commit"]) for env in environments if env.get("commit")):
        changed = changed_since(commit, code.files)
        if changed is None:
            yield f"Not checked: whether {code.name} changed after commit {commit[:12]}. Git does not know it here."
        elif changed:
            yield f"Stale: made at commit {commit[:12]}; {code.name} changed after it."
