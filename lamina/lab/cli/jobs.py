"""From options to runs: what was typed becomes settings, jobs and how to run them. No torch in this room."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import fail, one_of
from ..experiment import Config, Job, Scale, Sheet
from ..options import Settings

KINDS = {int: "a whole number", float: "a number", str: "a name"}
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda")]


def flag(name: str) -> str:
    """Spell a setting as the command line does."""
    return f"--{name.replace('_', '-')}"


def parse(item: dataclasses.Field[Any], text: str) -> tuple[Any, ...]:
    """Return the value of a setting, or those of a comma list; the settings themselves check ranges."""
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
    """Return the settings of every combination of values, each of them checked."""
    for name, several in values.items():
        twice = [value for value, count in Counter(several).items() if count > 1]
        if twice:
            raise fail(f"{flag(name)} takes each value once", f"{twice[0]} twice", "Leave one out.")
    return [sheet.config(**dict(zip(values, chosen))) for chosen in itertools.product(*values.values())]


def find_scale(sheet: Sheet, name: str) -> Scale:
    """Return a scale of an experiment, by name."""
    one_of("--scale", name, sheet.scales)
    return sheet.scales[name]


def scaled(sheet: Sheet, scale: Scale, given: Mapping[str, Sequence[Any]]) -> list[Config]:
    """Return the settings of a scale's variants, with what the user gave in their place."""
    values = {**{name: (value,) for name, value in scale.settings.items()}, **scale.values, **given}
    configs = [_with_tuned(config, sheet, scale, given) for config in combine(sheet, values)]
    return [config for config in configs if not any(_fits(config, settings) for settings in scale.without)]


def _with_tuned(config: Config, sheet: Sheet, scale: Scale, given: Collection[str]) -> Config:
    for row in scale.tuned:
        variant = {name: value for name, value in row.items() if name in sheet.vary}
        if _fits(config, variant):
            chosen = {name: value for name, value in row.items() if name not in (*sheet.vary, *given)}
            config = dataclasses.replace(config, **chosen)
    return config


def _fits(config: Config, settings: Mapping[str, Any]) -> bool:
    return all(getattr(config, name) == value for name, value in settings.items())


def jobs_of_scale(sheet: Sheet, name: str, seeds: range | None = None, **given: Sequence[Any]) -> list[Job]:
    """Return a scale's jobs: every variant with every seed, and the placebo's further seeds.

    Runs whose settings the user changed are not the scale's, and do not bear its name.
    """
    scale = find_scale(sheet, name)
    own = set(scaled(sheet, scale, {}))
    seeds = range(scale.seeds) if seeds is None else seeds
    configs = scaled(sheet, scale, given)
    if not configs:
        raise fail("a scale trains at least one variant", f"{given} with --scale {name}", "Choose other values.")
    further = range(seeds.stop, seeds.stop + len(seeds))
    placebo = [config for config in configs if scale.placebo and _fits(config, scale.placebo)]
    pairs = [(config, seed) for seed in seeds for config in configs if seed - seeds.start < _most(config, scale)]
    pairs += [(config, seed) for config in placebo for seed in further]
    return _distinct([_job(sheet, config, seed, name if config in own else "") for config, seed in pairs])


def _most(config: Config, scale: Scale) -> float:
    """Return how many seeds a variant has at most."""
    return min((seeds for settings, seeds in scale.fewer if _fits(config, settings)), default=math.inf)


def jobs_for(sheet: Sheet, configs: Sequence[Config], seeds: Sequence[int]) -> list[Job]:
    """Return one job for each of the settings and each seed; no two share a folder."""
    return _distinct([_job(sheet, config, seed) for config in configs for seed in seeds])


def _job(sheet: Sheet, config: Config, seed: int, scale: str = "") -> Job:
    """Return a job whose label follows from its settings alone, so that any command finds the same folder again."""
    swept = [f for f in dataclasses.fields(config) if f.metadata["sweep"] and f.name not in sheet.vary]
    more = (f.name for f in swept if not scale and getattr(config, f.name) != f.default)
    return Job(sheet.name, config, seed, (*sheet.vary, *more), scale)


def _distinct(jobs: list[Job]) -> list[Job]:
    label, count = Counter(job.label for job in jobs).most_common(1)[0]
    if count > 1:
        raise fail("each run needs a folder of its own", f"{count} runs named {label}", "Give values further apart.")
    return jobs


def check(settings: Settings) -> None:
    """Refuse what is wrong without looking at torch or data."""
    if settings.scale and settings.tuned:
        raise fail("a scale has its own tuned settings", "--scale and --tuned together", "Pass one of them.")
    one_of("--device", settings.device, ("auto", "cpu", "cuda"))
    one_of("--engine", settings.engine, ("auto", "eager", "graph"))
    if settings.root == "":
        raise fail("--data must be a folder, or embedded", "''", "Leave it out for the default.")
    if settings.resume and settings.restart:
        raise fail("a run is either resumed or restarted", "--resume and --restart together", "Pass one of them.")
    if processes() > 1 and (settings.jobs or 1) > 1:
        raise fail("--jobs is 1 when a launcher starts the processes", f"--jobs {settings.jobs}", "Leave it out.")
    writable_folder(settings.runs, "--runs")


def uses_cuda(settings: Settings) -> bool:
    """Return whether runs will be on a GPU; only there can an update be captured."""
    cuda = False
    if settings.device != "cpu":
        import torch

        cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not cuda:
        raise fail("--device cuda needs a CUDA device", "none found", "Use --device auto.")
    if settings.engine == "graph" and not cuda:
        raise fail(f"--engine {settings.engine} needs a CUDA device", "the CPU", "Use --engine auto.")
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
    """Return the number of processes that torchrun or accelerate launch started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Return the number of this process among them."""
    return int(os.environ.get("RANK") or 0)
