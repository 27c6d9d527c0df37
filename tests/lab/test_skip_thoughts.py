"""Skip-thoughts: the chunked softmax and its memory, batches of triples, equations, gradients, start values, runs."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.data.books import BookData
from lamina.lab.data.text import END, Ragged, Vocabulary
from lamina.lab.experiment import Job
from lamina.lab.experiments.skip_thoughts import model, softmax
from lamina.lab.experiments.skip_thoughts.claims import CLAIMS
from lamina.lab.experiments.skip_thoughts.settings import NORMS, SHEET, STEP_SIZES, SkipConfig
from lamina.lab.experiments.skip_thoughts.softmax import chunked_loss, sampled_loss, word_losses
from lamina.lab.experiments.skip_thoughts.triples import EqualLengths, Triples, taken, usable, words_in
from lamina.lab.options import Settings
from lamina.lab.training.draws import Draws, draws_of_update
from lamina.lab.training.loop import train
from lamina.lab.training.update import Update
from lamina.optim import Adam, clip_gradients

CPU = torch.device("cpu")

# The chunked softmax


def inputs(rows: int, words: int, units: int = 7, dtype=torch.float64, scale: float = 1.0, seed: int = 0):
    """States, weight, bias and words."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=g, dtype=dtype) * scale for size in ((rows, units), (words, units), (words,))]
    return *drawn, torch.randint(words, (rows,), generator=g)


def plain_loss(states, weight, bias, words, floor):
    log_chances = -F.cross_entropy(states @ weight.T + bias, words, reduction="none")
    return -(log_chances.exp() + floor).log().sum() if floor else -log_chances.sum()


def with_gradients(function, tensors, *rest, upstream: float = 1.0):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    loss = function(*leaves, *rest)
    return [loss.detach(), *torch.autograd.grad(loss * upstream, leaves)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("rows", "words", "limit"), [(1, 2, 1), (17, 33, 100), (64, 1000, 2**14), (129, 50, 2**20)])
@pytest.mark.parametrize("floor", [0.0, 1e-8, 1e-2])
def test_loss_and_gradients_are_those_of_the_plain_softmax(monkeypatch, dtype, bound, rows, words, limit, floor):
    monkeypatch.setattr(softmax, "ON_CPU", limit)
    *tensors, own = inputs(rows, words, dtype=dtype)
    found = with_gradients(chunked_loss, tensors, own, floor, upstream=0.7)
    wanted = with_gradients(plain_loss, [tensor.double() for tensor in tensors], own, floor, upstream=0.7)
    for ours, theirs in zip(found, wanted):
        assert ours.dtype == dtype
        assert float((ours - theirs).norm()) <= bound * float(theirs.norm())
    losses = word_losses(*tensors, own)
    assert torch.allclose(losses.double().sum(), plain_loss(*(t.double() for t in tensors), own, 0.0), rtol=bound)


@pytest.mark.parametrize("floor", [0.0, 1e-2])
def test_gradients_are_those_of_finite_differences(floor):
    *tensors, own = inputs(9, 12, 5)
    gradients = with_gradients(chunked_loss, tensors, own, floor)[1:]
    g = torch.Generator().manual_seed(1)
    for which, gradient in enumerate(gradients):
        way = torch.randn(gradient.shape, generator=g, dtype=torch.float64)
        ends = [[t + s * 1e-6 * way if at == which else t for at, t in enumerate(tensors)] for s in (1, -1)]
        slope = (chunked_loss(*ends[0], own, floor) - chunked_loss(*ends[1], own, floor)) / 2e-6
        assert float(slope) == pytest.approx(float((gradient * way).sum()), rel=1e-7)


@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_equal_and_huge_logits_overflow_nowhere(scale):
    *tensors, own = inputs(20, 30, dtype=torch.float32, scale=scale)
    found = with_gradients(chunked_loss, tensors, own, 0.0)
    assert all(bool(one.isfinite().all()) for one in found)
    wanted = with_gradients(plain_loss, [tensor.double() for tensor in tensors], own, 0.0)
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
    floored = with_gradients(chunked_loss, tensors, own, 1e-8)
    assert float(floored[0]) <= 20 * -math.log(1e-8) + 1e-3
    assert all(bool(one.isfinite().all()) for one in floored)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_not_swallowed(which):
    *tensors, own = inputs(5, 6)
    tensors[which].view(-1)[0] = torch.nan
    assert torch.isnan(chunked_loss(*tensors, own))
    assert torch.isnan(word_losses(*tensors, own)).any()


