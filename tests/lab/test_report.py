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
from lamina.lab.reports import page as report
from lamina.lab.reports import records, verdicts
from tests.lab.test_records import DATA, ENVIRONMENT, TOY, only, toy, write_run  # noqa: F401  (toy is a fixture)

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
        self.rows: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data
        if "tr" in self.open:
            self.rows[-1] += data + " "


def page_of(done: report.Report) -> Page:
    return Page(done.html.read_text(encoding="utf-8"))


def rows_of(page: Page) -> list[str]:
    """Rows of the page's tables as text, without spaces between the cells' tags."""
    return [re.sub(r"\s+", " ", text).strip() for text in page.rows]


def cells(markdown: str, row: str) -> list[str]:
    """The cells of the first table row that begins with these words."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


class TestFiles:
    def test_what_is_written(self, built):
        out = built.html.parent
        drawn = ("claims", "nll", "error", "border")  # no claim on speed has enough runs for levels
        names = [f"toy-digits-{name}" for name in drawn] + [f"toy-digits-embedded-{name}" for name in drawn[1:]]
        assert [path.relative_to(out).as_posix() for path in built.figures] == [f"figures/{name}.svg" for name in names]
        assert sorted(path.name for path in built.records) == ["toy-digits-embedded.json", "toy-digits.json"]
        assert sorted(path.name for path in out.iterdir()) == sorted(
            ["RESULTS.md", "figures", "report.html", *(path.name for path in built.records)]
        )

    def test_the_count_of_claims(self, built):
        assert built.real == (0, 1, 1, 1)  # the comparison that the paper does not make is not counted
        assert built.stand_in == (0, 0, 3, 0)
        for text in (built.markdown.read_text(encoding="utf-8"), page_of(built).text):
            assert -1 < text.find("Claims on real data") < text.find("Claims on stand-in data")
        assert "config.json is not valid JSON" in only(list(built.notes))

    @pytest.mark.usefixtures("small")
    def test_a_report_on_stand_ins_alone_counts_nothing_as_real(self, tmp_path):
        write_run(tmp_path / "runs", data=STAND_IN)
        done = build(tmp_path)
        assert sum(done.real) == 0 < sum(done.stand_in)
        for text in (done.markdown.read_text(encoding="utf-8"), page_of(done).text):
            assert "No run here is on the paper" in text
            assert "Claims on real data" not in text

    def test_links_of_the_markdown_lead_to_the_figures(self, built):
        links = re.findall(r"\]\(([^)#]+)\)", built.markdown.read_text(encoding="utf-8"))
        assert len(links) == 7
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
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(report.__file__).parents[3])}
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
        third = report.build(first.records, tmp_path / "out")
        assert third.records == first.records
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

    def test_a_report_into_the_records_folder_adds_to_them_and_loses_no_row(self, tmp_path):
        write_run(tmp_path / "runs")
        (path,) = build(tmp_path).records
        shutil.rmtree(tmp_path / "runs")
        write_run(tmp_path / "runs", seeds=(1,), made={"commit": "later"})
        build(tmp_path)
        rows = records.load(path)["runs"]
        assert [(run["seed"], run["environment"]["commit"]) for run in rows] == [
            (0, ENVIRONMENT["commit"]),
            (1, "later"),
        ]

    def test_a_record_does_not_grow_by_runs_with_other_settings(self, tmp_path):
        write_run(tmp_path / "runs")
        (path,) = build(tmp_path).records
        before = path.read_bytes()
        shutil.rmtree(tmp_path / "runs")
        write_run(tmp_path / "runs", seeds=(1,), lr=0.5)
        with pytest.raises(InputError, match=r"lr 0\.5 in place of 0\.001"):
            build(tmp_path)
        assert path.read_bytes() == before
        assert report.build([tmp_path / "runs"], tmp_path / "elsewhere").records

    def test_a_report_up_to_an_epoch_saves_no_record(self, tmp_path):
        write_run(tmp_path / "runs")
        (path,) = build(tmp_path).records
        before = path.read_bytes()
        assert report.build([tmp_path / "runs"], tmp_path / "out", until=3).records == ()
        assert path.read_bytes() == before

    def test_a_record_of_another_schema_is_left_out_with_a_line(self, tmp_path):
        write_run(tmp_path / "runs")
        (tmp_path / "runs" / "old.json").write_text('{"schema": 1, "kind": "experiment"}')
        done = build(tmp_path)
        assert "runs/old.json: left out. a record must have schema 2 and a kind" in only(list(done.notes))
        with pytest.raises(InputError, match="schema 2"):
            report.build([tmp_path / "runs" / "old.json"], tmp_path / "out")

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
        error = np.array([run["series"]["test_error"]["value"][-1] for run in runs]) * 100
        best = np.array([min(run["series"]["train_nll"]["value"]) for run in runs])
        row = cells(built.markdown.read_text(encoding="utf-8"), f"{norm} norm, batch size {size}")
        for cell, values in ((row[1], error), (row[3], best)):
            mean, spread, n = re.fullmatch(r"([\d.]+) ± ([\d.]+) \((\d)\)", cell).groups()
            assert len(spread.lstrip("0.")) == 2  # significant digits
            assert len(mean.partition(".")[2]) == len(spread.partition(".")[2])
            assert float(mean) == pytest.approx(values.mean(), abs=float(spread) / 10)
            assert (float(spread), int(n)) == (pytest.approx(values.std(ddof=1), rel=0.06), 3)
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
            ([None, 0.02], TOY.numbers[0], "not finite in 1 of 2; others 2"),
            ([None, None], TOY.numbers[2], "not reached in 2 of 2"),
            ([12345.0, 12347.0], TOY.numbers[2], "12,346.0 ± 1.4 (2)"),
            ([11345.0, 13347.0], TOY.numbers[2], "12,300 ± 1,400 (2)"),
            ([0.0, 0.0], TOY.numbers[1], "0 ± 0 (2)"),
            ([0.00002, 0.00004], TOY.numbers[1], "0.000030 ± 0.000014 (2)"),
            ([0.000002, 0.000004], TOY.numbers[1], "3.0e-06 ± 1.4e-06 (2)"),
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
    def test_every_verdict_is_a_word_and_a_symbol_and_carries_its_interval(self, built):
        text = built.markdown.read_text(encoding="utf-8")
        interval = r"lead [+-][\d.]+ points \([+-][\d.]+ to [+-][\d.]+, n = 3\)"
        real = r"\| \[[^]]*\]\(#toy-digits\) "
        assert re.search(
            rf"{real}\| Layer norm ends lower.* \| ✓ direction reproduced, indicative \| {interval} \|", text
        )
        assert re.search(
            rf"{real}\| Batch norm beats.* \| ✗ not reproduced, indicative \| {interval}; the interval", text
        )
        assert re.search(
            r"\(#toy-digits-embedded\) \| Layer norm ends.* \| \? inconclusive \| not measured; fewer", text
        )
        shown = re.sub(r"\s+", " ", page_of(built).text)
        assert all(verdict in shown for verdict in ("✓ direction reproduced", "✗ not reproduced", "? inconclusive"))
        assert "indicative: 3 pairs" in shown

    def test_what_did_not_reproduce_is_listed_with_our_doubt(self, built):
        for text in (built.markdown.read_text(encoding="utf-8"), page_of(built).text):
            part = text[text.index("What did not reproduce") : text.index("Claims on stand-in data")]
            assert "Batch norm beats all." in part
            assert "By construction." in part
            assert "Layer norm ends lower" not in part

    def test_pairs_placebo_and_levels_stand_in_a_table_too(self, built):
        rows = [row for row in rows_of(page_of(built)) if row.startswith("Batch norm beats all.")]
        row = rows[2]  # after the tables of claims, on real data and on stand-ins
        assert len(re.findall(r"-[\d.]+ points", row)) == 3
        assert "not measured" in row  # the placebo: no further seeds

    def test_all_claims_on_speed_are_pooled_where_there_are_several(self, tmp_path, monkeypatch):
        claims = [dataclasses.replace(TOY.claims[3], name=norm, baseline={"norm": norm}) for norm in ("none", "batch")]
        claims = [dataclasses.replace(claim, ours={"norm": "layer"}) for claim in claims]
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": dataclasses.replace(SMALL, claims=tuple(claims))})
        for norm in ("layer", "batch", "none"):
            for seed in range(5):
                write_run(tmp_path / "runs", norm, seeds=(seed,), scale="laptop")
        done = build(tmp_path)
        told = re.search(
            r"All 2 claims on speed with a ratio, laptop scale, .* is at least ([\d.]+)x as fast", page_of(done).text
        )
        found = [claim for section in done.sections for claim in section.claims]
        nearest = [np.mean(list(claim["nearest"].values())) for claim in found]
        assert 1 < float(told[1]) < np.exp(np.mean(nearest))
        assert "This mean is about these tasks only." in page_of(done).text

    def test_a_claim_that_breaks_is_not_said_to_lack_runs(self, tmp_path, monkeypatch):
        claim = dataclasses.replace(TOY.claims[0], measure=None)
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": dataclasses.replace(SMALL, claims=(claim,))})
        write_run(tmp_path / "runs")
        done = build(tmp_path)
        assert done.real == (0, 0, 1, 0)
        assert "could not be judged" in done.markdown.read_text(encoding="utf-8")

    def test_stand_ins_are_marked_and_real_data_said_once(self, built):
        page = built.html.read_text(encoding="utf-8")
        sections = {
            re.match(r'<section id="([\w-]+)"', part)[0][13:-1]: part
            for part in re.findall(r"<section id=.*?</section>", page, flags=re.DOTALL)
        }
        assert sections["toy-digits-embedded"].count("EMBEDDED STAND-IN") >= 4  # section and figures
        assert STAND_IN["label"] in sections["toy-digits-embedded"]
        assert DATA["label"] in sections["toy-digits"]
        assert "REAL DATA" not in page
        assert [*sections].index("toy-digits") < [*sections].index("toy-digits-embedded")

    def test_a_scale_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": SMALL})
        write_run(tmp_path / "runs", scale="laptop")
        done = build(tmp_path)
        assert only(list(done.records)).name == "toy-digits-laptop.json"
        assert "Permutation-invariant digits, Digits, laptop scale" in page_of(done).text
        assert "12 s of training over all runs, 2 cores, A" in page_of(done).text

    @pytest.mark.parametrize("index", range(7))
    def test_figures_say_what_they_show(self, built, index):
        svg = built.figures[index].read_text(encoding="utf-8")
        drawn = " ".join(
            node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
        )
        assert (STAND_IN if "embedded" in built.figures[index].name else DATA)["label"] in re.sub(r"\s+", " ", drawn)
        assert re.search(r"layer norm.*\(n=\d|one pair of runs", drawn)

    def test_a_figure_of_other_data_is_left_out(self, tmp_path, monkeypatch):
        (nll,) = SMALL.figures
        other = dataclasses.replace(nll, name="other", datasets=("another set",))
        own = dataclasses.replace(nll, name="own", datasets=(DATA["name"],))
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": dataclasses.replace(SMALL, figures=(own, other))})
        write_run(tmp_path / "runs")
        assert [path.stem.split("-")[-1] for path in build(tmp_path).figures] == ["own"]

    def test_an_unfinished_run_is_drawn_and_told(self, built):
        svg = next(path for path in built.figures if path.stem == "toy-digits-nll").read_text(encoding="utf-8")
        assert re.search(r"no norm \(.*unfinished, 1 begun\)", svg)

    def test_where_the_numbers_come_from(self, built):
        text = page_of(built).text
        for told in ("A CPU", "torch 2.13.0", "commit c0ffee", "ab" * 32, "lamina run toy --norm layer", "eager"):
            assert told in text

    def test_benchmarks_and_checks_have_a_table_of_their_own(self, tmp_path, monkeypatch):
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": SMALL})
        write_run(tmp_path / "runs")
        record = {"schema": 2, "kind": "bench", "title": "Speed", "command": "bench it", "environment": ENVIRONMENT}
        (tmp_path / "runs" / "bench.json").write_text(json.dumps(record))
        text = build(tmp_path).markdown.read_text(encoding="utf-8")
        assert "## Benchmarks and checks" in text
        assert cells(text, "[Speed](#bench)") == ["[Speed](#bench)", "2 cores, A", "`bench it`"]

    @pytest.mark.usefixtures("small")
    def test_other_kinds_of_record_get_a_small_table(self, tmp_path):
        write_run(tmp_path / "runs")
        rows = [{"op": f"lstm {i}", "ms": 1.23456789, "note": None} for i in range(60)]
        record = {"schema": 2, "kind": "bench", "name": "h200", "passed": True, "rows": rows, "limits": {"ratio": 1.5}}
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
        record = {"schema": 2, "kind": "bench", "name": "gpu", "rows": [{"raw": 1}], "tables": [table], "about": "told"}
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
        assert done.real == (0, 1, 1, 1)  # as recorded
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
        assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
        assert all(a["src"].startswith("data:image/") for tag, a in page.elements if tag == "img")
        assert not re.search(r"@import|@font-face|url\((?!#)", text)

    def test_figures_are_named_for_those_who_cannot_see_them(self, built):
        alts = [a["alt"] for tag, a in page_of(built).elements if tag == "img"]
        told = [alt for alt in alts if alt]  # marks beside the words of a legend have none
        assert len(told) == 12
        assert all(len(alt) < 200 for alt in told)
        links = re.findall(r"!\[((?:[^]\\]|\\.)*)\]", built.markdown.read_text(encoding="utf-8"))
        assert len(links) == 7
        assert all(0 < len(alt) < 200 for alt in links)

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
        assert not {"script", "b"} & {tag for tag, _ in page.elements}
        assert all(a["src"].startswith("data:image/") for tag, a in page.elements if tag == "img")
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        markdown = re.sub(r"```.*?```|(?<!\\)`[^`\n]*`", "", done.markdown.read_text(encoding="utf-8"), flags=re.DOTALL)
        tags = {"!--", "a", "/a", "details", "/details", "summary", "/summary"}
        assert set(re.findall(r"<(!--|/?\w+)", markdown)) <= tags
        assert len(re.findall(r"(?<!\\)\]\((?!figures|#)", markdown)) == 0
        for svg in done.figures:
            ElementTree.fromstring(svg.read_text(encoding="utf-8"))


class TestRealSheets:
    @pytest.mark.parametrize("name", sorted(experiments.SHEETS))
    def test_each_sheet_has_a_report(self, tmp_path, name):
        sheet = experiments.SHEETS[name]
        panels = [panel for figure in sheet.figures for panel in figure.panels]
        steps = [430 * k for k in range(1, 5)]
        for norm in sheet.axes[0].labels:
            names = {name for panel in panels for name in panel.y.split()} | {number.metric for number in sheet.numbers}
            series = {key: {"update": steps, "value": [0.4, 0.3, 0.2, 0.1]} for key in names}
            config = dataclasses.asdict(sheet.config(norm=norm, dataset=sheet.datasets[0]))
            extras = {key: [0.1, 0.2, 0.3] for panel in panels if panel.kind == "profile" for key in (panel.x, panel.y)}
            run = {"config": config, "seed": 0, "finished": True, "steps": steps[-1], "series": series}
            common = {"schema": 2, "kind": "experiment", "experiment": name, "data": DATA | {"name": sheet.datasets[0]}}
            record = {**common, "scale": "", "runs": [{**run, "extras": extras}]}
            records.write(tmp_path / "in" / f"{norm}.json", json.dumps(record))
        done = report.build([tmp_path / "in"], tmp_path / "out")
        text = done.markdown.read_text(encoding="utf-8")
        assert (sum(done.real), sum(done.stand_in)) == (sum(claim.claimed for claim in sheet.claims), 0)
        assert "could not be judged" not in text
        assert "no finished run" not in text
        assert "no runs yet" not in re.sub(r"batch size 4: .*?yet\.", "", text)  # only the default batch size was run
        page_of(done)


RESULTS = Path(__file__).parents[2] / "results"


def test_the_verdicts_kept_in_the_records_are_todays(tmp_path):
    """No record in results/ keeps a verdict that today's rules would not give, from the rows alone."""
    for path in RESULTS.glob("*.json"):
        record = records.load(path)
        if record["kind"] == "experiment":
            rows = {key: value for key, value in record.items() if key not in ("summary", "claims")}
            assert records.save(verdicts.judged(rows), tmp_path).read_bytes() == path.read_bytes(), path.name
            assert all(claim["reason"] for claim in record["claims"] if claim["word"] == "inconclusive")


