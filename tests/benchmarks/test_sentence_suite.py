"""The benchmark of the sentence suite judges TF-IDF against published figures, and the solver against scikit-learn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.lab.reports import records
from lamina.lab.sentences.tasks import load


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("sentence_suite")


def rows(**accuracies):
    found = [{"task": name, "row": "tfidf", "accuracy": value} for name, value in accuracies.items()]
    found += [{"task": name, "row": "majority", "accuracy": 50.0} for name in accuracies]
    return [*found, {"task": "SICK", "row": "tfidf", "pearson": 0.75, "spearman": 0.7, "mse": 0.44}]


NEAR = {"MR": 77.0, "CR": 79.0, "SUBJ": 91.0, "MPQA": 86.0}
QUICK = {"fits": 900, "ours": 1e-3, "sklearn": 1e-2, "mean_apart": 0.1, "apart": [0.1]}


def test_a_record_is_judged_by_its_distance_from_published_figures(benchmark):
    data = load("embedded")
    record = benchmark.record_of(rows(**NEAR), data, None)
    assert record["passed"]
    assert record["tables"][0]["rows"][0] == ["MR", "50.0", "77.0", "76.2", "78.1", "0.8"]
    assert records.name(record) == "sentence-suite"
    assert not benchmark.record_of(rows(**NEAR | {"CR": 77.4}), data, None)["passed"]
    assert benchmark.record_of(rows(**NEAR), data, QUICK)["passed"]
    assert not benchmark.record_of(rows(**NEAR), data, QUICK | {"ours": 2e-3})["passed"]
    assert not benchmark.record_of(rows(**NEAR), data, QUICK | {"mean_apart": 0.2})["passed"]


def test_a_record_holds_no_sentence(benchmark, monkeypatch):
    data = load("embedded")
    monkeypatch.setattr(benchmark, "CONTROLS", {"majority": benchmark.CONTROLS["majority"]})
    found = [row | {"row": "tfidf"} for row in benchmark.measured(data)] + benchmark.measured(data)
    text = json.dumps(records.rounded(benchmark.record_of(found, data, None)))
    assert not [one for task in data.tasks.values() for one in task.texts() if one in text]


def test_both_solvers_are_given_the_same_fits(benchmark, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(benchmark, "AXES", 5)
    try:
        found = benchmark.timed(load("embedded").tasks["CR"])
    finally:
        torch.set_num_threads(threads)
    assert found["fits"] == 900
    assert found["mean_apart"] < 2
    assert len(found["apart"]) == len(range(0, 900, 31))


def test_the_fits_are_those_of_a_nested_cross_validation(benchmark):
    parts, costs = benchmark.problems(200)
    assert parts.shape == (900, 200)
    assert set(parts.sum(1).tolist()) == {162}
    assert np.unique(costs).size == 9
