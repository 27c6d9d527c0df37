"""Batch norm's sampling noise: the exact identity, the Gaussian model with 2/N and 1/N, and what it costs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina
from lamina.analysis.geometry import summed_inputs
from lamina.analysis.noise import (
    batch_errors,
    measured_noise,
    model_errors,
    model_noise,
    regulariser,
    resampled,
)
from lamina.checks import InputError
from lamina.layers import SPREAD_FLOOR


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


POPULATION = 3 + 2 * randn(20_000, 4, seed=1)


# ---- the identity


@settings(max_examples=20)
@given(cases=st.integers(2, 40), seed=st.integers(0, 10**6), skew=st.booleans())
def test_identity_is_exact_on_real_batches(cases, seed, skew):
    """Against the layer itself, whose population statistics and batch statistics are both its own."""
    population = randn(100, 5, seed=seed)
    population = population.exp() if skew else population
    gain, batch = randn(5, seed=seed + 1), population[torch.randperm(100, generator=generator(seed))[:cases]]
    layer = lamina.BatchNorm(5, eps=0.0, dtype=torch.float64)
    layer.weight.data.copy_(gain)
    (var, mean), (batch_var, batch_mean) = (torch.var_mean(a, 0, correction=0) for a in (population, batch))
    normalised = gain * (batch - mean) / var.sqrt()
    by_identity = resampled(normalised, (mean - batch_mean) / var.sqrt(), batch_var / var, gain)
    torch.testing.assert_close(by_identity, layer(batch), rtol=1e-9, atol=1e-10)


def test_identity_from_the_errors_of_batches():
    """shift and spread are all that the identity needs."""
    shift, spread = batch_errors(POPULATION, 16, 1, generator(4))
    index = torch.randint(len(POPULATION), (1, 16), generator=generator(4))[0]
    batch, (var, mean) = POPULATION[index], torch.var_mean(POPULATION, 0, correction=0)
    layer = lamina.BatchNorm(4, eps=0.0, affine=False, dtype=torch.float64)
    torch.testing.assert_close(((batch - mean) / var.sqrt() + shift) * spread.rsqrt(), layer(batch))


# ---- variances


@pytest.mark.parametrize("cases", [16, 64, 256])
def test_relative_variance_of_a_gaussian_batch_is_two_over_n(cases):
    found = measured_noise(POPULATION, cases, 3000)
    assert found.spread_variance == pytest.approx(2 * (cases - 1) / cases, rel=0.06)  # biased variance: 2 (N-1)/N^2
    assert found.spread_variance > 1.5  # the printed 1 is out of reach
    assert found.shift_sd == pytest.approx(found.expected_shift_sd, rel=0.03)


def test_deviation_of_the_scale_follows_the_corrected_variance():
    found = measured_noise(POPULATION, 64, 3000)
    assert found.expected_scale_sd() == pytest.approx(math.sqrt(1 / 128))
    assert found.expected_scale_sd("printed") == pytest.approx(1 / 16)
    assert found.scale_sd == pytest.approx(found.expected_scale_sd(), rel=0.07)
    assert found.scale_sd > 1.3 * found.expected_scale_sd("printed")


@pytest.mark.parametrize("cases", [8, 64])
def test_the_scale_of_gaussian_batches_has_the_deviation_of_chi_squared(cases):
    """First order gives 0.25 at 8 cases; 1/sqrt(chi^2_7/8) has a deviation of 0.389."""
    measured = measured_noise(randn(100_000, seed=3), cases, 20_000)
    assert measured.scale_sd == pytest.approx(measured.gaussian_scale_sd, rel=0.02)
    assert measured.gaussian_scale_sd > (1.5 if cases == 8 else 1.04) * measured.expected_scale_sd()
    if cases == 8:  # Gamma(7/2) = 15 sqrt(pi)/8
        assert measured.gaussian_scale_sd == pytest.approx(math.sqrt(8 / 5 - 1024 / (225 * math.pi)), abs=1e-12)


def test_batches_of_three_or_fewer_have_no_finite_scale_deviation():
    assert measured_noise(randn(1000), 3, 10).gaussian_scale_sd == math.inf
    assert math.isfinite(measured_noise(randn(1000), 4, 10).gaussian_scale_sd)


def test_other_distributions_have_kurtosis_minus_one():
    uniform = torch.rand(20_000, 4, generator=generator(2), dtype=torch.float64)
    laplace = uniform.sub(0.5).sign() * -torch.log1p(-2 * uniform.sub(0.5).abs())
    for population, kurtosis in ((uniform, 1.8), (laplace, 6.0)):
        assert measured_noise(population, 256, 1500).spread_variance == pytest.approx(kurtosis - 1, rel=0.1)


@pytest.mark.parametrize(("variance", "expected"), [("corrected", 2.0), ("printed", 1.0)])
def test_draws_of_the_model_have_the_variance_asked_for(variance, expected):
    shift, spread = model_errors(torch.empty(200_000, 1).double(), 100, variance, generator=generator())
    assert float(shift.var()) == pytest.approx(1 / 100, rel=0.02)
    assert float(spread.mean()) == pytest.approx(1, abs=2e-3)
    assert 100 * float(spread.var()) == pytest.approx(expected, rel=0.02)
    assert abs(float(torch.corrcoef(torch.cat((shift, spread), 1).T)[0, 1])) < 0.01


def test_few_cases_are_clamped_as_the_layer_does():
    _, spread = model_errors(torch.empty(10_000, 1), 4, generator=generator())
    assert float(spread.min()) == pytest.approx(SPREAD_FLOOR)
    assert torch.equal(model_errors(spread, 4)[1], model_errors(spread, 4)[1])


def test_model_is_that_of_the_noisy_layer():
    layer = lamina.NoisyLayerNorm(6, 32, eps=0.0, elementwise_affine=False, dtype=torch.float64)
    x = randn(40_000, 6, seed=3)
    normalised = lamina.LayerNorm(6, eps=0.0, elementwise_affine=False, dtype=torch.float64)(x)
    ours, theirs = resampled(normalised, *model_errors(normalised, 32, generator=generator(5))), layer(x)
    for moment in (lambda t: t.square().mean(), lambda t: (t - normalised).square().mean()):
        assert float(moment(ours)) == pytest.approx(float(moment(theirs)), rel=0.05)


# ---- shared noise and second moments


def test_real_noise_is_shared_by_a_batch_and_keeps_its_second_moment():
    found = measured_noise(POPULATION, 64, 500)
    assert found.unshared < 1e-13
    assert found.second_moment_spread < 1e-13


@pytest.mark.parametrize("variance", ["corrected", "printed"])
def test_modelled_noise_inflates_the_second_moment(variance):
    """(1 + 1/N) E[1/|1 + xi|], the latter 1 + v + 3 v^2 to second order in v = Var xi."""
    found = model_noise(POPULATION, 64, 4000, variance)
    v = (2 if variance == "corrected" else 1) / 64
    assert found.second_moment == pytest.approx((1 + 1 / 64) * (1 + v + 3 * v**2), abs=5e-3)
    assert found.unshared > 0.5 / 64
    assert found.second_moment_spread > 0.01


def test_modelled_noise_drawn_for_each_unit_is_shared():
    found = model_noise(POPULATION, 64, 500, noise_shape="unit")
    assert found.unshared < 1e-13
    assert found.second_moment_spread > 0.01
    normalised = torch.stack((randn(30), torch.ones(30).double()), 1)
    for noise_shape, shared in (("unit", True), ("case", False)):
        drawn = resampled(normalised[:, :1], *model_errors(normalised[:, :1], 64, noise_shape=noise_shape))
        left = drawn - normalised @ torch.linalg.lstsq(normalised, drawn).solution
        assert bool(left.norm() < 1e-12) is shared


# ---- the regulariser


def test_regulariser_written_out():
    abar, target = torch.tensor([0.5, -2.0]).double(), torch.tensor([1.0, 1.0]).double()
    found = regulariser(abar, 3.0, 50)
    torch.testing.assert_close(found, 9 / 50 + abar.square() / 100)
    with_target = regulariser(abar, 3.0, 50, target)
    torch.testing.assert_close(with_target - found, 2 * (abar - target) * abar * 3 / (4 * 50))
    torch.testing.assert_close(regulariser(abar, 3.0, 50, variance="printed"), 9 / 50 + abar.square() / 200)


@pytest.mark.parametrize("variance", ["corrected", "printed"])
def test_regulariser_is_the_modelled_increase_of_the_squared_error(variance):
    """Second order is 1/N^2, a hundredth of the increase here; each variance fails with the other's draws."""
    abar, target, gain, cases = torch.tensor([1.5, -0.5]).double(), torch.tensor([-1.0, 0.3]).double(), 0.8, 400
    wide = abar.expand(1_000_000, 2)
    drawn = resampled(wide, *model_errors(wide, cases, variance, generator=generator()), gain)
    measured = ((drawn - target).square() - (abar - target).square()).mean(0)
    other = "printed" if variance == "corrected" else "corrected"
    expected, wrong = (regulariser(abar, gain, cases, target, v) for v in (variance, other))
    assert ((measured - expected).abs() / expected).max() < 0.05
    assert ((measured - wrong).abs() / expected)[0] > 0.3


