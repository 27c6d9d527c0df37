"""Files of a run folder: safe writes, JSON, the lock, the metrics and TensorBoard's events."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from ...errors import InputError, RunError, fail

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATIENCE = 0.2  # seconds to wait for a lock: a process that asks for the status holds it for an instant
NO_SCALARS = ("kind", "step", "seed", "epoch", "seconds")  # keys of a line that TensorBoard draws no curve of


@contextmanager
def disk_errors(what: object) -> Iterator[None]:
    """Turn a failed write into a ``RunError`` with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise RunError(f"disk full while writing {what}: free space and run again with --resume") from error
        reason = error.strerror or str(error)
        raise RunError(f"could not write {what} ({reason}): put that right and run again with --resume") from error


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Turn an error of the system into one about a run folder that cannot be used; a full disk is a ``RunError``."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            with disk_errors(path):
                raise
        rule, received = "a run folder must be a folder that can be written to", f"{path} ({error.strerror or error})"
        raise fail(rule, received, "Choose another or change its rights.") from error


def make_folder(path: Path) -> None:
    """Make the folder if it does not exist; raise if it cannot be written to."""
    with folder_errors(path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no right to write")


def write_all(file: int, data: bytes) -> None:
    """Write all data: one ``os.write``, and more only where the system took less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(path: Path) -> None:
    """Make renames and new names in the folder survive a loss of power."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: at every moment it has its old content or all of the new."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with disk_errors(path):
        try:
            write_synced(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def plain(value: Any) -> Any:
    """Return the value as strict JSON holds it: arrays and tensors as lists, NaN and infinity as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parsed(text: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def damaged_file(
    path: Path, fault: str = ", which cannot be read", remedy: str = "Restore it from a copy."
) -> InputError:
    """Return the error for a file of the run that somebody or something else changed."""
    return fail(f"{path.name} must be as the run wrote it", f"{path}{fault}", remedy)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file."""
    try:
        content = parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError:
        content = None
    if content is None:
        raise damaged_file(path)
    return content


class Metrics:
    """``metrics.jsonl``: whole lines, in the order they were logged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends_in_newline = False  # not checked yet

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append all of the lines in one write; if the disk is full, none of them."""
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        with self.path.open("ab") as file:
            if not self._ends_in_newline:  # a kill may have cut the last line short: remove what is left of it
                file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
                self._ends_in_newline = True
            before = self.size()
            try:
                write_all(file.fileno(), data)
            except BaseException:
                file.truncate(before)
                raise

    def sync(self) -> int:
        """Bring the lines to the disk and return the size."""
        if self.size():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return self.size()

    def read(self) -> list[dict[str, Any]]:
        """Return every line; without a last one that a kill cut short."""
        complete = self.path.read_bytes().split(b"\n")[:-1] if self.size() else []
        lines = [parsed(line) for line in complete]
        if lines and lines[-1] is None:
            lines.pop()
        if None in lines:
            fault = f" with line {lines.index(None) + 1} damaged"
            raise damaged_file(self.path, fault, "Restore it from a copy, or remove that line.")
        return [line for line in lines if line is not None]


class Events:
    """TensorBoard's copy of the metrics. A run goes on without it, with a note."""

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
    """Take a lock that the system releases when the process ends, however it ends. The file names its holder."""
    # A lock file without flock, the fallback of filelock, would outlive a killed run.
    file_lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with folder_errors(path.parent):
        try:
            file_lock.acquire(timeout=PATIENCE, poll_interval=0.02)
            path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except Timeout:
            rule, received = "a run folder takes one process at a time", f"{path.parent}, held by {_holder(path)}"
            raise fail(rule, received, "Wait for it to end, or choose another folder.") from None
        except BaseException:
            file_lock.release()
            raise
    return file_lock


def _holder(path: Path) -> str:
    holder = parsed(path.read_bytes()) or {}
    return f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= set(holder) else "another process"


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
