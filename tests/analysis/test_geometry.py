"""Directions without effect, orthogonal gradients, effective learning rates, gain metrics, growth in training."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lamina
from lamina.analysis.families import Gaussian
from lamina.analysis.geometry import null_directions, orthogonality, summed_inputs
from lamina.analysis.information import fisher, flat, where
from lamina.analysis.rates import angle_between, effective_rate, gain_metric, normalised_inputs
from lamina.analysis.training import Tracker, normalised_weights, track
from lamina.checks import InputError

NORMALISED = ("batch", "weight", "layer")
NORMS = (*NORMALISED, None)
CASES, INPUTS, UNITS = 40, 3, 4
DIMENSION = {"batch": UNITS, "weight": UNITS, "layer": 1 + INPUTS, None: 0}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(norm, inputs=INPUTS, units=UNITS, seed=0, eps=0.0, **options):
    """A layer with nothing at its start value; gains away from 0, which would hide directions."""
    layer = lamina.Linear(inputs, units, norm=norm, eps=eps, dtype=torch.float64, **options)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=10 * seed + i))
    if layer.gain is not None:
        layer.gain.data.abs_().add_(0.5)
    return layer


def target_loss(output):
    return (output - randn(*output.shape, seed=77)).square().sum()


def unchanged(layer, state, mode):
    return layer.training is mode and all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())


def snapshot(layer):
    return {k: v.clone() for k, v in layer.state_dict().items()}


# ---- null directions


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_null_space_of_the_fisher_matrix_is_the_one_returned(norm, family):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    basis, matrix = null_directions(layer), fisher(layer, x, family)
    assert basis.shape == (flat(layer).numel(), DIMENSION[norm])
    torch.testing.assert_close(basis.T @ basis, torch.eye(DIMENSION[norm]).double(), rtol=0, atol=1e-13)
    values = torch.linalg.eigvalsh(matrix)
    assert int((values < 1e-11 * values[-1]).sum()) == DIMENSION[norm]
    assert int((values < 1e-6 * values[-1]).sum()) == DIMENSION[norm]  # the others are far from 0
    assert (matrix @ basis).norm() < 1e-12 * matrix.norm()


@settings(max_examples=15)
@given(norm=st.sampled_from(NORMALISED), inputs=st.integers(2, 4), units=st.integers(3, 5), seed=st.integers(0, 10**6))
def test_dimensions_are_generic(norm, inputs, units, seed):
    layer, x = make(norm, inputs, units, seed), randn(60, inputs, seed=seed + 1)
    expected = 1 + inputs if norm == "layer" else units
    basis, values = null_directions(layer), torch.linalg.eigvalsh(fisher(layer, x, "gaussian"))
    assert basis.shape[1] == expected
    assert int((values < 1e-12 * values[-1]).sum()) == expected


@pytest.mark.parametrize(("inputs", "units"), [(3, 2), (1, 4)])
def test_layer_norm_of_two_units_or_one_input_is_not_generic(inputs, units):
    """ahat is (1, -1) or (-1, 1) whatever the weights; or sign(x) times one vector, which gains can change as well."""
    layer = make("layer", inputs, units)
    values = torch.linalg.eigvalsh(fisher(layer, randn(CASES, inputs, seed=5), "gaussian"))
    assert int((values < 1e-12 * values[-1]).sum()) == layer.weight.numel() > null_directions(layer).shape[1]


@pytest.mark.parametrize("norm", NORMALISED)
def test_output_stays_along_a_null_direction(norm):
    layer, x, mix = make(norm), randn(CASES, INPUTS, seed=5), randn(DIMENSION[norm], seed=6)
    step, moved = null_directions(layer) @ mix, copy.deepcopy(layer)
    torch.nn.utils.vector_to_parameters(flat(layer).detach() + 1e-4 * step, moved.parameters())
    change = (moved(x) - layer(x)).abs().max()
    other, random = copy.deepcopy(layer), randn(step.numel(), seed=8)
    torch.nn.utils.vector_to_parameters(flat(layer).detach() + 1e-4 * random, other.parameters())
    assert change < 1e-10  # straight lines, not only tangents, at positive scales
    assert (other(x) - layer(x)).abs().max() > 1e-5


def test_a_single_row_is_not_null_under_layer_norm_nor_a_common_shift_under_the_others():
    x = randn(CASES, INPUTS, seed=5)
    row = torch.zeros(UNITS, INPUTS).double()
    row[0] = make("layer").weight.detach()[0]
    shift = torch.ones(UNITS, 1).double() @ randn(1, INPUTS, seed=3)
    for norm, direction in (("layer", row), ("batch", shift), ("weight", shift), (None, row)):
        layer = make(norm)
        d = torch.cat((direction.flatten(), torch.zeros(flat(layer).numel() - direction.numel()).double()))
        assert d @ fisher(layer, x, "gaussian") @ d > 1e-2


def test_directions_of_a_model_stack_in_its_own_order():
    model = nn.Sequential(
        make("batch", 3, 5), nn.Tanh(), nn.Linear(5, 5).double(), make("layer", 5, 4, seed=1), make(None, 4, 4, seed=2)
    )
    basis, slices = null_directions(model), where(model)
    assert basis.shape == (flat(model).numel(), 5 + 6)
    torch.testing.assert_close(basis.T @ basis, torch.eye(11).double(), rtol=0, atol=1e-13)
    assert (fisher(model, randn(CASES, 3, seed=4)) @ basis).abs().max() < 1e-13
    torch.testing.assert_close(basis[slices["3.weight"], 5:], null_directions(model[3])[: 4 * 5])
    model[0].weight.requires_grad_(False)
    assert null_directions(model).shape == (flat(model).numel(), 6)


@pytest.mark.parametrize(("norm", "count"), [("batch", 4), ("weight", 4), ("layer", 1)])
def test_convolutions_have_a_scale_for_each_filter_or_for_all(norm, count):
    layer = lamina.Conv2d(2, 4, 3, norm=norm, eps=0.0, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Flatten())
    basis = null_directions(model)
    assert basis.shape == (flat(model).numel(), count)
    assert (fisher(model, randn(6, 2, 5, 5), "gaussian") @ basis).abs().max() < 1e-12


def test_models_without_a_normalised_layer_or_with_void_weights_are_refused():
    with pytest.raises(InputError, match="Sequential without one"):
        null_directions(nn.Sequential(nn.Linear(3, 4), make(None)))
    layer = make("weight")
    layer.weight.data[2] = 0
    with pytest.raises(InputError, match=r"'0', Linear\(3, 4, norm='weight'\), needs rows .* row 2 of zeros"):
        null_directions(nn.Sequential(layer))
    layer = make("layer")
    layer.weight.data[:] = layer.weight.data[:1].clone()
    with pytest.raises(InputError, match=r"Linear\(3, 4, norm='layer'\) needs rows of weights that differ"):
        null_directions(layer)
    tied = nn.Sequential(make("layer", 3, 3), nn.Linear(3, 3).double())
    tied[1].weight = tied[0].weight
    with pytest.raises(InputError, match="shared between layers"):
        null_directions(tied)


# ---- gradients


@pytest.mark.parametrize("norm", NORMALISED)
def test_gradients_are_orthogonal_to_void_directions_and_to_no_others(norm):
    layer, x = make(norm, activation="tanh"), randn(CASES, INPUTS, seed=5)
    found = orthogonality(layer, x, target_loss)
    assert found.violation < 1e-13
    assert found.rows.shape == (UNITS,)
    assert found.columns.shape == (INPUTS,)
    if norm == "layer":
        assert found.rows.abs().max() > 1e-2
    else:
        assert found.whole.abs() < 1e-13
        assert found.columns.abs().max() > 1e-2


def test_without_a_norm_nothing_is_orthogonal():
    found = orthogonality(make(None), randn(CASES, INPUTS, seed=5), target_loss)
    assert min(found.rows.abs().max(), found.whole.abs(), found.columns.abs().max()) > 1e-2
    assert found.violation > 1e-2


def test_eps_spoils_orthogonality_by_eps_over_sigma_squared():
    small, large = (
        orthogonality(make("layer", eps=e), randn(CASES, INPUTS, seed=5), target_loss) for e in (1e-6, 1e-2)
    )
    assert 1e-9 < small.violation < large.violation < 1


def test_a_gradient_of_zero_violates_nothing():
    assert orthogonality(make("layer"), randn(CASES, INPUTS), lambda out: (0 * out).sum()).violation == 0


# ---- effective learning rate


@pytest.mark.parametrize("norm", NORMALISED)
@pytest.mark.parametrize("family", ["bernoulli", "categorical"])
def test_doubled_weights_quarter_the_curvature_and_halve_the_gradient(norm, family):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    found = effective_rate(layer, x, target_loss, family=family)
    assert found.weights == pytest.approx((1, 1 / 4, 1 / 16), abs=1e-10)
    for field in (found.bias, found.gain, found.gradient):
        assert field == pytest.approx((1, 1 / 2, 1 / 4), abs=1e-10)
    assert max(found.output_change) < 1e-12
    assert found.other_rows is None
    assert found.exponent("weights") == pytest.approx(-2, abs=1e-9)


@pytest.mark.parametrize("norm", NORMALISED)
def test_blocks_shrink_entry_by_entry(norm):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    doubled = copy.deepcopy(layer)
    doubled.weight.data *= 2
    degree = torch.ones(flat(layer).numel()).double()
    degree[where(layer)["weight"]] /= 2
    expected = fisher(layer, x, "categorical") * torch.outer(degree, degree)
    torch.testing.assert_close(fisher(doubled, x, "categorical"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "weight"])
def test_one_doubled_row_quarters_its_block_and_halves_those_with_other_rows(norm):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    found = effective_rate(layer, x, target_loss, family="categorical", row=2)
    assert found.weights == pytest.approx((1, 1 / 4, 1 / 16), abs=1e-10)
    for field in (found.other_rows, found.bias, found.gain, found.gradient):
        assert field == pytest.approx((1, 1 / 2, 1 / 4), abs=1e-10)
    assert max(found.output_change) < 1e-12
    assert found.exponent("angle") == pytest.approx(-2, abs=1e-3)


def test_one_doubled_row_changes_the_function_under_layer_norm():
    found = effective_rate(make("layer"), randn(CASES, INPUTS, seed=5), target_loss, row=1)
    assert found.output_change[1] > 1e-2
    assert abs(found.weights[1] - 1 / 4) > 1e-3


def test_blocks_between_independent_units_are_zero():
    found = effective_rate(make("batch"), randn(CASES, INPUTS, seed=5), target_loss, row=1)
    assert all(map(math.isnan, found.other_rows))


@pytest.mark.parametrize("norm", NORMALISED)
@pytest.mark.parametrize(("optimiser", "exponent"), [("sgd", -2), ("adam", -1)])
def test_rotation_per_step_falls_with_the_scale(norm, optimiser, exponent):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    found = effective_rate(layer, x, target_loss, (1, 2, 4, 8), optimiser=optimiser, lr=1e-5)
    assert found.exponent("angle") == pytest.approx(exponent, abs=1e-3)
    if optimiser == "sgd":
        step = 1e-5 * torch.autograd.grad(target_loss(layer(x)), layer.weight)[0]
        assert found.angle[0] == pytest.approx(float(torch.atan(step.norm() / layer.weight.detach().norm())), rel=1e-8)


def test_rates_need_a_normalised_layer_and_sane_arguments():
    x = randn(CASES, INPUTS)
    with pytest.raises(InputError, match=r"Linear\(3, 4, norm=None\)"):
        effective_rate(make(None), x, target_loss)
    with pytest.raises(InputError, match="optimiser must be one of 'sgd', 'adam'"):
        effective_rate(make("layer"), x, target_loss, optimiser="adamw")
    with pytest.raises(InputError, match="scales"):
        effective_rate(make("layer"), x, target_loss, scales=(1, -2))
    with pytest.raises(InputError, match="4 units"):
        effective_rate(make("layer"), x, target_loss, row=4)
    with pytest.raises(InputError, match="one number"):
        effective_rate(make("layer"), x, lambda out: out)
    found = effective_rate(make("layer", bias=False), x, target_loss, scales=(1, 2))
    assert found.bias is None
    with pytest.raises(InputError, match="'bias'"):
        found.exponent("bias")


def test_tiny_angles_keep_their_digits():
    before, turn = torch.tensor([1.0, 0.0]).double(), 1e-12
    assert float(angle_between(before, torch.tensor([3.0, 3 * turn]).double())) == pytest.approx(turn, rel=1e-10)
    assert float(angle_between(before, -before)) == pytest.approx(math.pi)


# ---- gain metric


@pytest.mark.parametrize("norm", NORMALISED)
@pytest.mark.parametrize("family", [Gaussian(0.5), "bernoulli", "poisson", "categorical"])
def test_gain_metric_is_the_gain_block_of_the_fisher_matrix(norm, family):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    gains = where(layer)["gain"]
    torch.testing.assert_close(
        gain_metric(layer, x, family), fisher(layer, x, family)[gains, gains], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "categorical"])
def test_standard_model_has_the_gain_metric_of_weight_norm(family):
    plain, normed, x = make(None), make("weight"), randn(CASES, INPUTS, seed=5)
    normed.gain.data.copy_(normed.weight.data.norm(dim=1))
    normed.bias.data.copy_(plain.bias.data)
    found, directions = gain_metric(plain, x, family), null_directions(normed)[: UNITS * INPUTS]
    weights = where(plain)["weight"]
    torch.testing.assert_close(found, directions.T @ fisher(plain, x, family)[weights, weights] @ directions)
    torch.testing.assert_close(found, gain_metric(normed, x, family), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("norm", "factor"), [("batch", 1), ("layer", 1), ("weight", 100), (None, 100)])
def test_gain_metric_and_the_scale_of_the_inputs(norm, factor):
    layer, x = make(norm), randn(CASES, INPUTS, seed=5)
    small, large = gain_metric(layer, x), gain_metric(layer, 10 * x)
    torch.testing.assert_close(large, factor * small, rtol=1e-10, atol=1e-10)


def test_printed_gain_metric_of_batch_norm_is_right_for_gaussian_outputs_only():
    layer, x = make("batch"), randn(400, INPUTS, seed=5)
    exact, printed = (gain_metric(layer, x, printed=p).diagonal() for p in (False, True))
    torch.testing.assert_close(exact, printed, rtol=1e-12, atol=0)  # E ahat^2 = 1
    exact, printed = (gain_metric(layer, x, "bernoulli", printed=p).diagonal() for p in (False, True))
    assert (printed / exact - 1).min() > 0.02  # p(1 - p) is small where ahat^2 is large
    for norm in ("layer", "weight"):
        same = make(norm)
        assert torch.equal(gain_metric(same, x, "bernoulli"), gain_metric(same, x, "bernoulli", printed=True))
    with pytest.raises(InputError, match="norm=None"):
        gain_metric(make(None), x, printed=True)
    with pytest.raises(InputError, match="activation='tanh'"):
        gain_metric(make("layer", activation="tanh"), x)


def test_layer_norm_bounds_what_a_gain_can_meet():
    values = normalised_inputs(make("layer"), randn(CASES, INPUTS, seed=5))
    torch.testing.assert_close(values.square().sum(1), torch.full((CASES,), float(UNITS)).double())
    assert values.abs().max() <= math.sqrt(UNITS - 1) + 1e-12


# ---- inputs that cannot be normalised, and what must not change


SINGULAR = [
    ("batch", randn(1, INPUTS), "two cases"),
    ("batch", randn(1, INPUTS).expand(6, -1), "vary over the cases"),
    ("layer", torch.zeros(6, INPUTS).double(), "vary over the units"),
]


@pytest.mark.parametrize(("norm", "x", "message"), SINGULAR)
def test_singular_statistics_are_refused_by_the_layers_name(norm, x, message):
    layer = make(norm)
    for analyse in (gain_metric, lambda *both: orthogonality(*both, target_loss), normalised_inputs):
        with pytest.raises(InputError, match=message) as caught:
            analyse(layer, x)
        assert f"Linear(3, 4, norm={norm!r})" in str(caught.value)
    with pytest.raises(InputError, match=message):
        effective_rate(layer, x, target_loss)


def test_rows_of_zeros_and_wrong_inputs_are_refused():
    for norm in ("weight", None):
        layer = make(norm)
        layer.weight.data[1] = 0
        with pytest.raises(InputError, match="of zeros"):
            gain_metric(layer, randn(CASES, INPUTS))
    for x in (randn(CASES, INPUTS + 1), randn(CASES, INPUTS).float(), None):
        with pytest.raises(InputError, match=r"needs inputs \[N, 3\]"):
            summed_inputs(make("layer"), x)
    with pytest.raises(InputError, match=r"a lamina.Linear layer is needed, got Sequential"):
        orthogonality(nn.Sequential(make("layer")), randn(CASES, INPUTS), target_loss)


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_of_the_layer_changes(norm):
    layer, x = make(norm).eval(), randn(CASES, INPUTS, seed=5)
    layer.weight.requires_grad_(False)
    state, random = snapshot(layer), torch.get_rng_state()
    gain_metric(layer, x)
    null_directions(layer)
    orthogonality(layer, x, target_loss)
    if norm is not None:
        effective_rate(layer, x, target_loss, optimiser="adam")
    assert unchanged(layer, state, False)
    assert torch.equal(torch.get_rng_state(), random)
    assert not layer.weight.requires_grad
    assert all(p.grad is None for p in layer.parameters())


# ---- along a run


def sgd_step(model, x, lr, loss=target_loss):
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)

    def update():
        optimiser.zero_grad()
        output = model(x)
        loss(output[0] if isinstance(output, tuple) else output).backward()
        optimiser.step()

    return update


@pytest.mark.parametrize("norm", NORMALISED)
def test_norms_grow_by_the_squared_step_and_the_rate_is_lr_over_the_squared_norm(norm):
    layer, lr = make(norm), 1e-3
    tracker = track(layer, sgd_step(layer, randn(CASES, INPUTS, seed=5), lr), 20)
    seen = tracker.history["weight"]
    assert [o.step for o in seen] == list(range(21))
    for before, after in pairwise(seen):
        assert after.norm**2 - before.norm**2 == pytest.approx(lr**2 * after.gradient_norm**2, abs=1e-10)
        assert after.norm > before.norm
        assert after.effective_rate == pytest.approx(lr / before.norm**2, rel=1e-9)
    assert seen[-1].norm > 1.0001 * seen[0].norm


def test_without_a_norm_the_growth_is_another():
    layer, lr = make(None), 1e-3
    tracker = track(layer, sgd_step(layer, randn(CASES, INPUTS, seed=5), lr), 3, names=["weight"])
    before, after = tracker.history["weight"][:2]
    assert abs(after.norm**2 - before.norm**2 - lr**2 * after.gradient_norm**2) > 1e-3


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_weights_are_followed_each_by_itself(kind):
    model = getattr(lamina, kind)(3, 4, norm="layer", eps=0.0, dtype=torch.float64)
    tracker = track(model, sgd_step(model, randn(5, 6, 3, seed=1), 1e-3), 5)
    assert set(tracker.history) == {"weight_ih_l0", "weight_hh_l0"}
    for seen in tracker.history.values():
        for before, after in pairwise(seen):
            assert after.norm**2 - before.norm**2 == pytest.approx(1e-6 * after.gradient_norm**2, abs=1e-10)
            assert after.angle > 0


def test_a_norm_of_the_sum_holds_both_weights_together_only():
    model = lamina.RNN(3, 4, norm="layer", eps=0.0, dtype=torch.float64)
    tracker = track(model, sgd_step(model, randn(5, 6, 3, seed=1), 1e-2), 1)
    grown = [s[1].norm ** 2 - s[0].norm ** 2 - 1e-4 * s[1].gradient_norm ** 2 for s in tracker.history.values()]
    assert len(grown) == 2
    assert abs(sum(grown)) < 1e-10
    assert abs(grown[0]) > 1e-4


def test_which_weights_are_normalised():
    model = nn.ModuleDict(
        {
            "first": lamina.Linear(3, 4),
            "plain": lamina.Linear(4, 4, norm=None),
            "torch": nn.Linear(4, 4),
            "conv": lamina.Conv2d(1, 2, 3, norm="batch"),
            "weights": lamina.LSTM(3, 4, norm="weight", proj_size=2),
            "layers": lamina.LSTM(3, 4, norm="layer", proj_size=2),
            "sums": lamina.LSTM(3, 4, norm="layer", placement="joint", proj_size=2),
            "cell": lamina.GRUCell(3, 4, norm="batch"),
            "free": lamina.RNN(3, 4, norm=None),
        }
    )
    assert [name for name, _ in normalised_weights(model)] == [
        "first.weight", "conv.weight", "weights.weight_ih_l0", "weights.weight_hh_l0", "weights.weight_hr_l0",
        "layers.weight_ih_l0", "layers.weight_hh_l0", "sums.weight_ih_l0", "sums.weight_hh_l0", "cell.weight_ih",
        "cell.weight_hh",
    ]  # fmt: skip


def test_observations_without_gradients_of_weights_that_stand_still():
    layer = nn.Linear(3, 4)
    tracker = Tracker(layer, ["weight"])
    newest = tracker.observe()["weight"]
    assert (newest.angle, newest.gradient_norm, newest.effective_rate) == (0.0, None, None)
    with torch.no_grad():
        layer.weight.mul_(3)
    newest = tracker.observe()["weight"]
    assert newest.angle < 1e-7
    assert newest.norm == pytest.approx(3 * tracker.history["weight"][0].norm)
    assert tracker.series("weight", "step") == [0, 1, 2]


def test_trackers_need_a_weight_to_follow():
    with pytest.raises(InputError, match="LSTM without one"):
        Tracker(nn.LSTM(3, 4))
    with pytest.raises(InputError, match="'wieght'"):
        Tracker(nn.Linear(3, 4), ["wieght"])
    with pytest.raises(InputError, match="a tracked weight must be one of"):
        Tracker(make("layer")).series("bias", "norm")
