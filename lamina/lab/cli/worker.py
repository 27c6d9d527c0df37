"""Worker process: read orders from standard input, train, and report in JSON lines on standard output."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from ..experiment import Job
from ..experiments import find
from ..options import Settings
from ..runs.progress import JsonReporter
from .commands import message_and_code
from .workers import train_here

orders: queue.Queue[str | None] = queue.Queue()
at_work = threading.Event()


def main() -> None:
    """Carry out orders until standard input closes, as it does when the parent ends for any reason."""
    threading.Thread(target=_listen, daemon=True).start()
    while (order := orders.get()) is not None:
        at_work.set()
        code, text = _carry_out(json.loads(order), JsonReporter(_write))
        at_work.clear()
        _write(json.dumps({"event": "done", "code": code, "text": text}) + "\n")


def _write(text: str) -> None:
    """Write to standard output. If the reader has died, drop the text, so that the run can still save a checkpoint."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _listen() -> None:
    """Queue the orders; at the end of the input, make a run at work save its checkpoint and end."""
    for line in sys.stdin:
        orders.put(line)
    orders.put(None)
    if at_work.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _carry_out(order: dict[str, Any], say: JsonReporter) -> tuple[int, str]:
    """Train one job; return the exit code and the message of an error."""
    described = order.pop("job")
    config = find(described["experiment"]).config(**described.pop("config"))
    try:
        train_here([Job(config=config, **{**described, "vary": tuple(described["vary"])})], Settings(**order), say)
    except (Exception, KeyboardInterrupt) as error:
        text, code = message_and_code(error)
        return code if code == 2 else 1, " ".join(text.split())
    return 0, ""


if __name__ == "__main__":
    main()
