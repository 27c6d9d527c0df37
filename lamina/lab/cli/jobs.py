"""From options to runs: what was typed becomes settings, jobs and how to run them. No torch in this room."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import fail, one_of
from ..experiments import Config, Job, Sheet

KINDS = {int: "a whole number", float: "a number", str: "a name"}
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda")]


# Which runs


def flag(name: str) -> str:
    """``batch_size`` as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def parse(item: dataclasses.Field[Any], text: str) -> tuple[Any, ...]:
    """The value of a setting, or those of a comma list; their ranges are the settings' own business."""
    words = text.split(",") if item.metadata["sweep"] else [text]
    return tuple(_parse_one(item, word.strip()) for word in words)


def _parse_one(item: dataclasses.Field[Any], word: str) -> Any:
    kind: Any = type(item.default)
    try:
        if word:
            return kind(word)
    except ValueError:
        pass
    several = ", or several with commas between" if item.metadata["sweep"] else ""
    raise fail(f"{flag(item.name)} must be {KINDS[kind]}{several}", repr(word), f"The default is {item.default}.")


def combine(sheet: Sheet, values: Mapping[str, Sequence[Any]]) -> list[Config]:
    """The settings of every combination of values, each of them checked."""
    for name, several in values.items():
        twice = [value for value, count in Counter(several).items() if count > 1]
        if twice:
            raise fail(f"{flag(name)} takes each value once", f"{twice[0]} twice", "Leave one out.")
    return [sheet.config(**dict(zip(values, chosen))) for chosen in itertools.product(*values.values())]


def jobs_for(sheet: Sheet, configs: Sequence[Config], seeds: Sequence[int], stacked: bool) -> list[Job]:
    """One job for each of the settings and each seed, or for all seeds together; no two share a folder."""
    groups = [tuple(seeds)] if stacked else [(seed,) for seed in seeds]
    jobs = [Job(sheet.name, config, group, _vary(sheet, config)) for config in configs for group in groups]
    label, count = Counter(job.label for job in jobs).most_common(1)[0]
    if count > 1:
        raise fail("each run needs a folder of its own", f"{count} runs named {label}", "Give values further apart.")
    return jobs


def _vary(sheet: Sheet, config: Config) -> tuple[str, ...]:
    """The settings in a run's label follow from the settings alone, so any command finds the same folder again."""
    swept = [f for f in dataclasses.fields(config) if f.metadata["sweep"] and f.name not in sheet.vary]
    return (*sheet.vary, *(f.name for f in swept if getattr(config, f.name) != f.default))


# How to run


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How to run", **more)


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A reader of whole numbers in a range that tells what it got."""

    def parse(given: Any) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(f"must be a whole number from {least} to {most}, got {given!r}.")
        return number

    return parse


@dataclass
class How:
    """The options of ``lamina run`` that are not settings of the experiment."""

    seeds: Annotated[int, _option("number of seeds", metavar="N", parser=whole(1, 1000))] = 1
    first_seed: Annotated[int, _option("the first of them", metavar="N", parser=whole(0, 2**31))] = 0
    stack: Annotated[bool | None, _option("train all seeds as one model (default: on a GPU)")] = None
    small: Annotated[bool, _option("begin from the small settings of lamina reproduce", "--small")] = False
    tuned: Annotated[str | None, _option("record of lamina tune: each variant with what was chosen for it")] = None
    data: Annotated[str | None, _option("folder with the data sets, or embedded for the stand-in")] = None
    runs: Annotated[str, _option("folder for the runs")] = "runs"
    device: Annotated[str, _option("auto, cpu or cuda")] = "auto"
    engine: Annotated[str, _option("auto, eager, graph (CUDA graph) or compile")] = "auto"
    together: Annotated[
        int, _option("runs side by side on one device; 0 chooses", metavar="N", parser=whole(0, 64))
    ] = 0
    jobs: Annotated[
        int | None, _option("processes (default: cores; 1 on a GPU)", metavar="N", parser=whole(1, 999))
    ] = None
    resume: Annotated[bool, _option("go on where runs stopped; finished ones are passed over", "--resume")] = False
    restart: Annotated[bool, _option("begin anew; what is there is moved to old-1, old-2 ...", "--restart")] = False
    keep_best: Annotated[bool, _option("keep the checkpoint that validates best")] = True
    quiet: Annotated[bool, _option("no progress, only the results", "--quiet")] = False
    worker_of: Annotated[str | None, _option("the command this process works for", hidden=True)] = None
    command: str = field(default="", init=False)  # as it was typed, for the runs' headers

    def check(self, sheet: Sheet) -> None:
        """What can be told to be wrong without torch or data."""
        one_of("--device", self.device, ("auto", "cpu", "cuda"))
        one_of("--engine", self.engine, ("auto", "eager", "graph", "compile"))
        if self.data == "":
            raise fail("--data must be a folder, or embedded", "''", "Leave it out for the default.")
        if self.resume and self.restart:
            raise fail("a run is resumed or begun anew", "--resume and --restart together", "Pass one of them.")
        if self.stack and not sheet.stackable:
            raise fail("--stack needs an experiment whose seeds can be stacked", sheet.name, "Leave it out.")
        if processes() > 1 and (self.jobs or 1) > 1:
            raise fail("--jobs is 1 when a launcher starts the processes", f"--jobs {self.jobs}", "Leave it out.")
        writable_folder(self.runs, "--runs")

    def uses_cuda(self) -> bool:
        """Whether runs will be on a GPU; only there can an update be captured."""
        cuda = False
        if self.device != "cpu":
            import torch

            cuda = torch.cuda.is_available()
        if self.device == "cuda" and not cuda:
            raise fail("--device cuda needs a CUDA device", "none found", "Use --device auto.")
        if self.engine in ("graph", "compile") and not cuda:
            raise fail(f"--engine {self.engine} needs a CUDA device", "the CPU", "Use --engine auto.")
        return cuda


def writable_folder(path: Path | str, name: str) -> Path:
    """Check that the folder can be written to, or made, before anything starts. It is made with its first file."""
    above = next(place for place in (Path(path), *Path(path).absolute().parents) if os.path.lexists(place))
    fault = "" if os.access(above, os.W_OK | os.X_OK) else "no right to write"
    fault = fault if above.is_dir() else "Not a directory"
    fault = fault if str(path) else "no name"
    if fault:
        raise fail(f"{name} must be a folder to write to", f"{str(path)!r} ({fault})", "Pass another.")
    return Path(path)


def processes() -> int:
    """Those that torchrun or accelerate launch started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Which of them this one is."""
    return int(os.environ.get("RANK") or 0)
