"""``lamina analyse``: the study as a whole, its page and its pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
from lamina.lab.cli import commands
from lamina.lab.reports import analysis, analysis_pictures

NAMES = ["invariances", "fisher", "divergence", "rates", "training", "noise"]


@pytest.fixture(scope="module", autouse=True)
def _short():
    """A shorter training run than a reader gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "UPDATES", 50)
        yield


@pytest.fixture(scope="module")
def found(_short):
    return analysis.study(seed=0)


ERRATA = Path(__file__).parents[2] / "docs" / "errata.md"


def test_every_erratum_names_tests_that_there_are():
    paragraphs = [line for line in ERRATA.read_text().splitlines() if line.startswith("**")]
    assert len(paragraphs) >= 18
    for paragraph in paragraphs:
        named = re.findall(r"`(test_\w+\.py)?::(test_\w+)`", paragraph)
        assert named, paragraph[:60]
        file = named[0][0]
        for part, name in named:
            file = part or file
            assert f"def {name}(" in next(ERRATA.parents[1].glob(f"tests/**/{file}")).read_text(), name


def numbers(found, name):
    return found.tables[name][0]["rows"]


def test_every_part_is_there_and_told(found):
    heard = []
    state = torch.random.get_rng_state()
    again = analysis.study(seed=0, done=heard.append)
    assert heard == NAMES == [p.name for p in found.pictures]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [p.svg for p in again.pictures] == [p.svg for p in found.pictures]  # the same bytes from the same seed


def test_pictures_are_drawings_with_words(found):
    for picture in found.pictures:
        root = ElementTree.fromstring(picture.svg)
        texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
        assert len(texts) > 8, picture.name
        assert not [t for t in texts if "mathdefault" in t or "$" in t], picture.name  # formulas are not set
        assert picture.caption in picture.svg.replace("&#x27;", "'")  # the description for those who cannot see it


def test_what_the_tables_say(found):
    assert [row[2:4] for row in numbers(found, "fisher")] == [["3", "3"], ["3", "3"], ["5", "5"], ["0", "0"]]
    off = [float(row[4]) for row in numbers(found, "fisher")]
    assert off[2] > 0.1  # the printed formula, under layer norm only
    assert max(off[0], off[1], off[3]) < 1e-12
    assert [row[1:] for row in numbers(found, "rates")] == [["0.25", "0.5", "0.5"]] * 3
    assert all(abs(float(row[1]) - 2) < 0.35 for row in numbers(found, "noise"))


def test_the_page_holds_every_picture(found, tmp_path):
    files = analysis.write(found, tmp_path / "new", seed=3)
    page = files[0].read_text()
    assert "--seed 3" in page
    assert [f.name for f in files[1:]] == [f"analysis-{name}.svg" for name in NAMES]
    assert re.findall(r'<section id="([a-z]+)"', page) == NAMES
    assert page.count("<svg") == len(NAMES)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # drawings in one page do not share names


def test_a_change_of_nothing_is_drawn_too():
    cells = {"layer": [(0.0, True), (1.0, False)], "none": [(2.0, False), (float("1e-300"), True)]}
    assert "0e+00" in analysis_pictures.invariance_map(["one change", "another change"], cells).svg
    flat = {"layer": np.zeros((2, 2)) + np.eye(2)}
    assert analysis_pictures.fisher_maps(flat, {"layer": [("W", 1), ("b", 1)]}).name == "fisher"


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(analysis, "study", lambda seed, done: analysis.Study())
    assert commands.main(["analyse", "--out", str(tmp_path / "here"), "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "Invariant" in out
    assert str(tmp_path / "here" / "analysis.html") in out.replace("\n", "")
    (tmp_path / "file").write_text("")
    assert commands.main(["analyse", "--out", str(tmp_path / "file")]) == 2
    assert "--out must be a folder" in capsys.readouterr().err