def test_a_second_backward_pass_is_refused():
    *tensors, own = inputs(5, 6)
    loss = chunked_loss(*(tensor.requires_grad_() for tensor in tensors), own)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="differentiated once"):
        loss.backward()


def test_half_precision_states_are_compared_in_float32():
    *tensors, own = inputs(40, 50, dtype=torch.float32)
    states = tensors[0].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(chunked_loss, [states, *tensors[1:]], own, 0.0)
    wanted = with_gradients(chunked_loss, [states.float(), *tensors[1:]], own, 0.0)
    assert found[1].dtype == torch.bfloat16
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found[2:], wanted[2:]))


def peak_memory(function) -> int:
    """Return the most bytes that tensors held at once, beyond those there before."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_memory_beyond_the_gradients_does_not_grow_with_the_vocabulary(monkeypatch):
    """2,048 words of text against 4,000 and 20,000: plain logits take 33 and 164 MB, and their gradients as much."""
    monkeypatch.setattr(softmax, "ON_CPU", 2**18)

    def beyond(function, words: int) -> int:
        *tensors, own = inputs(2048, words, 16, torch.float32)
        gradients = 4 * sum(tensor.numel() for tensor in tensors)
        return peak_memory(lambda: with_gradients(function, tensors, own, 0.0)) - 2 * gradients  # leaves and theirs

    small, large = (beyond(chunked_loss, words) for words in (4_000, 20_000))
    assert 0 < large < 1.3 * small
    assert large < 4 * 2**20
    assert beyond(plain_loss, 20_000) > 4 * beyond(plain_loss, 4_000) > 10 * large


def test_the_sampled_softmax_of_very_many_samples_is_the_full_one():
    *tensors, own = inputs(6, 20, scale=0.5)
    chances = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    log_chances = (chances / chances.sum()).log()
    samples = torch.multinomial(log_chances.exp(), 400_000, True, generator=torch.Generator().manual_seed(3))
    found = with_gradients(sampled_loss, tensors, own, samples, log_chances)
    wanted = with_gradients(plain_loss, tensors, own, 0.0)
    assert all(float((a - b).norm()) < 0.01 * float(b.norm()) for a, b in zip(found, wanted))


# Triples and batches


def sentences(*lengths: int, words: int = 12) -> Ragged:
    """Sentences of so many words each, ids from 2 on, with end marks."""
    g = torch.Generator().manual_seed(0)
    return Ragged.of([[*torch.randint(2, words, (length,), generator=g).tolist(), END] for length in lengths])


def random_lengths(count: int, most: int = 9, seed: int = 0) -> list[int]:
    return torch.randint(1, most + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_triple_has_the_sentences_before_and_after():
    text = sentences(2, 4, 1, 3, 2)
    found = taken(text, torch.tensor([1, 3]))
    assert found.middle_lengths.tolist() == [5, 4]
    assert found.before_lengths.tolist() == [3, 2]
    assert found.after_lengths.tolist() == [2, 3]
    assert found.middle[0].tolist() == text.values[3:8].tolist()
    assert found.before[0].tolist() == text.values[:3].tolist()
    assert found.after[1].tolist() == text.values[14:].tolist()
    assert found.after[0].tolist() == [*text.values[8:10].tolist(), 0]


def test_all_three_sentences_stay_strictly_below_the_limit():
    lengths = torch.tensor([29, 29, 30, 29, 29, 29, 31, 1, 10_000, 2, 3])
    assert usable(lengths, 30).tolist() == [4]
    assert usable(lengths, 31).tolist() == [1, 2, 3, 4]
    assert usable(lengths, 2).tolist() == []
    assert usable(lengths[:2], 30).tolist() == []


def test_batches_have_one_length_and_hold_each_usable_triple_once_an_epoch():
    lengths = torch.tensor(random_lengths(500))
    batches = EqualLengths(lengths, 8, 16, 3)
    count = batches.updates(1)
    for epoch in range(2):
        first = sum(batches._updates_of(before) for before in range(epoch))
        found = [batches.at(first + step) for step in range(batches._updates_of(epoch))]
        assert all(len(set(lengths[one].tolist())) == 1 and 1 <= len(one) <= 16 for one in found)
        assert sorted(torch.cat(found).tolist()) == usable(lengths, 8).tolist()
        assert len({int(lengths[one[0]]) for one in found[:7]}) == 7  # lengths come in turn
    assert batches.cases == len(usable(lengths, 8))
    assert batches.epoch(count) == 1
    assert batches.updates(2.5) == math.ceil(2.5 * count)


def test_triples_leave_groups_that_were_made_without_regard_to_the_limit():
    """As in the authors' code: groups are of 16, and the limit takes about the same share of each."""
    lengths = torch.tensor(random_lengths(4000))
    kept = len(usable(lengths, 8)) / int((lengths[1:-1] < 8).sum())
    batches = EqualLengths(lengths, 8, 16, 0)
    sizes = torch.tensor([float(len(batches.at(step))) for step in range(batches.updates(1))])
    assert float(sizes.mean()) == pytest.approx(16 * kept, rel=0.05)
    assert 0 < float(sizes.std()) < 4


