"""The sheets: settings that refuse nonsense, claims on runs made by hand, names that experiments really use."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from lamina.errors import InputError
from lamina.lab.claims import DIRECTION, INCONCLUSIVE, NOT_REPRODUCED, Inside, Quality, Speed, SpeedToBest, judge
from lamina.lab.cli.jobs import jobs_of_scale
from lamina.lab.experiment import Job, Sheet
from lamina.lab.experiments import SHEETS, find
from lamina.lab.experiments.convnet.claims import LAYERS
from lamina.lab.reports import page, records, verdicts
from lamina.lab.results import Metric, Results
from lamina.lab.runs.progress import Reporter
from lamina.lab.statistics import HEADLINE_SEEDS, MIN_SEEDS

SHEET = pytest.mark.parametrize("sheet", SHEETS.values(), ids=list(SHEETS))
FIELDS = [pytest.param(s, f, id=f"{s.name}-{f.name}") for s in SHEETS.values() for f in dataclasses.fields(s.config)]


# Settings


@pytest.mark.parametrize(("sheet", "item"), FIELDS)
def test_every_setting_has_help_and_refuses_nonsense(sheet, item):
    assert len(item.metadata["help"]) > 5
    kind = type(item.default)
    wrong = {
        str: ["no such name", "", None, 3],
        int: ["7", None, 2.5, True, -1],
        float: ["x", None, math.nan, math.inf, -1.0],
    }
    for value in wrong[kind]:
        with pytest.raises(InputError, match=rf"^--{item.name.replace('_', '-')} must be .*, got "):
            sheet.config(**{item.name: value})
    assert getattr(sheet.config(), item.name) == item.default


@pytest.mark.parametrize(("sheet", "item"), FIELDS)
def test_bounds_are_where_the_settings_say(sheet, item):
    above, least = item.metadata["above"], item.metadata["least"]
    kind = type(item.default)
    if above is not None:
        with pytest.raises(InputError, match=f"above {above:g}"):
            sheet.config(**{item.name: kind(above)})
        sheet.config(**{item.name: kind(above) + kind(1) / 2})
    elif least is not None:
        with pytest.raises(InputError, match=f"at least {least:g}"):
            sheet.config(**{item.name: kind(least - 1)})
        sheet.config(**{item.name: kind(least)})
    for choice in item.metadata["choices"]:
        assert getattr(sheet.config(**{item.name: choice}), item.name) == choice


def test_a_whole_number_may_stand_for_a_float():
    assert find("mnist").config(lr=1).lr == 1
    with pytest.raises(InputError, match="--lr must be above 0, got 0"):
        find("mnist").config(lr=0)


def test_an_unknown_experiment_gets_the_nearest_suggested():
    with pytest.raises(InputError, match="Did you mean 'convnet'"):
        find("convnt")


@SHEET
def test_a_sheet_agrees_with_its_settings(sheet):
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    assert set(sheet.vary) <= set(fields)
    for axis in sheet.axes:
        choices = fields[axis.setting].metadata["choices"]
        assert axis.baseline in axis.labels
        assert not choices or tuple(sorted(axis.labels)) == tuple(sorted(choices))
        assert fields[axis.setting].metadata["sweep"]
    assert sheet.datasets == fields["dataset"].metadata["choices"]
    assert len({claim.name for claim in sheet.claims}) == len(sheet.claims)
    assert len({figure.name for figure in sheet.figures}) == len(sheet.figures)


def test_labels_name_what_varies():
    config = find("mnist").config(norm="batch", batch_size=4, lr=3e-4)
    assert Job("mnist", config, 2, ("norm", "batch_size", "lr")).label == "batch-batch_size4-lr0.0003-seed2"
    assert Job("mnist", config).label == "seed0"


SCALES = pytest.mark.parametrize(
    ("sheet", "scale"), [pytest.param(s, n, id=f"{s.name}-{n}") for s in SHEETS.values() for n in s.scales]
)


def fits(job: Job, settings: dict) -> bool:
    return all(getattr(job.config, key) == value for key, value in settings.items())


@SCALES
def test_a_scale_trains_all_that_the_claims_compare(sheet, scale):
    jobs, explored = jobs_of_scale(sheet, scale), sheet.scales[scale].explores
    claims = [claim for claim in sheet.claims if explored in ("", claim.name)]
    assert claims
    for claim in claims:
        ours, baseline = ({job.seed for job in jobs if fits(job, side)} for side in (claim.ours, claim.baseline))
        sides = (claim.ours.items(), claim.baseline.items())
        fewer = sheet.scales[scale].fewer
        most = min((seeds for few, seeds in fewer if any(few.items() <= side for side in sides)), default=999)
        assert len(ours & baseline) >= min(most, sheet.scales[scale].seeds) >= MIN_SEEDS, claim.name


@SHEET
def test_the_laptop_scale_makes_headlines_and_its_placebo_serves_a_claim_on_speed(sheet):
    scale = sheet.scales["laptop"]
    assert scale.seeds >= HEADLINE_SEEDS
    jobs, served = jobs_of_scale(sheet, "laptop"), 0
    for claim in (claim for claim in sheet.claims if isinstance(claim.measure, Speed)):
        ours, baseline = ({job.seed for job in jobs if fits(job, side)} for side in (claim.ours, claim.baseline))
        served += len(baseline - ours) == scale.seeds
    assert served


@SCALES
def test_step_sizes_of_a_scale_are_the_same_search_for_every_variant(sheet, scale):
    """No seed of the comparison chose them, and a variant that was tuned is one that is trained."""
    jobs = jobs_of_scale(sheet, scale)
    for row in sheet.scales[scale].tuned:
        variant = {key: row[key] for key in sheet.vary if key in row}
        assert any(fits(job, row) for job in jobs), row
        assert all(fits(job, row) for job in jobs if fits(job, variant)), row


# Claims on runs made by hand


def run(sheet: Sheet, settings: dict, seed: int, level: float) -> dict:
    """A run all of whose metrics fall to a level by halves; those that are better the higher they are rise."""
    config = dataclasses.asdict(sheet.config(**settings))
    updates = [10 * 2**k for k in range(8)]
    values = [level * (1 + 2.0**-k) for k in range(8)]
    names = {getattr(claim.measure, "metric", "") for claim in sheet.claims} | {claim.final for claim in sheet.claims}
    turned = {name: [-value for value in values] if sheet.metric(name).higher else values for name in names - {""}}
    series = {name: {"update": updates, "value": told} for name, told in turned.items()}
    return {"config": config, "seed": seed, "finished": True, "steps": updates[-1], "series": series, "extras": {}}


NOISE = ((0, 1, 2, 3, 4), (2, 0, 4, 1, 3))  # of the two sides, whose seeds do not move in step


def judged(sheet: Sheet, claim, ours: float, baseline: float, n: int = HEADLINE_SEEDS):
    """The verdict on runs whose levels are about these."""
    sides = zip((claim.ours, claim.baseline), (ours, baseline), NOISE)
    made = [run(sheet, side, seed, level * (1 + noise[seed] / 50)) for side, level, noise in sides for seed in range(n)]
    return judge(claim, Results(made), sheet.metric)


COMPARED = pytest.mark.parametrize(
    ("sheet", "claim"),
    [
        pytest.param(s, c, id=f"{s.name}-{c.name}")
        for s in SHEETS.values()
        for c in s.claims
        if not isinstance(c.measure, (Inside, SpeedToBest))
    ],
)


@COMPARED
@pytest.mark.parametrize(
    ("ours", "baseline", "word"), [(0.01, 0.3, DIRECTION), (0.3, 0.01, NOT_REPRODUCED), (0.1, 0.1, INCONCLUSIVE)]
)
def test_each_claim_follows_its_runs(sheet, claim, ours, baseline, word):
    if word == INCONCLUSIVE:  # ours is ahead by just what the claim asks for
        ours = ours / math.exp(claim.margin) if getattr(claim.measure, "ratio", True) else ours - claim.margin
    verdict = judged(sheet, claim, ours, baseline)
    if isinstance(claim.measure, Speed) and word == NOT_REPRODUCED and not claim.final:
        word = INCONCLUSIVE  # ours never gets there
    assert verdict.word == word, verdict


@COMPARED
def test_each_claim_waits_for_enough_seeds(sheet, claim):
    assert judged(sheet, claim, 0.01, 0.3, MIN_SEEDS - 1).reason == "fewer than 3 seeds of both sides"


def test_layer_norm_may_lose_a_little_where_the_batch_is_small():
    sheet = find("mnist")
    claim = next(claim for claim in sheet.claims if claim.name == "robust-ln")
    for shift, word in ((0.0010, DIRECTION), (-0.0050, DIRECTION), (0.0050, NOT_REPRODUCED)):
        made = []
        for size, end in ((128, 0.0150), (4, 0.0150 + shift)):
            for seed, noise in enumerate((0, 2e-4, -2e-4, 1e-4, -1e-4) if size == 4 else (0,) * 5):
                one = run(sheet, {"norm": "layer", "batch_size": size}, seed, 1.0)
                made.append({**one, "series": {"test_error": {"update": [10], "value": [end + noise]}}})
        verdict = judge(claim, Results(made), sheet.metric)
        assert verdict.word == word
        assert verdict.interval.estimate == pytest.approx(-shift)


@pytest.mark.parametrize(("border", "word"), [(0.2, DIRECTION), (0.6, NOT_REPRODUCED), (0.4, INCONCLUSIVE)])
def test_units_at_the_border_are_compared_with_those_at_the_centre(border, word):
    sheet = find("convnet")
    claim = next(claim for claim in sheet.claims if claim.name == "border")
    made = [run(sheet, {"norm": "layer"}, seed, 1.0) for seed in range(3)]
    for one in made:
        centre = 0.4 + 0.01 * (one["seed"] - 1)
        one["extras"] = {f"{layer}_active": [border, 0.9, centre] for layer in LAYERS}
    assert judge(claim, Results(made), sheet.metric).word == word


# Results


def test_results_read_runs_that_have_the_metric():
    def one(seed, **series):
        told = {name: {"update": [10, 20, 30][: len(v)], "value": v} for name, v in series.items()}
        return {"config": {"norm": "layer"}, "seed": seed, "steps": 30, "finished": seed < 9, "series": told}

    made = [one(0, a=[3.0, 1.0, 2.0]), one(1, a=[4.0, None]), one(2, b=[0.0]), one(9, a=[0.0])]
    found, low, high = verdicts.results(made), Metric("a", "a"), Metric("a", "a", "higher")
    assert [run["seed"] for run in found] == [0, 1, 2]  # finished ones
    assert found.final(low) == {0: 2.0, 1: math.inf}
    assert found.final(high) == {0: 2.0, 1: -math.inf}
    assert found.best(low) == {0: 1.0, 1: 4.0}
    assert found.best(high) == {0: 3.0, 1: 4.0}
    assert found.steps() == {0: 30.0, 1: 30.0, 2: 30.0}
    assert len(found.select(norm="layer")) == 3
    assert not len(found.select(norm="none"))


# Names


def test_a_sheet_describes_the_networks_that_ran():
    configs = [dataclasses.asdict(find("mnist").config(hidden=n)) for n in (256, 1000, 256)]
    assert "two hidden layers of 256 units" in find("mnist").described(configs[:1])
    assert "of 256 or 1000 units" in find("mnist").described(configs)
    small = find("convnet").config(width=8, units=64, statistics="running")
    told = find("convnet").described([dataclasses.asdict(small)])
    assert "of 8 channels" in told
    assert "64 units" in told
    assert "with running statistics" in told


@pytest.fixture(scope="module")
def produced(tmp_path_factory) -> dict[str, tuple[set[str], set[str], set[str]]]:
    """What one tiny run of each experiment writes: metrics of its evaluations, lists of its extras, artefacts."""
    from lamina.lab.options import Settings
    from lamina.lab.training.loop import train

    runs = tmp_path_factory.mktemp("runs")
    found = {}
    for sheet in SHEETS.values():
        tiny = {
            "mnist": {"hidden": 8},
            "convnet": {"width": 2, "units": 8},
            "order_embeddings": {"units": 8, "word_size": 8, "updates": 2},
            "attentive_reader": {"units": 8, "updates": 2},
            "skip_thoughts": {"units": 8, "updates": 2},
        }[sheet.name]
        settings = {**sheet.scales["smoke"].settings, **tiny, "epochs": 0.05}
        job = Job(sheet.name, sheet.config(**settings), 0, sheet.vary)
        with Reporter(Console(quiet=True)) as say:
            train([job], Settings(root="embedded", runs=runs, device="cpu"), say)
        folder = next(runs.glob(f"{sheet.name}/*/{job.label}"))
        found[sheet.name] = names_in(folder)
    return found


def names_in(folder: Path) -> tuple[set[str], set[str], set[str]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = set().union(*(line for line in lines if line["kind"] == "eval"))
    extras = folder / "extras.json"
    lists = set(json.loads(extras.read_text())["0"]) if extras.exists() else set()
    return metrics, lists, {path.name for path in folder.glob("artefacts/*")}


@SHEET
def test_figures_tables_and_claims_show_what_runs_write(sheet, produced):
    metrics, extras, artefacts = produced[sheet.name]
    settings = {f.name for f in dataclasses.fields(sheet.config)}
    assert sheet.headline.name in metrics
    assert not sheet.headline.name.startswith("test_")  # test cases choose nothing
    for number in sheet.numbers:
        assert number.metric in metrics
        assert number.at in ("last", "best")
    for panel in (panel for figure in sheet.figures for panel in figure.panels):
        written = {"profile": extras, "gallery": artefacts}.get(panel.kind, metrics)
        assert set(panel.y.split()) <= written, panel.title
        assert panel.x in ("update", "epoch") or panel.x in extras
        assert set(panel.where) <= settings
    for claim in sheet.claims:
        measured = claim.measure.metric if isinstance(claim.measure, (Speed, SpeedToBest, Quality)) else ""
        assert {measured, claim.final} - {""} <= metrics, claim.name
        assert {*claim.ours, *claim.baseline} <= settings


def test_explorations_stand_beside_their_claim_and_count_in_no_tally(tmp_path):
    sheet = find("mnist")
    claim = next(claim for claim in sheet.claims if claim.name == "robust-ln")
    data = {"name": "mnist", "kind": "real", "label": "MNIST (real)", "sha256": {}}
    for scale, better in (("paper", 0.5), ("same_updates", 1.1)):  # how much better ours is than the baseline
        sides = zip((claim.ours, claim.baseline), (1 / better, 1.0), NOISE)
        runs = [run(sheet, side, seed, level + noise[seed] / 50) for side, level, noise in sides for seed in range(5)]
        record = {"schema": records.SCHEMA, "kind": "experiment", "experiment": "mnist", "scale": scale, "data": data}
        records.save(records.judged({**record, "runs": runs, "notes": []}), tmp_path)
    done = page.build([tmp_path], tmp_path / "report")
    assert done.real == page.Tally(0, 0, len([c for c in sheet.claims if c.claimed]) - 1, 1)
    text = done.markdown.read_text()
    line = next(line for line in text.splitlines() if "[Explored](#mnist-mnist-same_updates)" in line)
    assert sheet.scales["same_updates"].about[1:] in line
    assert text.count("[Permutation-invariant MNIST, exploration") == 0  # in no table of claims
    assert ">Explored</a>" in done.html.read_text()
