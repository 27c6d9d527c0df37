"""Progress of runs on the screen: bars with loss, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Reporter:
    """``with Reporter() as say:`` then ``say.begin``, ``say.advance``, ``say.line``, ``say.end``."""

    PAUSE = 2.0  # seconds between plain lines of one run

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._said: dict[str, float] = {}
        self._newest: dict[str, tuple[float, dict[str, Any]]] = {}  # when a run was last shown, and its figures

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, TextColumn("{task.fields[loss]}"), console=self.console)
            self._bars.start()
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)

    def begin(self, label: str, step: int, total: int) -> None:
        """Show a run of ``total`` updates that is at ``step``."""
        self._began[label] = (time.monotonic(), step)
        self._newest[label] = (time.monotonic(), {})
        if self._bars is not None:
            self._tasks[label] = self._bars.add_task(label, total=total, completed=step, loss="")

    def advance(self, label: str, step: int, total: int, values: dict[str, Any]) -> None:
        """Show the run at ``step``; ``values`` are its newest figures."""
        self._newest[label] = (time.monotonic(), values)
        figures = "  ".join(f"{k} {v:.4g}" for k, v in values.items() if v is not None)
        if self._bars is not None:
            self._bars.update(self._tasks[label], completed=step, loss=f"{figures}  {self._rate(label, step):.0f}/s")
        elif time.monotonic() - self._said.get(label, 0) >= self.PAUSE or step == total:
            self._said[label] = time.monotonic()
            self.line(f"{label}: {step:,}/{total:,}  {figures}  {self._left(label, step, total)}")

    def move(self, label: str, step: int, total: int) -> None:
        """Move the run on between two log lines, with the figures it had; called often, shown now and then."""
        shown, values = self._newest[label]
        if time.monotonic() - shown >= (self.PAUSE if self._bars is None else 0.2):
            self.advance(label, step, total, values)

    def end(self, label: str, text: str) -> None:
        """Remove the run's bar and print how it ended."""
        if self._bars is not None and label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label))
        self.line(f"{label}: {text}")

    def _rate(self, label: str, step: int) -> float:
        began, first = self._began[label]
        return (step - first) / max(time.monotonic() - began, 1e-9)

    def _left(self, label: str, step: int, total: int) -> str:
        rate = self._rate(label, step)
        return f"{rate:.0f}/s, {(total - step) / rate:.0f} s left" if rate > 0 else ""


class JsonReporter(Reporter):
    """Tell the same events as JSON lines, by the names of the methods and their arguments: for another process."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(Console(quiet=True))
        self.write = write

    def line(self, text: str) -> None:
        self._tell("line", text=text)

    def begin(self, label: str, step: int, total: int) -> None:
        super().begin(label, step, total)
        self._tell("begin", label=label, step=step, total=total)

    def advance(self, label: str, step: int, total: int, values: dict[str, Any]) -> None:
        self._newest[label] = (time.monotonic(), values)
        self._tell("advance", label=label, step=step, total=total, values=values)

    def end(self, label: str, text: str) -> None:
        self.line(f"{label}: {text}")

    def _tell(self, event: str, **details: Any) -> None:
        self.write(json.dumps({"event": event, **details}) + "\n")
