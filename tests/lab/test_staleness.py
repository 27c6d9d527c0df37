"""Records whose code has changed since: which files count, and what is said where git cannot tell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lamina.lab.experiments import SHEETS
from lamina.lab.reports import staleness
from lamina.lab.runs import environment

PACKAGE = environment.PACKAGE
FILES = ("__init__.py", "functional.py", "kernels/sequence.py", "kernels/cpu/rows.py", "lab/training/loop.py")
GPU, CPU = {"kind": "bench", "name": "sequence"}, {"kind": "bench", "name": "cpu"}
RUNS = {"kind": "experiment", "experiment": "mnist"}

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="asks git")


def git(folder, *words):
    options = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *options, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a repository with one commit, in place of ours."""
    folder = tmp_path / "repository" / "lamina"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a = 1\n")
    git(tmp_path, "init", "-q", "repository")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    return folder


def record_of(kind, *commits):
    made = [{"environment": {"commit": commit}} for commit in commits]
    return {**kind, **({"runs": made} if kind is RUNS else made[0])}


def marks(commit, *kinds):
    return [[mark.split(":")[0] for mark in staleness.marks(record_of(kind, commit))] for kind in kinds]


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("functional.py", (True, True, False)),
        ("kernels/sequence.py", (True, False, False)),
        ("kernels/cpu/rows.py", (False, True, False)),
        ("lab/training/loop.py", (False, False, True)),
        ("__init__.py", (False, False, False)),
    ],
)
def test_a_record_is_stale_when_a_file_that_it_covers_has_changed(package, file, stale):
    first = git(package, "rev-parse", "HEAD")
    assert marks(first, GPU, CPU, RUNS) == [[], [], []]
    (package / file).write_text("a = 2\n")
    wanted = [["Stale"] if each else [] for each in stale]
    assert marks(first, GPU, CPU, RUNS) == wanted
    git(package, "commit", "-q", "-a", "-m", "second")
    assert marks(first, GPU, CPU, RUNS) == wanted
    assert marks(git(package, "rev-parse", "HEAD"), GPU, CPU, RUNS) == [[], [], []]


def test_words_and_a_new_name_make_no_record_stale(package):
    first = git(package, "rev-parse", "HEAD")
    (package / "functional.py").write_text('"""More words."""\n\nimport sys\n\na = 1  # and here\n')
    git(package, "mv", "lab/training/loop.py", "lab/training/training_loop.py")
    assert marks(first, GPU, CPU, RUNS) == [[], [], []]
    (package / "lab/training/training_loop.py").write_text("a = 2\n")
    assert marks(first, GPU, CPU, RUNS) == [[], [], ["Stale"]]


FUNCTION = """
def total(values, start=1):
    found = start
    for value in values:
        found += value
    return found
"""


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("found", "subtotal", False),
        ("value in values", "value in reversed(values)", True),
        ("start", "first", True),  # an argument's name is part of the call
        ("=1", "=1.0", True),
        ("total", "added", True),
    ],
)
def test_a_local_variable_may_change_its_name(package, old, new, stale):
    (package / "functional.py").write_text(FUNCTION)
    git(package, "commit", "-q", "-a", "-m", "second")
    (package / "functional.py").write_text(FUNCTION.replace(old, new))
    assert marks(git(package, "rev-parse", "HEAD"), GPU) == [["Stale"] if stale else []]


def test_what_git_cannot_tell_is_said(package, monkeypatch, tmp_path):
    first = git(package, "rev-parse", "HEAD")
    assert marks("0" * 40, GPU) == marks("--output=x", GPU) == [["Not checked"]]
    assert marks(None, GPU) == [[]]  # the report says "commit not recorded"
    (package / "lab/training/loop.py").write_text("a = 2\n")
    git(package, "commit", "-q", "-a", "-m", "second")
    git(tmp_path, "clone", "-q", "--depth", "1", package.parent.as_uri(), "shallow")
    for folder in (tmp_path / "shallow" / "lamina", tmp_path):
        monkeypatch.setattr(environment, "PACKAGE", folder)
        assert marks(first, GPU) == [["Not checked"]]


def test_each_commit_of_a_records_rows_is_told_of(package):
    first = git(package, "rev-parse", "HEAD")
    (package / "lab/training/loop.py").write_text("a = 2\n")
    git(package, "commit", "-q", "-a", "-m", "second")
    commits = [first, git(package, "rev-parse", "HEAD"), "f" * 40, first]
    assert [*staleness.marks(record_of(RUNS, *commits))] == [
        f"Stale: 2 of 4 runs made at commit {first[:12]}; the training code or the layers that it trains changed after "
        "it.",
        "Not checked: whether the training code or the layers that it trains changed after commit ffffffffffff. Git "
        "does not know it here.",
    ]


def test_data_make_no_record_stale(package):
    """A record holds the SHA-256 of its data."""
    (package / "lab/data").mkdir()
    (package / "lab/data/formats.py").write_text("a = 1\n")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "second")
    second = git(package, "rev-parse", "HEAD")
    (package / "lab/data/formats.py").write_text("a = 2\n")
    assert marks(second, RUNS) == [[]]


OWN_MODELS = ("order_embeddings", "attentive_reader", "skip_thoughts")


@pytest.mark.parametrize(
    ("file", "experiments"),
    [
        ("mnist/model.py", ["mnist"]),
        ("mnist/settings.py", []),
        ("mnist/claims.py", []),
        ("images.py", ["mnist", "convnet"]),
        ("order_embeddings/scores.py", ["order_embeddings"]),
        ("order_embeddings/search.py", []),
        ("attentive_reader/entities.py", ["attentive_reader"]),
        ("attentive_reader/pictures.py", []),
        ("skip_thoughts/softmax.py", ["skip_thoughts"]),
        ("skip_thoughts/expansion.py", []),
        ("skip_thoughts/encoding.py", []),
        ("skip_thoughts/suite.py", []),
        ("another/model.py", ["another"]),
    ],
)
def test_a_record_is_about_its_own_experiment_alone(package, file, experiments):
    path = package / "lab/experiments" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    first = git(package, "rev-parse", "HEAD")
    path.write_text("a = 1\n")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "second")
    kinds = [{**RUNS, "experiment": name} for name in ("mnist", "convnet", *OWN_MODELS, "another")]
    stale = [kind["experiment"] for kind in kinds if [*staleness.marks({**kind, "environment": {"commit": first}})]]
    assert stale == experiments


RECORDS = [
    *({"kind": kind, "experiment": name} for kind in ("experiment", "tuning") for name in SHEETS),
    *({"kind": kind, "name": name} for kind, name in (("soak", ""), ("bench", "cpu"), ("bench", "sequence"))),
    {"kind": "bench", "name": "order", "experiment": "order_embeddings"},
    {"kind": "sentence", "name": "suite"},
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: "-".join(record.values()))
def test_covered_files_exist(record):
    """A file that was renamed would be covered no more."""
    code = staleness.covered(record)
    paths = [file for file in code.files if file != "." and not file.startswith(":!")]
    assert [path for path in paths if not [*PACKAGE.glob(path)]] == []
