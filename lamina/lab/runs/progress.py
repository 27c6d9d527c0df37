"""Progress of runs on the screen: bars with loss, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn


class Reporter:
    """``with Reporter() as say:`` then ``say.begin``, ``say.advance``, ``say.line``, ``say.end``."""

    PAUSE = 2.0  # seconds between plain lines of one run

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        figures, plain = TextColumn("{task.fields[figures]}"), not self.console.is_terminal
        self._bars = Progress(*columns, figures, console=self.console, disable=plain)
        self._tasks: dict[str, Task] = {}  # by label of a run

    def __enter__(self) -> Reporter:
        self._bars.start()
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        if not self._bars.disable:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)

    def begin(self, label: str, step: int, total: int) -> None:
        """Show a run of ``total`` updates that is at ``step``."""
        state: dict[str, Any] = {
            "first": step,
            "shown": time.monotonic(),
            "printed": -math.inf,
            "values": {},
            "figures": "",
        }
        self._bars.add_task(label, total=total, completed=step, **state)
        self._tasks[label] = self._bars.tasks[-1]

    def advance(self, label: str, step: int, total: int, values: dict[str, Any]) -> None:
        """Show the run at ``step``; ``values`` are its newest figures."""
        task, now = self._tasks[label], time.monotonic()
        rate = (step - task.fields["first"]) / max(task.elapsed or 0, 1e-9)
        figures = "  ".join([*(f"{k} {v:.4g}" for k, v in values.items() if v is not None), f"{rate:.0f}/s"])
        self._bars.update(task.id, completed=step, figures=figures, shown=now, values=values)
        if self._bars.disable and (now - task.fields["printed"] >= self.PAUSE or step == total):
            task.fields["printed"] = now
            left = f", {(total - step) / rate:.0f} s left" if rate > 0 else ""
            self.line(f"{label}: {step:,}/{total:,}  {figures}{left}")

    def move(self, label: str, step: int, total: int) -> None:
        """Show the run at ``step`` with its last figures, unless it was shown just now. Called often."""
        fields = self._tasks[label].fields
        if time.monotonic() - fields["shown"] >= (self.PAUSE if self._bars.disable else 0.2):
            self.advance(label, step, total, fields["values"])

    def end(self, label: str, text: str) -> None:
        """Remove the run's bar and print how it ended."""
        if label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label).id)
        self.line(f"{label}: {text}")


class JsonReporter(Reporter):
    """Write the same events as JSON lines, by the names of the methods and their arguments: for another process."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(Console(quiet=True))
        self.write = write

    def line(self, text: str) -> None:
        self._event("line", text=text)

    def begin(self, label: str, step: int, total: int) -> None:
        super().begin(label, step, total)
        self._event("begin", label=label, step=step, total=total)

    def advance(self, label: str, step: int, total: int, values: dict[str, Any]) -> None:
        self._tasks[label].fields |= {"shown": time.monotonic(), "values": values}
        self._event("advance", label=label, step=step, total=total, values=values)

    def _event(self, event: str, **details: Any) -> None:
        self.write(json.dumps({"event": event, **details}) + "\n")
