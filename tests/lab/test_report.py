"""The report: numbers, figures, wording, escaping, the same bytes each time, and how a browser shows the page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lamina.errors import InputError
from lamina.lab import experiments
from lamina.lab.experiment import Figure, Panel
from lamina.lab.reports import figures, records, verdicts
from lamina.lab.reports import page as report
from tests.lab.test_records import DATA, TOY, only, toy, write_run  # noqa: F401  (toy is a fixture)

STAND_IN = {**DATA, "kind": "embedded", "label": "Digits 8x8 (embedded stand-in: 1,437 + 360)"}
# One panel, for tests that need a report but not its figures: drawing is what takes time.
SMALL = dataclasses.replace(
    TOY, figures=(Figure("nll", "Training loss.", (Panel("All", "train_nll", "NLL", log=True),)),)
)
VOID = {"meta", "link", "br", "img", "hr", "input"}


def write_all(root: Path) -> None:
    """What a folder of runs looks like in the middle of the work."""
    for norm in ("layer", "batch"):
        for size in (128, 4):
            for seed in range(3):
                write_run(root, norm, size, seeds=(seed,))
    write_run(root, "none", 128, seeds=(0, 1))
    write_run(root, "none", 4, seeds=(0,), points=5, finished=False)
    write_run(root, "layer", 128, data=STAND_IN)
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One report that several tests read; building takes a second or two."""
    root = tmp_path_factory.mktemp("report")
    write_all(root / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.lab.experiments.SHEETS", {"toy": TOY})
        done = report.build([root / "runs"], root / "out")
    return done


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": SMALL})


def build(root: Path, *extra: Path) -> report.Report:
    return report.build([root / "runs", *extra], root / "out")


class Page(HTMLParser):
    """Fails on tags that do not match; collects elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def page_of(done: report.Report) -> Page:
    return Page(done.html.read_text(encoding="utf-8"))


def cells(markdown: str, row: str) -> list[str]:
    """The cells of the first table row that begins with these words."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


class TestFiles:
    def test_what_is_written(self, built):
        out = built.html.parent
        names = ["toy-digits-nll", "toy-digits-error", "toy-digits-border"]
        names += [name.replace("digits", "digits-embedded") for name in names]
        assert [path.relative_to(out).as_posix() for path in built.figures] == [f"figures/{name}.svg" for name in names]
        assert sorted(path.name for path in built.records) == ["toy-digits-embedded.json", "toy-digits.json"]
        assert sorted(path.name for path in out.iterdir()) == sorted(
            ["RESULTS.md", "figures", "report.html", *(path.name for path in built.records)]
        )

    def test_the_count_of_claims(self, built):
        assert built.real == (1, 1, 0)
        assert built.stand_in == (0, 1, 1)  # apart, and first
        for text in (built.markdown.read_text(encoding="utf-8"), page_of(built).text):
            assert -1 < text.lower().find("stand-in data") < text.find("On real data")
        assert "config.json is not valid JSON" in only(list(built.notes))

    @pytest.mark.usefixtures("small")
    def test_a_report_on_stand_ins_alone_counts_nothing_as_real(self, tmp_path):
        write_run(tmp_path / "runs", data=STAND_IN)
        done = build(tmp_path)
        assert sum(done.real) == 0 < sum(done.stand_in)
        assert "On real data" not in done.markdown.read_text(encoding="utf-8") + page_of(done).text
        assert "no verdict here is on real data" in done.markdown.read_text(encoding="utf-8")

    def test_links_of_the_markdown_lead_to_the_figures(self, built):
        links = re.findall(r"\]\(([^)#]+)\)", built.markdown.read_text(encoding="utf-8"))
        assert len(links) == 6
        assert all((built.markdown.parent / link).is_file() for link in links)

    @pytest.mark.usefixtures("small")
    def test_links_follow_the_markdown(self, tmp_path):
        write_run(tmp_path / "runs")
        done = report.build([tmp_path / "runs"], tmp_path / "a" / "out", markdown=tmp_path / "docs" / "RESULTS.md")
        links = re.findall(r"\]\(([^)#]+)\)", done.markdown.read_text(encoding="utf-8"))
        assert links[0] == "../a/out/figures/toy-digits-nll.svg"
        assert all((done.markdown.parent / link).is_file() for link in links)

    def test_no_machine_path_is_shown(self, built):
        root = str(built.html.parents[1])
        files = [built.html, built.markdown, *built.figures, *built.records]
        assert not [file for file in files if root in file.read_text(encoding="utf-8")]

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("broken", [False, True])
    def test_nothing_to_report(self, tmp_path, broken):
        (tmp_path / "runs").mkdir()
        if broken:
            (tmp_path / "runs" / "config.json").write_text("{")
        with pytest.raises(InputError, match=r"no runs under .*runs.*lamina run mnist") as error:
            build(tmp_path)
        assert ("left out" in str(error.value)) is broken
        assert not (tmp_path / "out").exists()

    @pytest.mark.usefixtures("small")
    def test_a_path_that_is_no_record(self, tmp_path):
        write_run(tmp_path / "runs")
        with pytest.raises(InputError, match="absent"):
            build(tmp_path, tmp_path / "absent.json")


@pytest.mark.usefixtures("small")
class TestSameBytes:
    def everything(self, folder: Path) -> dict[str, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def test_in_another_process(self, tmp_path):
        """And there, that neither torch nor pyplot, with its state for all, is needed."""
        write_run(tmp_path / "runs", seeds=(0, 1))
        here = build(tmp_path)
        code = f"""
import sys, lamina.lab.experiments
from pathlib import Path
from lamina.lab.reports import page
from tests.lab.test_report import SMALL
lamina.lab.experiments.SHEETS = {{"toy": SMALL}}
root = Path({str(tmp_path)!r})
page.build([root / "runs"], root / "there")
print(*(name in sys.modules for name in ("torch", "matplotlib.pyplot")))
"""
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(report.__file__).parents[1])}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split() == ["False", "False"]
        assert self.everything(tmp_path / "there") == self.everything(here.html.parent)

    def test_from_records_as_from_runs(self, tmp_path):
        write_run(tmp_path / "runs", seeds=(0, 1))
        write_run(tmp_path / "runs", "none", points=4, finished=False)
        first = build(tmp_path)
        second = report.build(first.records, tmp_path / "second")
        assert second.records == ()  # nothing was made from runs
        assert second.html.read_bytes() == first.html.read_bytes()
        assert second.markdown.read_bytes() == first.markdown.read_bytes()

    def test_runs_and_their_own_record_are_not_counted_twice(self, tmp_path):
        write_run(tmp_path / "runs", seeds=(0, 1))
        first = build(tmp_path).markdown.read_bytes()
        done = build(tmp_path, tmp_path / "out")
        assert done.notes == ()
        assert done.markdown.read_bytes() == first

    def test_a_damaged_run_in_a_record_is_left_out_and_named(self, tmp_path):
        """As records hold them that were made before damage was looked for."""
        write_run(tmp_path / "runs", seeds=(0, 1))
        path = build(tmp_path).records[0]
        record = json.loads(path.read_text())
        record["runs"][1]["steps"] += 1
        path.write_text(json.dumps(record))
        done = report.build([path], tmp_path / "second")
        assert "seed 1 is damaged and left out" in only(list(done.notes))
        text = done.markdown.read_text(encoding="utf-8")
        assert cells(text, "layer norm, batch size 128")[1].endswith("(1)")
        assert "seed 1 is damaged" in text

    def test_a_record_and_further_runs_make_one_section(self, tmp_path):
        write_run(tmp_path / "runs")
        old = build(tmp_path).records[0].rename(tmp_path / "old.json")
        shutil.rmtree(tmp_path / "runs")
        write_run(tmp_path / "runs", seeds=(1,))
        done = build(tmp_path, old)
        assert [run["seed"] for run in records.load(only(list(done.records)))["runs"]] == [0, 1]


