"""Drawn scenes: the same bytes everywhere, pictures and captions that agree, features that carry the content."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from lamina.lab.data import scenes
from lamina.lab.data.captions import load_captions, vocabulary_of

NUMBERS = {"three": 3, "four": 4, "five": 5, "six": 6}


@pytest.fixture(scope="module")
def data():
    return load_captions("scenes")


def test_scenes_come_in_three_splits_of_unit_features_and_five_captions(data):
    assert data.describe()["sizes"] == scenes.SIZES
    assert (data.kind, data.name) == ("embedded", "scenes")
    names = [name for split in data.splits.values() for name in split.names]
    assert len(set(names)) == len(names) == 2400
    for split in data.splits.values():
        assert len(split.captions) == 5 * len(split.names) == 5 * len(split.features)
        assert split.features.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(split.features, axis=1), 1, atol=1e-6)
        assert {6 <= len(caption) <= 25 for caption in split.captions} == {True}
    vocabulary = vocabulary_of(data.splits["train"])
    assert {word in vocabulary.ids for split in data.splits.values() for c in split.captions for word in c} == {True}


def test_every_machine_draws_the_same_bytes(data):
    """Records name the scenes by these hashes: with others, no old run could be resumed."""
    assert data.sha256["train_x"] == "dc9955e8e0c3e3f6ae816121bbef2c55fc54434533a4f7e3ed3f9b6564a8207b"
    assert data.sha256["test_captions"] == "f3820015b5901229dafe3458eae0c1f0ababf08633f843e1276a406283b8647a"


def test_pictures_show_what_captions_say(data):
    """The colours of a caption are in its picture, and it counts the shapes that are drawn."""
    split, drawn = data.splits["test"], scenes._scenes()
    counted = 0
    for number, caption in enumerate(split.captions):
        name = split.names[number // 5]
        colours = {tuple(pixel) for pixel in scenes.picture(name).reshape(-1, 3).tolist()}
        assert all(scenes.COLOURS[word] in colours for word in caption if word in scenes.COLOURS)
        if caption[0] in NUMBERS:
            counted += 1
            assert drawn.counts[int(name[-4:])] == NUMBERS[caption[0]]
    assert counted > 50


def test_relations_are_true():
    a, b = scenes.Thing("ring", "red", 1, (0, 2)), scenes.Thing("cross", "blue", 0, (2, 2))
    assert {scenes._relation(a, b, draw) for draw in range(4)} == {"above", "over"}
    assert {scenes._relation(b, a, draw) for draw in range(4)} == {"below", "under"}
    aside = scenes.Thing("ring", "red", 1, (1, 0))
    assert {scenes._relation(aside, b, draw) for draw in range(4)} >= {"above", "to the left of"}
    assert {scenes._place(aside, draw) for draw in range(2)} == {"on the left", "at the left edge"}
    assert {scenes._phrase(scenes.Thing("square", "orange", 0, (0, 0)), draw) for draw in range(8)} == {
        "an orange square", "an orange box", "a small orange square", "a small orange box", "a little orange square",
        "a little orange box",
    }  # fmt: skip


def test_a_linear_map_of_the_features_retrieves_far_above_chance_and_far_from_perfectly(data):
    """Ridge regression to bags of words. Chance is 5 % among the first ten of 200."""
    found = recall_of_ridge(data, 10)
    assert 15 < found < 50
    assert recall_of_ridge(data, 1) < 15
    shuffled = np.random.default_rng(0).permutation(2000)
    assert recall_of_ridge(data, 10, shuffled) < 9  # features of other scenes


def recall_of_ridge(data, first, order=slice(None)):
    """Image retrieval at ``first`` in percent, by cosine of predicted and true bags of words."""
    train, test = data.splits["train"], data.splits["test"]
    vocabulary = vocabulary_of(train)

    def bags(captions):
        found = np.zeros((len(captions), len(vocabulary)))
        for row, caption in enumerate(captions):
            np.add.at(found[row], vocabulary.encode(caption)[:-1], 1)
        return found

    wanted = bags(train.captions).reshape(len(train.names), 5, -1).mean(1)
    mean, scale = wanted.mean(0), 1 / (wanted.std(0) + 0.03)
    centre, spread = train.features.mean(0), train.features.std(0) + 1e-6
    x, y = ((train.features - centre) / spread)[order], (wanted - mean) * scale
    weights = np.linalg.solve(x.T @ x + 0.3 * len(x) * np.eye(x.shape[1]), x.T @ y)
    predicted, asked = ((test.features - centre) / spread) @ weights, (bags(test.captions) - mean) * scale
    scores = asked @ (predicted / np.linalg.norm(predicted, axis=1, keepdims=True)).T
    own = scores[np.arange(len(scores)), np.arange(len(scores)) // 5]
    return 100 * ((scores > own[:, None]).sum(1) < first).mean()


def test_scenes_are_drawn_in_time_and_need_no_torch():
    code = "import sys, time; began = time.perf_counter(); from lamina.lab.data import captions; "
    code += "captions.load_captions('scenes'); print('torch' in sys.modules, time.perf_counter() - began)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("False"), done.stderr
    assert time.perf_counter() - began < 5  # 0.3 s on an idle core
