"""The embedded facts: always the same, each question has one answer, and guesses without reading stay poor."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time

import pytest
import torch

from lamina.lab.data import facts
from lamina.lab.data.questions import load_questions
from tests.lab.test_questions import told

MEANINGS = {verb: number for number, group in enumerate(facts.VERBS) for verb in group}


@pytest.fixture(scope="module")
def data():
    return load_questions("facts")


def test_the_numbers_never_change():
    arrays = facts.arrays()
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    assert digest == "4b5c6bc712c8f70b99adf73feab57c3ace268f2165ca1cdf45cb94dbb9c1e2e4"


def test_sizes_and_vocabulary(data):
    assert data.describe()["sizes"] == {"train": 3000, "valid": 300, "test": 300}
    assert 300 <= len(data.vocabulary) <= 800
    assert len(data.entities) == facts.ENTITIES
    assert (data.kind, data.name) == ("embedded", "facts")
    assert "embedded" in data.label
    assert all(int((split.passages.values == 1).sum()) == 0 for split in data.splits.values())  # no unknown words


def test_every_question_is_answered_by_exactly_one_sentence(data):
    for passage, query, answer in told(data, "valid"):
        sentences = [sentence.split() for sentence in passage.removesuffix(" .").split(" . ")]
        assert len(sentences) == 4
        assert all(7 <= len(sentence) <= 14 for sentence in sentences)  # and the point
        (meaning,) = [MEANINGS[word] for word in query.split() if word in MEANINGS]
        (fact,) = [one for one in sentences if any(MEANINGS.get(word) == meaning for word in one)]
        pair = [word for word in fact if word.startswith("@entity")]
        asked = [word for word in query.split() if word.startswith("@")]
        assert [word if word != "@placeholder" else answer for word in asked] == pair
        assert query.split()[0] == asked[0]
        assert pair[0] != pair[1]


def test_some_queries_use_another_word_than_the_passage(data):
    pairs = [(set(p.split()), next(w for w in q.split() if w in MEANINGS)) for p, q, _ in told(data, "train")]
    same = sum(verb in passage for passage, verb in pairs) / len(pairs)
    assert 0.2 < same < 0.5


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_guesses_without_reading_stay_poor(data, split):
    controls = data.controls[split]
    assert controls["answer_present"] == 1
    assert 0.6 < controls["most_frequent"] < 0.8
    assert 0.45 < controls["most_frequent_not_in_query"] < 0.65
    answers, firsts = data.splits[split].answers, data.splits[split].passages
    assert float((firsts.values[firsts.offsets[:-1]] == answers).float().mean()) < 0.35  # nor is it a fixed place
    assert float(torch.bincount(answers).max()) / len(answers) < 0.1  # nor one entity


def test_the_questions_are_made_at_once():
    start = time.perf_counter()
    facts.arrays()
    assert time.perf_counter() - start < 1.5


def test_the_stand_in_needs_no_torch():
    code = "import sys, lamina.lab.data.facts as f; f.arrays(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
