"""Vocabularies and ragged sequences, by their properties."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import InputError
from lamina.lab.data.text import END, MARKS, UNKNOWN, Ragged, Vocabulary

WORDS = st.text("abcé ", min_size=1, max_size=3) | st.sampled_from(MARKS)
SENTENCES = st.lists(WORDS, max_size=8)
COUNTS = st.dictionaries(WORDS, st.integers(1, 4), max_size=8)


@given(COUNTS, SENTENCES)
def test_known_words_come_back_and_others_are_unknown(counts, sentence):
    vocabulary = Vocabulary(counts)
    ids = vocabulary.encode(sentence)
    assert ids[-1] == END
    assert END not in ids[:-1]
    assert vocabulary.decode(ids) == [word if word in counts else MARKS[UNKNOWN] for word in sentence]
    assert vocabulary.decode([*ids, 1, 1]) == vocabulary.decode(ids[:-1]) == vocabulary.decode(torch.tensor(ids))


@given(COUNTS, st.integers(2, 12), st.randoms())
def test_a_limited_vocabulary_keeps_the_most_frequent_words(counts, size, chance):
    vocabulary = Vocabulary(counts, size)
    assert len(vocabulary) == min(size, len(counts) + 2)
    kept = vocabulary.words[2:]
    assert all((-counts[a], a) < (-counts[b], b) for a, b in pairwise(kept))
    assert all(counts[word] <= min(counts[k] for k in kept) for word in set(counts) - set(kept) if kept)
    shuffled = list(counts.items())
    chance.shuffle(shuffled)
    assert Vocabulary(dict(shuffled), size).words == vocabulary.words  # whatever order the words were counted in


def test_a_vocabulary_counts_sentences():
    vocabulary = Vocabulary(Counter(["a", "rose", "is"] * 2 + ["a", "rose"]), 4)
    assert vocabulary.words == ("<end>", "<unknown>", "a", "rose")
    assert vocabulary.encode(["a", "rose", "is"]) == [2, 3, UNKNOWN, END]
    with pytest.raises(InputError, match="room for its two marks, got size=1"):
        Vocabulary({"a": 1}, 1)


SEQUENCES = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=6).filter(any)


@given(SEQUENCES, st.data())
def test_padded_sequences_are_the_sequences_and_nothing_else(sequences, draw):
    ragged = Ragged.of(sequences, torch.int64)
    assert len(ragged) == len(sequences)
    cases = draw.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=7))
    longest = max((len(sequences[case]) for case in cases), default=0)
    length = draw.draw(st.none() | st.integers(longest, longest + 3))
    values, lengths = ragged.padded(torch.tensor(cases, dtype=torch.int64), length, fill=99)
    assert values.shape == (len(cases), longest if length is None else length)
    assert lengths.tolist() == [len(sequences[case]) for case in cases]
    for row, case in zip(values.tolist(), cases):
        assert row == sequences[case] + [99] * (len(row) - len(sequences[case]))


@given(SEQUENCES)
def test_values_may_be_vectors_and_come_as_arrays_or_tensors(sequences):
    points = [np.array(one, np.float32).reshape(-1, 1) * np.ones(3, np.float32) for one in sequences]
    cases = torch.arange(len(points))
    values, lengths = Ragged.of(points).padded(cases)
    for row, length, one in zip(values, lengths, points):
        np.testing.assert_array_equal(row[:length], one)
        assert not row[length:].any()
    again, _ = Ragged.of([torch.from_numpy(one) for one in points]).to("cpu").padded(cases)
    assert torch.equal(again, values)


def test_a_ragged_set_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="at least one value, got 2 empty ones"):
        Ragged.of([[], []])
    for offsets in ([0, 2], [1, 3], [0, 2, 1, 3]):
        with pytest.raises(InputError, match="offsets must rise"):
            Ragged(torch.arange(3), torch.tensor(offsets))
    with pytest.raises(InputError, match="got 1 for one of 2"):
        Ragged.of([[1, 2], [3]]).padded(torch.tensor([0, 1]), length=1)


def test_a_vocabulary_needs_no_torch():
    code = "import sys, lamina.lab.data.text as t; t.Vocabulary({'a': 1}).encode('a'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
