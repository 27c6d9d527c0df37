"""Checkpoints that are whole or not there at all: written aside, hashed, synced and renamed into place."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, RunError, fail

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs needs none of it
    import torch

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"


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


# Files that reach the disk


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
    """One ``os.write``; more only where the system took less than all of it."""
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
    """The file has its old content or all of the new, at every moment."""
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
    """The value as strict JSON holds it: arrays and tensors as lists, NaN and infinity as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Tensors and everything else in an optimiser's state


def _on_host(name: str, tensor: object) -> torch.Tensor:
    """A copy of its own: safetensors refuses tied and strided tensors, and the run must not change it meanwhile."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        kind = "a sparse or meta tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise fail("weights in a checkpoint must be dense tensors", f"{kind} for {name!r}", "Convert it first.")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON; its tensors go to ``tensors`` under their dotted path. ``_unpack`` gives back the same."""
    import torch

    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a.b": t} and {"a": {"b": t}} have the same path
            name += "'"
        tensors[name] = _on_host(name, value)
        return {"$tensor": name, "on": value.device.type}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, name, tensors)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    received = f"{type(value).__name__} at {name!r}"
    raise fail("a checkpoint holds numbers, text, lists, dicts and tensors", received, "Convert it first.")


def _pack_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON knows only text as keys; optimisers number their parameters."""
    pairs = [(key, _pack(item, f"{name}.{key}" if name else str(key), tensors)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$items": [[_pack(key, f"{name}.key", tensors), item] for key, item in pairs]}


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor], device: str | torch.device) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        # Adam counts its steps on the CPU unless it is capturable, and refuses to go on when they have moved.
        return tensors[value["$tensor"]].to("cpu" if value["on"] == "cpu" else device)
    if "$tuple" in value:
        return tuple(_unpack(item, tensors, device) for item in value["$tuple"])
    if "$items" in value:
        return {_unpack(key, tensors, device): _unpack(item, tensors, device) for key, item in value["$items"]}
    return {key: _unpack(item, tensors, device) for key, item in value.items()}


# One checkpoint is one folder


def listed(home: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints in ``home``, oldest first; whether they are whole is not looked at."""
    names = os.listdir(home) if home.is_dir() else []
    found = [(match, home / match.string) for match in map(re.compile(r"step-(\d+)").fullmatch, names) if match]
    return sorted((int(match[1]), path) for match, path in found)


def write(home: Path, checkpoint: Checkpoint) -> Path:
    """Put the checkpoint at ``home/step-...``: all of it, or nothing and what was there before."""
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

    tensors: dict[str, torch.Tensor] = {}
    state = {
        "metrics_bytes": checkpoint.metrics_bytes,
        "best": checkpoint.best,
        "optimizer": _pack(checkpoint.optimizer, "", tensors),
        "state": _pack(checkpoint.state, "run", tensors),
    }
    files = {
        WEIGHTS: save({name: _on_host(name, tensor) for name, tensor in checkpoint.weights.items()}),
        OPTIMIZER: save(tensors),
        STATE: json.dumps(state).encode(),
    }
    sizes = {name: {"size": len(data), "sha256": _hash(data)} for name, data in files.items()}
    return {**files, MANIFEST: _manifest({"schema": 1, "step": checkpoint.step, "files": sizes})}


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename; a checkpoint of the same step steps aside first and goes when the new one is there."""
    previous = target.with_name(f".old-{target.name}")
    if target.exists():
        os.rename(target, previous)
    os.rename(temporary, target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def tidy(home: Path) -> None:
    """Clear what an interrupted write left; a checkpoint whose replacement never came goes back to its place."""
    for path in home.glob(".old-*"):
        target = path.with_name(path.name.removeprefix(".old-"))
        if target.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, target)
    for path in home.glob(".tmp-*"):
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


def read(path: Path, map_location: str | torch.device = "cpu") -> Checkpoint:
    """The checkpoint in this folder; raises ``Damaged`` unless every byte is the one that was written."""
    from safetensors.torch import load

    step, files = _read_files(path)
    weights = {name: tensor.to(map_location) for name, tensor in load(files[WEIGHTS]).items()}
    tensors, state = load(files[OPTIMIZER]), json.loads(files[STATE])
    optimizer, own = (_unpack(state[key], tensors, map_location) for key in ("optimizer", "state"))
    return Checkpoint(step, weights, optimizer, own, state["metrics_bytes"], state["best"])


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
    return manifest


def _manifest(content: dict[str, Any]) -> bytes:
    """Its own hash comes last, so that damage to the list of hashes shows too."""
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


# Random numbers


def rng_state() -> dict[str, Any]:
    """The generators of torch (CPU and every CUDA device), ``random`` and numpy, as JSON can hold them."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    kind, key, *rest = np.random.get_state(legacy=True)
    started: Callable[[], bool] = torch.cuda.is_initialized  # asking a device that nobody uses would start it
    cuda = torch.cuda.get_rng_state_all() if started() else []
    return {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_text(state.numpy().tobytes()) for state in cuda],
        "python": [version, _text(np.array(words, np.uint64).tobytes()), gauss],
        "numpy": [kind, _text(np.asarray(key, np.uint32).tobytes()), *rest],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back where ``rng_state`` found it."""
    import numpy as np
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(_raw(words), np.uint64).tolist()), gauss))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_raw(key), np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    present = torch.cuda.device_count()
    if present < len(state["cuda"]):
        saved = len(state["cuda"])
        warnings.warn(f"random states of {saved} CUDA devices were saved, {present} are here", stacklevel=2)
    for device, text in enumerate(state["cuda"][:present]):
        torch.cuda.set_rng_state(_bytes_tensor(text), device)


def _bytes_tensor(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(_raw(text)), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