class TestNumbers:
    @pytest.mark.parametrize("norm", ["layer", "batch"])
    @pytest.mark.parametrize("size", [128, 4])
    def test_the_table_holds_the_means_and_deviations(self, built, norm, size):
        record = records.load(built.html.parent / "toy-digits.json")
        runs = [r for r in record["runs"] if (r["config"]["norm"], r["config"]["batch_size"]) == (norm, size)]
        error = np.array([run["curve"]["test_error"][-1] for run in runs]) * 100
        best = np.array([min(run["curve"]["train_nll"]) for run in runs])
        row = cells(built.markdown.read_text(encoding="utf-8"), f"{norm} norm, batch size {size}")
        assert row[1] == f"{error.mean():.2f} ± {error.std(ddof=1):.2f} (3)"
        assert row[3] == f"{best.mean():.4f} ± {best.std(ddof=1):.4f} (3)"
        assert row[1] in page_of(built).text

    def test_the_papers_number_or_that_there_is_none(self, built):
        text = built.markdown.read_text(encoding="utf-8")
        assert cells(text, "layer norm, batch size 128")[2] == "1.1"
        assert cells(text, "batch norm, batch size 128")[2] == "not printed"

    def test_unfinished_runs_have_no_number(self, built):
        text = built.markdown.read_text(encoding="utf-8")
        assert cells(text, "no norm, batch size 4")[1] == "no finished run"
        assert "Unfinished runs (1)" in text

    @pytest.mark.parametrize(
        ("values", "number", "shown"),
        [
            ([0.0184], TOY.numbers[0], "1.84 (1)"),
            ([0.018, 0.020], TOY.numbers[0], "1.90 ± 0.14 (2)"),
            ([None, 0.02], TOY.numbers[0], "not finite in 1 of 2; others 2.00"),
            ([None, None], TOY.numbers[2], "not reached in 2 of 2"),
            ([12345.0, 12347.0], TOY.numbers[2], "12,346 ± 1 (2)"),
            ([0.0, 0.0], TOY.numbers[1], "0.0000 ± 0.0000 (2)"),
            ([0.00002, 0.00004], TOY.numbers[1], "3.0e-05 ± 1.4e-05 (2)"),
            ([], TOY.numbers[1], "no finished run"),
        ],
    )
    def test_how_a_sample_is_shown(self, values, number, shown):
        assert report.shown_sample(number, {"values": values, "n": len(values)}) == shown

    @pytest.mark.usefixtures("small")
    def test_settings_that_differ_are_told(self, tmp_path):
        write_run(tmp_path / "runs")
        write_run(tmp_path / "runs", seeds=(1,), lr=0.1)
        text = build(tmp_path).markdown.read_text(encoding="utf-8")
        assert "Runs of one variant differ in lr" in text
        assert cells(text, "layer norm, batch size 128, lr 0.1")[1].endswith("(1)")