@pytest.mark.parametrize("cases", [32, 128])
def test_regulariser_is_what_real_batches_cost_on_average(cases):
    """1/N + 1/(2N) for standardised Gaussian values; the printed variance would give 1/N + 1/(4N)."""
    var, mean = torch.var_mean(POPULATION, 0, correction=0)
    abar = (POPULATION - mean) / var.sqrt()
    expected, printed = (float(regulariser(abar, 1.0, cases, variance=v).mean()) for v in ("corrected", "printed"))
    found = measured_noise(POPULATION, cases, 4000).squared_error
    assert expected == pytest.approx(1.5 / cases)
    assert found == pytest.approx(expected, rel=0.05)
    assert found > 1.1 * printed


# ---- mistakes and manners


def test_batches_that_have_no_deviation_are_refused():
    with pytest.raises(InputError, match="at least two cases"):
        measured_noise(POPULATION, 1)
    constant = POPULATION.clone()
    constant[:, 2] = 0.1
    with pytest.raises(InputError, match=r"constant summed inputs \(unit 2\)"):
        measured_noise(constant, 8)
    with pytest.raises(InputError, match="a batch of 2 equal cases"):
        measured_noise(torch.tensor([0.0, 1.0]).double(), 2)
    with pytest.raises(InputError, match="two or more finite cases"):
        measured_noise(POPULATION / 0, 8)
    with pytest.raises(InputError, match=r"summed inputs \[M\] or \[M, H\]"):
        measured_noise(torch.arange(5), 8)
    with pytest.raises(InputError, match="'corrected', 'printed'"):
        model_errors(POPULATION, 4, "exact")


def test_population_from_a_layer_and_the_callers_random_numbers():
    layer = lamina.Linear(3, 4, norm="batch", dtype=torch.float64)
    population, state = summed_inputs(layer, randn(500, 3)), torch.get_rng_state()
    assert measured_noise(population, 8, 50) == measured_noise(population, 8, 50)
    assert measured_noise(population, 8, 50) != measured_noise(population, 8, 50, generator(1))
    assert measured_noise(population[:, 0], 8, 50).cases == 8
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.statistics.num_batches_tracked == 0
