"""The files of a run folder: its lock, its metrics and TensorBoard's events."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import InputError, fail
from . import checkpoints
from .checkpoints import disk_errors

NO_SCALARS = ("kind", "step", "seed", "epoch", "seconds")  # keys of a line that TensorBoard draws no curve of


def not_writable(path: Path, error: OSError) -> InputError:
    """What the user is told of a run folder that cannot be used, to raise."""
    received = f"{path} ({error.strerror or error})"
    return fail(
        "a run folder must be a folder that can be written to", received, "Choose another or change its rights."
    )


def make_folder(path: Path) -> None:
    """Make the folder if need be; refused where it cannot be written to."""
    if not path.is_dir():
        try:
            path.mkdir(parents=True, exist_ok=True)
            checkpoints.sync_folder(path.parent)
        except OSError as error:
            if error.errno in checkpoints.DISK_FULL:
                with disk_errors(path):
                    raise
            raise not_writable(path, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise not_writable(path, PermissionError(0, "no right to write"))


# Metrics and events


class Metrics:
    """``metrics.jsonl``: whole lines, in the order they were logged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """All of the lines in one write; if the disk is full, none of them."""
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        file = self._opened()
        before = os.fstat(file).st_size
        try:
            checkpoints.write_all(file, data)
        except BaseException:
            os.ftruncate(file, before)
            raise

    def _opened(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            # A kill may have cut the last line short: what follows must not be glued to it.
            os.ftruncate(self._file, self.path.read_bytes().rfind(b"\n") + 1)
        return self._file

    def sync(self) -> int:
        """Bring the lines to the disk; returns the size."""
        if self._file is not None:
            os.fsync(self._file)
        return self.size()

    def cut(self, size: int) -> None:
        os.truncate(self.path, size)

    def read(self) -> list[dict[str, Any]]:
        if not self.size():
            return []
        raw = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was never finished
        lines = [parsed(line) for line in raw]
        if lines and lines[-1] is None:
            lines.pop()
        whole = [line for line in lines if line is not None]
        if len(whole) < len(lines):
            received = f"{self.path} with line {lines.index(None) + 1} damaged"
            remedy = "Restore it from a copy, or remove that line."
            raise fail(f"{self.path.name} must be as the run wrote it", received, remedy)
        return whole

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Events:
    """TensorBoard's copy of the metrics. A run goes on without it, and says so in its notes."""

    def __init__(self, path: Path, notes: list[str]) -> None:
        self.path = path
        self.notes = notes
        self.purge_step: int | None = None  # events from this step on belong to a run that was killed: hide them
        self.several_seeds = False
        self._writer: Any = None
        self._given_up = False

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self._writer is None and not self._given_up:
            self._attempt(self._open)
        for line in lines:
            if self._writer is not None:
                self._attempt(partial(self._add_line, line))

    def _open(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what its imports say of each other is nothing to the user
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.path), purge_step=self.purge_step, flush_secs=30)

    def _add_line(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            if key not in NO_SCALARS and isinstance(value, (int, float)):
                tag = f"{key}/seed{line.get('seed')}" if self.several_seeds else key
                self._writer.add_scalar(tag, value, line.get("step"))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._writer, self._given_up = None, True
            self.notes.append(f"TensorBoard events are not written: {error or type(error).__name__}")

    def flush(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.flush)

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)
        self._writer = None


# The lock


_held_locks: set[int] = set()


def _let_go_in_child() -> None:
    """A data-loading worker that outlives a killed run must not keep its folder locked."""
    for file in _held_locks:
        os.close(file)
    _held_locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class Lock:
    """An ``flock``: the system releases it with the process, however that ends. The file says who holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise not_writable(path.parent, error) from error
        try:
            self._take()
            _held_locks.add(self._file)
            self._sign()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        for _ in range(10):  # ``status`` holds it for an instant
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError as error:
                raise not_writable(self.path.parent, error) from error
        received = f"{self.path.parent}, held by {_holder(self.path)}"
        raise fail(
            "a run folder takes one process at a time", received, "Wait for it to end, or choose another folder."
        )

    def _sign(self) -> None:
        who = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        with disk_errors(self.path):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, who, 0)

    def release(self) -> None:
        """Unlocked by name, since a program started without our knowledge may share the open file."""
        if self._file in _held_locks:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        _held_locks.discard(self._file)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _holder(lock: Path) -> str:
    who = parsed(lock.read_bytes()) or {}
    return f"process {who['pid']} on {who['host']}" if {"pid", "host"} <= set(who) else "another process"


def is_held(lock: Path) -> bool | None:
    """Whether a process holds the lock; None where the system does not say."""
    try:
        file = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False