class TestWords:
    def test_every_verdict_is_a_word_and_a_symbol(self, built):
        text = built.markdown.read_text(encoding="utf-8")
        assert re.search(r"\| Layer norm reaches a lower error.*\| ✓ held \|", text)
        assert re.search(r"\| Nothing beats anything\..*\| ✗ did not hold \|", text)
        assert re.search(r"\| Layer norm reaches.*1 and 0 runs \| \? inconclusive: fewer than 2 seeds \|", text)
        shown = re.sub(r"\s+", " ", page_of(built).text)
        assert all(verdict in shown for verdict in ("✓ held", "✗ did not hold", "? inconclusive"))

    def test_a_claim_that_breaks_is_not_said_to_lack_runs(self, tmp_path, monkeypatch):
        claim = dataclasses.replace(TOY.claims[0], judge=lambda results: 1 / 0)
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": dataclasses.replace(SMALL, claims=(claim,))})
        write_run(tmp_path / "runs")
        done = build(tmp_path)
        assert done.real == (0, 0, 1)
        assert "| ? inconclusive: could not be judged |" in done.markdown.read_text(encoding="utf-8")

    def test_the_kind_of_data_is_on_everything(self, built):
        page = built.html.read_text(encoding="utf-8")
        for section in re.findall(r"<section id=.*?</section>", page, flags=re.DOTALL):
            badge, label = (
                ("EMBEDDED STAND-IN", STAND_IN["label"]) if "embedded" in section[:60] else ("REAL DATA", DATA["label"])
            )
            heads = re.findall(
                r'<caption>(.*?)</caption>|<p class="(?:data|figure-title)">(.*?)</p>', section, re.DOTALL
            )
            assert len(heads) == 8  # one section head, three figures, four tables
            assert all(badge in "".join(head) and label in "".join(head) for head in heads)
        assert page.count("<section id=") == 2

    @pytest.mark.parametrize("index", range(6))
    def test_figures_say_what_they_show(self, built, index):
        svg = built.figures[index].read_text(encoding="utf-8")
        badge = "EMBEDDED STAND-IN" if "embedded" in built.figures[index].name else "REAL DATA"
        drawn = " ".join(
            node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
        )
        assert badge in drawn
        assert re.search(r"layer norm.*\(n=\d\)", drawn)
        label = re.search(r'aria-label="([^"]*)"', svg)
        assert label is not None
        assert badge in label[1]

    def test_an_unfinished_run_is_drawn_and_told(self, built):
        svg = built.figures[0].read_text(encoding="utf-8")
        assert "no norm (unfinished, 1 begun)" in svg

    def test_where_the_numbers_come_from(self, built):
        text = page_of(built).text
        for told in ("A CPU", "torch 2.13.0", "commit c0ffee", "ab" * 32, "lamina run toy --norm layer", "eager"):
            assert told in text

    def test_experiments_are_in_the_summary_with_their_counts(self, built):
        text = built.markdown.read_text(encoding="utf-8")
        row = next(line for line in text.splitlines() if "(#toy-digits)" in line)
        assert row.endswith("| 14 (+1 unfinished) | 1 | 1 | 0 |")

    @pytest.mark.usefixtures("small")
    def test_other_kinds_of_record_get_a_small_table(self, tmp_path):
        write_run(tmp_path / "runs")
        rows = [{"op": f"lstm {i}", "ms": 1.23456789, "note": None} for i in range(60)]
        record = {"schema": 1, "kind": "bench", "name": "h200", "passed": True, "rows": rows, "limits": {"ratio": 1.5}}
        (tmp_path / "runs" / "bench.json").write_text(json.dumps(record))
        done = build(tmp_path)
        text = done.markdown.read_text(encoding="utf-8")
        assert "## bench h200" in text
        assert cells(text, "lstm 39")[1:] == ["1.23457", "null"]
        assert "lstm 40" not in text
        assert "the first 40 of 60 rows" in text
        assert cells(text, "passed") == ["passed", "true"]
        page_of(done)

    @pytest.mark.usefixtures("small")
    def test_a_record_may_bring_its_own_tables(self, tmp_path):
        write_run(tmp_path / "runs")
        table = {"caption": "speed", "columns": ["case", "us"], "rows": [["lstm", "6.6"], ["gru", "5.7"]]}
        record = {"schema": 1, "kind": "bench", "name": "gpu", "rows": [{"raw": 1}], "tables": [table], "about": "told"}
        (tmp_path / "runs" / "bench.json").write_text(json.dumps(record))
        done = build(tmp_path)
        text = done.markdown.read_text(encoding="utf-8")
        assert cells(text, "lstm") == ["lstm", "6.6"]
        assert "told" in text
        assert "raw" not in text
        page_of(done)

    def test_an_experiment_without_a_sheet_is_shown_and_noted(self, tmp_path, monkeypatch, built):
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {})
        done = report.build([built.html.parent / "toy-digits.json"], tmp_path)
        assert "knows no experiment 'toy'" in only(list(done.notes))
        assert done.real.held == 1  # as recorded
        assert "test_error" in done.markdown.read_text(encoding="utf-8")


