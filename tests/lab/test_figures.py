"""Figures of runs and of claims: which numbers they draw, their legends, and files that are the same every time."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from PIL import Image

from lamina.errors import InputError
from lamina.lab.claims import Claim, Quality, Speed
from lamina.lab.experiment import Axis, Config, Figure, Panel, Sheet, option
from lamina.lab.reports import drawings, figures
from lamina.lab.results import Metric

CELLS = {"plain": "plain cell", "layer": "cell with LN", "batch": "cell with BN"}
SVG = "{http://www.w3.org/2000/svg}"
BATCH = {"batch_size": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordsConfig(Config):
    cell: str = option("plain", "kind of cell", choices=tuple(CELLS))


def claim(name: str, measure: Any, **more: Any) -> Claim:
    sides = {"ours": {"cell": "layer"}, "baseline": {"cell": "plain"}}
    return Claim(name, f"The cell with LN is better at {name}.", "figure 2", measure, **sides, **more)


SHEET = Sheet(
    name="words",
    title="Words",
    section="6",
    about="Words.",
    config=WordsConfig,
    module="words",
    axes=(Axis("cell", CELLS, "plain"), Axis("batch_size", {128: "batches of 128", 4: "batches of 4"}, 128)),
    scales={},
    datasets=("words",),
    figures=(),
    numbers=(),
    claims=(
        claim("speed", Speed("loss"), expected=1.7),
        claim("loss", Quality("loss", ratio=True), margin=math.log(2)),
        claim("recall", Quality("recall", unit="points", scale=100)),
    ),
    headline=Metric("recall", "recall", better="higher"),
    metrics=(Metric("loss", "training loss"),),
)


def run(cell: str = "plain", size: int = 128, seed: int = 0, finished: bool = True, points: int = 6) -> dict[str, Any]:
    updates = [100 * k for k in range(1, points + 1)]
    loss = [(1 + seed + list(CELLS).index(cell)) / k for k in range(1, points + 1)]
    series = {"loss": loss, "recall": [1 - 0.1 * one for one in loss], "epoch": [u / 50 for u in updates]}
    config = dataclasses.asdict(WordsConfig(cell=cell, batch_size=size))
    extras = {"place": [0, 1, 2], "share": [0.1, 0.2, 0.3 + seed]} if finished else {}
    return {
        **{"config": config, "seed": seed, "finished": finished, "steps": 100 * points, "extras": extras},
        "series": {name: {"update": updates, "value": values} for name, values in series.items()},
    }


def record(*runs: dict[str, Any], claims: Any = (), label: str = "Words (real: 1,000)") -> dict[str, Any]:
    data = {"name": "words", "kind": "real", "label": label}
    return {"kind": "experiment", "experiment": "words", "data": data, "runs": list(runs), "claims": list(claims)}


def panel(y: str = "loss", **more: Any) -> Panel:
    return Panel("Title", y, "what y is", **more)


def lines(*runs: dict[str, Any], **more: Any) -> list[figures.Line]:
    return figures.panel_lines(record(*runs), SHEET, panel(**more))


def draw(*panels: Panel, runs: Any = (), **more: Any) -> drawings.Drawing:
    return figures.draw(record(*(runs or [run()]), **more), SHEET, Figure("one", "Caption.", panels))


def words(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


class Tags(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}


class TestLines:
    def test_a_line_is_the_mean_of_finished_runs(self):
        (line,) = lines(*(run(seed=seed) for seed in range(3)), run(seed=3, finished=False, points=2))
        assert (line.label, line.note) == ("plain cell, batches of 128", "n=3, 1 unfinished")
        np.testing.assert_allclose(line.mean(log=False), [2 / k for k in range(1, 7)])
        np.testing.assert_allclose(line.mean(log=True), [6 ** (1 / 3) / k for k in range(1, 7)])
        np.testing.assert_array_equal(line.x, [100, 200, 300, 400, 500, 600])
        assert [x.tolist() for x, _ in line.loose] == [[100, 200]]

    def test_seeds_are_averaged_at_the_updates_that_all_have(self):
        (line,) = lines(run(points=6), run(seed=1, points=4))
        assert line.rows.shape == (2, 4)
        np.testing.assert_allclose(line.mean(log=False), [1.5 / k for k in range(1, 5)])

    def test_runs_that_share_no_update_are_drawn_one_by_one(self):
        other = run(seed=1)
        other["series"]["loss"]["update"] = [u + 1 for u in other["series"]["loss"]["update"]]
        (line,) = lines(run(), other)
        assert line.note == "n=2, no common times"
        assert (line.rows.size, len(line.loose)) == (0, 2)

    def test_the_horizontal_axis_may_be_epochs(self):
        np.testing.assert_allclose(lines(run(), x="epoch")[0].x, [2, 4, 6, 8, 10, 12])

    def test_a_profile_is_averaged_over_seeds(self):
        (line,) = lines(run(), run(seed=1), y="share", x="place", kind="profile")
        np.testing.assert_allclose(line.mean(log=False), [0.1, 0.2, 0.8])
        np.testing.assert_array_equal(line.x, [0, 1, 2])

    def test_a_panel_shows_only_its_runs_and_does_not_repeat_what_they_share(self):
        assert [line.label for line in lines(run(), run(size=4), where={"batch_size": 4})] == ["plain cell"]

    def test_colours_follow_the_first_axis_and_dashes_the_others(self):
        every = [run(cell, size) for size in (4, 128) for cell in reversed(CELLS)]
        drawn = {line.label: line.look for line in lines(*every)}
        for place, cell in enumerate(CELLS.values()):
            for dash, size in enumerate(("128", "4")):
                look = drawn[f"{cell}, batches of {size}"]
                seen = (look["color"], look["marker"], look["linestyle"])
                assert seen == (drawings.COLOURS[place], drawings.MARKERS[place], drawings.DASHES[dash])

    def test_a_variant_looks_the_same_where_others_are_missing(self):
        alone, among = lines(run("batch"), where=BATCH), lines(*(run(cell) for cell in CELLS), where=BATCH)
        assert alone[0].look == among[-1].look

    def test_values_that_are_not_finite_are_told(self):
        broken = run()
        broken["series"]["loss"]["value"][2] = None
        (line,) = lines(broken, run(seed=1))
        assert line.note == "n=2, 1 not finite"
        assert np.isnan(line.rows[0, 2])


class TestCurves:
    @pytest.mark.parametrize("log", [False, True])
    @pytest.mark.parametrize(("value", "points"), [(None, 1), (None, 6), (0.0, 6), (-1.0, 1)])
    def test_curves_that_no_axis_can_hold_are_no_error(self, value, points, log):
        broken = run(points=points)
        broken["series"]["loss"]["value"] = [value] * points
        ElementTree.fromstring(draw(panel(log=log, log_x=log), runs=[broken]).svg)

    @pytest.mark.parametrize("finished", [True, False])
    def test_a_run_without_evaluations_is_no_error(self, finished):
        assert "no runs yet" in words(draw(panel(), runs=[run(points=0, finished=finished)]).svg)

    def test_panels_of_one_metric_share_their_limits(self):
        panels = [panel(where={"batch_size": size}) for size in (128, 4)] + [panel("recall")]
        runs = [run(), run("batch", 4)]
        drawn = [figures.panel_lines(record(*runs), SHEET, one) for one in panels]
        first, second, other = figures.shared_limits(panels, drawn)
        assert first == second != other
        assert first[0] < 1 / 6
        assert first[1] > 3

    def test_reference_lines_have_names_and_lie_inside(self):
        one = panel(references={"the paper's 7": 7.0})
        assert figures.shared_limits([one], [lines(run())])[0][1] > 7
        assert "the paper's 7" in words(draw(one).svg)

    def test_a_measured_reference_is_the_mean_of_all_runs_that_have_it(self):
        runs = [run(seed=0), run("batch", seed=1)]
        for one, value in zip(runs, (5.0, 9.0)):
            one["series"]["guess"] = {"update": [600], "value": [value]}
        asked = panel(measured_references={"guessing": "guess", "nobody's": "missing"})
        shown = figures._with_measured_references(asked, lines(*runs, run(finished=False)), SHEET)
        assert shown.references == {"guessing": 7.0}
        drawn = words(draw(asked, runs=runs).svg)
        assert "guessing" in drawn
        assert "nobody's" not in drawn

    def test_fixed_limits_are_kept(self):
        one = panel(y_limits=(0.0, 40.0))
        assert "40" in words(draw(one).svg)

    @pytest.mark.parametrize("scale", [1.0, 0.3, 0.05])
    def test_a_log_axis_has_labels_on_any_range(self, scale):
        one = run()
        one["series"]["loss"]["value"] = [0.39 * (1 + scale * k) for k in range(6)]
        labels = [
            float(text) for text in words(draw(panel(log=True), runs=[one]).svg) if re.fullmatch(r"0?\.?\d+", text)
        ]
        assert len([label for label in labels if 0.3 < label < 10]) >= 2

    def test_a_log_horizontal_axis_has_plain_numbers(self):
        drawn = words(draw(panel(log_x=True), runs=[run(points=100)]).svg)
        assert {"100", "1,000", "10,000"} <= set(drawn)


class TestLegends:
    def test_a_figure_has_one_legend(self):
        runs = [run(cell, size) for cell in CELLS for size in (128, 4)]
        drawn = draw(*(panel(where={"batch_size": size}) for size in (128, 4)), runs=runs)
        assert words(drawn.svg).count("cell with LN (n=1)") == 1
        assert len(drawn.panels) == 3
        assert drawn.panels[-1].startswith('<ul class="legend">')
        assert re.findall(r"> ([^<>]+)</li>", drawn.panels[-1]) == [f"{cell} (n=1)" for cell in CELLS.values()]

    def test_it_tells_different_numbers_of_runs(self):
        runs = [run(), run(seed=1), run(size=4)]
        drawn = draw(*(panel(where={"batch_size": size}) for size in (128, 4)), runs=runs)
        assert "plain cell (n=2; n=1)" in drawn.panels[-1]

    def test_words_are_only_words(self):
        hostile = "<script>alert(1)</script> \" $\\frac{$ & ' </svg>"
        axes = (Axis("cell", {"plain": hostile}, "plain"), SHEET.axes[1])
        sheet = dataclasses.replace(SHEET, axes=axes)
        kinds = [panel(), panel(kind="bars"), panel("loss recall", kind="table"), panel("*", kind="gallery")]
        one = run() | {"artefacts": {f"{hostile}.png".replace("/", ""): "data:image/png;base64,AAAA"}}
        drawn = figures.draw(record(one, label=hostile), sheet, Figure("one", "", tuple(kinds)))
        assert hostile in " ".join(words(drawn.svg))
        tags = {
            "img",
            "table",
            "caption",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "div",
            "ul",
            "li",
            "p",
            "figure",
            "figcaption",
        }
        page = Tags()
        page.feed("".join(drawn.panels))
        assert page.seen <= tags
        assert page.attributes <= {"class", "alt", "src", "scope", "role", "tabindex", "aria-label"}


class TestBarsTablesGalleries:
    def test_bars_show_the_value_at_the_end_or_the_best(self):
        late = run()
        late["series"]["recall"]["value"] = [0.2, 0.9, 0.1, 0.3, 0.4, 0.5]
        assert "plain cell (n=1) 0.5" in only(draw(panel("recall", kind="bars", where=BATCH), runs=[late]))
        assert "plain cell (n=1) 0.9" in only(draw(panel("recall", kind="bars", at="best", where=BATCH), runs=[late]))

    def test_bars_name_their_variants_and_need_no_legend(self):
        drawn = draw(panel(kind="bars", where=BATCH, references={"paper": 2.0}), runs=[run(cell) for cell in CELLS])
        assert len(drawn.panels) == 1
        assert {"plain cell (n=1)", "paper"} <= set(words(drawn.svg))

    def test_a_table_holds_means_with_two_digits_of_their_spread_and_the_papers_row(self):
        runs = [run(seed=seed) for seed in range(3)]
        one = panel("loss recall", kind="table", scale=100, where=BATCH, printed={"the paper": ("30", "97.1")})
        drawn = draw(one, runs=runs)
        cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", drawn.panels[0])
        assert cells[:3] == ["", "training loss", "recall"]
        assert cells[3:6] == ["plain cell (n=3)", "33 ± 17", "96.7 ± 1.7"]
        assert cells[6:] == ["the paper", "30", "97.1"]
        assert set(cells) - {""} <= set(words(drawn.svg))

    def test_a_gallery_shows_the_pictures_of_the_first_finished_run(self, tmp_path):
        Image.new("RGB", (4, 4), "red").save(tmp_path / "sample_1.png")
        (tmp_path / "sample_2.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        (tmp_path / "notes.txt").write_text("no picture")
        found = drawings.read_pictures(tmp_path)
        assert list(found) == ["sample_1.png", "sample_2.svg"]
        runs = [run(finished=False) | {"artefacts": {"sample_0.png": "data:image/png;base64,AAAA"}}]
        runs += [run(seed=1) | {"artefacts": {**found, "other.png": found["sample_1.png"]}}, run("layer")]
        drawn = draw(panel("sample_*", kind="gallery", where=BATCH), runs=runs)
        assert re.findall('src="([^"]+)"', drawn.panels[0]) == list(found.values())
        shown = [node.attrib["{http://www.w3.org/1999/xlink}href"] for node in images(drawn.svg)]
        assert shown == list(found.values())
        assert "plain cell, sample 1" in drawn.panels[0]

    def test_pictures_of_several_variants_lie_beside_each_other(self):
        runs = [run(cell) | {"artefacts": {"a.png": "data:image/png;base64,AAAA"}} for cell in CELLS]
        places = [float(node.attrib["x"]) for node in images(draw(panel("a*", kind="gallery"), runs=runs).svg)]
        assert len(places) == 3
        assert places == sorted(set(places))

    def test_a_gallery_without_pictures_says_so(self):
        drawn = draw(panel("a*", kind="gallery"))
        assert "no pictures yet" in drawn.panels[0]
        assert "no pictures yet" in words(drawn.svg)

    def test_a_kind_that_does_not_exist_is_refused(self):
        with pytest.raises(InputError, match="kind of a panel must be one of"):
            panel(kind="curves")


def only(drawn: drawings.Drawing) -> str:
    (page,) = drawn.panels
    return page


def images(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}image"))


def told(of: Claim, pairs: dict[str, float], low: float, high: float, **more: Any) -> dict[str, Any]:
    middle = sum(pairs.values()) / max(len(pairs), 1)
    interval = {"estimate": middle, "low": low, "high": high, "n": len(pairs)}
    said = {"name": of.name, "text": of.text, "word": "direction reproduced", "measured": "as measured", "reason": ""}
    return {**said, "interval": interval, "pairs": pairs, "placebo": None, "levels": [], "claimed": True, **more}


PAIRS = {"0": 0.5, "1": 0.7, "2": 0.6}


class TestClaims:
    def test_every_claim_has_its_words_verdict_and_measure(self):
        speed, loss, recall = (told(one, PAIRS, 0.3, 0.9) for one in SHEET.claims)
        drawn = figures.draw_claims(record(claims=[speed, loss | {"claimed": False}, recall]), SHEET)
        said = " ".join(words(drawn.svg))
        assert said.count("direction reproduced: as measured") == 3
        assert said.count("Not a claim of the paper") == 1
        assert "Words (real: 1,000)" in said
        assert {"Ratios", "Differences in points"} <= set(words(drawn.svg))

    def test_ratios_have_a_log_axis_and_differences_their_unit(self):
        ratio = told(SHEET.claims[0], {"0": -0.6, "1": 0.2, "2": 0.6}, -0.7, 0.7)
        assert {"0.5x", "1x", "2x"} <= set(words(figures.draw_claims(record(claims=[ratio]), SHEET).svg))
        points = told(SHEET.claims[2], {"0": 0.02, "1": 0.03, "2": 0.04}, 0.015, 0.045)
        assert {"0", "2", "4"} <= set(words(figures.draw_claims(record(claims=[points]), SHEET).svg))

    def test_every_pair_is_a_dot(self):
        one = told(SHEET.claims[0], PAIRS, 0.3, 0.9)
        more = told(SHEET.claims[0], {**PAIRS, "3": 0.8, "4": 0.9}, 0.3, 0.9)
        dots = [figures.draw_claims(record(claims=[each]), SHEET).svg.count("<use") for each in (one, more)]
        assert dots[1] == dots[0] + 2

    def test_the_legend_names_only_what_is_drawn(self):
        speed, loss = (told(one, PAIRS, 0.3, 0.9) for one in SHEET.claims[:2])
        placebo = {"estimate": 0.0, "low": -0.1, "high": 0.1, "n": 3}
        plain = figures.draw_claims(record(claims=[told(SHEET.claims[2], PAIRS, 0.3, 0.9)]), SHEET).panels[-1]
        full = figures.draw_claims(record(claims=[speed | {"placebo": placebo}, loss]), SHEET).panels[-1]
        for name in ("paper&#x27;s ratio", "baseline against itself", "least that the claim asks for"):
            assert name not in plain
            assert name in full

    def test_misses_and_missing_intervals_are_no_error(self):
        missed = told(SHEET.claims[0], {"0": math.inf, "1": 0.7, "2": -math.inf}, 0.1, math.inf)
        missed["interval"]["estimate"] = math.inf
        unknown = missed | {"interval": None, "reason": "fewer than 3 seeds of both sides", "word": "inconclusive"}
        from_file = missed | {"interval": {"estimate": "inf", "low": 0.1, "high": "inf", "n": 3}}
        for one in (missed, unknown, from_file):
            said = " ".join(words(figures.draw_claims(record(claims=[one]), SHEET).svg))
            assert one["reason"] in said

    def test_nothing_measured_is_no_figure(self):
        nothing = told(SHEET.claims[0], {}, 0, 0, interval=None)
        assert figures.draw_claims(record(claims=[nothing]), SHEET) is None
        assert figures.draw_levels(record(claims=[nothing]), SHEET) is None

    def test_levels_have_a_line_for_each_claim_on_speed(self):
        interval, bound = ({"estimate": 0.7, "low": 0.3, "high": high, "n": 3} for high in (1.1, math.inf))
        levels = [[0.2, interval, None], [0.6, bound, {**interval, "low": -0.3}], [1.0, None, None]]
        speed, recall = (told(one, PAIRS, 0.3, 0.9) for one in SHEET.claims[::2])
        drawn = figures.draw_levels(record(claims=[speed | {"levels": levels}, recall]), SHEET)
        assert {"1x", "2x", "20", "100"} <= set(words(drawn.svg))
        assert SHEET.claims[0].text in drawn.panels[-1]
        assert SHEET.claims[2].text not in drawn.panels[-1]
        assert "2x at 60%" in drawn.panels[0]


class TestFiles:
    def test_descriptions_are_short(self):
        axes = (Axis("cell", {name: f"{label} {'of great length ' * 8}" for name, label in CELLS.items()}, "plain"),)
        sheet, runs = dataclasses.replace(SHEET, axes=axes), [run(cell) for cell in CELLS]
        kinds = ("curve", "bars", "table", "gallery")
        drawn = [figures.draw(record(*runs), sheet, Figure("one", "", (panel(kind=kind),))) for kind in kinds]
        drawn.append(figures.draw_claims(record(claims=[told(one, PAIRS, 0.3, 0.9) for one in SHEET.claims]), SHEET))
        for one in drawn:
            described = [one.alt, *re.findall('alt="([^"]*)"', " ".join(one.panels))]
            assert all(len(text) < 200 for text in described)
            title = next(ElementTree.fromstring(one.svg).iter(f"{SVG}title")).text
            assert title == one.alt

    def test_a_description_tells_where_the_lines_end(self):
        drawn = draw(panel(where=BATCH), runs=[run(), run("batch")])
        assert (
            'alt="Title: what y is against updates. plain cell ends at 0.167; cell with BN ends at 0.5."'
            in drawn.panels[0]
        )

    def test_a_users_settings_change_nothing_and_stay(self):
        import matplotlib

        before = dict(matplotlib.rcParams)
        expected = draw(panel())
        with matplotlib.rc_context({"font.size": 33, "axes.linewidth": 9, "svg.fonttype": "path"}):
            assert draw(panel()) == expected
        assert dict(matplotlib.rcParams) == before

    def test_a_file_needs_no_other_file(self):
        drawn = draw(panel(), panel("a*", kind="gallery"))
        for text in (drawn.svg, *drawn.panels):
            addresses = re.findall(r'(?:href|src)="([^"]*)"', text)
            assert all(address.startswith(("#", "data:")) for address in addresses)
            assert str(Path.cwd()) not in text
