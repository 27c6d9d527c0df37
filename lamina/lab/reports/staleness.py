"""Which code a record covers, and whether that code has changed since the commits that its rows were made at.

Code is compared, not words: comments, docstrings, imports and the names of files may change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from ..runs.environment import changed_since


@dataclass(frozen=True)
class Code:
    """Part of the package: how a reader calls it, and its files as git's pathspecs below ``lamina/``.

    ``{experiment}`` stands for the folder of the record's experiment.
    """

    name: str
    files: tuple[str, ...]


_RECURRENT = ("functional.py", "opaque.py", "recurrent.py", "recurrent_module.py", "cells.py")
_OWN = "lab/experiments/{experiment}"
_APART = ("settings", "claims", "search", "reading", "pictures", "expansion", "encoding", "suite")
_MODEL = (_OWN, *(f":!{_OWN}/{name}.py" for name in _APART))
_TRAINING = (  # without lab/data: a record holds the SHA-256 of its data
    *("lab/training", "optim.py", "baselines.py"),
    *_MODEL,
)
_NO_NUMBERS = ":!lab/training/control.py"  # signals and the clock
_LAYERS = ("recurrent.py", "recurrent_module.py", "options.py", "reference.py")
_IMAGE_LAYERS = ("lab/experiments/images.py", "layers.py", "population_statistics.py")
_READER_LAYERS = (*_LAYERS, "layers.py", "population_statistics.py")
# what the models of an experiment are made of
LAYERS = {"mnist": _IMAGE_LAYERS, "convnet": _IMAGE_LAYERS, "attentive_reader": _READER_LAYERS}
GPU = Code("the GPU kernels or the layers that call them", (*_RECURRENT, "layers.py", "kernels", ":!kernels/cpu"))
CPU = Code(
    "the CPU kernels or the layers that call them",
    (*_RECURRENT, "streaming.py", "kernels/__init__.py", "kernels/fused.py", "kernels/given.py", "kernels/cpu"),
)
TRAINING = Code("the training code or the layers that it trains", (*_TRAINING, _NO_NUMBERS))
RUNS = Code("the training code or what saves its runs", (*_TRAINING, "lab/runs", ":!lab/runs/environment.py"))
PACKAGE = Code("the package", (".",))

# The first pattern that fits "kind name" counts. Claims are not covered: a report judges them anew.
COVERED = {
    "experiment *": TRAINING,
    "tuning *": TRAINING,
    "bench train": TRAINING,
    "soak *": RUNS,
    "bench cpu": CPU,
    "bench order": Code("the model or the CPU kernels", (*CPU.files, "optim.py", *_MODEL)),
    "sentence *": Code("the sentence evaluation", ("lab/sentences", "lab/data/sentence_files.py")),
    **dict.fromkeys(("bench *", "verify *", "stress *", "sanitize *"), GPU),
    "*": PACKAGE,
}


def covered(record: Mapping[str, Any]) -> Code:
    """Return the code that a record's numbers are about."""
    name = f"{record['kind']} {record.get('name', '')}"
    code = next(code for pattern, code in COVERED.items() if fnmatch(name, pattern))
    if not any(file == _OWN for file in code.files):
        return code
    experiment = record.get("experiment", "mnist")  # which a record of killed runs does not name
    files = (file.format(experiment=experiment) for file in code.files)
    return replace(code, files=(*files, *LAYERS.get(experiment, _LAYERS)))


def marks(record: Mapping[str, Any]) -> Iterator[str]:
    """Say for each commit of a record that its code has changed since, or that git cannot tell."""
    rows = record.get("runs", [record])
    commits = Counter(str(row["environment"]["commit"]) for row in rows if (row.get("environment") or {}).get("commit"))
    code = covered(record)
    for commit, count in commits.items():
        part = f"{count} of {len(rows)} runs " if count < len(rows) else ""
        changed = changed_since(commit, code.files)
        if changed is None:
            yield f"Not checked: whether {code.name} changed after commit {commit[:12]}. Git does not know it here."
        elif changed:
            yield f"Stale: {part}made at commit {commit[:12]}; {code.name} changed after it."
