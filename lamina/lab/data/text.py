"""Text as numbers: a vocabulary, and sequences of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import fail

if TYPE_CHECKING:  # whoever only builds a vocabulary needs no torch
    import torch
    from torch import Tensor

END, UNKNOWN = 0, 1  # ids of the end mark and of every word that the vocabulary lacks
MARKS = ("<end>", "<unknown>")


class Vocabulary:
    """The most frequent words, numbered from 2 on; words of equal counts in alphabetical order."""

    def __init__(self, counts: Mapping[str, int], size: int | None = None) -> None:
        """Take the words from their counts; ``size`` limits the number of ids, marks included."""
        if size is not None and size < len(MARKS):
            raise fail("a vocabulary must have room for its two marks", f"size={size}", "Pass a larger size.")
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = (*MARKS, *ranked)[:size]
        self.ids = {word: number for number, word in enumerate(self.words[len(MARKS) :], len(MARKS))}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of a sentence and the end mark."""
        return [*(self.ids.get(word, UNKNOWN) for word in words), END]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words up to the first end mark."""
        numbers = list(map(int, ids))
        return [self.words[n] for n in numbers[: numbers.index(END) if END in numbers else None]]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, end to end: number i is ``values[offsets[i] : offsets[i + 1]]``.

    values: [total, ...], at least one; offsets: whole numbers, [sequences + 1].
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        first, last = (int(self.offsets[at]) for at in (0, -1))
        if not len(self.values) or (first, last) != (0, len(self.values)) or bool((self.offsets.diff() < 0).any()):
            received = f"{len(self.values)} values, offsets from {first} to {last}"
            raise fail("offsets must rise from 0 to the number of values, at least 1", received, "Correct them.")

    @classmethod
    def of(cls, sequences: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Join sequences of numbers, arrays or tensors."""
        import torch

        parts = [torch.as_tensor(one, dtype=dtype) for one in sequences]
        filled = [part for part in parts if len(part)]  # an empty list has another dtype and shape
        if not filled:
            raise fail("ragged sequences must hold at least one value", f"{len(parts)} empty ones", "Pass others.")
        return cls(torch.cat(filled), torch.tensor([0, *map(len, parts)]).cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to(self, device: torch.device | str) -> Ragged:
        return replace(self, values=self.values.to(device), offsets=self.offsets.to(device))

    def padded(self, cases: Tensor, length: int | None = None, fill: float = 0) -> tuple[Tensor, Tensor]:
        """Return the sequences numbered ``cases``, [cases, length, ...], and their lengths, [cases].

        length: of the longest of them by default. fill: value beyond the end of a sequence.
        """
        import torch

        cases = cases.to(self.offsets.device)
        starts, lengths = self.offsets[cases], self.offsets.diff()[cases]
        longest = int(lengths.max()) if len(lengths) else 0
        if length is not None and length < longest:
            raise fail("length must hold the longest sequence", f"{length} for one of {longest}", "Pass a larger one.")
        steps = torch.arange(longest if length is None else length, device=starts.device)
        places = (starts[:, None] + steps).clamp(max=len(self.values) - 1)
        beyond = (steps >= lengths[:, None]).reshape(*places.shape, *[1] * (self.values.dim() - 1))
        return self.values[places].masked_fill(beyond, fill), lengths