def test_a_batch_depends_on_seed_and_update_alone():
    lengths = torch.tensor(random_lengths(300))
    one, other = EqualLengths(lengths, 8, 16, 3), EqualLengths(lengths, 8, 16, 3)
    for step in (150, 3, 77, 0, 150):
        assert torch.equal(one.at(step), other.at(step))
        assert torch.equal(one.at(step), EqualLengths(lengths, 8, 16, 3).at(step))
    order = [tuple(one.at(step).tolist()) for step in range(20)]
    assert order != [tuple(EqualLengths(lengths, 8, 16, 4).at(step).tolist()) for step in range(20)]
    assert len({int(one.at(step).sum()) for step in range(60)}) > 50


def test_text_without_three_short_sentences_in_a_row_is_refused():
    with pytest.raises(InputError, match=r"three sentences in a row .*--longest, got none below 30 words"):
        EqualLengths(torch.tensor([5, 40, 5, 40, 5]), 30, 16, 0)
    short, long = sentences(*[3] * 9), sentences(5, 40, 5)
    with pytest.raises(InputError, match="the valid part of made up must hold three sentences"):
        model.held_out(dataclasses.replace(books(), splits={"train": short, "valid": long}), "valid", SMALL)


# The model

SMALL = SkipConfig(
    **{"dataset": "topics", "units": 6, "word_size": 5, "vocabulary": 12, "longest": 9, "batch_size": 8, "lr": 1e-2},
    **{"updates": 6, "eval_updates": 3, "log_every": 2},
)


def books(count: int = 120, words: int = 12) -> BookData:
    splits = {
        name: sentences(*random_lengths(count, seed=seed), words=words)
        for seed, name in enumerate(("train", "valid", "test"))
    }
    vocabulary = Vocabulary({f"w{number:05d}": 1 for number in range(words - 2)})
    counts = torch.bincount(splits["train"].values, minlength=words)
    return BookData("made up", "embedded", "made up", {}, splits, vocabulary, counts, ())


@pytest.fixture
def data(monkeypatch):
    made = books()
    monkeypatch.setattr(model, "load_books", lambda *given: made)
    model._load.cache_clear()
    yield made
    model._load.cache_clear()


def built(seed: int = 0, **changes) -> model.SkipThoughts:
    torch.manual_seed(seed)
    return model.build(dataclasses.replace(SMALL, **changes), books())


def shaken(made: model.SkipThoughts) -> model.SkipThoughts:
    """Move every parameter away from its start value, so that nothing is 0 by chance."""
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    return made


def some(*middles: int) -> Triples:
    return taken(books().splits["train"], torch.tensor(middles or (1, 5, 9, 30)))


CONDITIONING = pytest.mark.parametrize("conditioning", ["start", "every_step"])


