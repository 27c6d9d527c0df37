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

from filelock import BaseFileLock, FileLock, Timeout

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

    def read(self) -> list[dict[str, Any]]:
        if not self.size():
            return []
        # what follows the last newline was never finished
        lines = [parsed(line) for line in self.path.read_bytes().split(b"\n")[:-1]]
        if lines and lines[-1] is None:
            lines.pop()
        if None in lines:
            received = f"{self.path} with line {lines.index(None) + 1} damaged"
            remedy = "Restore it from a copy, or remove that line."
            raise fail(f"{self.path.name} must be as the run wrote it", received, remedy)
        return [line for line in lines if line is not None]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def parsed(line: bytes | str) -> dict[str, Any] | None:
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
        if not self._given_up:
            self._attempt(partial(self._add, lines))

    def _add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._writer = self._writer or self._opened()
        for line in lines:
            for key, value in line.items():
                if key not in NO_SCALARS and isinstance(value, (int, float)):
                    self._writer.add_scalar(key, value, line.get("step"))

    def _opened(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its imports warn about each other
            from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.path), purge_step=self.purge_step, flush_secs=30)

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


def lock(path: Path) -> BaseFileLock:
    """Return a lock, held, that the system releases with the process, however that ends. Its file says who holds it."""
    # A lock file without flock, the fallback of filelock, would outlive a killed run.
    held = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire(timeout=PATIENCE, poll_interval=0.02)
    except Timeout:
        received, remedy = f"{path.parent}, held by {_holder(path)}", "Wait for it to end, or choose another folder."
        raise fail("a run folder takes one process at a time", received, remedy) from None
    except OSError as error:
        raise not_writable(path.parent, error) from error
    try:
        with disk_errors(path):
            path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    except BaseException:
        held.release()
        raise
    return held


def _holder(path: Path) -> str:
    who = parsed(path.read_bytes()) or {}
    return f"process {who['pid']} on {who['host']}" if {"pid", "host"} <= set(who) else "another process"


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock; None where the system does not say."""
    try:
        if not path.exists():
            return False
        FileLock(path, fallback_to_soft=False).acquire(timeout=PATIENCE / 4, poll_interval=0.02).lock.release()
    except Timeout:
        return True
    except OSError:
        return None
    return False
