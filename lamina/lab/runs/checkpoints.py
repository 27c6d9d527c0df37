"""Atomic checkpoints: written to a temporary folder, hashed, synced and renamed into place."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import fail
from .files import disk_errors, parsed, sync_folder, write_synced

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs needs none of it
    import torch

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.pt", "state.pt", "MANIFEST.json"
SCHEMA = 2  # 1 held the optimiser as safetensors and JSON


class Damaged(Exception):
    """Checkpoint that is not as it was written; the text names the fault."""


@dataclass
class Checkpoint:
    """All that a run needs to go on. The caller defines ``state``."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    metrics_bytes: int = 0  # size of metrics.jsonl when the checkpoint was written
    best: float | None = None  # the value that made this checkpoint the best so far


def _on_host(name: str, tensor: object) -> torch.Tensor:
    """Return a contiguous copy on the CPU: safetensors refuses tied and strided tensors."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        kind = "a sparse or meta tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise fail("weights in a checkpoint must be dense tensors", f"{kind} for {name!r}", "Convert it first.")
    on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg()
    return on_cpu.clone(memory_format=torch.contiguous_format)


def _dumped(name: str, value: Mapping[str, Any]) -> bytes:
    """Return the value as torch saves it; raise if reading it back would have to run code."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(dict(value), buffer)
        _loaded(buffer.getvalue())
    except (pickle.PickleError, AttributeError, TypeError) as error:
        classes = re.findall(r"GLOBAL (\S+)", str(error)) or [str(error).split("\n")[0]]
        rule = "a checkpoint holds numbers, text, lists, dicts and tensors"
        raise fail(rule, f"{classes[0]} in {name}", "Convert it first.") from None
    return buffer.getvalue()


def _loaded(data: bytes) -> dict[str, Any]:
    import torch

    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


# One checkpoint is one folder


def listed(home: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints in ``home``, oldest first, damaged ones included."""
    names = os.listdir(home) if home.is_dir() else []
    matches = filter(None, map(re.compile(r"step-(\d+)").fullmatch, names))
    return sorted((int(match[1]), home / match.string) for match in matches)


def write(home: Path, checkpoint: Checkpoint) -> Path:
    """Write the checkpoint to ``home/step-...``; if that fails, leave ``home`` as it was."""
    target, temporary = home / f"step-{checkpoint.step:09d}", home / f".tmp-{os.getpid()}"
    files = _contents(checkpoint)
    with disk_errors(target):
        try:
            temporary.mkdir(parents=True)
            for name, data in files.items():
                write_synced(temporary / name, data)
            sync_folder(temporary)
            _put_in_place(temporary, target)
        except BaseException:
            tidy(home)
            raise
    return target


def _contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    from safetensors.torch import save

    state = {"metrics_bytes": checkpoint.metrics_bytes, "best": checkpoint.best, "state": checkpoint.state}
    files = {
        WEIGHTS: save({name: _on_host(name, tensor) for name, tensor in checkpoint.weights.items()}),
        OPTIMIZER: _dumped("the optimiser's state", checkpoint.optimizer),
        STATE: _dumped("the run's state", state),
    }
    sizes = {name: {"size": len(data), "sha256": _hash(data)} for name, data in files.items()}
    return {**files, MANIFEST: _manifest({"schema": SCHEMA, "step": checkpoint.step, "files": sizes})}


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename; an older checkpoint of the same step is moved aside first, and deleted last."""
    previous = target.with_name(f".old-{target.name}")
    if target.exists():
        os.rename(target, previous)
    os.rename(temporary, target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def tidy(home: Path) -> None:
    """Remove what an interrupted write left; restore a checkpoint whose replacement was never put in place."""
    for path in home.glob(".old-*"):
        target = path.with_name(path.name.removeprefix(".old-"))
        if not target.exists():
            os.rename(path, target)
    for path in (*home.glob(".old-*"), *home.glob(".tmp-*")):
        shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Rename, then delete, so that a kill half way leaves no torn folder under a checkpoint's name."""
    shutil.rmtree(path.rename(path.with_name(f".tmp-{path.name}")))


def set_aside(path: Path) -> None:
    """Rename the folder, so that it no longer counts as a checkpoint."""
    names = (f"set-aside-{number}-{path.name}" for number in itertools.count(1))
    path.rename(next(name for name in map(path.with_name, names) if not name.exists()))


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder, on the CPU; raise ``Damaged`` if any byte has changed."""
    from safetensors.torch import load

    manifest = _read_manifest(path)
    if path.name != f"step-{manifest['step']:09d}":
        raise Damaged(f"its {MANIFEST} is that of step {manifest['step']}")
    files = {name: _read_checked(path / name, **expected) for name, expected in manifest["files"].items()}
    return Checkpoint(manifest["step"], load(files[WEIGHTS]), _loaded(files[OPTIMIZER]), **_loaded(files[STATE]))


def _read_checked(path: Path, size: int, sha256: str) -> bytes:
    data = _read_bytes(path)
    if len(data) != size:
        raise Damaged(f"{path.name} has {len(data)} bytes and should have {size}")
    if _hash(data) != sha256:
        raise Damaged(f"{path.name} does not match its hash")
    return data


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = _read_bytes(path / MANIFEST)
    manifest = parsed(raw) or {}
    manifest.pop("sha256", None)
    if _manifest(manifest) != raw:
        raise Damaged(f"{MANIFEST} does not match its hash")
    if manifest["schema"] != SCHEMA:
        raise Damaged(f"it was written by another version of lamina (schema {manifest['schema']}, not {SCHEMA})")
    return manifest


def _manifest(content: dict[str, Any]) -> bytes:
    """Return the manifest as JSON with its own hash last, so that damage to the list of hashes is seen too."""
    return json.dumps({**content, "sha256": _hash(json.dumps(content).encode())}, indent=1).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
