"""Embedded stand-in for the CNN questions: four facts about anonymised entities, and one of them asked in other words.

A fact is (entity, verb, entity, modifiers). The four verbs of a passage differ in meaning, so the query has one answer.
Entities recur within a passage: how often one occurs says little about the answer, and one has to read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .formats import Array
from .question_files import PLACEHOLDER, Collected

SIZES = {"train": 3000, "valid": 300, "test": 300}
TITLE = "facts about anonymised entities (embedded: 3,000 + 300 + 300)"
STAND_IN = TITLE.replace("embedded", "embedded stand-in for {}")
ENTITIES = 30
FEWEST, MOST = 6, 8  # entities in a passage
FACTS = 4


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VERBS = tuple(  # of one meaning in each group
    _words(group)
    for group in (
        "praised lauded applauded",
        "sued prosecuted litigated",
        "visited toured approached",
        "hired employed recruited",
        "defeated beat conquered",
        "blamed accused faulted",
        "rescued saved freed",
        "married wed espoused",
        "attacked assaulted raided",
        "funded financed sponsored",
        "replaced succeeded supplanted",
        "questioned interrogated quizzed",
        "trained coached taught",
        "warned cautioned alerted",
        "thanked rewarded honored",
        "fired dismissed sacked",
        "followed pursued chased",
        "met encountered greeted",
        "mocked ridiculed taunted",
        "feared dreaded distrusted",
        "helped assisted supported",
        "robbed plundered looted",
        "elected chose selected",
        "invited summoned welcomed",
        "joined accompanied escorted",
        "ignored neglected overlooked",
    )
)
ADVERBS = _words(
    "quietly openly briefly finally again reportedly publicly suddenly nearly often repeatedly once secretly gladly "
    "promptly officially allegedly proudly barely twice"
)
LINKS = _words("over after during before despite following with amid for near")
ADJECTIVES = _words(
    "old new long secret failed famous bitter costly local annual violent rare final public private early late deadly "
    "broken historic popular strange quiet crowded bright hidden sudden brief massive narrow "
    "ancient modern tragic generous reckless foreign domestic urgent delayed disputed"
)
NOUNS = _words(
    "trial storm election film concert strike fire match treaty merger protest debate flight party summit wedding "
    "contract rescue robbery budget speech festival blackout crash scandal parade auction drought lecture tournament "
    "harvest referendum shipwreck hearing blockade ceremony rally ceasefire outage audit premiere vaccine pipeline "
    "bridge museum railway harbour stadium dam school tunnel hospital orchestra statue satellite voyage marathon "
    "archive garden castle factory lottery manuscript expedition glacier volcano monument theatre cathedral reactor"
)
PLACES = _words(
    "paris london tokyo cairo boston madrid lima oslo delhi sydney berlin nairobi athens dublin havana geneva seoul "
    "lagos vienna kabul texas alaska quebec florida lisbon warsaw prague zurich milan munich naples riga oxford "
    "jakarta manila bogota quito tunis accra"
)
DAYS = _words("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = _words("january february march april may june july august september october november december")


def arrays() -> dict[str, Array]:
    """Return the questions of the three splits, as ``Collected.arrays`` holds them."""
    collected, random = Collected(), np.random.RandomState(20)  # a legacy generator: its numbers are frozen
    for split, size in SIZES.items():
        for number in range(size):
            passage, query, answer = _question(random)
            collected.add(split, passage, query, answer, f"{split} {number}")
    return collected.arrays("the embedded facts")


def _question(random: np.random.RandomState) -> tuple[list[str], list[str], str]:
    """Return passage, query and answer of one question."""
    draws = random.randint(0, 2**16, (FACTS + 1, 12)).tolist()
    cast = random.permutation(ENTITIES)[: FEWEST + draws[-1][0] % (MOST - FEWEST + 1)].tolist()
    meanings = random.permutation(len(VERBS))[:FACTS].tolist()
    told = [_fact(cast, meaning, draw) for meaning, draw in zip(meanings, draws)]
    asked, role = draws[-1][1] % FACTS, draws[-1][2] % 2
    pair, verb, phrase, rest = told[asked]
    verb = VERBS[meanings[asked]][draws[-1][3] % 3]  # maybe of the same meaning only
    answer, names = pair[role], [*pair]
    names[role] = PLACEHOLDER
    query = [names[0], verb, names[1], *phrase[: 4 * (draws[-1][4] % 2)], *rest[: 2 * (draws[-1][5] % 2)]]
    passage = [word for one, draw in zip(told, draws) for word in _sentence(*one, adverb=draw[11])]
    return passage, query, answer


def _fact(cast: Sequence[int], meaning: int, draw: Sequence[int]) -> tuple[list[str], str, list[str], list[str]]:
    """Return two entities, the verb between them, where it applies, and place and time."""
    first = draw[0] % len(cast)
    second = (first + 1 + draw[1] % (len(cast) - 1)) % len(cast)
    pair = [f"@entity{cast[first]}", f"@entity{cast[second]}"]
    phrase = [LINKS[draw[3] % len(LINKS)], "the", ADJECTIVES[draw[4] % len(ADJECTIVES)], NOUNS[draw[5] % len(NOUNS)]]
    rest = ["in", PLACES[draw[6] % len(PLACES)]] * (draw[7] % 2)
    rest += ["on", DAYS[draw[8] % len(DAYS)]] * (draw[9] % 2)
    rest += ["last", MONTHS[draw[8] % len(MONTHS)]] * (draw[10] % 3 == 0)
    return pair, VERBS[meaning][draw[2] % 3], phrase, rest


def _sentence(pair: Sequence[str], verb: str, phrase: Sequence[str], rest: Sequence[str], adverb: int) -> list[str]:
    """Return a sentence of 8 to 15 tokens."""
    adverbs = [ADVERBS[adverb // 2 % len(ADVERBS)]] * (adverb % 2)
    return [pair[0], *adverbs, verb, pair[1], *phrase, *rest, "."]
