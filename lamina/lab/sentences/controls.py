"""Control rows: what a task yields without a sentence encoder.

"majority" guesses the most frequent label, or the mean score of the training pairs. "tfidf" weighs words: the inverse
document frequencies are those of all sentences of a classification task, without labels, and of SICK's training pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from ...errors import fail
from ..data.formats import Array
from . import relatedness
from .classification import Protocol, held_out_folds, nested
from .tasks import Classification, Relatedness, Task

TOKEN = r"\S+"  # the published files are tokenised


def majority(task: Task, protocol: Protocol) -> dict[str, Any]:
    """Return the measures of a guess that reads no sentence."""
    if isinstance(task, Relatedness):
        test = task.splits["test"].scores
        guesses = np.full(len(test), np.mean(task.splits["train"].scores))
        return relatedness.measured(guesses, test)
    # Of the whole set: the rest of a balanced set has fewer of a fold's more frequent label, and would guess below 50 %
    right = task.labels == np.bincount(task.labels).argmax()
    folds = 100 * np.array([right[mask].mean() for mask in held_out_folds(task, protocol)])
    return {"accuracy": float(folds.mean()), "std": float(folds.std())}


def tfidf(task: Task, protocol: Protocol) -> dict[str, Any]:
    """Return the measures of TF-IDF features: the protocol's regression, or the head of SICK."""
    if isinstance(task, Relatedness):
        return _tfidf_pairs(task)
    features = TfidfVectorizer(token_pattern=TOKEN).fit_transform(task.sentences)
    return nested(task, lambda parts, costs: _one_by_one(features, task, parts, costs), protocol)


def _one_by_one(features: Any, task: Classification, parts: Array, costs: Array) -> tuple[Array, int]:
    """Fit with scikit-learn's liblinear: quick on sparse features, and what the authors' code called."""
    scores = np.empty(parts.shape, np.float32)
    for part, cost, score in zip(parts, costs, scores):
        model = LogisticRegression(C=cost, solver="liblinear").fit(features[part], task.labels[part])
        score[:] = model.decision_function(features)
    return scores, 0


def _tfidf_pairs(task: Relatedness) -> dict[str, Any]:
    train = task.splits["train"]
    words = TfidfVectorizer(token_pattern=TOKEN).fit([*train.first, *train.second])

    def features(split: str) -> Array:
        parts = (task.splits[split].first, task.splits[split].second)
        return relatedness.pair_features(*(words.transform(part).toarray().astype(np.float32) for part in parts))

    return relatedness.regressed(task, features)


def mean_of(vectors: Mapping[str, Array]) -> Callable[[Sequence[str]], Array]:
    """Return an encoder that takes the mean of the vectors of a sentence's words; zeros where it knows none.

    vectors: by word, of one size. Words are looked up as they are, and else in lower case.
    """
    if not vectors:
        raise fail("word vectors must hold words", "none", "Pass a mapping from word to vector.")
    size = len(next(iter(vectors.values())))

    def encode(sentences: Sequence[str]) -> Array:
        return np.stack(
            [_mean([vector for word in one.split() if (vector := _vector(word)) is not None]) for one in sentences]
        )

    def _vector(word: str) -> Array | None:
        return vectors.get(word, vectors.get(word.lower()))

    def _mean(known: list[Array]) -> Array:
        return np.asarray(np.mean(known, 0)) if known else np.zeros(size)

    return encode


# By name; ``evaluation`` adds "vectors" where it was given some
CONTROLS: dict[str, Callable[[Task, Protocol], dict[str, Any]]] = {"majority": majority, "tfidf": tfidf}
