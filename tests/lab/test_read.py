"""Reading by hand: what the reader is asked, what it answers, the page, and mistakes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lamina.errors import InputError
from lamina.lab.cli import screen
from lamina.lab.cli.commands import main
from lamina.lab.data.question_files import LONGEST
from lamina.lab.data.questions import UNKNOWN, load_questions
from lamina.lab.experiments.attentive_reader.reading import Reader, tokenised
from tests.lab.test_questions import told
from tests.lab.test_search import Page


class Exact:
    """Looks at entities that stand behind "praised", and takes the last of them for the answer."""

    def __init__(self, data) -> None:
        self.data, self.seen = data, []

    def read(self, passages, lengths, queries, query_lengths):
        self.seen.append((passages, lengths, queries, query_lengths))
        verb = self.data.vocabulary.ids["praised"]
        look = torch.zeros(passages.shape)
        look[:, 1:] = (passages[:, :-1] == verb).float()
        found = torch.full((len(passages), len(self.data.vocabulary)), -20.0)
        for row, place in look.nonzero().tolist():
            found[row, passages[row, place]] = 5.0
        found[:, UNKNOWN] = 3.0
        return found.log_softmax(1), look + 0.001


@pytest.fixture(scope="module", params=[0, 8])
def data(request):
    return load_questions("facts", relabel=request.param)


@pytest.fixture
def reader(data):
    return Reader(Exact(data), data)


TEXT = "In Paris, @entity77's lawyer sued @entity3. @entity3 praised @entity500!"


def test_a_text_is_read_with_the_users_own_names(reader):
    found = reader.of_text(TEXT, "@entity3 praised @placeholder in zzz")
    assert " ".join(found.passage) == "in paris , @entity77 's lawyer sued @entity3 . @entity3 praised @entity500 !"
    assert found.guesses[0].entity == "@entity500"
    assert {guess.entity for guess in found.guesses} == {"@entity3", "@entity77", "@entity500"}
    assert found.guesses[0].probability == pytest.approx(1 / (1 + 2.718281828**-2), rel=1e-4)
    assert found.elsewhere == pytest.approx(1 - found.guesses[0].probability, abs=1e-6)
    word, weight, share = max(found.marked, key=lambda one: one[1])
    assert (word, share) == ("@entity500", 1)
    assert weight == pytest.approx(1.001)
    assert found.notes == ("Read as unknown words: ,, 's, lawyer, !, zzz.",)
    assert found.answer == ""


def test_the_model_gets_labels_that_it_knows(reader, data):
    reader.of_text(TEXT, "@entity3 praised @placeholder with @entity9")
    ((passages, lengths, queries, query_lengths),) = reader.model.seen
    words = [data.vocabulary.words[n] for n in [*passages[0].tolist(), *queries[0].tolist()]]
    labels = [word for word in words if word.startswith("@entity")]
    assert lengths.tolist() == [passages.shape[1]]
    assert query_lengths.tolist() == [queries.shape[1]]
    assert labels[1] == labels[2] == labels[4] != labels[3]
    assert len(set(labels)) == 4
    if data.relabel:  # by first appearance, as in training
        assert labels == ["@entity0", "@entity1", "@entity1", "@entity2", "@entity1", "@entity3"]
    else:  # the reader's own where it has the name, and a free one for the others
        assert (labels[1], labels[5]) == ("@entity3", "@entity9")


def test_a_question_of_the_data_is_read_as_it_is(reader, data):
    texts = told(data, "valid")
    found = reader.of_data("valid", 300)
    assert (" ".join(found.passage), " ".join(found.query), found.answer) == texts[299]
    assert [guess.entity for guess in found.guesses if guess.right] == [found.answer]
    with pytest.raises(InputError, match=r"got 301, and the valid split has 300 questions. Pass 1 to 300"):
        reader.of_data("valid", 301)


def test_a_model_that_couples_its_cases_reads_in_company(data):
    model = Exact(data)
    alone, beside = Reader(model, data).of_data("test", 1), Reader(model, data, 15).of_data("test", 1)
    assert [len(passages) for passages, *_ in model.seen] == [1, 16]
    assert alone == beside


def test_a_long_passage_is_cut_as_in_training(reader):
    filler = "nothing was said . " * 30_000
    found = reader.of_text(filler + "@entity1 praised @entity2 .", "@entity1 praised @placeholder")
    assert found.passage[-4:] == ("@entity1", "praised", "@entity2", ".")
    assert len(found.passage) < 30
    assert found.guesses[0].entity == "@entity2"
    assert found.notes[0].startswith("The passage has 30001 sentences. Read are the 4 ")


@pytest.mark.parametrize(
    ("passage", "query", "part"),
    [
        (" \n", "@placeholder won", "a passage must have words"),
        ("@entity1 won .", "who won", "a query must have @placeholder where the answer goes, got 'who won'"),
        ("somebody won .", "@placeholder won", "a passage must have an entity, got 3 words and none"),
        ("@entity1 " * (LONGEST + 1), "@placeholder won", "4 sentences may have 2,000 words"),
        (" ".join(f"@entity{n}" for n in range(40)), "@placeholder won", "may have "),
    ],
)
def test_the_reader_refuses_what_nobody_can_answer(reader, passage, query, part):
    with pytest.raises(InputError, match=re.escape(part)):
        reader.of_text(passage, query)


def test_tokens_are_those_of_the_data(data):
    words = data.vocabulary
    assert tokenised("@Entity1's <end> 1,000 praised. (2011.)", words) == [
        *("@entity1", "'s", "<", "end", ">", "1,000", "praised", ".", "(", "2011", ".", ")"),
    ]
    assert tokenised("", words) == []


def test_attention_is_drawn_as_background(monkeypatch):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system="truecolor", width=40, highlight=False)
    monkeypatch.setattr(screen, "Screen", lambda: terminal)
    screen.say_marked([("[bold]a", 1.0), ("b", 0.0)])
    assert "48;2;242;142;43m[bold]a" in out.getvalue()
    assert "48;2;255;255;255mb" in out.getvalue()


# The command, on a small run


@pytest.fixture(scope="module", params=["layer", "batch"])
def run(request, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    words = f"run attentive_reader --dataset facts --norm {request.param} --data embedded --units 8 --updates 2"
    words += " --eval-updates 2 --batch-size 16 --relabel 8 --valid-questions 16 --device cpu --jobs 1 --quiet --runs"
    assert main([*words.split(), str(runs)]) == 0
    (header,) = runs.rglob("config.json")
    return header.parent


def said(capsys, *words, code=0):
    capsys.readouterr()
    got = main(["read", *map(str, words)])
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


def test_a_passage_is_answered_in_the_terminal_and_on_a_page(capsys, run, tmp_path):
    path = tmp_path / "passage.txt"
    path.write_text("@entity12 praised <b>@entity40</b> . @entity40 sued @entity41 .")
    page = tmp_path / "new/page.html"
    out, err = said(capsys, run, "--passage", path, "--query", "@placeholder sued @entity41", "--page", page)
    assert err == ""
    assert "@entity12 praised < b > @entity40 < / b > . @entity40 sued @entity41 ." in out
    assert "EMBEDDED STAND-IN" in out
    assert "Read as unknown words: <, b, >, /." in out
    shown = re.findall(r"│ \d +│ (@entity\d+) +│ ([\d.]+)%", out)
    assert {name for name, _ in shown} == {"@entity12", "@entity40", "@entity41"}
    values = [float(value) for _, value in shown]
    assert values == sorted(values, reverse=True)
    assert "looked at most: " in out
    parsed = Page(page.read_text(encoding="utf-8"))
    assert parsed.open == []
    assert all(source.startswith("data:") for source in parsed.sources)  # nothing is fetched
    assert "@placeholder sued @entity41" in parsed.text
    assert page.read_text().count("rgba(242, 142, 43, ") == 15  # one a word


def test_a_question_of_the_data_is_answered_by_number(capsys, run):
    out, _ = said(capsys, run, "--question", 3, "--split", "test", "--top", 2)
    assert "question 3 of the test split" in out
    passage, query, answer = told(load_questions("facts", relabel=8), "test")[2]
    assert f"{passage}\n" in out
    assert f"query: {query}  answer: {answer}" in out
    assert len(re.findall(r"│ \d +│ @entity", out)) == 2
    page = (run / "reading.html").read_text(encoding="utf-8")
    assert f"The answer is <strong>{answer}</strong>" in page


@pytest.mark.parametrize("run", ["layer"], indirect=True)
def test_several_questions_share_a_page(capsys, run, tmp_path):
    page = tmp_path / "ten.html"
    out, _ = said(capsys, run, "--question", "2-11", "--page", page)
    html = page.read_text(encoding="utf-8")
    assert Page(html).open == []
    for passage, query, answer in told(load_questions("facts", relabel=8), "valid")[1:11]:
        assert f"{passage}\n" in out
        assert f"query: {query}  answer: {answer}" in out
        assert f"<h2>{query}</h2>" in html
    assert html.count("<h2>") == 10
    assert "<h1>10 questions</h1>" in html


@pytest.mark.parametrize("run", ["layer"], indirect=True)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("RUN", "got neither"),
        ("RUN --question 1 --passage TEXT", "got both"),
        ("RUN --passage TEXT", "got no --query"),
        ("RUN --query @placeholder", "got no --passage"),
        ("RUN --passage TEXT --query who", "--query must have @placeholder"),
        ("RUN --passage TEXT --query=", "--query must have @placeholder"),
        ("RUN --passage MISSING --query @placeholder", "'MISSING', which is none"),
        ("RUN --passage EMPTY --query @placeholder", "'EMPTY', which is none"),
        ("RUN --passage BROKEN --query @placeholder", "must be text in UTF-8"),
        ("RUN --passage BLANK --query @placeholder", "a passage must have words"),
        ("RUN --passage PLAIN --query @placeholder", "a passage must have an entity"),
        ("RUN --question 0", "'0'"),
        ("RUN --question 999", "has 300 questions"),
        ("RUN --question 3-1", "'3-1'"),
        ("RUN --question 1-101", "at most 100"),
        ("RUN --question first", "'first'"),
        ("RUN --question 1 --split dev", "'valid'"),
        ("RUN --question 1 --page EMPTY", "--page must be a file"),
        ("RUN --question 1 --device tpu", "'tpu'"),
        ("EMPTY --question 1", "EMPTY, none"),
        ("UNFINISHED --question 1", "needs a checkpoint"),
        ("OTHER --question 1", "OTHER, a run of mnist"),
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
    Path("TEXT").write_text("@entity1 won .")
    Path("PLAIN").write_text("nobody won .")
    Path("BLANK").write_text(" \n")
    Path("BROKEN").write_bytes(b"\xff\xfe@entity1")
    before = sorted(path.name for path in run.rglob("*"))
    _, err = said(capsys, *words.split(" "), code=2)
    assert err.startswith("lamina: ")
    assert err.count("\n") == 1
    assert part in err
    assert sorted(path.name for path in run.rglob("*")) == before
    assert not list(Path("EMPTY").iterdir())


def test_help_waits_for_no_torch():
    code = "import sys; from lamina.lab.cli.commands import main; main(['read', '--help']); "
    code += "sys.exit(' '.join(m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--passage" in done.stdout
