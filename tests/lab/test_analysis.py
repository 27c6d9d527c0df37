"""``lamina analyse``: the study as a whole, its page and its pictures."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

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


def numbers(found, name):
    return next(table.rows for drawing, _, table in found if drawing.name == name)


def test_every_part_is_there_and_told(found):
    heard = []
    state = torch.random.get_rng_state()
    again = analysis.study(seed=0, done=heard.append)
    assert heard == NAMES == [picture.drawing.name for picture in found]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [shown[:2] for shown in again] == [shown[:2] for shown in found]  # the same bytes from the same seed


def test_pictures_are_drawings_with_words(found):
    for drawing, caption, _ in found:
        root = ElementTree.fromstring(drawing.svg)
        texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
        assert len(texts) > 8, drawing.name
        assert not [t for t in texts if "mathdefault" in t or "$" in t], drawing.name  # formulas are not set
        described = re.findall('alt="([^"]+)"', "".join(drawing.panels))
        assert caption.endswith(".")
        assert all(text.endswith(".") and len(text) < 200 for text in described), drawing.name


def test_what_the_tables_say(found):
    assert [row[2:4] for row in numbers(found, "fisher")] == [["3", "3"], ["3", "3"], ["5", "5"], ["0", "0"]]
    off = [float(row[4]) for row in numbers(found, "fisher")]
    assert off[2] > 0.1  # the printed formula, under layer norm only
    assert max(off[0], off[1], off[3]) < 1e-12
    assert [row[1:] for row in numbers(found, "rates")] == [["0.25", "0.5", "0.5"]] * 3


def test_the_caption_on_norm_growth_agrees_with_its_table(found):
    """It says that a norm rules out shorter weights, and that they grow and turn less without one too."""
    rows = {row[0]: row for row in numbers(found, "training")}
    assert [rows[norm][2] for norm in ("batch norm", "weight norm", "layer norm")] == [f"0 of {analysis.UPDATES}"] * 3
    assert all(float(row[1]) > 1 and float(row[4]) < float(row[3]) for row in rows.values())
    caption = next(picture.caption for picture in found if picture.drawing.name == "training")
    assert "no update can make them shorter" in caption
    assert "growth alone does not tell the models apart" in caption


def test_the_noise_of_small_batches_is_the_exact_one(found):
    """At 8 cases the first-order 2/N is off by a third, and the caption says why."""
    for row in numbers(found, "noise"):
        measured, exact, first_order, printed = map(float, row[1:5])
        assert measured == pytest.approx(exact, rel=0.04)
        assert printed < first_order < exact
    assert float(numbers(found, "noise")[0][3]) < 0.7 * float(numbers(found, "noise")[0][2])
    caption = next(picture.caption for picture in found if picture.drawing.name == "noise")
    assert "often far too small" in caption


def test_the_page_holds_every_picture(found, tmp_path):
    files = analysis.write(found, tmp_path / "new", seed=3)
    page = files[0].read_text()
    assert "--seed 3" in page
    assert [f.name for f in files[1:]] == [f"analysis-{name}.svg" for name in NAMES]
    assert re.findall(r'<section id="([a-z]+)"', page) == NAMES
    for drawing, caption, _ in found:
        assert all(panel in page for panel in drawing.panels)
        assert html.escape(caption, quote=False).replace("'", "&#39;").replace('"', "&#34;") in page


def test_a_change_of_nothing_is_drawn_too():
    cells = {"layer": [(0.0, True), (1.0, False)], "none": [(2.0, False), (float("1e-300"), True)]}
    picture = analysis_pictures.invariance_map(["one change", "another change"], cells)
    assert "0e+00" in picture.drawing.svg
    assert "All cells agree" in picture.caption
    wrong = analysis_pictures.invariance_map(["one change"], {"layer": [(0.5, True)]})
    assert "Not all cells agree" in wrong.caption
    flat = {"layer": np.zeros((2, 2)) + np.eye(2)}
    assert analysis_pictures.fisher_maps(flat, {"layer": [("W", 1), ("b", 1)]}).drawing.name == "fisher"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# A window cannot be narrower than about 500 pixels, a frame can.
FRAME = """<iframe src="analysis.html" width="390" height="3000" style="border:0"></iframe><script>onload = () => {
const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
const widths = [...page.querySelectorAll(".panels > img")].map(image => image.getBoundingClientRect().width);
document.title = [root.clientWidth, root.scrollWidth, Math.min(...widths)]; }</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_the_page_fits_a_phone(found, tmp_path):
    analysis.write(found, tmp_path, seed=0)
    (tmp_path / "frame.html").write_text(FRAME)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += [
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=4000",
    ]
    address = (tmp_path / "frame.html").as_uri()
    dom = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True).stdout
    shown, needed, smallest = map(float, re.search("<title>(.*?)</title>", dom)[1].split(","))
    assert shown == needed == 390
    assert smallest > 300


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(analysis, "study", lambda seed, done: [])
    assert commands.main(["analyse", "--out", str(tmp_path / "here"), "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "Invariant" in out
    assert str(tmp_path / "here" / "analysis.html") in out.replace("\n", "")
    (tmp_path / "file").write_text("")
    assert commands.main(["analyse", "--out", str(tmp_path / "file")]) == 2
    assert "--out must be a folder" in capsys.readouterr().err
