"""Adam in both forms, clipping and shuffled batches: the parts of the training loop."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from lamina.errors import InputError
from lamina.lab.training.batches import ShuffledBatches
from lamina.optim import Adam, clip_gradients

SHAPES = [(5, 3), (5,), (1,), (2, 3, 4)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


def test_correct_adam_is_torchs():
    ours, theirs = parameters(), parameters()
    pairs = (ours, Adam(ours, 0.01)), (theirs, torch.optim.Adam(theirs, 0.01))
    for step in range(20):
        for held, optimizer in pairs:
            for p, g in zip(held, gradients(step)):
                p.grad = g
            optimizer.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_kiros_adam_is_the_authors_formula():
    """lr_t = lr sqrt(1 - 0.001^t)/(1 - 0.1^t), p -= lr_t m/(sqrt(v) + 1e-8), in plain numpy."""
    held = parameters()
    optimizer = Adam(held, 0.01, bias_correction="kiros")
    p = [x.detach().numpy().copy() for x in held]
    m, v = [np.zeros_like(x) for x in p], [np.zeros_like(x) for x in p]
    for t in range(1, 31):
        rate = 0.01 * np.sqrt(1 - 0.001**t) / (1 - 0.1**t)
        for k, g in enumerate(gradients(t)):
            held[k].grad = g
            m[k] = 0.9 * m[k] + 0.1 * g.numpy()
            v[k] = 0.999 * v[k] + 0.001 * g.numpy() ** 2
            p[k] = p[k] - rate * m[k] / (np.sqrt(v[k]) + 1e-8)
        optimizer.step()
    for ours, theirs in zip(held, p):  # the update counter is float32, so the rate is good to 1e-7
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-6)


@pytest.mark.parametrize(("t", "ratio"), [(1, 3.16 * 1.11), (10, 6.5), (100, 3.2), (1000, 1.26)])
def test_kiros_adam_takes_the_long_first_steps_of_the_specification(t, ratio):
    """Under a constant gradient, how much longer its t-th update is than the published one's."""
    lengths = []
    for form in ("kiros", "correct"):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = Adam([p], 1.0, bias_correction=form)
        for _ in range(t):
            before = p.item()
            p.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
        lengths.append(before - p.item())
    assert lengths[0] / lengths[1] == pytest.approx(ratio, rel=0.02)


def test_kiros_adam_counts_each_parameters_own_updates():
    """One that gets its first gradient later takes its first steps then, beside others that are further."""

    def trained(late: int, first: int, updates: int) -> list[torch.Tensor]:
        held = parameters()
        optimizer = Adam(held, 0.01, bias_correction="kiros")
        for step in range(first, first + updates):
            for k, (p, g) in enumerate(zip(held, gradients(step))):
                p.grad = None if k == 1 and step < late else g
            optimizer.step()
        return held

    mixed = trained(3, 0, 6)
    assert torch.equal(mixed[0], trained(0, 0, 6)[0])
    assert torch.equal(mixed[1], trained(0, 3, 3)[1])


def test_kiros_adam_resumes_from_its_state():
    def trained(split: int) -> list[torch.Tensor]:
        held = parameters()
        optimizer = Adam(held, 0.01, bias_correction="kiros")
        for step in range(12):
            if step == split:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = Adam(held, 0.5, bias_correction="kiros")
                optimizer.load_state_dict(state)
            for p, g in zip(held, gradients(step)):
                p.grad = g
            optimizer.step()
        return held

    assert all(torch.equal(a, b) for a, b in zip(trained(5), trained(99)))


def test_moments_take_the_layout_of_their_parameters():
    """A file keeps no strides, and a fused step that finds others pairs up the wrong elements."""

    def trained(split: int) -> torch.Tensor:
        p = nn.Parameter(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).transpose(1, 2))
        optimizer = Adam([p], 0.01)
        for step in range(6):
            if step == split:
                state = copy.deepcopy(optimizer.state_dict())
                for name in ("exp_avg", "exp_avg_sq"):
                    state["state"][0][name] = state["state"][0][name].contiguous()
                optimizer = Adam([p], 0.5)
                optimizer.load_state_dict(state)
                assert all(optimizer.state[p][name].stride() == p.stride() for name in ("exp_avg", "exp_avg_sq"))
            p.grad = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(step)).transpose(1, 2)
            optimizer.step()
        return p

    assert torch.equal(trained(3), trained(99))


