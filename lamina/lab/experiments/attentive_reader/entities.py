"""Names of entities: training draws new ones, so that a reader cannot learn who is who.

A renaming is a row of E numbers: number k of the entities becomes number row[k]. Rows are permutations, so one row
applied to passage, query and answer keeps the question and its answer as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...training.draws import Draws


def numbers_by_id(entities: Tensor, vocabulary: int) -> Tensor:
    """Return the number of the entity with each id, [vocabulary]; -1 for words that are none."""
    numbers = torch.full((vocabulary,), -1, dtype=torch.long)
    numbers[entities] = torch.arange(len(entities))
    return numbers


def random_names(draws: Draws, count: int, for_each: bool) -> Tensor:
    """Return a random renaming of so many entities: one for the batch [1, count], or one for each question."""
    if for_each:
        return draws.uniform(count).argsort(1)
    return torch.randperm(count, generator=draws.once(), device=draws.once().device).unsqueeze(0)


def renamed(ids: Tensor, names: Tensor, entities: Tensor, numbers: Tensor) -> Tensor:
    """Return ids [B, T] with every entity renamed; other words stay.

    names: [B, E] or [1, E]. numbers: the entity's number of each id, as ``numbers_by_id`` returns them.
    """
    own = numbers[ids]
    new = names.expand(len(ids), -1).gather(1, own.clamp(min=0))
    return torch.where(own < 0, ids, entities[new])
