"""The sentence suite on features with known results: TF-IDF of single words against published figures.

    python benchmarks/sentence_suite.py --data DIR --out results/sentence-suite.json

DIR holds the files of sentence_eval. Published: Wang and Manning, "Baselines and Bigrams", ACL 2012, table 2, rows of
linear classifiers on single words. ``--timing`` also compares the batched solver with scikit-learn on dense features of
MR: accuracies of the same fits, and CPU seconds of one thread. The record holds no sentence of the data.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamina.lab.data.formats import Array
from lamina.lab.reports import records
from lamina.lab.sentences.classification import FOLDS, PROTOCOLS, contiguous
from lamina.lab.sentences.controls import CONTROLS, TOKEN
from lamina.lab.sentences.logistic import LogisticRegressions
from lamina.lab.sentences.tasks import Classification, TaskData, load

PUBLISHED = {  # accuracy in percent: linear SVM, and its combination with naive Bayes, which is no plain classifier
    "MR": (76.2, 78.1),
    "CR": (79.0, 80.5),
    "SUBJ": (90.8, 92.4),
    "MPQA": (86.1, 85.3),
}
ALLOWED, AGREED, FASTER = 1.5, 0.1, 10.0  # points, points, times
AXES, EACH = 300, 3  # size of the dense features; fits out of each outer fold that scikit-learn is timed on
Row = dict[str, Any]


def measured(data: TaskData) -> list[Row]:
    """Return accuracies of the two controls for each task, and measures of SICK."""
    return [
        {"task": name, "row": control, **measure(task, PROTOCOLS["kiros"])}
        for name, task in data.tasks.items()
        for control, measure in CONTROLS.items()
    ]


def dense(task: Classification) -> Array:
    """Return TF-IDF features on their first axes, of length 1 like skip-thoughts' vectors."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    words = TfidfVectorizer(token_pattern=TOKEN).fit_transform(task.sentences)
    return normalize(TruncatedSVD(AXES, random_state=0).fit_transform(words)).astype(np.float32)


def problems(count: int) -> tuple[Array, Array]:
    """Return parts and C of all fits of a nested cross-validation but the last ones."""
    outer = np.array_split(np.random.RandomState(1234).permutation(count), FOLDS)
    parts = np.ones((FOLDS * FOLDS, count), np.bool_)
    for number, held_out in enumerate(outer):
        rest = np.setdiff1d(np.arange(count), held_out)
        for row, fold in zip(parts[FOLDS * number :], contiguous(rest)):
            row[held_out] = row[rest[fold]] = False
    costs = np.array(PROTOCOLS["kiros"].costs)
    return np.repeat(parts, len(costs), 0), np.tile(costs, len(parts))


def timed(task: Classification) -> Row:
    """Compare the batched solver with scikit-learn's, which fits some of the parts only."""
    from sklearn.linear_model import LogisticRegression

    torch.set_num_threads(1)
    features, labels = dense(task), task.labels
    parts, costs = problems(len(labels))
    began = time.process_time()
    regressions = LogisticRegressions(torch.from_numpy(features), torch.from_numpy(labels))
    scores = regressions.solve(torch.from_numpy(parts), torch.from_numpy(costs)).scores.numpy()
    ours = (time.process_time() - began) / len(parts)
    chosen, apart = range(0, len(parts), len(parts) // (EACH * FOLDS) + 1), list[float]()
    began = time.process_time()
    models = [LogisticRegression(C=costs[n], max_iter=1000).fit(features[parts[n]], labels[parts[n]]) for n in chosen]
    theirs = (time.process_time() - began) / len(models)
    for number, model in zip(chosen, models):
        rest = ~parts[number]
        right = [(guess[rest] == labels[rest]).mean() for guess in (scores[number] > 0, model.predict(features))]
        apart.append(100 * abs(float(right[0] - right[1])))
    return {"fits": len(parts), "ours": ours, "sklearn": theirs, "mean_apart": float(np.mean(apart)), "apart": apart}


def record_of(rows: list[Row], data: TaskData, timing: Row | None) -> dict[str, Any]:
    found = {row["task"]: row for row in rows if row["row"] == "tfidf"}
    apart = {name: abs(found[name]["accuracy"] - svm) for name, (svm, _) in PUBLISHED.items()}
    passed = max(apart.values()) <= ALLOWED and (timing is None or _quick(timing))
    return {
        "schema": records.SCHEMA, "kind": "sentence", "name": "suite", "environment": records.environment(),
        "title": "The sentence evaluation on features with known results", "rows": rows, "timing": timing,
        "data": {"label": data.label, "kind": data.kind},
        "command": "python benchmarks/sentence_suite.py --data DIR" + " --timing" * (timing is not None),
        "passed": passed, "tables": _tables(rows, found, apart, timing),
        "about": f"TF-IDF of single words, {data.label}. Published: Wang and Manning, Baselines and Bigrams, ACL 2012, "
        f"table 2. Allowed: {ALLOWED} points between ours and the linear SVM on single words.",
    }  # fmt: skip


def _quick(timing: Row) -> bool:
    return bool(timing["sklearn"] >= FASTER * timing["ours"] and timing["mean_apart"] <= AGREED)


def _tables(rows: list[Row], found: dict[str, Row], apart: dict[str, float], timing: Row | None) -> list[Row]:
    majority = {row["task"]: row for row in rows if row["row"] == "majority"}
    shown = [
        [name, *(f"{value:.1f}" for value in (majority[name]["accuracy"], found[name]["accuracy"], svm, both)),
         f"{apart[name]:.1f}"] for name, (svm, both) in PUBLISHED.items()
    ]  # fmt: skip
    columns = ["Task", "Majority", "TF-IDF, logistic regression", "Published SVM", "Published NBSVM", "Apart"]
    tables: list[Row] = [{"caption": "Accuracy in percent, nested ten-fold", "columns": columns, "rows": shown}]
    sick = [f"{found['SICK'][name]:.3f}" for name in ("pearson", "spearman", "mse")]
    tables.append({"caption": "SICK, TF-IDF", "columns": ["Pearson", "Spearman", "Squared error"], "rows": [sick]})
    if timing is not None:
        row = [f"{timing['fits']:,}", f"{1e3 * timing['ours']:.1f}", f"{1e3 * timing['sklearn']:.1f}",
               f"{timing['sklearn'] / timing['ours']:.0f}", f"{timing['mean_apart']:.3f}"]  # fmt: skip
        columns = ["Fits", "Ours, CPU ms a fit", "scikit-learn, CPU ms a fit", "Times as fast", "Points apart"]
        tables.append({"caption": f"Logistic regressions on {AXES} features of MR", "columns": columns, "rows": [row]})
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", default="results/sentence-suite.json")
    parser.add_argument("--timing", action="store_true")
    given = parser.parse_args()
    data = load(given.data)
    mr = data.tasks["MR"]
    timing = timed(mr) if given.timing and isinstance(mr, Classification) else None
    record = record_of(measured(data), data, timing)
    for table in record["tables"]:
        for line in table["rows"]:
            print(*(f"{name} {value}" for name, value in zip(table["columns"], line)), sep="; ")
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(records.rounded(record), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