@CONDITIONING
@pytest.mark.parametrize("norm", NORMS)
def test_each_triple_alone_has_the_loss_of_the_equations(norm, conditioning):
    made = shaken(built(norm=norm, conditioning=conditioning, floor=0.0).double())
    batch = some()
    wanted = []
    for case in range(len(batch.middle)):
        middle, before, after = (ids[case, : lengths[case]] for ids, lengths in zip(batch[::2], batch[1::2]))
        vector = made.encoder(made.words(middle))[1]
        total = torch.zeros((), dtype=torch.float64)
        for gru, own in ((made.before, before), (made.after, after)):
            known = torch.cat([torch.zeros(1, 5, dtype=torch.float64), made.words(own[:-1])])
            if conditioning == "every_step":
                known = torch.cat([known, vector.expand(len(known), -1)], 1)
            total = total + F.cross_entropy(made.output(gru(known, vector)[0]), own.long(), reduction="sum")
        wanted.append(total)
    losses, words = made.measure(batch)
    assert torch.allclose(losses, torch.stack(wanted), atol=1e-10)
    assert words.tolist() == (batch.before_lengths + batch.after_lengths).tolist()
    found = model.loss(made, batch, Draws(None))
    assert torch.allclose(found.total, sum(wanted), atol=1e-10)
    assert found.weight == 1


@CONDITIONING
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_the_loss_are_those_of_finite_differences(norm, conditioning, monkeypatch):
    made = shaken(built(norm=norm, conditioning=conditioning, units=3).double())
    free = {name: p for name, p in made.named_parameters() if p.requires_grad}
    monkeypatch.setattr(model, "chunked_loss", plain_loss)  # which can be differentiated several times
    batch = some(1, 5)

    def function(*parameters):
        return functional_call(made, dict(zip(free, parameters)), (batch, Draws(None)))

    assert gradcheck(function, tuple(free.values()), eps=1e-6, atol=1e-5, fast_mode=True)


def test_both_decoders_are_one_call_of_the_softmax_on_words_without_padding(monkeypatch):
    calls = []
    monkeypatch.setattr(
        model, "chunked_loss", lambda states, *rest: calls.append((states, rest)) or chunked_loss(states, *rest)
    )
    batch = some()
    model.loss(built(), batch, Draws(None))
    ((states, rest),) = calls
    assert len(states) == int(batch.before_lengths.sum() + batch.after_lengths.sum())
    assert rest[-1] == 1e-8
    assert int((rest[2] == END).sum()) == 2 * len(batch.middle)


@pytest.mark.parametrize("norm", NORMS)
def test_what_stands_in_the_padding_changes_nothing(norm):
    made = shaken(built(norm=norm))
    batch = some()
    others = []
    for ids, lengths in zip(batch[::2], batch[1::2]):
        beyond = torch.arange(ids.shape[1]) >= lengths.unsqueeze(1)
        assert beyond.any()
        others += [ids.masked_fill(beyond, 7), lengths]
    assert torch.equal(made.measure(batch)[0], made.measure(Triples(*others))[0])


@pytest.mark.parametrize("norm", NORMS)
def test_parts_of_a_batch_have_the_gradient_of_the_whole(norm):
    """A sum over the batch does not change where the batch is cut into parts."""
    made, gradients = shaken(built(norm=norm)), []
    batch = some()
    for parts in (1, 2):
        made.zero_grad()
        size, weight, found = 4 // parts, 0.0, []
        for first in range(0, 4, size):
            part = Triples(*(tensor[first : first + size] for tensor in batch))
            loss = model.loss(made, part, Draws(None, first, size, 4))
            weight += float(loss.weight)
            loss.total.backward()
            found.append(loss.total)
        assert weight == 1
        gradients.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients))


def test_the_sampled_softmax_draws_from_the_runs_own_generator():
    made = built(softmax="sampled", samples=50)
    first, again, other = (
        float(model.loss(made, some(), draws_of_update(0, step, CPU, 0, 4, 4)).total.detach()) for step in (1, 1, 2)
    )
    assert first == again != other
    assert torch.allclose(made.log_chances.exp().sum(), torch.tensor(1.0))
    counts = books().counts
    assert int(made.log_chances.argmax()) == int(counts.argmax()) == END
    assert "log_chances" not in made.state_dict()


