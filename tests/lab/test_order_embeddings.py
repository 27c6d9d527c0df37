"""Order embeddings: scores and loss against their definitions, metrics by hand, start values, batches, runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.data.captions import PER_IMAGE, CaptionData, CaptionedImages
from lamina.lab.experiment import Job
from lamina.lab.experiments.order_embeddings import metrics, model, scores
from lamina.lab.experiments.order_embeddings.claims import CLAIMS
from lamina.lab.experiments.order_embeddings.settings import MARGINS, NORMS, SHEET, OrderConfig
from lamina.lab.options import Settings
from lamina.lab.runs.folder import RunFolder
from lamina.lab.training.loop import train
from lamina.lab.training.update import Update
from lamina.optim import Adam, clip_gradients
from lamina.recurrent import GRU

# Scores and loss


def rows(count: int, units: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    drawn = torch.rand(count, units, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return drawn / drawn.norm(dim=1, keepdim=True)


def defined(captions, images, kind):
    """The score of each pair, one by one."""
    pairs = [
        [(-(s * v).sum() if kind == "cosine" else sum(max(0.0, float(d)) ** 2 for d in s - v)) for v in images]
        for s in captions
    ]
    return torch.tensor([[float(score) for score in row] for row in pairs], dtype=torch.float64)


def defined_loss(matrix, margin):
    pairs = [(i, j) for i in range(len(matrix)) for j in range(len(matrix)) if i != j]
    right = [float(matrix[i, i]) for i in range(len(matrix))]
    return sum(
        max(0.0, margin - float(matrix[i, j]) + right[j]) + max(0.0, margin - float(matrix[i, j]) + right[i])
        for i, j in pairs
    )


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize(("captions", "images", "units"), [(1, 1, 1), (2, 17, 5), (17, 2, 33), (13, 12, 64)])
def test_scores_are_the_definition(kind, captions, images, units):
    s, v = rows(captions, units, 0), rows(images, units, 1)
    assert torch.allclose(scores.scores(s, v, kind), defined(s, v, kind), atol=1e-12)


@pytest.mark.parametrize("limit", [100, 1000, 2**18])
@pytest.mark.parametrize(("cases", "units"), [(1, 3), (2, 17), (17, 100), (129, 33)])
def test_blocks_of_any_size_give_score_and_gradients_of_plain_broadcasting(monkeypatch, limit, cases, units):
    monkeypatch.setattr(scores, "ON_CPU", limit)
    s, v, g = rows(cases, units, 0), rows(cases + 1, units, 1), rows(cases, cases + 1, 2) - 0.1
    ours, plain = ([x.clone().requires_grad_() for x in (s, v)] for _ in range(2))
    found = scores.scores(*ours, "order")
    wanted = (plain[0].unsqueeze(1) - plain[1]).clamp(min=0).square().sum(2)
    found.backward(g)
    wanted.backward(g)
    assert torch.allclose(found, wanted, atol=1e-13)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-13) for a, b in zip(ours, plain))


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("cases", [2, 9])
def test_the_loss_is_its_definition_and_its_gradient_that_of_finite_differences(kind, cases):
    s, v = rows(cases, 6, 3).requires_grad_(), rows(cases, 6, 4).requires_grad_()

    def loss(s, v):
        return scores.ranking_loss(scores.scores(s, v, kind), MARGINS[kind])

    assert float(loss(s, v).detach()) == pytest.approx(
        defined_loss(defined(s.detach(), v.detach(), kind), MARGINS[kind])
    )
    assert float(loss(s, v).detach()) > 0
    assert gradcheck(loss, (s, v), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("side", [0, 1])
def test_nan_in_an_embedding_is_not_swallowed(kind, side):
    s, v = (rows(4, 6, seed).requires_grad_() for seed in (3, 4))
    with torch.no_grad():
        (s, v)[side][2, 1] = torch.nan
    found = scores.scores(s, v, kind)
    assert torch.isnan(found[2] if side == 0 else found[:, 2]).all()
    assert torch.isnan(scores.ranking_loss(found, 0.05))


def test_an_unknown_score_gets_the_nearest_suggested():
    with pytest.raises(InputError, match="Did you mean 'cosine'"):
        scores.scores(torch.ones(1, 1), torch.ones(1, 1), "cosin")


# Metrics: two images, ten captions; lower is better


def by_hand():
    """Scores of 10 captions and 2 images; the first five belong to image 0."""
    own = [[1, 2], [3, 2], [2, 2], [5, 9], [4, 6]]
    other = [[0, 1], [7, 1], [6, 6], [8, 7], [9, 5]]
    return torch.tensor([*own, *other], dtype=torch.float32)


def test_ranks_by_hand_with_ties():
    """Image 0's best caption has 1: caption 5 of the other image has 0. Image 1's best has 1: none of the others has.

    Captions 1, 2 and 7 do not find their image: another is better or as good, which counts as better.
    """
    captions, images = metrics.ranks(by_hand())
    assert captions.tolist() == [1, 0]
    assert images.tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 0, 0]
    tied = by_hand()
    tied[0, 1] = 1  # as good as image 1's own best
    assert metrics.ranks(tied)[0].tolist() == [1, 1]


def test_summaries_by_hand():
    found = metrics.summary(torch.tensor([0, 0, 4, 5, 9, 10]))
    assert {key: float(value) for key, value in found.items()} == pytest.approx(
        {"r1": 200 / 6, "r5": 300 / 6, "r10": 500 / 6, "recall": 1000 / 18, "mean": 28 / 6 + 1, "median": 5}
    )
    assert float(metrics.summary(torch.tensor([2, 3, 8]))["median"]) == 4


@pytest.mark.parametrize("value", [0.0, 1.0, torch.nan])
def test_a_model_that_gives_all_pairs_one_score_ranks_last(value):
    captions, images = metrics.ranks(torch.full((100, 20), value))
    assert captions.tolist() == [95] * 20
    assert images.tolist() == [19] * 100


def test_ranks_are_those_of_a_sorted_list_where_nothing_ties(monkeypatch):
    monkeypatch.setattr(metrics, "ROWS", 7)
    matrix = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    captions, images = metrics.ranks(matrix)
    for caption in range(60):
        assert images[caption] == matrix[caption].argsort().tolist().index(caption // PER_IMAGE)
    for image in range(12):
        order = matrix[:, image].argsort().tolist()
        assert captions[image] == min(order.index(own) for own in range(PER_IMAGE * image, PER_IMAGE * (image + 1)))


def test_five_folds_where_there_are_images_for_them():
    assert [(fold.start, fold.stop) for fold in metrics.folds(5003)] == [(i, i + 1000) for i in range(0, 5000, 1000)]
    assert metrics.protocol(5003) == "mean of 5 folds of 1,000 images"
    assert list(metrics.folds(4999)) == [slice(0, 4999)]
    assert metrics.protocol(1000) == "one fold of 1,000 images"
    parts = [torch.tensor([0, 2]), torch.tensor([0, 0])]
    assert float(metrics.averaged(parts)["r1"]) == 75
    assert float(metrics.averaged(parts)["median"]) == 1.5  # the folds' metrics are averaged, not their ranks


@pytest.mark.slow
def test_25000_captions_and_5000_images_are_ranked_in_2_gb():
    """Scores take 0.5 GB; the rest is temporaries."""
    import resource

    generator = torch.Generator().manual_seed(0)
    captions, images = (torch.rand(count, 16, generator=generator) for count in (25_000, 5_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics.ranks(scores.scores(captions, images, "order"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # kB


# Data, batches and model


def made_up(images: int, features: int = 12, seed: int = 0) -> CaptionedImages:
    """Images whose five captions name them in words of their own."""
    draw = np.random.default_rng(seed)
    pixels = np.abs(draw.standard_normal((images, features))).astype(np.float32)
    captions = [("see", *"ab"[: which % 3], f"thing{image}") for image in range(images) for which in range(PER_IMAGE)]
    names = tuple(f"{image}.jpg" for image in range(images))
    return CaptionedImages(names, pixels / np.linalg.norm(pixels, axis=1, keepdims=True), tuple(captions))


def captions_of(monkeypatch, train: int = 50, features: int = 12) -> model.Captions:
    splits = {name: made_up(train, features) for name in ("train", "valid", "test")}
    data = CaptionData("made up", "embedded", "made up", {}, splits, ())
    monkeypatch.setattr(model, "load_captions", lambda dataset, root: data)
    model._load.cache_clear()
    return model.load(OrderConfig(dataset="scenes"), None)


@pytest.fixture
def captions(monkeypatch):
    yield captions_of(monkeypatch)
    model._load.cache_clear()


SMALL = OrderConfig(dataset="scenes", units=16, word_size=8, batch_size=10, updates=6, eval_updates=3, log_every=2)


def test_a_batch_has_each_image_once_with_one_of_its_captions(captions):
    batches = model.batches(dataclasses.replace(SMALL, batch_size=8), captions, 3)
    epoch = torch.cat([batches.at(step) for step in range(6)])
    assert batches.updates(1) == 6  # 50 images in batches of 8: the last 2 of an epoch are left out
    assert len(set((epoch // PER_IMAGE).tolist())) == 48
    chosen = torch.cat([batches.at(step) % PER_IMAGE for step in range(100)])
    assert torch.bincount(chosen, minlength=PER_IMAGE).min() > 100  # 160 expected
    assert torch.equal(batches.at(5), model.batches(dataclasses.replace(SMALL, batch_size=8), captions, 3).at(5))
    assert torch.equal(batches.stretch(4, 2)[1], batches.at(5))


def test_a_batch_is_cut_to_its_own_longest_caption(captions):
    index = torch.tensor([0, 11])  # see thing0 / see a thing2
    features, words, lengths = model.batch(captions, index)
    assert torch.equal(features, captions.splits["train"].features[[0, 2]])
    assert lengths.tolist() == [3, 4]
    assert words.shape == (2, 4)
    assert captions.vocabulary.decode(words[1].tolist()) == ["see", "a", "thing2"]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("score", scores.KINDS)
def test_embeddings_are_the_equations_and_ignore_padding(captions, norm, score):
    made = model.build(dataclasses.replace(SMALL, norm=norm, score=score), captions).eval()
    split = captions.splits["test"]
    words, lengths = split.captions.padded(torch.arange(10))
    with torch.no_grad():
        together = made.sentences(words, lengths)
        images = made.images(split.features)
    for found in (together, images):
        assert torch.allclose(found.norm(dim=1), torch.ones(len(found)), atol=1e-5)
        assert bool((found >= 0).all()) == (score == "order")
    v = split.features @ made.image.weight.T + made.image.bias
    v = v / v.norm(dim=1, keepdim=True)
    assert torch.allclose(images, v.abs() if score == "order" else v, atol=1e-6)
    if norm != "batch":  # whose statistics come from the batch before any training
        with torch.no_grad():
            alone = made.sentences(words[3:4, : lengths[3]], lengths[3:4])
        assert torch.allclose(alone, together[3:4], atol=1e-6)


def test_start_values_and_the_number_of_parameters_are_those_of_the_specification(monkeypatch):
    """GRU 4,070,400 and image side 4,195,328 for features of 4,096 numbers. Layer norm adds its gains and one bias."""
    data = captions_of(monkeypatch, train=12, features=4096)
    plain, normed = (model.build(OrderConfig(dataset="coco", norm=norm), data) for norm in ("none", "layer"))
    model._load.cache_clear()

    def count(module):
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    assert count(plain.reader) == 4_070_400
    assert count(plain.image) == 4_195_328
    assert count(normed.reader) == 4_070_400 + 3 * 3 * 1024
    assert plain.words.weight.shape == (len(data.vocabulary), 300)
    for made in (plain, normed):
        for weight in (made.words.weight, made.reader.weight_ih_l0):
            assert 0.09 < float(weight.detach().abs().max()) <= 0.1
        for block in made.reader.weight_hh_l0.chunk(3):
            assert torch.allclose(block @ block.T, torch.eye(1024), atol=1e-4)
        bound = (6 / (4096 + 1024)) ** 0.5
        assert 0.99 * bound < float(made.image.weight.detach().abs().max()) <= bound
        assert not any(p.any() for name, p in made.named_parameters() if "bias" in name)
    assert (normed.reader.gain_ih_l0 == 1).all()
    assert isinstance(normed.reader, GRU)
    assert (normed.reader.placement, normed.reader.eps, normed.reader.eps_mode) == ("paper", 1e-5, "var")


def test_variants_of_one_seed_share_their_start_values(captions):
    drawn = []
    for norm in NORMS:
        torch.manual_seed(5)
        drawn.append(model.build(dataclasses.replace(SMALL, norm=norm), captions))
    for name in ("words.weight", "image.weight", "reader.weight_ih_l0", "reader.weight_hh_l0"):
        assert all(torch.equal(one.get_parameter(name), drawn[0].get_parameter(name)) for one in drawn)


@pytest.mark.parametrize(("norm", "score"), [("none", "order"), ("layer", "order"), ("none", "cosine")])
def test_a_model_that_memorises_50_pairs_finds_them_all(captions, norm, score):
    config = dataclasses.replace(SMALL, norm=norm, score=score, batch_size=50, units=48)
    torch.manual_seed(0)
    made = model.build(config, captions)
    adam, batches = Adam(made.parameters(), 1e-2), model.batches(config, captions, 0)
    for step in range(60):
        adam.zero_grad()
        model.loss(made, model.batch(captions, batches.at(step)), None).total.backward()
        clip_gradients(list(made.parameters()), 2.0, "tensor")
        adam.step()
    found = model.validate(made.eval(), captions, config)
    assert (float(found["valid_caption_r1"]), float(found["valid_image_r1"])) == (100, 100)
    assert float(found["valid_recalls"]) == 300


# Runs


def job(**changes) -> Job:
    return Job("order_embeddings", dataclasses.replace(SMALL, **changes), 0, ("norm", "score"))


def finished(runs, wanted, say, **how):
    train([wanted], Settings(root="embedded", runs=runs, device="cpu", **how), say)
    return next(runs.glob(f"*/*/{wanted.label}"))


def lines_of(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_test_cases_are_ranked_once_by_the_best_checkpoint(captions, tmp_path, say, monkeypatch):
    values, plain = iter([1.0, 7.0, 3.0]), model.validate
    monkeypatch.setattr(model, "validate", lambda *given: {**plain(*given), "valid_recalls": next(values)})
    folder = finished(tmp_path, job(updates=9, lr=0.01), say)
    lines = [line for line in lines_of(folder) if line["kind"] == "eval"]
    assert [line["step"] for line in lines if "test_image_r1" in line] == [9]
    extras = json.loads((folder / "extras.json").read_text())["0"]
    assert (len(extras["test_caption_ranks"]), len(extras["test_image_ranks"])) == (50, 250)
    with RunFolder.open(folder) as opened:
        best = opened.best_checkpoint()
    assert best.step == 6
    made = model.build(SMALL, captions)
    made.load_state_dict(best.weights)
    found = model.test(made.eval(), captions, SMALL)
    assert found["test_image_ranks"].tolist() == extras["test_image_ranks"]
    assert found["test_caption_ranks"].tolist() == extras["test_caption_ranks"]
    assert float(found["test_image_recall"]) == lines[-1]["test_image_recall"]


def test_claims_read_the_ranks_as_the_metrics_do(captions):
    made = model.build(SMALL, captions).eval()
    found = {name: value.tolist() for name, value in model.test(made, captions, SMALL).items()}
    for claim in (claim for claim in CLAIMS if getattr(claim.measure, "items", None)):
        items = claim.measure.items({"extras": found})
        assert len(items) == 50
        assert sum(items) / 50 == pytest.approx(found[claim.measure.metric])
        assert claim.measure.items({"extras": {}}) is None


@pytest.mark.parametrize("changes", [{"norm": "none"}, {"score": "cosine"}, {"norm": "batch"}, {"norm": "weight"}])
def test_an_interrupted_run_goes_on_bit_for_bit(captions, tmp_path, say, monkeypatch, changes):
    wanted = job(checkpoint_every=2, **changes)
    whole = finished(tmp_path / "whole", wanted, say)
    plain = Update.__call__

    def cut(update, index, step=0):
        if step == 5:
            raise KeyboardInterrupt
        plain(update, index, step)

    monkeypatch.setattr(Update, "__call__", cut)
    with pytest.raises(KeyboardInterrupt):
        finished(tmp_path / "cut", wanted, say)
    monkeypatch.setattr(Update, "__call__", plain)
    resumed = finished(tmp_path / "cut", wanted, say, resume=True)
    assert lines_of(resumed) == lines_of(whole)
    assert (resumed / "extras.json").read_text() == (whole / "extras.json").read_text()
    last = [next((folder / "checkpoints").glob("step-*6")) / "weights.safetensors" for folder in (resumed, whole)]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_runs_side_by_side_have_the_numbers_of_runs_alone(captions, tmp_path, say):
    several = [job(norm="none"), job(), job(score="cosine")]
    train(several, Settings(root="embedded", runs=tmp_path / "together", device="cpu", together=3), say)
    for each in several:
        assert lines_of(finished(tmp_path / "alone", each, say)) == lines_of(
            next((tmp_path / "together").glob(f"*/*/{each.label}"))
        )


# Scales


SPECIFICATION = {  # section 6.1 and the code that the paper runs
    "units": 1024,
    "word_size": 300,
    "batch_size": 128,
    "epochs": 100,
    "updates": 0,
    "lr": 1e-3,
    "bias_correction": "kiros",
    "clip": 2.0,
    "clip_by": "tensor",
    "accumulate": 1,
    "precision": "float32",
    "eval_updates": 300,
    "valid_images": 1000,
    "dataset": "coco",
}


def test_the_paper_scale_is_the_papers_configuration():
    configs = plan.scaled(SHEET, SHEET.scales["paper"], {})
    assert {(config.norm, config.score, config.hinge) for config in configs} == {
        (norm, score, margin) for norm in ("none", "layer") for score, margin in (("order", 0.05), ("cosine", 0.2))
    }
    for config in configs:
        assert {name: getattr(config, name) for name in SPECIFICATION} == SPECIFICATION


def test_a_margin_may_be_chosen():
    assert OrderConfig(score="cosine", margin=0.1).hinge == 0.1


def test_laptop_step_sizes_are_those_of_the_committed_search():
    """One grid for all variants."""
    name = "tuning-order_embeddings_flickr8k_laptop.json"
    record = json.loads((Path(__file__).parents[2] / "results" / name).read_text())
    chosen = [{**row} for row in SHEET.scales["laptop"].tuned]
    assert sorted(chosen, key=str) == sorted(
        ({k: row[k] for k in ("norm", "score", "lr")} for row in record["chosen"]), key=str
    )
    grids: dict[tuple[str, ...], set[float]] = {}
    for row in record["rows"]:
        grids.setdefault(tuple(row["variant"].values()), set()).add(row["setting"]["lr"])
    assert len(grids) == 4
    assert all(grid == {1e-4, 3e-4, 1e-3, 3e-3} for grid in grids.values())


COCO_PARTS = {"train": "train", "valid": "val", "test": "test"}


@pytest.mark.slow
def test_the_paper_scale_makes_three_updates_on_a_folder_in_the_original_layout(tmp_path, say):
    """The settings of the scale, but for the length; 130 made-up images with features of 4,096 numbers."""
    (tmp_path / "coco" / "images" / "10crop").mkdir(parents=True)
    for name, part in COCO_PARTS.items():
        split = made_up(130 if name == "train" else 4, 4096, seed=len(name))
        lines = "".join(" ".join(words) + "\n" for words in split.captions)
        (tmp_path / "coco" / f"{part}.txt").write_text(lines)
        np.save(tmp_path / "coco" / "images" / "10crop" / f"{part}.npy", split.features)
    for wanted in plan.jobs_of_scale(SHEET, "paper", range(1)):
        wanted = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, updates=3))
        train([wanted], Settings(root=str(tmp_path), runs=tmp_path / "runs", device="cpu"), say)
        folder = next((tmp_path / "runs").glob(f"*/*/{wanted.label}"))
        assert json.loads((folder / "summary.json").read_text())["steps"] == 3
        assert "test_image_r1" in lines_of(folder)[-1]
