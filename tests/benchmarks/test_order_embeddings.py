"""The benchmark of order embeddings times two contenders that compute the same, and writes a record."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from lamina.lab.experiments.order_embeddings.settings import OrderConfig

SMALL = OrderConfig(units=24, word_size=10, batch_size=9)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("order_embeddings")


def test_a_record_names_medians_and_their_ratio(benchmark):
    threads = torch.get_num_threads()
    try:
        found = benchmark.measure(3, SMALL)
    finally:
        torch.set_num_threads(threads)
    assert found["difference"] < 1e-3
    assert [len(times) for times in found["seconds"].values()] == [3, 3]
    found["seconds"] = {"ours": [0.2, 0.3, 0.9], "eager": [1.0, 1.5, 1.2]}
    record = benchmark.record_of(found, SMALL)
    assert record["tables"][0]["rows"] == [["24", "0.300", "1.200", "0.25"]]
    assert record["passed"]
    found["seconds"]["ours"] = [0.41] * 3
    assert not benchmark.record_of(found, SMALL)["passed"]


def test_contenders_that_differ_are_not_timed(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "ours", lambda model, batch: 1.01 * benchmark.eager(model, batch))
    with pytest.raises(RuntimeError, match="not timed"):
        benchmark.measure(1, SMALL)