class TestPage:
    def test_it_is_whole(self, built):
        page = page_of(built)
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        inner = [a["href"][1:] for _, a in page.elements if (a.get("href") or "").startswith("#")]
        assert inner
        assert set(inner) <= set(ids)
        assert set(re.findall(r"url\(#([^)]*)\)", built.html.read_text(encoding="utf-8"))) <= set(ids)

    def test_it_stands_alone(self, built):
        page, text = page_of(built), built.html.read_text(encoding="utf-8")
        assert "http" not in text
        assert not {"script", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.elements}
        assert not re.search(r"@import|@font-face|url\((?!#)", text)

    def test_figures_are_named_for_those_who_cannot_see_them(self, built):
        drawings = [attributes for tag, attributes in page_of(built).elements if tag == "svg"]
        assert len(drawings) == 10
        assert all(svg["role"] == "img" and "against" in svg["aria-label"] for svg in drawings)

    def test_colours_come_from_the_style_sheet(self, built):
        text = built.html.read_text(encoding="utf-8")
        inline = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
        assert not re.search(r"#[0-9a-f]{6}\b", inline)
        for variable in set(re.findall(r"var\((--[\w-]+)\)", inline)):
            assert text.count(f"{variable}:") == 2  # light and dark

    @pytest.mark.parametrize(
        "hostile",
        [
            "<script>alert(1)</script> \"><img src=x onerror='alert(1)'> </svg></style><b>",
            "a | b\n\n# c `d` [e](http://f) *g* $\\frac{$ & {{ 7*7 }} {% x %}",
        ],
    )
    @pytest.mark.usefixtures("small")
    def test_hostile_words_are_only_words(self, tmp_path, hostile):
        data = {**DATA, "name": "digits", "label": hostile, "sha256": {hostile: hostile}}
        folder = write_run(tmp_path / "runs", hostile, data=data, name="x")
        header = json.loads((folder / "config.json").read_text())
        header["command"] = f"lamina {hostile}"
        (folder / "config.json").write_text(json.dumps(header))
        done = build(tmp_path)
        page = page_of(done)
        assert hostile in page.text
        assert not {"script", "img", "b"} & {tag for tag, _ in page.elements}
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        markdown = re.sub(r"```.*?```", "", done.markdown.read_text(encoding="utf-8"), flags=re.DOTALL)
        tags = {"!--", "a", "/a", "details", "/details", "summary", "/summary"}
        assert set(re.findall(r"<(!--|/?\w+)", markdown)) <= tags
        assert len(re.findall(r"(?<!\\)\]\((?!figures|#)", markdown)) == 0
        for svg in done.figures:
            ElementTree.fromstring(svg.read_text(encoding="utf-8"))