@pytest.mark.parametrize("form", ["correct", "kiros"])
def test_a_loss_scale_changes_nothing_and_overflow_is_skipped(form):
    """fp16: gradients arrive scaled; one that overflowed must leave parameters and moments alone."""
    plain, scaled = parameters(), parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    alone, guarded = Adam(plain, 0.01, bias_correction=form), Adam(scaled, 0.01, bias_correction=form)
    for step in range(4):
        for p, q, g in zip(plain, scaled, gradients(step)):
            p.grad, q.grad = g, g * scaler.scale(torch.ones((), dtype=torch.float64))
        if step == 2:
            scaled[0].grad[0, 0] = torch.inf
        else:
            alone.step()
        scaler.step(guarded)
        scaler.update()
    for p, q in zip(plain, scaled):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
    assert scaler.get_scale() == 512


def test_unknown_correction_is_refused():
    with pytest.raises(InputError, match="Did you mean 'kiros'"):
        Adam(parameters(), bias_correction="kiro")


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e3])
def test_global_clipping_is_torchs(limit):
    ours, theirs = parameters(), parameters()
    for held in (ours, theirs):
        for p, g in zip(held, gradients(0)):
            p.grad = g.clone()
    clip_gradients(ours, limit)
    torch.nn.utils.clip_grad_norm_(theirs, limit)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-6 / limit if limit < 1 else 1e-6, atol=0)


def test_clipping_by_tensor_bounds_each():
    held = parameters()
    for p, g in zip(held, gradients(0)):
        p.grad = g.clone()
    held[1].grad.mul_(1e-3)  # short already: stays
    held[2].grad.fill_(-7.0)
    kept = held[1].grad.clone()
    clip_gradients(held, 0.5, "tensor")
    norms = [p.grad.norm().item() for p in held]
    assert torch.equal(held[1].grad, kept)
    assert [n == pytest.approx(0.5) for n in norms] == [True, False, True, True]


def test_clipping_zero_gradients_gives_zeros():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    clip_gradients([p, nn.Parameter(torch.ones(2))], 1.0)
    assert torch.equal(p.grad, torch.zeros(3))


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 5), st.integers(1, 9))
def test_batches_show_every_case_once_an_epoch(cases, batch_size, seed, epochs):
    batches = ShuffledBatches(cases, batch_size, seed)
    steps = batches.updates(epochs)
    row = batches.stretch(0, steps).flatten()
    for epoch in range(epochs):
        assert sorted(row[epoch * cases : (epoch + 1) * cases].tolist()) == list(range(cases))
    assert (steps - 1) * batch_size < epochs * cases <= steps * batch_size
    middle = steps // 2
    assert torch.equal(batches.stretch(middle, steps - middle), batches.stretch(0, steps)[middle:])
    assert torch.equal(batches.at(middle), batches.stretch(0, steps)[middle])


@given(st.integers(1, 60_000), st.integers(1, 300), st.integers(1, 400), st.sampled_from(["0.1", "0.2", "0.3", "0.05"]))
@example(1000, 100, 3, "0.1")
def test_fractions_of_epochs_are_rounded_up_from_what_they_mean(cases, batch_size, number, part):
    """3 * 0.1 is a little more than 0.3 in floating point, which must not cost an update."""
    exact = number * Fraction(part) * cases / batch_size
    assert ShuffledBatches(cases, batch_size, 0).updates(number * float(part)) == math.ceil(exact)


def test_more_updates_than_can_be_counted_are_refused():
    with pytest.raises(InputError, match=r"1e\+308 epochs"):
        ShuffledBatches(1000, 4, 0).updates(1e308)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(ShuffledBatches(100, 100, seed).at(step).tolist()) for seed in (0, 1) for step in range(3)}
    assert len(orders) == 6


@pytest.mark.parametrize(("cases", "drop_last"), [(0, False), (3, True)])
def test_no_cases_is_refused(cases, drop_last):
    with pytest.raises(InputError, match="at least one batch"):
        ShuffledBatches(cases, 4, 0, drop_last)
