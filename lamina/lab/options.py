"""Options of running: those of the command line, which training reads too. No torch in this file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How to run")


def whole(help: str, least: int, most: int, panel: str | None = "How to run") -> Any:
    """Return an option whose value is a whole number in a range."""

    def parse(given: Any) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(f"must be a whole number from {least} to {most}, got {given!r}.")
        return number

    return typer.Option(help=help, metavar="N", parser=parse, rich_help_panel=panel)


@dataclass(frozen=True)
class Settings:
    """Options of running, not of the experiment; beyond rounding nothing here changes a result.

    An annotated field is an option of ``lamina run``. root: folder of the data; None asks LAMINA_DATA.
    command: as it was typed, for the runs' headers. hours: after which every run saves a checkpoint and ends.
    """

    scale: Annotated[
        str, _option("all that the claims compare at this size: smoke, laptop, paper, or an exploration")
    ] = ""
    seeds: Annotated[int | None, whole("number of seeds (default: the scale's, or 1)", 1, 1000)] = None
    first_seed: Annotated[int, whole("the first of them", 0, 2**31)] = 0
    tuned: Annotated[str | None, _option("record of lamina tune: each variant with what was chosen for it")] = None
    root: Annotated[str | None, _option("folder with the data sets, or embedded for the stand-in", "--data")] = None
    runs: Annotated[str, _option("folder for the runs")] = "runs"
    device: Annotated[str, _option("auto, cpu or cuda")] = "auto"
    engine: Annotated[str, _option("auto, eager, or graph (a CUDA graph)")] = "auto"
    together: Annotated[int, whole("runs side by side on one device; 0 chooses", 0, 64)] = 0
    jobs: Annotated[int | None, whole("processes (default: cores; 1 on a GPU)", 1, 999)] = None
    resume: Annotated[bool, _option("go on where runs stopped; finished ones are passed over", "--resume")] = False
    restart: Annotated[bool, _option("start again; existing files move to old-1, old-2 ...", "--restart")] = False
    keep_best: Annotated[bool, _option("keep the checkpoint that validates best")] = True
    quiet: Annotated[bool, _option("no progress, only the results", "--quiet")] = False
    command: str = ""
    hours: float = math.inf
