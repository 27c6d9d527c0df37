"""Embedded stand-in for the sentence tasks: made-up opinions, descriptions, phrases, and pairs of scenes.

A class shows in some of its words only, so that good features beat poor ones and nothing reaches 100 %.
"""

from __future__ import annotations

import numpy as np

from .formats import Array, lines_array
from .sentence_files import classes, pairs

SIZES = {"MR": (120, 120), "CR": (100, 60), "SUBJ": (120, 120), "MPQA": (70, 130)}  # of label 1 and label 0
PAIR_SIZES = {"train": 240, "valid": 60, "test": 120}
STAND_IN = "made-up opinions and pairs (embedded stand-in for sentence_eval: 240 + 60 + 120)"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GOOD = _words("brilliant moving warm funny sharp tender superb honest fresh graceful reliable crisp")
BAD = _words("dull clumsy cold tedious shallow noisy awful lazy stale bloated fragile blurry")
FILM = _words("film plot cast script ending music story hero scene camera")
THING = _words("phone lens battery router screen menu player button manual case")
PLAIN = _words("long short second usual new old french quiet small whole")
EVENTS = _words("travels returns marries discovers escapes inherits follows meets hides sails")
SUBJECTS = ("a man", "a woman", "a boy", "a girl", "a dog", "two children", "an old man", "a cat")
ACTIONS = _words("washing chasing holding watching pulling painting lifting throwing")
OBJECTS = _words("ball car bicycle basket horse kite boat guitar")
SITES = (
    "in a park",
    "on the beach",
    "near a river",
    "in the street",
    "on a hill",
    "indoors",
    "in the snow",
    "at night",
)
NOISE = 0.15  # share of opinions whose word is of the other class


class _Draws:
    """Random choices that are the same on every machine."""

    def __init__(self) -> None:
        self._random = np.random.RandomState(31)  # a legacy generator: its numbers are frozen

    def one(self, choices: tuple[str, ...]) -> str:
        return choices[self._random.randint(len(choices))]

    def below(self, limit: int) -> int:
        return int(self._random.randint(limit))

    def chance(self, share: float) -> bool:
        return bool(self._random.random_sample() < share)


def arrays() -> dict[str, Array]:
    """Return the tasks as ``sentence_files.read`` does."""
    draws, held = _Draws(), dict[str, Array]()
    for task, (ones, zeros) in SIZES.items():
        texts = [[_sentence(task, label, draws) for _ in range(size)] for label, size in ((1, ones), (0, zeros))]
        held |= classes(task, *texts)
    for split, size in PAIR_SIZES.items():
        held |= pairs(split, [_pair(draws) for _ in range(size)])
    return held | {"notes": lines_array(())}


def _sentence(task: str, label: int, draws: _Draws) -> str:
    if draws.chance(NOISE):
        label = 1 - label
    if task == "SUBJ":
        return _description(draws) if label else _opinion(draws.chance(0.5), FILM, draws)
    if task == "MPQA":
        return f"{draws.one(PLAIN)} {draws.one(GOOD if label else BAD)}"
    return _opinion(bool(label), FILM if task == "MR" else THING, draws)


def _opinion(good: bool, things: tuple[str, ...], draws: _Draws) -> str:
    judged, told = draws.one(GOOD if good else BAD), draws.one(PLAIN)
    return f"the {told} {draws.one(things)} is {judged} , with a {draws.one(PLAIN)} {draws.one(things)} ."


def _description(draws: _Draws) -> str:
    return f"{draws.one(SUBJECTS)} {draws.one(EVENTS)} {draws.one(SITES)} with a {draws.one(PLAIN)} {draws.one(FILM)} ."


def _pair(draws: _Draws) -> tuple[str, str, float]:
    """Return two scenes; their relatedness rises by 1 with each of the four parts that they share."""
    parts = (SUBJECTS, ACTIONS, OBJECTS, SITES)
    first = [draws.one(choices) for choices in parts]
    kept = draws.below(len(parts) + 1)
    second = [old if at < kept else draws.one(new) for at, (old, new) in enumerate(zip(first, parts))]
    shared = sum(a == b for a, b in zip(first, second))
    return _scene(first), _scene(second), 1.0 + shared


def _scene(parts: list[str]) -> str:
    subject, action, thing, site = parts
    return f"{subject} {'are' if subject.startswith('two') else 'is'} {action} a {thing} {site}"
