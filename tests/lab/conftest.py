"""Lab tests train on 8x8 digits, which take an eighth of the embedded set's time."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lamina.lab.data.registry import Dataset
from lamina.lab.experiments import images


@lru_cache
def digits(name: str, root: str | None = None) -> Dataset:
    found = load_digits()
    pixels, labels = np.rint(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.uint8)
    arrays = {"train_x": pixels[500:], "train_y": labels[500:], "test_x": pixels[:500], "test_y": labels[:500]}
    return Dataset(name, "embedded", "digits 8x8 (embedded stand-in)", arrays, {})


@pytest.fixture
def small_digits(monkeypatch):
    monkeypatch.setattr(images, "_read", digits)
