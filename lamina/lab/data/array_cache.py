"""Arrays that took long to compute, kept on the disk and mapped into memory: processes share their pages."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .formats import Array

FACTS = "facts.json"


def read(folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Return arrays and facts that ``write`` kept; None if they are absent or a byte of them is damaged."""
    try:
        held = json.loads((folder / FACTS).read_bytes())
        arrays: dict[str, Array] = {}
        for name, checksum in held["checksums"].items():
            # Copy on write: torch warns about arrays that it may not change
            arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            if _checksum(arrays[name]) != checksum:
                return None
        return arrays, held["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def write(folder: Path, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> bool:
    """Keep arrays and facts in a folder that appears with all of its files; return whether the disk took them."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            part = Path(temporary) / folder.name
            part.mkdir()
            for name, values in arrays.items():
                np.save(part / f"{name}.npy", values)
            checksums = {name: _checksum(values) for name, values in arrays.items()}
            (part / FACTS).write_text(json.dumps({"checksums": checksums, "facts": dict(facts)}))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            os.replace(part, folder)
    except OSError:
        return False
    return True


def _checksum(values: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data)
