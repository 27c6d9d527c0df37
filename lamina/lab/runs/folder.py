"""Run folders: used by one process at a time, written atomically, safe when the process is killed."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import fail
from . import checkpoints, files
from .checkpoints import Checkpoint, Damaged
from .files import disk_errors, folder_errors, parsed, plain, read_json

if TYPE_CHECKING:  # torch takes seconds to import, and ``status`` needs none of it
    import torch
    from filelock import BaseFileLock

__all__ = ["Checkpoint", "RunFolder", "status"]

HEADER, METRICS, SUMMARY, BEST = "config.json", "metrics.jsonl", "summary.json", "best.json"
LOCK, CHECKPOINTS, ARTEFACTS = "run.lock", "checkpoints", "artefacts"


class RunFolder:
    """The folder of one run, held by this process.

    ::

        with RunFolder.open("runs/mnist/mnist-real/layer-seed0") as folder:
            folder.start(header, resume=True)
            checkpoint = folder.load()  # None in a new run

    ``notes`` collects warnings (a damaged checkpoint, no TensorBoard); the caller prints them.
    """

    def __init__(self, path: Path, run_lock: BaseFileLock) -> None:
        self.path = path
        self.notes: list[str] = []
        self._lock = run_lock
        self._owner = os.getpid()
        self._home = path / CHECKPOINTS
        self._metrics = files.Metrics(path / METRICS)
        self._events = files.Events(path, self.notes)
        self._resuming = False  # until the first load, which rewinds the metrics

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make the folder if it does not exist and lock it; raise while another process (or this one) holds it."""
        place = Path(path)
        files.make_folder(place)
        folder = cls(place, files.lock(place / LOCK))
        try:
            with folder_errors(place):
                for left_over in place.glob(".tmp-*"):
                    left_over.unlink(missing_ok=True)
                checkpoints.tidy(folder._home)
        except BaseException:
            folder.close()
            raise
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; in a forked child, do nothing: the lock is its parent's."""
        if os.getpid() == self._owner:
            self._events.close()
            self._lock.release()

    @property
    def artefacts(self) -> Path:
        """Folder of pictures and samples, made on first use."""
        files.make_folder(self.path / ARTEFACTS)
        return self.path / ARTEFACTS

    @property
    def header(self) -> dict[str, Any] | None:
        """Header that ``start`` wrote when the run began."""
        return read_json(self.path / HEADER)

    def start(self, header: Mapping[str, Any], *, resume: bool, restart: bool = False) -> None:
        """Begin a run, or resume the one in this folder.

        Args:
            header: experiment, config, seeds, data and the environment.
            resume: resume a run of the same experiment, settings, seeds and data; begin one if the folder has none.
            restart: move the files of an earlier run to ``old-<n>`` and begin a new one.
        """
        if resume and restart:
            raise fail("a run is either resumed or restarted", "--resume and --restart together", "Pass one of them.")
        if restart:
            self._move_to_old()
        stored = self.header
        if stored is None:
            self._refuse_orphans()
            self.write_json(HEADER, header)
        elif resume:
            _check_same_run(stored, plain(header))
            self._resuming = True
        else:
            received = f"{self.path}, which holds a run at step {_last_step(self.path)}"
            raise fail("a new run needs a new folder", received, "Pass --resume to go on or --restart to begin anew.")

    def _refuse_orphans(self) -> None:
        """Raise if there are metrics or checkpoints without a header: they may be a run that somebody needs."""
        if checkpoints.listed(self._home) or self._metrics.size():
            received = f"{self.path} with metrics or checkpoints and no {HEADER}"
            raise fail("a new run needs a new folder", received, f"Put {HEADER} back, or pass --restart to begin anew.")

    def _move_to_old(self) -> None:
        """Move an earlier run, its header first: after an interrupt the folder is refused, not resumed."""
        paths = [path for path in self.path.iterdir() if path.name != LOCK and not path.name.startswith("old-")]
        if not paths:
            return
        self._events.close()
        old = next(old for n in itertools.count(1) if not (old := self.path / f"old-{n}").exists())
        with disk_errors(old):
            old.mkdir()
            for path in sorted(paths, key=lambda p: p.name != HEADER):
                path.rename(old / path.name)
            files.sync_folder(self.path)

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to ``metrics.jsonl``, and to TensorBoard's events."""
        rows = [plain(line) for line in lines]
        with disk_errors(self.path / METRICS):
            self._metrics.append(rows)
        self._events.add(rows)

    def metrics(self) -> list[dict[str, Any]]:
        """Return every line so far, without a last one that a kill cut short."""
        return self._metrics.read()

    def write_json(self, name: str, value: Mapping[Any, Any]) -> None:
        """Write a small file atomically; numbers that are not finite become null."""
        text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
        files.write_atomically(self.path / name, text.encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return what ``write_json`` wrote, or None."""
        return read_json(self.path / name)

    def save(
        self,
        step: int,
        weights: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
        best: float | None = None,
    ) -> Path:
        """Write a checkpoint; keep the last two and the best, delete older ones once the new one is in place.

        ``state`` is anything made of numbers, text, lists, dicts and tensors. ``best`` is the value if this is the best
        checkpoint so far: it marks the checkpoint even if a kill follows at once.
        """
        with disk_errors(self.path / METRICS):
            size = self._metrics.sync()  # the checkpoint must not outlive lines that it counts as written
        self._events.flush()
        saved = Checkpoint(step, dict(weights), dict(optimizer), dict(state), size, best)
        path = checkpoints.write(self._home, saved)
        if best is not None:
            self.mark_best(step, best)
        else:
            self._prune(step)
        return path

    def load(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, on the CPU, or None if there is no checkpoint at all.

        The first load after ``start(resume=True)`` also rewinds metrics and events to that checkpoint.
        """
        faults: list[str] = []
        for _, path in reversed(checkpoints.listed(self._home)):
            try:
                checkpoint = checkpoints.read(path)
                self._check_metrics_reach(checkpoint)
            except Damaged as damage:
                faults.append(f"{path.name}: {damage}")
                continue
            self.notes += [f"checkpoint passed over: {fault}" for fault in faults]
            self._rewind(checkpoint)
            return checkpoint
        if faults:
            remedy = f"Put whole ones back into {self._home}, or pass --restart to begin anew (the old files are kept)."
            raise fail("a run goes on from a checkpoint that is whole", "; ".join(faults), remedy)
        self._rewind(None)
        return None

    def best_checkpoint(self) -> Checkpoint | None:
        """Return the best checkpoint, or the newest undamaged one if none is marked; None if there is none."""
        best = self.best()
        if best is None:
            return self.load()
        try:
            return checkpoints.read(dict(checkpoints.listed(self._home))[best[0]])
        except (KeyError, Damaged) as damage:
            remedy = "Put it back from a copy, or train the run again with --restart."
            raise fail("the best checkpoint must be whole", f"step {best[0]}: {damage}", remedy) from None

    def memo(self, name: str, checkpoint: Checkpoint) -> Callable[[str, Callable[[], Any]], Any]:
        """Return a function that computes a part of an evaluation once and stores it in the folder, as JSON.

        Parts that were stored for another checkpoint are dropped.
        """
        file = f"evaluation-{name}.json"
        stored = self.read_json(file) or {}
        parts: dict[str, Any] = stored["parts"] if stored.get("step") == checkpoint.step else {}

        def part(key: str, compute: Callable[[], Any]) -> Any:
            if key not in parts:
                parts[key] = plain(compute())
                self.write_json(file, {"step": checkpoint.step, "parts": parts})
            return parts[key]

        return part

    def _check_metrics_reach(self, checkpoint: Checkpoint) -> None:
        size = self._metrics.size()
        if self._resuming and size < checkpoint.metrics_bytes:
            raise Damaged(f"{METRICS} has {size} bytes and had {checkpoint.metrics_bytes} when it was written")

    def _rewind(self, checkpoint: Checkpoint | None) -> None:
        """Restore the folder to the time of the checkpoint, so that a resumed run writes no line twice.

        Later checkpoints are renamed: they are damaged, or one of them would have been loaded.
        """
        if not self._resuming:
            return
        step, metrics_bytes = (checkpoint.step, checkpoint.metrics_bytes) if checkpoint else (0, 0)
        with disk_errors(self.path):
            for later, path in checkpoints.listed(self._home):
                if later > step:
                    checkpoints.set_aside(path)
            best = self.best()
            if best and best[0] > step:
                (self.path / BEST).unlink()
            if self._metrics.size() > metrics_bytes:
                (self.path / SUMMARY).unlink(missing_ok=True)  # a run that goes back has not finished
                os.truncate(self._metrics.path, metrics_bytes)
        self._events.purge_step = step + 1 if metrics_bytes else 0
        if checkpoint and checkpoint.best is not None and (self.best() or (None,))[0] != step:
            self.mark_best(step, checkpoint.best)  # killed between the checkpoint and best.json
        self._resuming = False

    def mark_best(self, step: int, value: float) -> None:
        """Keep the checkpoint of this step until a better one is marked."""
        if step not in dict(checkpoints.listed(self._home)):
            raise fail("the best step must have a checkpoint", f"step {step}", "Save it first.")
        if not math.isfinite(value):
            raise fail("the best value must be finite", repr(value), "Do not mark a run that has diverged.")
        self.write_json(BEST, {"step": step, "value": value})
        self._prune(step)

    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best checkpoint."""
        stored = self.read_json(BEST)
        try:
            return None if stored is None else (int(stored["step"]), float(stored["value"]))
        except (KeyError, TypeError, ValueError):
            raise files.damaged_file(self.path / BEST) from None

    def _prune(self, new: int) -> None:
        every, best = checkpoints.listed(self._home), self.best()
        keep = {new, *(step for step, _ in every[-2:]), best[0] if best else new}
        for path in (path for step, path in every if step not in keep):
            try:
                checkpoints.discard(path)
            except OSError as error:  # untidy, but no reason to end a run
                self.notes.append(f"an old checkpoint could not be deleted: {path} ({error.strerror})")


def _identity(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change when a run is resumed, under the names that messages use."""
    data = header.get("data") or {}
    identity = {name: header.get(name) for name in ("schema", "experiment", "seeds")}
    identity |= {f"config.{name}": value for name, value in (header.get("config") or {}).items()}
    identity |= {f"data.{name}": data.get(name) for name in ("name", "kind")}
    return identity | {f"data.sha256.{name}": value for name, value in (data.get("sha256") or {}).items()}


def _check_same_run(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, after, absent = _identity(stored), _identity(now), "(absent)"
    pairs = {name: (before.get(name, absent), after.get(name, absent)) for name in {**before, **after}}
    differing = [f"{name} {old!r} stored and {new!r} now" for name, (old, new) in pairs.items() if old != new]
    if differing:
        remedy = "Pass what the run began with, or --restart to begin anew."
        raise fail("a run goes on with the settings and data it began with", "; ".join(differing), remedy)


def status(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return header, step, checkpoint, finished and running of a run folder, without opening the run.

    ``step`` is the last one logged or saved; ``checkpoint`` the one a resumed run would look at first, or None;
    ``running`` is None where the file system knows no locks.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise fail("a run folder must be a folder", str(folder), "Pass the folder of one run.")
    saved = checkpoints.listed(folder / CHECKPOINTS)
    return {
        "header": read_json(folder / HEADER),
        "step": _last_step(folder),
        "checkpoint": saved[-1][0] if saved else None,
        "finished": bool((read_json(folder / SUMMARY) or {}).get("finished")),
        "running": files.is_held(folder / LOCK),
    }


def _last_step(folder: Path) -> int:
    metrics, steps = folder / METRICS, [step for step, _ in checkpoints.listed(folder / CHECKPOINTS)]
    if metrics.is_file():
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 2**16))  # the newest step is in the last 64 KiB
            logged = [(parsed(line) or {}).get("step") for line in file.read().split(b"\n")[:-1]]
        steps += [step for step in logged if isinstance(step, int)]
    return max(steps, default=0)
