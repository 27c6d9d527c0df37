"""The files of a run folder: its lock, its metrics and TensorBoard's events."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...errors import InputError, fail
from . import checkpoints
from .checkpoints import disk_errors

PATIENCE = 0.2  # seconds to wait for a lock: another process that asks for the status holds it for an instant
NO_SCALARS = ("kind", "step", "seed", "epoch", "seconds")  # keys of a line that TensorBoard draws no curve of


def not_writable(path: Path, error: OSError) -> InputError:
    """Return the error for a run folder that cannot be used."""
    received = f"{path} ({error.strerror or error})"
    rule = "a run folder must be a folder that can be written to"
    return fail(rule, received, "Choose another or change its rights.")


def make_folder(path: Path) -> None:
    """Make the folder if need be; refuse one that cannot be written to."""
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
        """Append all of the lines in one write; if the disk is full, none of them."""
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
        """Bring the lines to the disk and return the size."""
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
    """Return the JSON object in a line; None where there is none."""
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
            warnings.simplefilter("ignore")  # its imports warn about each other
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.path), purge_step=self.purge_step, flush_secs=30)

    def _add_line(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            if key not in NO_SCALARS and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, line.get("step"))

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


class Lock:
    """A lock that the system releases with the process, however that ends. The file says who holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A lock file without flock, the fallback of filelock, would outlive a killed run.
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=PATIENCE, poll_interval=0.02)
        except Timeout:
            received = f"{path.parent}, held by {_holder(path)}"
            remedy = "Wait for it to end, or choose another folder."
            raise fail("a run folder takes one process at a time", received, remedy) from None
        except OSError as error:
            raise not_writable(path.parent, error) from error
        try:
            with disk_errors(path):
                path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._lock.release()


def _holder(lock: Path) -> str:
    who = parsed(lock.read_bytes()) or {}
    return f"process {who['pid']} on {who['host']}" if {"pid", "host"} <= set(who) else "another process"


def is_held(lock: Path) -> bool | None:
    """Return whether a process holds the lock; None where the system does not say."""
    try:
        if not lock.exists():
            return False
        FileLock(lock, fallback_to_soft=False).acquire(timeout=PATIENCE / 4, poll_interval=0.02).lock.release()
    except Timeout:
        return True
    except OSError:
        return None
    return False
