"""The attentive reader: equations and gradients, padding, names of entities, variants, start values, runs, scales."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.data.questions import QuestionData, Questions, Words
from lamina.lab.data.text import Ragged
from lamina.lab.experiment import Job
from lamina.lab.experiments.attentive_reader import model, pictures
from lamina.lab.experiments.attentive_reader.claims import CLAIMS
from lamina.lab.experiments.attentive_reader.entities import random_names
from lamina.lab.experiments.attentive_reader.settings import NORMS, SHEET, STEP_SIZES, ReaderConfig
from lamina.lab.options import Settings
from lamina.lab.training.draws import Draws, draws_of_update
from lamina.lab.training.loop import train
from lamina.lab.training.update import Update
from lamina.optim import Adam

WORDS = ("<end>", "<unknown>", "<number>", *(f"@entity{n}" for n in range(6)), *"abcdefgh", "@placeholder")
ENTITIES = torch.arange(3, 9)
CPU = torch.device("cpu")
SMALL = ReaderConfig(dataset="facts", units=6, batch_size=4, updates=6, eval_updates=3, lr=1e-2)


def made_up(count: int, longest: int = 9, seed: int = 0) -> Questions:
    """Questions of random words; every passage holds entities, and one of them is the answer."""
    g = torch.Generator().manual_seed(seed)

    def words(least: int) -> list[torch.Tensor]:
        lengths = torch.randint(least, longest + 1, (count,), generator=g).tolist()
        return [torch.randint(3, len(WORDS), (length,), generator=g) for length in lengths]

    answers = ENTITIES[torch.randint(0, len(ENTITIES), (count,), generator=g)]
    passages = words(3)
    for passage, answer in zip(passages, answers):
        passage[1] = answer
    return Questions(Ragged.of(passages), Ragged.of(words(2)), answers)


def questions(count: int = 24, kind: str = "embedded") -> QuestionData:
    splits = {name: made_up(count, seed=number) for number, name in enumerate(("train", "valid", "test"))}
    control = {"most_frequent": 0.7, "most_frequent_not_in_query": 0.6, "answer_present": 0.9}
    controls = dict.fromkeys(splits, control)
    return QuestionData("made up", kind, "made up", {}, splits, Words(WORDS), ENTITIES, controls, ())


@pytest.fixture
def data(monkeypatch):
    made = questions()
    monkeypatch.setattr(model, "load_questions", lambda *given, **more: made)
    model._load.cache_clear()
    yield made
    model._load.cache_clear()


def built(seed: int = 0, **changes) -> model.AttentiveReader:
    torch.manual_seed(seed)
    return model.build(dataclasses.replace(SMALL, **changes), questions())


def shaken(reader: model.AttentiveReader) -> model.AttentiveReader:
    """Move every parameter away from its start value, so that nothing is 0 by chance."""
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in reader.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    return reader


def some(count: int = 4, seed: int = 0) -> model.Batch:
    return model._taken(made_up(count, seed=seed), torch.arange(count))


def drawn(step: int = 0, cases: int = 4) -> Draws:
    return draws_of_update(0, step, CPU, 0, cases, cases)


# Equations


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_each_question_alone_has_the_numbers_of_the_equations(norm):
    reader = shaken(built(norm=norm).double()).eval()
    passages, lengths, queries, query_lengths, _ = some()
    found, attention = reader.read(passages, lengths, queries, query_lengths)
    for i in range(len(passages)):
        p = reader.passage(reader.words(passages[i, : lengths[i]]))[0]
        q = reader.query(reader.words(queries[i, : query_lengths[i]]))[0][-1]
        same = (p @ reader.likeness) @ (q @ reader.likeness)
        met = p @ reader.content.weight.T + reader.content.bias + reader.asked.weight @ q + same.unsqueeze(1)
        alpha = (torch.tanh(met) @ reader.weigh.weight[0]).softmax(0)
        out = reader.recalled.weight @ (alpha @ p) + reader.skipped.weight @ p.mean(0)
        out = torch.tanh(out + reader.replied.weight @ q + reader.replied.bias)
        wanted = (reader.answer.weight @ out + reader.answer.bias).log_softmax(0)
        assert torch.allclose(attention[i, : lengths[i]], alpha, atol=1e-12)
        assert torch.allclose(found[i], wanted, atol=1e-12)


@pytest.mark.parametrize("padding", ["left_out", "cyclic"])
@pytest.mark.parametrize("norm", ["none", "layer", "batch_everywhere"])
def test_gradients_of_attention_and_loss_are_those_of_finite_differences(norm, padding):
    reader = shaken(built(norm=norm, padding=padding, units=3).double()).eval()
    free = {name: p for name, p in reader.named_parameters() if p.requires_grad}
    *inputs, answers = some(3)
    inputs[0], inputs[1] = inputs[0][:, :5], inputs[1].clamp(max=5)

    def function(*parameters):
        found, attention = functional_call(reader, dict(zip(free, parameters)), tuple(inputs))
        return torch.nn.functional.nll_loss(found, answers), attention

    assert gradcheck(function, tuple(free.values()), eps=1e-6, atol=1e-6, fast_mode=True)


def test_the_first_h_is_learned_and_the_first_c_stays_0():
    reader = built(norm="none")
    before = {side: getattr(reader, side).initial_h_l0.clone() for side in ("passage", "query")}
    adam = Adam(reader.parameters(), 1e-2)
    for step in range(3):
        adam.zero_grad()
        model.loss(reader, some(), drawn(step)).total.backward()
        adam.step()
    for side, start in before.items():
        assert not start.any()
        assert (getattr(reader, side).initial_h_l0 != 0).all()
        assert not getattr(reader, side).initial_c_l0.any()


def test_dropout_keeps_half_of_the_numbers_and_doubles_them():
    x = torch.ones(50, 20, 10)
    reader = built()
    kept = reader._dropped(x, drawn(cases=50))
    assert set(kept.unique().tolist()) == {0, 2}
    assert float(kept.mean()) == pytest.approx(1, abs=0.03)
    assert torch.equal(kept, reader._dropped(x, drawn(cases=50)))
    assert torch.equal(reader._dropped(x, None), x)
    rarer = built(dropout=0.2)._dropped(x, drawn(cases=50))
    assert rarer.unique().tolist() == [0, 1.25]
    assert float(rarer.mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("place", ["words", "answer"])
def test_dropout_sits_on_the_embeddings_and_before_the_answer(monkeypatch, place):
    seen = []
    monkeypatch.setattr(
        model.AttentiveReader, "_dropped", lambda _, x, draws: seen.append((tuple(x.shape), draws)) or x
    )
    draws = drawn()
    passages, lengths, queries, query_lengths, _ = some()
    built()(passages, lengths, queries, query_lengths, draws)
    wanted = {"words": [(*passages.shape, 6), (*queries.shape, 6)], "answer": [(4, 6)]}[place]
    assert [shape for shape, _ in seen if len(shape) == len(wanted[0])] == wanted
    assert all(given is draws for _, given in seen)


@pytest.mark.parametrize("answers", ["vocabulary", "entities"])
def test_the_softmax_is_over_all_words_or_over_the_entities(answers):
    reader = built(answers=answers)
    found, _ = reader.read(*some()[:4])
    likely = found.exp()
    assert torch.allclose(likely.sum(1), torch.ones(4), atol=1e-5)
    others = torch.ones(len(WORDS), dtype=bool)
    others[ENTITIES] = False
    assert bool((likely[:, others] > 0).all()) == (answers == "vocabulary")
    assert bool((likely[:, others] == 0).all()) == (answers == "entities")
    batch = some()
    model.loss(reader, batch, drawn()).total.backward()
    assert all(bool(p.grad.isfinite().all()) for p in reader.parameters() if p.grad is not None)


def test_an_answer_that_is_not_in_the_passage_is_a_question_like_others():
    reader = shaken(built())
    passages, lengths, queries, query_lengths, answers = some()
    absent = torch.where(passages == answers.unsqueeze(1), 9, passages)
    assert not (absent == answers.unsqueeze(1)).any()
    found = model.loss(reader, (absent, lengths, queries, query_lengths, answers), drawn())
    found.total.backward()
    assert found.weight == 4
    assert bool(found.total.isfinite())
    assert reader.answer.weight.grad.isfinite().all()


# Padding


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("padding", ["left_out", "cyclic"])
def test_what_stands_in_the_padding_changes_nothing_and_gets_no_attention(norm, padding):
    reader = shaken(built(norm=norm, padding=padding)).eval()
    passages, lengths, queries, query_lengths, _ = some()
    beyond, query_beyond = (model._beyond(*side) for side in ((passages, lengths), (queries, query_lengths)))
    assert beyond.any()
    assert query_beyond.any()
    found, attention = reader.read(passages, lengths, queries, query_lengths)
    assert not attention[beyond].any()
    assert (attention[~beyond] > 0).all()
    assert torch.allclose(attention.sum(1), torch.ones(4))
    others = passages.masked_fill(beyond, 5), lengths, queries.masked_fill(query_beyond, 6), query_lengths
    again = reader.read(*others)
    assert torch.equal(found, again[0])
    assert torch.equal(attention, again[1])


def test_cyclic_padding_repeats_a_sequence():
    ids = torch.tensor([[3, 4, 0, 0, 0], [5, 6, 7, 8, 9], [7, 0, 0, 0, 0]])
    wanted = [[3, 4, 3, 4, 3], [5, 6, 7, 8, 9], [7] * 5]
    assert model.cyclic(ids, torch.tensor([2, 5, 1])).tolist() == wanted


@pytest.mark.parametrize(
    ("norm", "equal"), [("none", True), ("layer", True), ("batch", False), ("batch_everywhere", False)]
)
def test_cyclic_padding_counts_in_the_statistics_of_batch_norm_alone(norm, equal):
    inputs = some()[:4]
    readers = [shaken(built(norm=norm, padding=padding)).eval() for padding in ("left_out", "cyclic")]
    apart, together = (reader.read(*inputs)[0] for reader in readers)
    assert torch.allclose(apart, together, atol=1e-5) == equal


@pytest.mark.parametrize("norm", ["batch", "batch_everywhere"])
def test_a_passage_longer_than_any_in_training_is_read_with_the_statistics_of_the_last_step(norm):
    reader = built(norm=norm, statistics="population")
    for step in range(5):
        model.loss(reader, some(seed=step), drawn(step))
    reader.eval()
    assert len(reader.passage.get_submodule("statistics_l0").batches) <= 9
    long = made_up(3, 80, seed=7)
    inputs = model._taken(long, torch.arange(3))[:4]
    assert inputs[1].max() > 20
    found, attention = reader.read(*inputs)
    assert found.isfinite().all()
    assert torch.allclose(attention.sum(1), torch.ones(3))
    alone = model._taken(long, torch.tensor([1]))[:4]
    assert torch.allclose(reader.read(*alone)[0][0], found[1], atol=1e-5)  # no statistics of the batch


@pytest.mark.parametrize("norm", ["batch", "batch_everywhere"])
def test_evaluations_take_the_statistics_that_were_asked_for(norm):
    inputs = some()[:4]
    for statistics in ("batch", "population"):
        reader = shaken(built(norm=norm, statistics=statistics))
        for step in range(3):
            model.loss(reader, some(seed=step), drawn(step))
        with torch.no_grad():
            in_training = reader.train()(*inputs)[0]
        assert torch.allclose(reader.read(*inputs)[0], in_training, atol=1e-5) == (statistics == "batch")


# Names of entities


@pytest.mark.parametrize("permutation", ["batch", "question"])
def test_names_are_a_bijection_for_passage_query_and_answer_alike(permutation):
    reader = built(permutation=permutation)
    batch = some(20)
    changed = model.with_random_names(reader, batch, drawn(3, 20))
    rows = []
    for i in range(20):
        pairs = set()
        for before, after in ((batch[0], changed[0]), (batch[2], changed[2]), (batch[4][:, None], changed[4][:, None])):
            pairs |= set(zip(before[i].tolist(), after[i].tolist()))
        names = {old: new for old, new in pairs if old in ENTITIES.tolist()}
        assert len(pairs) == len(dict(pairs)) == len({new for _, new in pairs})  # one to one, over all three
        assert all(old == new for old, new in pairs if old not in names)
        assert set(names.values()) <= set(ENTITIES.tolist())
        rows.append(names)
    shared = {}
    for names in rows:
        agree = all(shared.get(old, new) == new for old, new in names.items())
        shared |= names
        if not agree:
            break
    assert agree == (permutation == "batch")
    assert torch.equal(changed[1], batch[1])
    assert torch.equal(changed[3], batch[3])
    assert model.with_random_names(built(permutation="none"), batch, drawn(3, 20)) is batch


def test_names_follow_from_seed_and_update_alone():
    def names(seed, step):
        return random_names(draws_of_update(seed, step, CPU, 0, 4, 4), 30, False)

    assert torch.equal(names(1, 2), names(1, 2))
    assert not torch.equal(names(1, 2), names(1, 3))
    assert not torch.equal(names(1, 2), names(2, 2))
    assert sorted(names(1, 2)[0].tolist()) == list(range(30))


def test_parts_of_a_batch_get_the_names_of_the_whole():
    for for_each in (False, True):
        whole = random_names(draws_of_update(0, 5, CPU, 0, 4, 4), 6, for_each)
        part = random_names(draws_of_update(0, 5, CPU, 2, 2, 4), 6, for_each)
        assert torch.equal(part, whole[2:] if for_each else whole)


def test_training_renames_entities_and_evaluations_do_not(data, monkeypatch):
    reader = built()
    seen = []
    plain = model.AttentiveReader.forward
    monkeypatch.setattr(model.AttentiveReader, "forward", lambda *given: seen.append(given[1]) or plain(*given))
    batch = model.batch(data, torch.arange(4))
    model.loss(reader, batch, drawn())
    assert not torch.equal(seen.pop(), batch[0])
    model.measured(reader, data.splits["train"], torch.arange(4))
    assert torch.equal(seen.pop(), batch[0])


# Variants and start values


def test_variants_have_the_gains_of_the_specification():
    gains = {"layer": 1.0, "layer01": 0.1, "batch": 0.1, "batch_everywhere": 0.1}
    norms = {"layer": "layer", "layer01": "layer", "batch": "batch", "batch_everywhere": "batch"}
    for norm in NORMS:
        reader = built(norm=norm)
        for lstm in (reader.passage, reader.query):
            assert lstm.norm == norms.get(norm)
            for site in ("ih", "hh", "cell") if norm in gains else ():
                gain = lstm.get_parameter(f"gain_{site}_l0")
                assert torch.equal(gain, torch.full_like(gain, gains[norm]))
        for name in ("content", "asked", "recalled", "skipped", "replied"):
            layer = getattr(reader, name)
            assert layer.norm == ("batch" if norm == "batch_everywhere" else None)
            if layer.norm:
                assert torch.equal(layer.gain, torch.full((6,), 0.1))
        assert not any(p.any() for name, p in reader.named_parameters() if "bias" in name or "initial" in name)


def test_the_number_of_parameters_is_that_of_the_specification():
    """461,760 for an LSTM with one bias. Without a norm ours has two, as theirs adds its one twice; and a learned h."""
    for norm, more in (("none", 960 + 240), ("batch", 2160 + 240 + 240), ("layer", 2160 + 960 + 240 + 240)):
        lstm = built(norm=norm, units=240).passage
        assert sum(p.numel() for p in lstm.parameters() if p.requires_grad) == 461_760 + more


@pytest.mark.parametrize("norm", NORMS)
def test_square_blocks_start_orthogonal_and_others_uniform(norm):
    reader = built(norm=norm)
    recurrent = [w for lstm in (reader.passage, reader.query) for w in (lstm.weight_ih_l0, lstm.weight_hh_l0)]
    for weight in recurrent:
        for block in weight.chunk(4):
            scale = 1.0 if norm == "none_scaled" else 0.05
            assert torch.allclose(block @ block.T, scale**2 * torch.eye(6), atol=1e-5)
    for weight in (reader.likeness, *(getattr(reader, n).weight for n in ("content", "asked", "recalled", "replied"))):
        assert torch.allclose(weight @ weight.T, 0.05**2 * torch.eye(6), atol=1e-6)
    for weight in (reader.words.weight, reader.answer.weight):
        bound = (6 / (len(WORDS) + 6 + 1)) ** 0.5
        assert 0.9 * bound < float(weight.detach().abs().max()) <= bound


def test_start_values_are_independent_unless_the_authors_are_asked_for():
    blocks = {}
    for start in ("independent", "same"):
        for seed in (0, 1):
            weight = built(seed, start=start).passage.weight_hh_l0
            blocks[start, seed] = weight.chunk(4)
    assert not torch.equal(blocks["independent", 0][0], blocks["independent", 0][1])
    assert not torch.equal(blocks["independent", 0][0], blocks["independent", 1][0])
    assert torch.equal(blocks["same", 0][0], blocks["same", 1][3])
    reader = built(start="same")
    assert torch.equal(reader.words.weight, reader.answer.weight)


@pytest.mark.parametrize("permutation", ["none", "question"])
def test_answers_start_at_0_or_at_their_frequency(permutation):
    made = questions(20)
    changed = dataclasses.replace(made.splits["train"], answers=torch.tensor([3] * 15 + [4] * 5))
    made = dataclasses.replace(made, splits={**made.splits, "train": changed})
    start = dataclasses.replace(SMALL, permutation=permutation, answer_start="frequency")
    chances = model.build(start, made).answer.bias.detach().exp()
    total = 20 + len(WORDS)  # each is counted once more than it is
    assert torch.allclose(chances.sum(), torch.tensor(1.0))
    assert torch.allclose(chances[9:], torch.tensor(1 / total))
    wanted = [16, 6, 1, 1, 1, 1] if permutation == "none" else [26 / 6] * 6
    assert torch.allclose(chances[ENTITIES], torch.tensor(wanted) / total)
    assert not model.build(SMALL, made).answer.bias.any()


def test_variants_of_one_seed_share_their_start_values():
    readers = {norm: built(3, norm=norm) for norm in NORMS}
    for name, parameter in readers["none"].named_parameters():
        scale = 20 if name.startswith(("passage.w", "query.w")) else 1
        for norm, other in readers.items():
            wanted = parameter * (scale if norm == "none_scaled" else 1)
            assert torch.allclose(other.get_parameter(name), wanted, atol=1e-6), (norm, name)


# Training and evaluation


@pytest.mark.parametrize("norm", ["none", "layer", "batch_everywhere"])
def test_a_reader_learns_to_name_the_one_entity_of_a_passage(norm):
    g = torch.Generator().manual_seed(0)
    answers = ENTITIES[torch.randint(0, 6, (64,), generator=g)]
    passages = torch.randint(9, len(WORDS), (64, 4), generator=g)
    passages[torch.arange(64), torch.randint(0, 4, (64,), generator=g)] = answers
    lengths = torch.full((64,), 4)
    batch = passages, lengths, passages[:, :1].clamp(min=9), lengths.clamp(max=1), answers
    reader = built(norm=norm, units=24, batch_size=64)
    adam = Adam(reader.parameters(), 1e-2)
    for step in range(150):
        adam.zero_grad()
        found = model.loss(reader, batch, drawn(step, 64))
        (found.total / found.weight).backward()
        adam.step()
    found, _ = reader.read(*batch[:4])
    assert float((found.argmax(1) == answers).float().mean()) > 0.9


def test_batches_may_be_sorted_by_length(data):
    config = dataclasses.replace(SMALL, buckets=3)
    lengths = data.splits["train"].passages.offsets.diff()
    sorted_ones, plain = (model.batches(c, data, 0) for c in (config, SMALL))
    spread = [
        torch.stack([lengths[b.at(s)].max() - lengths[b.at(s)].min() for s in range(6)]).sum()
        for b in (sorted_ones, plain)
    ]
    assert spread[0] < spread[1]
    assert sorted(torch.cat([sorted_ones.at(s) for s in range(6)]).tolist()) == list(range(24))


def test_evaluations_keep_the_order_of_the_questions_and_full_batches(data):
    split = data.splits["valid"]
    for chosen, kept in ((torch.arange(24), 24), (torch.arange(23), 20), (torch.tensor([5, 2]), 2)):
        sorted_ones, plain = (
            model.measured(shaken(built(buckets=buckets)).eval(), split, chosen) for buckets in (2, 0)
        )
        assert len(plain[0]) == kept
        assert torch.equal(sorted_ones[0], plain[0])
        assert torch.allclose(sorted_ones[1], plain[1], atol=1e-6)


def test_curves_are_of_a_fixed_part_of_the_validation_questions(data):
    reader = built().eval()
    split = data.splits["valid"]
    config = dataclasses.replace(SMALL, valid_questions=8)
    found = model.validate(reader, data, config)
    correct, losses = model.measured(reader, split, torch.arange(0, 24, 3))
    assert float(found["valid_error"]) == pytest.approx(1 - float(correct.mean()))
    assert float(found["valid_nll"]) == pytest.approx(float(losses.mean()))
    everything = model.validate(reader, data, SMALL)
    assert float(everything["valid_error"]) == float(model.measure_all(reader, data, SMALL)["valid_all_error"])


# Runs


def job(**changes) -> Job:
    return Job("attentive_reader", dataclasses.replace(SMALL, **changes), 0, ("norm",))


def finished(runs, wanted, say, **how):
    train([wanted], Settings(root="embedded", runs=runs, device="cpu", **how), say)
    return next(runs.glob(f"*/*/{wanted.label}"))


def lines_of(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.mark.parametrize(
    "changes",
    [{"norm": "none"}, {"permutation": "question"}, {"norm": "batch_everywhere", "buckets": 2}, {"padding": "cyclic"}],
)
def test_an_interrupted_run_goes_on_bit_for_bit(data, tmp_path, say, monkeypatch, changes):
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


def test_a_run_measures_errors_controls_and_each_test_answer(data, tmp_path, say):
    folder = finished(tmp_path, job(), say)
    last = lines_of(folder)[-1]
    extras = json.loads((folder / "extras.json").read_text())["0"]
    assert last["test_error"] == pytest.approx(1 - sum(extras["test_correct"]) / 24)
    assert last["valid_most_frequent_not_in_query"] == pytest.approx(0.6)
    assert last["valid_answer_absent"] == pytest.approx(0.1)
    items = next(claim.measure.items for claim in CLAIMS if claim.name == "test")
    assert sum(items({"extras": extras})) / 24 == pytest.approx(1 - last["test_error"])
    assert items({"extras": {}}) is None


@pytest.mark.parametrize("kind", ["embedded", "real"])
def test_only_the_stand_ins_text_gets_into_artefacts(tmp_path, kind):
    made = questions(kind=kind)
    model.artefacts(built().eval(), made, SMALL, drawn(), tmp_path)
    files = [path.name for path in tmp_path.iterdir()]
    assert files == (["attention.svg"] if kind == "embedded" else [])
    if files:
        text = (tmp_path / "attention.svg").read_text()
        assert text.count("answer: @entity") == model.SHOWN
        assert text.count("<rect") == 1 + int(made.splits["valid"].passages.offsets[model.SHOWN])


def test_the_word_with_most_attention_has_the_darkest_background():
    reading = pictures.Reading(["a", "<b>", "c"], [0.1, 0.6, 0.3], ["who", "?"], "@entity0", "@entity1")
    text = pictures.drawn([reading])
    assert [f'fill-opacity="{share}"' in text for share in ("0.167", "1.000", "0.500")] == [True] * 3
    assert "&lt;b&gt;" in text
    assert "answer: @entity0, reader: @entity1" in text


# Scales


SPECIFICATION = {  # section 6.2 and the code that the paper runs
    "dataset": "cnn_qa",
    "units": 240,
    "batch_size": 64,
    "updates": 800_000,
    "lr": 8e-5,
    "bias_correction": "correct",
    "clip": 10.0,
    "clip_by": "global",
    "accumulate": 1,
    "precision": "float32",
    "eval_updates": 1000,
    "vocabulary": 0,
    "valid_questions": 0,
    "answers": "vocabulary",
    "dropout": 0.5,
    "permutation": "batch",
    "relabel": 0,
    "padding": "cyclic",
    "start": "same",
    "answer_start": "zero",
    "statistics": "batch",
    "buckets": 0,
}


def test_the_paper_scale_is_the_papers_configuration():
    configs = plan.scaled(SHEET, SHEET.scales["paper"], {})
    assert {config.norm for config in configs} == set(NORMS)
    for config in configs:
        assert {name: getattr(config, name) for name in SPECIFICATION} == SPECIFICATION


def test_one_grid_of_step_sizes_holds_the_papers():
    assert 8e-5 in STEP_SIZES
    assert {row["lr"] for row in SHEET.scales["laptop"].tuned} <= set(STEP_SIZES)
    assert len({row["norm"] for row in SHEET.scales["laptop"].tuned}) in (0, len(NORMS))


def test_dropout_leaves_something():
    with pytest.raises(InputError, match="--dropout must be below 1, got 1"):
        ReaderConfig(dropout=1.0)


def test_only_batch_norm_couples_the_questions_of_a_batch():
    assert {norm for norm in NORMS if ReaderConfig(norm=norm).coupling()} == {"batch", "batch_everywhere"}


@pytest.mark.slow
def test_the_paper_scale_makes_three_updates(monkeypatch, tmp_path, say):
    made = questions(130, "real")
    monkeypatch.setattr(model, "load_questions", lambda *given, **more: made)
    model._load.cache_clear()
    for wanted in plan.jobs_of_scale(SHEET, "paper", range(1)):
        wanted = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, updates=3))
        folder = finished(tmp_path, wanted, say)
        assert json.loads((folder / "summary.json").read_text())["steps"] == 3
        assert "test_error" in lines_of(folder)[-1]
    model._load.cache_clear()
