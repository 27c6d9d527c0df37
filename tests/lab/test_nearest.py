"""Encoders of a run of skip-thoughts: their vectors, nearest sentences, the sentence suite, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.lab.cli.commands import main
from lamina.lab.data.text import END, UNKNOWN
from lamina.lab.experiments.skip_thoughts import encoding, model, suite
from lamina.lab.experiments.skip_thoughts.expansion import WordVectors
from lamina.lab.options import Settings
from lamina.lab.sentences import controls, evaluation, relatedness

SENTENCES = (
    *("The value of the expression is returned.", "", "zzq wwv", "a name", "A NAME", "a zzq name ."),
    " ".join(["the value of a name"] * 20),
)
CPU = Settings(device="cpu", root="embedded")


@pytest.fixture(autouse=True)
def _no_data_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    words = "run skip_thoughts --dataset topics --units 8 --word-size 6 --vocabulary 200 --updates 2 --eval-updates 2"
    words += " --valid-triples 4 --batch-size 8 --lr 0.1 --device cpu --jobs 1 --quiet --runs"
    assert main([*words.split(), str(runs)]) == 0
    (header,) = runs.rglob("config.json")
    return header.parent


@pytest.fixture(scope="module")
def opened(run):
    return encoding.open_run(run, CPU, "a test")


# Encoders


def alone(opened, ids):
    """The vector of one sentence, from its ids, by the model itself."""
    with torch.no_grad():
        found = opened.model.encode(torch.tensor([ids]), torch.tensor([len(ids)]))[0]
    return (found / found.norm()).numpy()


@pytest.mark.parametrize("together", [1, 150, 2**13])
@pytest.mark.parametrize("with_end", [True, False])
def test_vectors_are_the_models_whatever_stands_beside_a_sentence(opened, monkeypatch, together, with_end):
    monkeypatch.setattr(encoding, "TOGETHER", together)
    encoder = dataclasses.replace(opened.trained, with_end=with_end)
    found = encoder.encode([*SENTENCES])
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    for sentence, vector in zip(SENTENCES, found):
        np.testing.assert_allclose(vector, alone(opened, encoder.numbers(sentence)), atol=1e-6)
    assert np.abs(found[0] - found[3]).max() > 1e-3
    np.testing.assert_allclose(found[3], found[4], atol=1e-6)


def test_a_sentence_is_its_words_and_the_end_mark(opened):
    ids, encoder = opened.books.vocabulary.ids, opened.trained
    a, name, point = (ids[word] for word in ("a", "name", "."))
    assert encoder.numbers("A  zzq name.") == [a, UNKNOWN, name, point, END]
    assert encoder.numbers("") == encoder.numbers("zzq, wwv") == [END] or "," in ids
    assert len(encoder.numbers(SENTENCES[-1])) == 101  # longer than the limit of training
    without = dataclasses.replace(encoder, with_end=False)
    assert without.numbers("a name") == [a, name]
    assert without.numbers("zzq") == [END]
    assert opened.mean.numbers("a zzq name") == [a, name]


def test_the_untrained_encoder_is_what_the_run_began_with(opened):
    torch.manual_seed(0)
    fresh = dataclasses.replace(opened, model=model.build(opened.config, opened.books).eval())
    expected, found = fresh.trained.encode([*SENTENCES]), opened.untrained.encode([*SENTENCES])
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - opened.trained.encode([*SENTENCES])).max() > 1e-3


def test_the_mean_is_that_of_known_words(opened):
    table, ids = opened.model.words.weight.detach().numpy(), opened.books.vocabulary.ids
    expected = [table[[ids["a"], ids["a"], ids["name"]]].mean(0), table[END]]
    found = opened.mean.encode(["a zzq a name", "zzq"])
    np.testing.assert_allclose(found, [row / np.linalg.norm(row) for row in expected], rtol=1e-5)


def test_word_vectors_add_words_to_every_encoder(opened):
    words, g = opened.books.vocabulary.words[2:60], np.random.default_rng(0)
    rows = g.standard_normal((len(words) + 1, 3)).astype(np.float32)
    wide = dataclasses.replace(opened, vectors=WordVectors((*words, "zzq"), rows))
    for name, encoder in wide.encoders.items():
        own = opened.encoders[name]
        np.testing.assert_allclose(encoder.encode(["a name"]), own.encode(["a name"]), atol=1e-6)
        assert np.abs(encoder.encode(["a zzq name"]) - own.encode(["a zzq name"])).max() > 1e-4
        assert encoder.ids["zzq"] == len(opened.books.vocabulary)


def test_nearest_sentences_come_in_order(opened):
    found = encoding.nearest(opened.trained, SENTENCES, "a name", 99)
    assert {hit.place for hit in found[:2]} == {3, 4}
    assert [hit.cosine for hit in found] == sorted((hit.cosine for hit in found), reverse=True)
    assert found[0].cosine == pytest.approx(1, abs=1e-5)
    assert len(found) == len(SENTENCES)


# The commands


def said(capsys, *words, code=0):
    capsys.readouterr()
    got = main([*map(str, words)])
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


def test_nearest_sentences_are_shown(capsys, run, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\ufeffthe [value] of a function\n\r\n  a name \r\nzzq\n", encoding="utf-8")
    out, err = said(capsys, "nearest", run, "--text", path, "--query", "A zzq name", "--top", 2)
    assert err == ""
    assert "Read as unknown words: zzq." in out
    assert "EMBEDDED STAND-IN" in out
    assert "3 sentences; checkpoint at update " in out
    assert out.count("│ ") == 2 * 4
    out, _ = said(capsys, "nearest", run, "--text", path, "--query", "a name")
    assert "│ 1 │ 1.0000             │ 3    │ a name " in out
    assert "the [value] of a function" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("RUN --text MISSING --query name", "'MISSING', which is none"),
        ("RUN --text EMPTY --query name", "'EMPTY', which is none"),
        ("RUN --text BROKEN --query name", "--text must be text in UTF-8"),
        ("RUN --text BLANK --query name", "BLANK, which is empty"),
        ("RUN --text MANY --query name", "may have 100,000 sentences, got 100,001"),
        ("RUN --text TEXT --query=", "--query must not be empty"),
        ("RUN --text TEXT --query zzq", "a word of the vocabulary, got 'zzq'"),
        ("RUN --text TEXT", "--query"),
        ("RUN --text TEXT --query name --top 0", "'0'"),
        ("RUN --text TEXT --query name --device tpu", "'tpu'"),
        ("EMPTY --text TEXT --query name", "EMPTY, none"),
        ("NOWHERE --text TEXT --query name", "a folder"),
        ("UNFINISHED --text TEXT --query name", "needs a checkpoint"),
        ("OTHER --text TEXT --query name", "needs a run of skip_thoughts, got OTHER, a run of mnist"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, run, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    header = json.loads((run / "config.json").read_text())
    for name, content in (("UNFINISHED", header), ("OTHER", {**header, "experiment": "mnist"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "RUN").symlink_to(run)
    for name, text in (("TEXT", "a name"), ("BLANK", " \n\n"), ("MANY", "a\n" * 100_001)):
        Path(name).write_text(text)
    Path("BROKEN").write_bytes(b"\xff\xfea name")
    before = sorted(path.name for path in run.rglob("*"))
    _, err = said(capsys, "nearest", *words.split(" "), code=2)
    assert err.startswith("lamina: ")
    assert err.count("\n") == 1
    assert part in err
    assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.parametrize("command", ["nearest", "evaluate"])
def test_help_waits_for_no_torch(command):
    code = f"import sys; from lamina.lab.cli.commands import main; main(['{command}', '--help']); "
    code += "sys.exit(' '.join(m for m in ('torch', 'sklearn') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# The suite


@pytest.fixture
def quick(monkeypatch):
    """TF-IDF's many fits and SICK's epochs take most of the time."""
    monkeypatch.setitem(controls.CONTROLS, "tfidf", controls.majority)
    monkeypatch.setattr(relatedness, "EPOCHS", 1)
    monkeypatch.setattr(relatedness, "MOST_BLOCKS", 2)


def cells(out: str) -> dict[str, list[str]]:
    rows = [line.strip("│┃ ").replace("┃", "│").split("│") for line in out.splitlines() if line[:1] in ("│", "┃")]
    return {name.strip(): [cell.strip() for cell in row] for name, *row in rows}


def interrupted(*_):
    raise KeyboardInterrupt


def test_the_suite_is_a_table_of_five_rows_and_goes_on(capsys, run, quick, monkeypatch):
    words = ["evaluate", run, "--suite", "sentences", "--tasks", "SICK,CR", "--data", "embedded", "--device", "cpu"]
    measure = evaluation.cross_validated
    monkeypatch.setattr(evaluation, "cross_validated", interrupted)
    said(capsys, *words, code=130)
    monkeypatch.setattr(evaluation, "cross_validated", measure)
    out, _ = said(capsys, *words)
    shown = cells(out)
    assert shown["Encoder"] == ["SICK r", "SICK rho", "SICK MSE", "CR"]
    names = ["this run", "the same encoder, untrained", "mean of the run's word vectors", "majority", "TF-IDF"]
    assert [*shown][1:] == names
    assert shown["majority"][:2] == ["-", "-"]
    assert shown["majority"][3] == "62.5"
    assert all(0 <= float(row[3]) <= 100 for name, row in shown.items() if name != "Encoder")
    assert "tasks: EMBEDDED STAND-IN for the real data: " in out
    assert "; protocol kiros" in out
    assert "training: EMBEDDED STAND-IN for the real data: Python's language reference" in out
    monkeypatch.setattr(evaluation, "cross_validated", interrupted)
    assert said(capsys, *words)[0] == out  # nothing is measured twice
    (folder,) = (run / "sentences").iterdir()
    kept = sorted(path.name for path in folder.glob("*.jsonl"))
    assert kept == ["model.jsonl", "untrained.jsonl", "words.jsonl"]


def test_sick_is_read_with_the_end_mark_and_the_others_without(run, monkeypatch):
    asked = list[tuple[str, ...]]()

    def stub(encode, data, results, **_):
        ends = encode("a name")
        asked.extend((results.stem, name, ends) for name in data.tasks)
        return [{"task": name, "row": "model"} for name in data.tasks]

    monkeypatch.setattr(suite, "evaluate", stub)
    monkeypatch.setattr(encoding.SentenceEncoder, "encode", encoding.SentenceEncoder.numbers)
    found = suite.evaluated(run, CPU, None, "kiros", None, print)
    assert [(line["row"], line["task"]) for line in found.lines] == [(row, name) for row, name, _ in asked]
    assert len(asked) == 3 * 5
    for row, name, numbers in asked:
        assert (numbers[-1] == END) == (name == "SICK" and row != "words")


def test_other_word_vectors_are_another_encoder(run, tmp_path, monkeypatch, opened):
    monkeypatch.setattr(suite, "evaluate", lambda *_, **__: [])
    folders = {suite.evaluated(run, CPU, ["CR"], "kiros", None, print).folder}
    for number in range(2):
        path = tmp_path / f"{number}.txt"
        path.write_text("\n".join(f"{word} {at % 7} {number}" for at, word in enumerate(opened.books.vocabulary.words)))
        folders.add(suite.evaluated(run, CPU, ["CR"], "kiros", path, print).folder)
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--tasks CR", "--tasks needs --suite"),
        ("--protocol kiros", "--protocol needs --suite"),
        ("--suite sentence", "Did you mean 'sentences'"),
        ("--suite sentences --tasks CRR", "a task must be one of"),
        ("--suite sentences --tasks CR,", "--tasks must be names"),
        ("--suite sentences --protocol fast", "'senteval'"),
        ("--suite sentences --data NOWHERE", "must be a folder with sentence_eval"),
        ("--suite sentences --vectors NOWHERE", "NOWHERE must be a readable file"),
    ],
)
def test_a_wrong_suite_is_one_line_and_code_2(capsys, run, words, part):
    before = sorted(path.name for path in run.rglob("*"))
    _, err = said(capsys, "evaluate", run, *words.split(), code=2)
    assert err.count("\n") == 1
    assert part in err
    assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.slow
def test_the_whole_suite_on_the_stand_in(capsys, run):
    out, _ = said(capsys, "evaluate", run, "--suite", "sentences", "--data", "embedded", "--protocol", "senteval")
    shown = cells(out)
    assert shown["Encoder"] == ["SICK r", "SICK rho", "SICK MSE", "MR", "CR", "SUBJ", "MPQA"]
    assert len(shown) == 6