def test_start_values_are_those_of_the_authors_code():
    for norm in NORMS:
        for conditioning, extra in (("start", 0), ("every_step", 40)):
            made = built(norm=norm, conditioning=conditioning, units=40, word_size=30)
            for weight in (made.words.weight, made.output.weight, made.encoder.weight_ih_l0):
                assert 0.05 < float(weight.detach().abs().max()) <= 0.1
            for gru in (made.encoder, made.before, made.after):
                for block in gru.weight_hh_l0.chunk(3):
                    assert torch.allclose(block @ block.T, torch.eye(40), atol=1e-5)
            assert made.before.weight_ih_l0.shape == (120, 30 + extra)
            for block in made.after.weight_ih_l0[:, 30:].chunk(3) if extra else ():
                assert torch.allclose(block @ block.T, torch.eye(40), atol=1e-5)
            assert not any(p.any() for name, p in made.named_parameters() if "bias" in name)
            frozen = [name for name, p in made.named_parameters() if not p.requires_grad]
            assert len(frozen) == (3 if norm == "none" else 0)


def test_variants_of_one_seed_share_their_start_values():
    plain, normed = (built(3, norm=norm) for norm in NORMS)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, normed.get_parameter(name)), name


def test_the_number_of_parameters_is_that_of_the_specification():
    """125,673,600. Layer norm has 12 vectors a GRU in the authors' code; ours leaves out three redundant biases."""
    for norm, wanted in (("none", 125_673_600), ("layer", 125_673_600 + 3 * 9 * 2400)):
        with torch.device("meta"):
            made = model.SkipThoughts(torch.ones(20_000), SkipConfig(norm=norm))
        assert sum(p.numel() for p in made.parameters() if p.requires_grad) == wanted


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("softmax", ["full", "sampled"])
def test_a_model_learns_text_in_which_each_sentence_tells_the_next(norm, softmax):
    """Four sentences in a ring: whoever reads one knows its neighbours."""
    ring = [[2, 3, END], [4, 5, 6, END], [7, 8, END], [9, 10, 11, END]]
    text = Ragged.of([ring[number % 4] for number in range(40)])
    made = dataclasses.replace(books(), splits=dict.fromkeys(("train", "valid", "test"), text))
    config = dataclasses.replace(SMALL, norm=norm, softmax=softmax, samples=30, units=24, word_size=16)
    torch.manual_seed(0)
    network, batches = model.build(config, made), model.batches(config, made, 0)
    adam = Adam(network.parameters(), 1e-2)
    for step in range(160):
        adam.zero_grad()
        batch = model.batch(made, batches.at(step))
        model.loss(network, batch, draws_of_update(0, step, CPU, 0, 8, 8)).total.backward()
        clip_gradients(list(network.parameters()), 5.0, "global")
        adam.step()
    assert float(model.validate(network, made, config)["valid_nll"]) < 0.15


# Evaluation


def test_losses_of_test_triples_have_the_loss_per_word_as_their_mean(data):
    made = shaken(built())
    found = model.test(made, data, SMALL)
    chosen = usable(words_in(data.splits["test"]), 9)
    batch = taken(data.splits["test"], chosen)
    losses, words = made.measure(batch)
    assert float(found["test_nll"]) == pytest.approx(float(losses.sum() / words.sum()))
    assert torch.allclose(found["test_losses"] * words.double().mean(), losses, atol=1e-5)  # in the order of the text
    items = next(claim.measure.items for claim in CLAIMS if claim.name == "test")
    told = items({"extras": {"test_losses": found["test_losses"].tolist()}})
    assert sum(told) / len(told) == pytest.approx(-float(found["test_nll"]))
    assert items({"extras": {}}) is None


def test_words_guessed_by_frequency_cost_their_surprise(data):
    split, chosen = data.splits["valid"], model.held_out(data, "valid", SMALL)
    chances = (data.counts + 1) / (data.counts + 1).sum()
    batch = taken(split, chosen)
    inside = [ids[torch.arange(ids.shape[1]) < lengths.unsqueeze(1)] for ids, lengths in (batch[2:4], batch[4:6])]
    wanted = -chances[torch.cat(inside).long()].log().mean()
    assert float(model.by_frequency(data, split, chosen)) == pytest.approx(float(wanted))


