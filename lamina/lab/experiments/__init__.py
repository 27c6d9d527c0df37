"""The experiments' sheets: settings, the paper's claims and how each is judged and drawn. No torch in this room."""

from __future__ import annotations

from ...errors import one_of
from ..experiment import Claim, Config, Figure, Job, Number, Panel, Sheet, Verdict
from ..results import Results, Sample, steps_to_best, steps_to_target
from .convnet.settings import SHEET as CONVNET
from .mnist.settings import SHEET as MNIST

SHEETS: dict[str, Sheet] = {sheet.name: sheet for sheet in (MNIST, CONVNET)}

__all__ = [
    "SHEETS",
    "find",
    "Claim",
    "Config",
    "Figure",
    "Job",
    "Number",
    "Panel",
    "Sheet",
    "Verdict",
    "Results",
    "Sample",
    "steps_to_best",
    "steps_to_target",
]


def find(name: str) -> Sheet:
    """The sheet of an experiment; an unknown name gets the nearest one suggested."""
    one_of("experiment", name, SHEETS)
    return SHEETS[name]
