"""Checkpoints that are whole or absent: written aside, hashed, synced and renamed into place."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, RunError, fail

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs needs none of it
    import torch

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.pt", "state.pt", "MANIFEST.json"
SCHEMA = 2  # 1 held the optimiser as safetensors and JSON


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the text says what is wrong with it."""


@dataclass
class Checkpoint:
    """What a run needs to go on: ``state`` is the caller's own, the rest says where the run stood."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    metrics_bytes: int = 0  # size of metrics.jsonl when the checkpoint was written
    best: float | None = None  # the value that made this checkpoint the best so far


@contextmanager
def disk_errors(what: object) -> Iterator[None]:
    """Turn a write that failed into a ``RunError`` with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunError(f"disk full while writing {what}: free space and run again with --resume") from error
        reason = error.strerror or str(error)
        raise RunError(f"could not write {what} ({reason}): put that right and run again with --resume") from error


def write_all(file: int, data: bytes) -> None:
    """Write all of it: one ``os.write``, and more only where the system took less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(path: Path) -> None:
    """Make renames and new names in the folder last through a loss of power."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_synced(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: at every moment it has its old content or all of the new."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with disk_errors(path):
        try:
            _write_synced(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def damaged_json(path: Path) -> InputError:
    return fail(f"{path.name} must be as the run wrote it", f"{path}, which cannot be read", "Restore it from a copy.")


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise damaged_json(path) from None
    if not isinstance(found, dict):
        raise damaged_json(path)
    return found


def plain(value: Any) -> Any:
    """Return the value as strict JSON holds it: arrays and tensors as lists, NaN and infinity as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _on_host(name: str, tensor: object) -> torch.Tensor:
    """Return a contiguous copy on the CPU: safetensors refuses tied and strided tensors."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        kind = "a sparse or meta tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise fail("weights in a checkpoint must be dense tensors", f"{kind} for {name!r}", "Convert it first.")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _dumped(name: str, value: Mapping[str, Any]) -> bytes:
    """Return the value as torch saves it; refused where reading it back would need to run code."""
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
    """Return steps and folders of the checkpoints in ``home``, oldest first, whole or not."""
    names = os.listdir(home) if home.is_dir() else []
    found = [(match, home / match.string) for match in map(re.compile(r"step-(\d+)").fullmatch, names) if match]
    return sorted((int(match[1]), path) for match, path in found)


def write(home: Path, checkpoint: Checkpoint) -> Path:
    """Write the checkpoint to ``home/step-...``: all of it, or nothing and what was there before."""
    target, temporary = home / f"step-{checkpoint.step:09d}", home / f".tmp-{os.getpid()}"
    files = _contents(checkpoint)
    with disk_errors(target):
        try:
            temporary.mkdir(parents=True)
            for name, data in files.items():
                _write_synced(temporary / name, data)
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
    """Clear what an interrupted write left; restore a checkpoint whose replacement never came."""
    for path in home.glob(".old-*"):
        target = path.with_name(path.name.removeprefix(".old-"))
        if not target.exists():
            os.rename(path, target)
    for path in (*home.glob(".old-*"), *home.glob(".tmp-*")):
        shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Delete; renamed first, so that a kill half way leaves no torn folder under a checkpoint's name."""
    leaving = path.with_name(f".tmp-{path.name}")
    os.rename(path, leaving)
    shutil.rmtree(leaving)


def set_aside(path: Path) -> Path:
    """Give the folder a name that is no checkpoint's; nothing is deleted."""
    number = next(n for n in range(1, 10**9) if not path.with_name(f"set-aside-{n}-{path.name}").exists())
    return path.rename(path.with_name(f"set-aside-{number}-{path.name}"))


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder, on the CPU; raise ``Damaged`` unless every byte is as it was written."""
    from safetensors.torch import load

    step, files = _read_files(path)
    return Checkpoint(step, load(files[WEIGHTS]), _loaded(files[OPTIMIZER]), **_loaded(files[STATE]))


def _read_files(path: Path) -> tuple[int, dict[str, bytes]]:
    manifest = _read_manifest(path)
    if path.name != f"step-{manifest['step']:09d}":
        raise Damaged(f"its {MANIFEST} is that of step {manifest['step']}")
    files = {name: _read_bytes(path / name) for name in manifest["files"]}
    for name, data in files.items():
        expected = manifest["files"][name]
        if len(data) != expected["size"]:
            raise Damaged(f"{name} has {len(data)} bytes and should have {expected['size']}")
        if _hash(data) != expected["sha256"]:
            raise Damaged(f"{name} does not match its hash")
    return manifest["step"], files


def _read_manifest(path: Path) -> dict[str, Any]:
    raw = _read_bytes(path / MANIFEST)
    try:
        manifest: dict[str, Any] = json.loads(raw)
        del manifest["sha256"]
        same = _manifest(manifest) == raw
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    if not same:
        raise Damaged(f"{MANIFEST} does not match its hash")
    if manifest["schema"] != SCHEMA:
        raise Damaged(f"it was written by another version of lamina (schema {manifest['schema']}, not {SCHEMA})")
    return manifest


def _manifest(content: dict[str, Any]) -> bytes:
    """Return the manifest with its own hash last, so that damage to the list of hashes shows too."""
    return json.dumps({**content, "sha256": _hash(json.dumps(content).encode())}, indent=1).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
