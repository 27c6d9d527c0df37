"""A switch that each thread has for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Switch:
    """False, but true in a thread while it is ``with`` the switch: ``with switch(): ...``."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __bool__(self) -> bool:
        return getattr(self._here, "on", False)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self._here.on = bool(self), True
        try:
            yield
        finally:
            self._here.on = before