def test_curves_are_of_a_fixed_part_of_the_held_out_triples(data):
    whole = model.held_out(data, "valid", SMALL)
    part = model.held_out(data, "valid", dataclasses.replace(SMALL, valid_triples=7))
    assert len(part) == 7
    assert set(part.tolist()) <= set(whole.tolist())
    assert int(part[-1]) > int(whole[len(whole) // 2])  # spread over the text
    assert len(model.held_out(data, "valid", dataclasses.replace(SMALL, valid_triples=10_000))) == len(whole)


# Runs


def job(**changes) -> Job:
    return Job("skip_thoughts", dataclasses.replace(SMALL, **changes), 0, ("norm",))


def finished(runs, wanted, say, **how):
    train([wanted], Settings(root="embedded", runs=runs, device="cpu", **how), say)
    return next(runs.glob(f"*/*/{wanted.label}"))


def lines_of(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.mark.parametrize(
    "changes",
    [{"norm": "none"}, {"conditioning": "every_step"}, {"softmax": "sampled", "samples": 5}, {"updates": 40}],
)
def test_an_interrupted_run_goes_on_bit_for_bit(data, tmp_path, say, monkeypatch, changes):
    wanted = job(checkpoint_every=2, **changes)
    whole = finished(tmp_path / "whole", wanted, say)
    plain, end = Update.__call__, wanted.config.updates - 1

    def cut(update, index, step=0):
        if step == end:
            raise KeyboardInterrupt
        plain(update, index, step)

    monkeypatch.setattr(Update, "__call__", cut)
    with pytest.raises(KeyboardInterrupt):
        finished(tmp_path / "cut", wanted, say)
    monkeypatch.setattr(Update, "__call__", plain)
    resumed = finished(tmp_path / "cut", wanted, say, resume=True)
    assert lines_of(resumed) == lines_of(whole)
    assert (resumed / "extras.json").read_text() == (whole / "extras.json").read_text()
    last = [next((f / "checkpoints").glob(f"step-*{end + 1}")) / "weights.safetensors" for f in (resumed, whole)]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_a_batch_in_parts_trains_as_the_whole_one_does(data, tmp_path, say):
    losses = []
    for parts in (1, 2):
        folder = finished(tmp_path / str(parts), job(accumulate=parts, batch_size=64), say)
        losses.append([line["loss"] for line in lines_of(folder) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# Scales


SPECIFICATION = {  # section 6.3 and the code that the paper runs
    "dataset": "books",
    "units": 2400,
    "word_size": 620,
    "vocabulary": 20_000,
    "longest": 30,
    "batch_size": 64,
    "updates": 1_000_000,
    "lr": 2e-4,
    "bias_correction": "kiros",
    "clip": 5.0,
    "clip_by": "global",
    "accumulate": 1,
    "precision": "float32",
    "eval_updates": 50_000,
    "conditioning": "start",
    "softmax": "full",
    "floor": 1e-8,
    "valid_triples": 0,
}


def test_the_paper_scale_is_the_papers_configuration():
    configs = plan.scaled(SHEET, SHEET.scales["paper"], {})
    assert {config.norm for config in configs} == set(NORMS)
    for config in configs:
        assert {name: getattr(config, name) for name in SPECIFICATION} == SPECIFICATION


def test_no_scale_compares_with_an_estimated_softmax():
    assert all(config.softmax == "full" for scale in SHEET.scales.values() for config in plan.scaled(SHEET, scale, {}))


def test_one_grid_of_step_sizes_holds_the_papers():
    assert 2e-4 in STEP_SIZES
    assert SHEET.scales["laptop"].settings["lr"] in STEP_SIZES
    assert {row["lr"] for row in SHEET.scales["laptop"].tuned} <= set(STEP_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_the_paper_scale_makes_three_updates(monkeypatch, tmp_path, say, norm):
    """The settings of the scale, but for the length, on sentences of a few of 20,000 words; 2 GB of memory."""
    made = books(40, 20_000)
    monkeypatch.setattr(model, "load_books", lambda *given: made)
    model._load.cache_clear()
    (wanted,) = (one for one in plan.jobs_of_scale(SHEET, "paper", range(1)) if one.config.norm == norm)
    wanted = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, updates=3))
    folder = finished(tmp_path, wanted, say)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert "test_nll" in lines_of(folder)[-1]
    model._load.cache_clear()
    shutil.rmtree(folder)  # 1.5 GB a checkpoint, and pytest keeps folders of several sessions