class TestFigures:
    def lines(self, runs: Path, **panel) -> list[figures.Line]:
        record = only(records.collect([runs]))
        return figures.panel_lines(record, TOY, Panel("t", panel.pop("y", "train_nll"), "y", **panel))

    @pytest.mark.usefixtures("toy")
    def test_the_line_is_the_mean_of_finished_runs(self, tmp_path):
        for seed in range(3):
            write_run(tmp_path, seeds=(seed,))
        write_run(tmp_path, seeds=(3,), points=4, finished=False)
        line = only(self.lines(tmp_path))
        finished = np.array([run["curve"]["train_nll"] for run in only(records.collect([tmp_path]))["runs"][:3]])
        assert line.label == "layer norm, batch size 128 (n=3, 1 unfinished)"
        np.testing.assert_array_equal(line.runs, finished)
        np.testing.assert_array_equal(line.x, np.arange(1.0, 13))
        assert [len(x) for x, _ in line.loose] == [4]

    @pytest.mark.usefixtures("toy")
    def test_seeds_are_averaged_where_they_were_all_evaluated(self, tmp_path):
        write_run(tmp_path, points=12)
        write_run(tmp_path, seeds=(1,), points=5)
        line = only(self.lines(tmp_path, x="seconds"))
        assert line.runs.shape == (2, 5)
        np.testing.assert_allclose(line.x, 0.5 * np.arange(1, 6) + 0.005)

    @pytest.mark.usefixtures("toy")
    def test_runs_that_share_no_step_are_drawn_one_by_one(self, tmp_path):
        write_run(tmp_path)
        folder = write_run(tmp_path, seeds=(1,))
        lines = (folder / "metrics.jsonl").read_text().replace('"step": ', '"step": 9')
        (folder / "metrics.jsonl").write_text(lines)
        summary = {**json.loads((folder / "summary.json").read_text()), "steps": 95160}
        (folder / "summary.json").write_text(json.dumps(summary))
        line = only(self.lines(tmp_path))
        assert "no common times" in line.label
        assert (line.runs.size, len(line.loose)) == (0, 2)

    @pytest.mark.usefixtures("toy")
    def test_a_profile_is_averaged_over_seeds(self, tmp_path):
        write_run(tmp_path, seeds=(0, 1, 2))
        line = only(self.lines(tmp_path, y="active", x="distance", kind="profile"))
        np.testing.assert_allclose(line.runs.mean(axis=0), [0.1, 0.3, 0.51])
        np.testing.assert_array_equal(line.x, [0, 1, 2])

    @pytest.mark.usefixtures("toy")
    def test_a_panel_shows_only_its_runs(self, tmp_path):
        write_run(tmp_path, "layer", 128)
        write_run(tmp_path, "layer", 4)
        assert [line.label for line in self.lines(tmp_path, where={"batch_size": 4})] == ["layer norm (n=1)"]

    @pytest.mark.usefixtures("toy")
    def test_lines_can_be_told_apart(self, tmp_path):
        for norm in ("layer", "batch", "none"):
            for size in (128, 4):
                write_run(tmp_path, norm, size)
        both, one = self.lines(tmp_path), self.lines(tmp_path, where={"batch_size": 4})
        assert len({(line.norm, line.dash) for line in both}) == 6
        assert len({line.norm for line in one}) == len({line.dash for line in one}) == 3

    @pytest.mark.usefixtures("toy")
    def test_values_that_are_not_finite_are_told(self, tmp_path):
        folder = write_run(tmp_path)
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(re.sub(r'"train_nll": [^,]*', '"train_nll": null', text, count=3))
        line = only(self.lines(tmp_path))
        assert line.label.endswith("(n=1, 1 not finite)")
        assert np.isnan(line.runs[0, :3]).all()

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize(("value", "points"), [("null", 1), ("null", 12), ("0.0", 12), ("-1.0", 1)])
    def test_curves_that_no_axis_can_hold_are_no_error(self, tmp_path, value, points):
        folder = write_run(tmp_path / "runs", points=points)
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(re.sub(r'"train_nll": [^,]*', f'"train_nll": {value}', text))
        page_of(build(tmp_path))

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("finished", [True, False])
    def test_a_run_without_evaluations_is_no_error(self, tmp_path, finished):
        write_run(tmp_path / "runs", points=0, finished=finished)
        assert "no runs yet" in build(tmp_path).html.read_text(encoding="utf-8")

    @pytest.mark.usefixtures("toy")
    def test_panels_of_one_metric_share_their_axis(self, tmp_path):
        write_run(tmp_path, "layer", 128)
        write_run(tmp_path, "batch", 4)
        record, figure = only(records.collect([tmp_path])), TOY.figures[1]
        with figures.plain_style():
            canvas = figures._canvas(figure.panels, [figures.panel_lines(record, TOY, p) for p in figure.panels], "")
            before = [ax.get_ylim() for ax in canvas.axes]
            limits = figures._share_limits(canvas, figure.panels)
        assert before[0] != before[1]
        assert limits[0] == limits[1] == (min(low for low, _ in before), max(high for _, high in before))

    @pytest.mark.usefixtures("toy")
    @pytest.mark.parametrize("scale", [1.0, 0.3, 0.05])
    def test_a_log_axis_has_labels_on_any_range(self, tmp_path, scale):
        folder = write_run(tmp_path)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        told = [{**line, "train_nll": 0.39 * (1 + scale * k)} for k, line in enumerate(lines)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
        figure = Figure("f", "c", (Panel("t", "train_nll", "NLL", x_label="", log=True),))
        svg = figures.draw(only(records.collect([tmp_path])), TOY, figure).svg
        texts = [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        labels = [float(text) for text in texts if re.fullmatch(r"[\d.]+", text)]
        heights = [label for label in labels if 0.3 < label < 10 and label not in (2, 4, 6, 8)]  # not the epochs
        assert len(heights) >= 2

    @pytest.mark.usefixtures("toy")
    def test_fixed_limits_are_kept(self, tmp_path):
        write_run(tmp_path)
        panel = dataclasses.replace(TOY.figures[1].panels[0], y_limits=(0.0, 0.5))
        drawing = figures.draw(only(records.collect([tmp_path])), TOY, Figure("f", "c", (panel,)))
        assert ">0.5<" in drawing.panels[0]

    @pytest.mark.usefixtures("small")
    def test_matplotlib_is_left_as_it_was(self, tmp_path):
        import matplotlib

        write_run(tmp_path / "runs")
        before = dict(matplotlib.rcParams)
        with matplotlib.rc_context({"font.size": 33, "axes.linewidth": 9, "svg.fonttype": "path"}):
            odd = build(tmp_path).figures[0].read_bytes()
        assert odd == build(tmp_path).figures[0].read_bytes()  # a user's own settings change nothing
        assert dict(matplotlib.rcParams) == before


class TestRealSheets:
    @pytest.mark.parametrize("name", sorted(experiments.SHEETS))
    def test_each_sheet_has_a_report(self, tmp_path, name):
        sheet = experiments.SHEETS[name]
        panels = [panel for figure in sheet.figures for panel in figure.panels]
        steps = [430 * k for k in range(1, 5)]
        for norm in sheet.norms:
            curve = {panel.y: [0.4, 0.3, 0.2, 0.1] for panel in panels} | {
                n.metric: [0.4, 0.3, 0.2, 0.1] for n in sheet.numbers
            }
            config = dataclasses.asdict(sheet.config(norm=norm, dataset="mnist"))
            extras = {key: [0.1, 0.2, 0.3] for panel in panels if panel.kind == "profile" for key in (panel.x, panel.y)}
            common = {
                "experiment": name,
                "data": DATA | {"name": "mnist"},
                "environment": {},
                "commands": [],
                "schema": 1,
            }
            curve |= {"step": steps, "epoch": [1.0, 2.0, 3.0, 4.0]}
            run = {"config": config, "seed": 0, "finished": True, "steps": steps[-1], "curve": curve, "extras": extras}
            records.write(tmp_path / "in" / f"{norm}.json", json.dumps({**common, "kind": "experiment", "runs": [run]}))
        done = report.build([tmp_path / "in"], tmp_path / "out")
        text = done.markdown.read_text(encoding="utf-8")
        assert (sum(done.real), sum(done.stand_in)) == (len(sheet.claims), 0)
        assert "could not be judged" not in text
        assert "no finished run" not in text
        assert "no runs yet" not in re.sub(r"batch size 4: .*?yet\.", "", text)  # only the default batch size was run
        page_of(done)


def test_the_verdicts_kept_in_the_records_are_todays():
    """No record in results/ keeps a verdict that today's rules would not give."""
    for path in (Path(__file__).parents[2] / "results").glob("*.json"):
        record = records.load(path)
        if record["kind"] == "experiment":
            assert record["claims"] == verdicts.judged(record)["claims"], path.name
            assert all(claim["reason"] for claim in record["claims"] if claim["held"] is None)


@pytest.mark.usefixtures("toy")
def test_fifty_runs_take_seconds(tmp_path):
    for norm in ("layer", "batch", "none"):
        for size in (128, 4):
            write_run(tmp_path / "runs", norm, size, seeds=tuple(range(9)), points=60)
    begun = time.process_time()
    build(tmp_path)
    assert time.process_time() - begun < 6


# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr"]
FLAGS += ["--virtual-time-budget=4000"]
# A window cannot be narrower than about 500 pixels, a frame can.
WRAPPER = """<!doctype html><link rel="icon" href="data:,"><body style="margin:0">
<iframe src="report.html" width="390" height="3000" style="border:0"></iframe>
<iframe src="report.html" width="1280" height="3000" style="border:0"></iframe>
<script>onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, root = page.documentElement;
  const drawn = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
  return {shown: root.clientWidth, needed: root.scrollWidth, figures: drawn.length,
          smallest: Math.min(...drawn.map(box => box.width)), widest: Math.max(...drawn.map(box => box.right))};
})); }</script>"""


@contextlib.contextmanager
def served(folder: Path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def browse(profile: Path, address: str, *flags: str) -> tuple[str, list[str]]:
    """What the browser printed, and its console messages."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def measure(page: str, folder: Path) -> tuple[list[dict[str, float]], list[str]]:
    """The page at 390 and at 1280 pixels: widths, and console messages."""
    (folder / "report.html").write_text(page, encoding="utf-8")
    (folder / "wrapper.html").write_text(WRAPPER, encoding="utf-8")
    with served(folder) as address:
        dom, console = browse(folder / "profile", f"{address}/wrapper.html", "--dump-dom", "--window-size=1700,3000")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None, dom[:500]
    return json.loads(title[1]), console


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
class TestBrowser:
    def test_the_page_fits_a_phone_and_a_desk(self, built, tmp_path):
        sizes, console = measure(built.html.read_text(encoding="utf-8"), tmp_path)
        assert console == []
        for size, width in zip(sizes, (390, 1280)):
            assert size["shown"] == size["needed"] == width
            assert size["figures"] == 10
            assert size["smallest"] >= 300  # readable, not squeezed
            assert size["widest"] <= width

    def test_a_screenshot_shows_a_page_at_both_widths(self, built, tmp_path):
        shutil.copy(built.html, tmp_path / "report.html")
        (tmp_path / "wrapper.html").write_text(WRAPPER, encoding="utf-8")
        shot = tmp_path / "shot.png"
        with served(tmp_path) as address:
            flags = ("--window-size=1700,1600", f"--screenshot={shot}")
            _, console = browse(tmp_path / "profile", f"{address}/wrapper.html", *flags)
        assert console == []
        assert shot.stat().st_size > 100_000  # a blank page of this size has a few kilobytes

    def test_what_these_tests_look_for_is_seen(self, built, tmp_path):
        bad = '<div style="width:700px">x</div><script>console.error("no"); nothing();</script></body>'
        sizes, console = measure(built.html.read_text(encoding="utf-8").replace("</body>", bad), tmp_path)
        assert len(console) == 4  # two messages in each of two frames
        assert sizes[0]["needed"] > sizes[0]["shown"] == 390
        assert sizes[1]["needed"] == 1280
