"""``python -m lamina``."""

from __future__ import annotations

from .lab.cli.commands import run_and_exit

if __name__ == "__main__":
    run_and_exit()