@pytest.mark.slow
def test_everything_shown_is_rendered_again_from_the_rows(tmp_path):
    """One command on results/ gives page, text and figures as they are: none is written by hand or out of date."""
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("figures", "report.html"))
    done = report.build([tmp_path / "results"], tmp_path / "results", markdown=tmp_path / "RESULTS.md")
    assert {path.name for path in done.figures} == {path.name for path in (RESULTS / "figures").iterdir()}
    for path in (*done.records, *done.figures):
        kept = RESULTS / path.relative_to(tmp_path / "results")
        assert path.read_bytes() == kept.read_bytes(), f"{path.name} is not what the rows say now. Run `make results`."
    for made, kept in ((done.html, RESULTS / "report.html"), (done.markdown, RESULTS.parent / "RESULTS.md")):
        fresh, text = (path.read_text(encoding="utf-8") for path in (made, kept))
        if "Not checked: " in fresh:  # a shallow clone or none: what git would say of changed code cannot be compared
            fresh, text = (re.sub(r"^(<p><em>|\*)(Stale|Not checked): .*\n+", "", t, flags=re.M) for t in (fresh, text))
        assert fresh == text, f"{kept.name} is not what the records and the code say now. Run `make results`."


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
  const drawn = [...page.querySelectorAll("img[alt]:not([alt=''])")].map(img => img.getBoundingClientRect());
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
            assert size["figures"] == 12
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
