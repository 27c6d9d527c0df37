"""Feed-forward layers against torch.nn and against the paper's formula, written out case by case."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lamina
from lamina.checks import BackendError, InputError
from lamina.layers import SPREAD_FLOOR, Conv2d, LayerNorm, Linear, NoisyLayerNorm
from lamina.reference import ACTIVATIONS
from tests.cases import assert_same, gradients

NORMS = ("layer", "batch", "weight", None)
MIX = [("var", 1e-5), ("var", 0.0), ("std", 1e-5), ("std", 0.3)]
GAINS = [*(("channel", norm) for norm in NORMS), ("neuron", "layer"), ("neuron", "batch")]
JIT_WARNING = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"  # torch's own, on the first jvp


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(layer):
    """Nothing at its start value, gains on both sides of 0."""
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=20 + i))
    return layer


def normalised(a, eps, eps_mode, unbiased=False):
    """One vector, or one block of numbers, that shares a mean and a deviation."""
    centred = a - a.sum() / a.numel()
    var = (centred * centred).sum() / (a.numel() - 1 if unbiased else a.numel())
    return centred / (torch.sqrt(var + eps) if eps_mode == "var" else torch.sqrt(var) + eps)


def formula(a, layer, unbiased=False):
    """g/sigma (a - mu) + b for summed inputs a [N, units, *positions] of ``layer``."""
    gain, bias = (spread(p, a.dim()) for p in (layer.gain, layer.bias))
    if layer.norm == "layer":
        a = torch.stack([normalised(case, layer.eps, layer.eps_mode) for case in a])
    elif layer.norm == "batch":
        a = torch.stack([normalised(a[:, c], layer.eps, layer.eps_mode, unbiased) for c in range(a.shape[1])], 1)
    elif layer.norm == "weight":
        a = a / spread(torch.stack([w.square().sum().sqrt() for w in layer.weight]), a.dim())
    a = a if gain is None else gain * a
    return a if bias is None else a + bias


def spread(parameter, dims):
    if parameter is None or parameter.dim() > 1:
        return parameter
    return parameter.reshape(-1, *[1] * (dims - 2))


def both(layer, x, reference):
    """Output and all gradients of the layer and of what it should be."""
    leaves = [x, *layer.parameters()]
    got, want = layer(x), reference()
    assert got.dtype == want.dtype
    assert_same([got], [want])
    assert_same(gradients([got], leaves), gradients([want], leaves), 1e-11)


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize(("shape", "over"), [((3, 1), 1), ((1, 17), 17), ((2, 3, 31), (3, 31)), ((5,), (5,))], ids=str)
def test_layer_norm_is_torchs(shape, over, affine):
    elementwise, bias = affine
    ours = randomised(LayerNorm(over, 1e-3, elementwise, bias, dtype=torch.float64))
    theirs = nn.LayerNorm(over, 1e-3, elementwise, bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == repr(theirs)
    x = (3 + randn(*shape)).requires_grad_()
    got, want = ours(x), theirs(x)
    assert_same([got], [want])
    for g, w in zip(
        gradients([got], [x, *ours.parameters()]), gradients([want], [x, *theirs.parameters()]), strict=True
    ):
        assert_same([g], [w])


def test_layer_norm_loads_torchs_state_and_starts_like_it():
    theirs, ours = nn.LayerNorm((3, 5)), LayerNorm((3, 5))
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert isinstance(ours, nn.LayerNorm)


@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("shape", "over"), [((3, 2), 2), ((4, 17), 17), ((2, 3, 5), (3, 5))], ids=str)
def test_layer_norm_is_the_formula(shape, over, backend, eps_mode, eps):
    layer = randomised(LayerNorm(over, eps, dtype=torch.float64, eps_mode=eps_mode, backend=backend))
    x = (3 + randn(*shape)).requires_grad_()
    both(layer, x, lambda: torch.stack([normalised(case, eps, eps_mode) * layer.weight + layer.bias for case in x]))


@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
def test_layer_norm_gradients_of_first_and_second_order(eps_mode, eps):
    layer = LayerNorm(5, eps, dtype=torch.float64, eps_mode=eps_mode)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    inputs = [randn(3, 5).requires_grad_(), randn(5, seed=1).requires_grad_(), randn(5, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_a_constant_vector_gives_the_bias_and_finite_gradients(value, eps_mode, eps):
    layer = randomised(LayerNorm(8, eps, dtype=torch.float64, eps_mode=eps_mode))
    x = torch.full((2, 8), value, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert_same([out], [layer.bias.expand(2, 8)])
    for gradient in gradients([out], [x, *layer.parameters()]):
        assert torch.isfinite(gradient).all()


@given(st.integers(2, 5), st.integers(1, 17), st.integers(0, 10**6), st.sampled_from([1e30, -7.0, math.nan, math.inf]))
def test_no_case_sees_another(cases, units, seed, other):
    x = randn(cases, 4, seed=seed)
    linear = randomised(Linear(4, units, dtype=torch.float64, activation="tanh"))
    norm = randomised(LayerNorm(4, dtype=torch.float64))
    conv = randomised(Conv2d(1, 3, 2, dtype=torch.float64))
    spoiled = x.clone()
    spoiled[seed % cases] = other
    kept = torch.arange(cases) != seed % cases
    assert torch.equal(linear(x)[kept], linear(spoiled)[kept])
    assert torch.equal(norm(x)[kept], norm(spoiled)[kept])
    images, spoiled_images = x.reshape(cases, 1, 2, 2), spoiled.reshape(cases, 1, 2, 2)
    assert torch.equal(conv(images)[kept], conv(spoiled_images)[kept])
    for i in range(cases):
        assert_same([linear(x[i]), norm(x[i]), conv(images[i])], [linear(x)[i], norm(x)[i], conv(images)[i]])


def noise_of(layer, cases=100_000):
    """xi_mu and |1 + xi_sigma| of many draws: the same noise around ahat = +1 and -1 tells them apart."""
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(cases, 2)
    outs = []
    for sign in (1, -1):
        torch.manual_seed(7)
        outs.append((layer(sign * x) - layer.bias) / layer.weight)
    apart, together = (outs[0] - outs[1]) / 2, (outs[0] + outs[1]) / 2
    return (x * together / apart).detach(), apart.square().reciprocal().detach()


def noisy(num_samples, **options):
    return randomised(NoisyLayerNorm(2, num_samples, 0.0, dtype=torch.float64, **options))


def normal_below(x, deviation):
    return 0.5 * (1 + torch.erf(x / (deviation * math.sqrt(2))))


def assert_distributed(draws, below):
    """Kolmogorov-Smirnov: sqrt(n) max|F_n - F| exceeds 2.2 in about 1 of 8000 samples."""
    ordered = draws.flatten().sort().values
    n = ordered.numel()
    gap = (below(ordered) - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
    assert gap * math.sqrt(n) < 2.2


@pytest.mark.parametrize(
    ("options", "factor"), [({}, 2), ({"variance": "printed"}, 1), ({"variance": "corrected"}, 2)], ids=str
)
@pytest.mark.parametrize("num_samples", [64, 257])
def test_normal_noise_has_the_stated_variances(num_samples, options, factor):
    shift, variance = noise_of(noisy(num_samples, **options))
    n = shift.numel()
    for draws, mean, var in ((shift, 0, 1 / num_samples), (variance, 1, factor / num_samples)):
        assert abs(draws.mean() - mean) < 4 * math.sqrt(var / n)
        assert abs(draws.var() - var) < 4 * var * math.sqrt(2 / n)  # the standard error of a normal sample's variance
        assert_distributed(draws - mean, lambda x, var=var: normal_below(x, math.sqrt(var)))
    assert abs(torch.corrcoef(torch.stack([shift.flatten(), variance.flatten()]))[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize("num_samples", [2, 4, 64])
def test_chi2_noise_is_a_sample_variances_own(num_samples):
    shift, variance = noise_of(noisy(num_samples, noise="chi2"))
    k = num_samples - 1
    assert_distributed(shift, lambda x: normal_below(x, 1 / math.sqrt(num_samples)))
    assert_distributed(variance, lambda x: torch.special.gammainc(torch.tensor(k / 2).double(), x * k / 2))


def test_noisy_output_has_the_predicted_second_moment():
    # E[(ahat + xi)^2] E[1/s] with s ~ chi^2_k / k and E[k/chi^2_k] = k/(k-2)
    samples, cases = 16, 200_000
    layer = NoisyLayerNorm(2, samples, 0.0, dtype=torch.float64, noise="chi2")
    out = layer(torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(cases, 2)).square().detach()
    want = (1 + 1 / samples) * (samples - 1) / (samples - 3)
    assert abs(out.mean() - want) < 4 * out.std() / math.sqrt(out.numel())


def test_noise_is_bounded_when_few_samples_are_modelled():
    _, variance = noise_of(noisy(2))
    assert variance.min() > SPREAD_FLOOR * (1 - 1e-9)
    assert (variance < SPREAD_FLOOR * (1 + 1e-9)).any()


def test_noise_stands_before_the_bias_and_scales_with_the_gain():
    layer = NoisyLayerNorm(3, 5, dtype=torch.float64)
    x = randn(4, 3)
    torch.manual_seed(3)
    plain = layer(x)
    gain, bias = randn(3, seed=1), randn(3, seed=2)
    layer.weight.data.copy_(gain)
    layer.bias.data.copy_(bias)
    torch.manual_seed(3)
    assert_same([layer(x)], [plain * gain + bias])


@pytest.mark.parametrize("noise", ["normal", "chi2"])
def test_noise_is_drawn_per_case_or_per_unit(noise):
    x = randn(6, 5)[:1].expand(6, 5)
    shared = NoisyLayerNorm(5, 8, dtype=torch.float64, noise=noise, noise_shape="unit")(x)
    assert torch.equal(shared, shared[:1].expand(6, 5))
    own = NoisyLayerNorm(5, 8, dtype=torch.float64, noise=noise)(x)
    assert (own - own[:1])[1:].abs().min() > 0
    ahat = LayerNorm(5, dtype=torch.float64)(x)
    assert (shared / ahat)[0].unique().numel() == 5


@pytest.mark.parametrize("noise", ["normal", "chi2"])
def test_no_noise_in_evaluation_or_with_infinite_samples(noise):
    x = randn(6, 5)
    layer = NoisyLayerNorm(5, 4, dtype=torch.float64, noise=noise)
    plain = LayerNorm(5, dtype=torch.float64)
    state = torch.get_rng_state()
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(NoisyLayerNorm(5, math.inf, dtype=torch.float64, noise=noise)(x), plain(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same([NoisyLayerNorm(5, 1e12, dtype=torch.float64, noise=noise)(x)], [plain(x)], 1e-4)
    assert (layer.train()(x) - plain(x)).abs().max() > 0.01
    layer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("noise", ["normal", "chi2"])
def test_noisy_gradients(noise):
    layer = NoisyLayerNorm(5, 6, dtype=torch.float64, noise=noise)

    def run(x, weight, bias):
        torch.manual_seed(0)
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    inputs = [randn(3, 5).requires_grad_(), randn(5, seed=1).requires_grad_(), randn(5, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "at least 1"),
        ({"num_samples": math.nan}, "at least 1"),
        ({"num_samples": True}, "at least 1"),
        ({"num_samples": "8"}, "at least 1"),
        ({"num_samples": 1, "noise": "chi2"}, "num_samples >= 2"),
        ({"noise": "chi2", "variance": "printed"}, "variance='corrected'"),
        ({"noise": "chi"}, "Did you mean 'chi2'"),
        ({"variance": "print"}, "Did you mean 'printed'"),
        ({"noise_shape": "units"}, "Did you mean 'unit'"),
    ],
    ids=str,
)
def test_bad_noise(arguments, message):
    with pytest.raises(InputError, match=message):
        NoisyLayerNorm(3, **{"num_samples": 8, **arguments})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(2, 3, 2), (5, 1, 3), (7, 17, 31)], ids=str)
def test_linear_is_the_formula(shape, norm, eps_mode, eps, bias):
    cases, inputs, units = shape
    layer = randomised(Linear(inputs, units, bias, dtype=torch.float64, norm=norm, eps=eps, eps_mode=eps_mode))
    x = (1 + randn(cases, inputs)).requires_grad_()
    both(layer, x, lambda: formula(x @ layer.weight.T, layer))


@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
@pytest.mark.parametrize(("norm", "shape"), [("layer", (3, 4, 1)), ("batch", (1, 4, 3))])
def test_a_norm_over_one_number_gives_the_bias(norm, shape, eps_mode, eps):
    cases, inputs, units = shape
    layer = randomised(Linear(inputs, units, dtype=torch.float64, norm=norm, eps=eps, eps_mode=eps_mode))
    x = randn(cases, inputs).requires_grad_()
    out = layer(x)
    assert_same([out], [layer.bias.expand(cases, units)])
    assert all(torch.isfinite(g).all() for g in gradients([out], [x, *layer.parameters()]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_linear_takes_any_leading_axes(leading, norm):
    layer = randomised(Linear(3, 5, dtype=torch.float64, norm=norm, activation="relu"))
    x = randn(*leading, 3)
    out = layer(x)
    assert out.shape == (*leading, 5)
    assert out.dtype == torch.float64
    twin = randomised(Linear(3, 5, dtype=torch.float64, norm=norm, activation="relu"))
    assert_same([out.reshape(-1, 5)], [twin(x.reshape(-1, 3))])


CONVOLUTIONS = [
    {"kernel_size": 1},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "padding_mode": "circular"},
    {"kernel_size": 2, "groups": 2, "bias": False},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize(("gain_shape", "norm"), GAINS)
def test_convolution_is_the_formula(gain_shape, norm, options):
    size = {"input_size": (5, 7)} if gain_shape == "neuron" else {}
    layer = randomised(Conv2d(4, 6, **options, dtype=torch.float64, norm=norm, gain_shape=gain_shape, **size))
    plain = nn.Conv2d(4, 6, **{**options, "bias": False}, dtype=torch.float64)
    plain.weight = layer.weight
    x = (1 + randn(3, 4, 5, 7)).requires_grad_()
    if norm is not None:
        assert layer.gain.shape == ((6,) if gain_shape == "channel" else plain(x).shape[1:])
    both(layer, x, lambda: formula(plain(x), layer))


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
def test_convolution_eps_modes(norm, eps_mode, eps):
    layer = randomised(Conv2d(2, 3, 2, dtype=torch.float64, norm=norm, eps=eps, eps_mode=eps_mode))
    x = randn(2, 2, 4, 3).requires_grad_()
    both(layer, x, lambda: formula(F.conv2d(x, layer.weight), layer))


@pytest.mark.parametrize("norm", NORMS)
def test_convolution_takes_one_image_without_a_batch_axis(norm):
    layer, twin = (randomised(Conv2d(2, 3, 2, dtype=torch.float64, norm=norm)) for _ in range(2))
    x = randn(2, 4, 3)
    assert_same([layer(x)], [twin(x.unsqueeze(0))[0]])
    assert layer(torch.empty(0, 2, 4, 3, dtype=torch.float64)).shape == (0, 3, 3, 2)


@pytest.mark.parametrize("make", [Linear, Conv2d])
def test_unbiased_batch_norm_inside_a_layer(make):
    size, shape = ((3, 5), (4, 3)) if make is Linear else ((3, 5, 1), (2, 3, 2, 2))
    layer = randomised(make(*size, dtype=torch.float64, norm="batch", unbiased=True))
    x = randn(*shape).requires_grad_()
    product = F.linear if make is Linear else F.conv2d
    both(layer, x, lambda: formula(product(x, layer.weight), layer, unbiased=True))


@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize(("kind", "norm"), [*(("linear", norm) for norm in NORMS), *GAINS])
def test_gradients_of_first_and_second_order(kind, norm, eps_mode):
    options = {"dtype": torch.float64, "norm": norm, "eps_mode": eps_mode, "population": "exact", "activation": "tanh"}
    if kind == "linear":
        layer, x = Linear(3, 4, **options), randn(3, 3)
    else:
        size = {"gain_shape": kind, "input_size": (2, 3)} if kind == "neuron" else {}
        layer, x = Conv2d(2, 2, 2, **options, **size), randn(2, 2, 2, 3)
    names, values = zip(*randomised(layer).named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    inputs = (x.requires_grad_(), *values)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("norm", ["layer", "batch", "weight"])
@pytest.mark.parametrize(("eps_mode", "eps"), MIX)
def test_equal_summed_inputs_give_the_bias_and_finite_gradients(norm, eps_mode, eps):
    layer = randomised(Linear(3, 4, dtype=torch.float64, norm=norm, eps=eps, eps_mode=eps_mode))
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert_same([out], [layer.bias.expand(2, 4)])
    assert all(torch.isfinite(g).all() for g in gradients([out], [x, *layer.parameters()]))
    layer.weight.data.zero_()
    out = layer(randn(2, 3).requires_grad_())
    assert_same([out], [layer.bias.expand(2, 4)])
    assert all(torch.isfinite(g).all() for g in gradients([out], [*layer.parameters()]))


def scaled(w, x):
    return 2.5 * w, x


def same_added_to_every_row(w, x):
    return w + randn(1, w.shape[1], seed=8), x


def one_row_scaled(w, x):
    return torch.cat([2.5 * w[:1], w[1:]]), x


def data_scaled(w, x):
    return w, 2.5 * x


def data_shifted(w, x):
    return w, x + randn(1, x.shape[1], seed=8)


def one_case_scaled(w, x):
    return w, torch.cat([2.5 * x[:1], x[1:]])


TABLE_1 = {  # the norms whose output does not change
    scaled: ("batch", "weight", "layer"),
    same_added_to_every_row: ("layer",),
    one_row_scaled: ("batch", "weight"),
    data_scaled: ("batch", "layer"),
    data_shifted: ("batch",),
    one_case_scaled: ("layer",),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("change", TABLE_1, ids=lambda f: f.__name__)
def test_table_1_of_the_paper(change, norm):
    layer = randomised(Linear(5, 7, dtype=torch.float64, norm=norm, eps=0.0))
    x = randn(6, 5, seed=1)
    before = layer(x)
    weight, changed = change(layer.weight.data, x)
    layer.weight.data.copy_(weight)
    difference = (layer(changed) - before).abs().max()
    if norm in TABLE_1[change]:
        assert difference < 1e-10
    else:
        assert difference > 0.1


def twins(make, **options):
    """Our layer without norm and torch's, drawn from one seed."""
    arguments = (3, 5) if make is Linear else (4, 6, 3, 1, 1, 1, 2)
    torch.manual_seed(11)
    ours = make(*arguments, **options)
    torch.manual_seed(11)
    return ours, getattr(nn, make.__name__)(*arguments)


@pytest.mark.parametrize("make", [Linear, Conv2d])
def test_without_norm_the_layer_is_torchs(make):
    ours, theirs = twins(make, norm=None)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(got, want)
    x = torch.randn(3, 3) if make is Linear else torch.randn(2, 4, 5, 3)
    assert torch.equal(ours(x), theirs(x))
    fresh = make(*((3, 5) if make is Linear else (4, 6, 3, 1, 1, 1, 2)), norm=None)
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh(x), theirs(x))


@pytest.mark.parametrize("make", [Linear, Conv2d])
@pytest.mark.parametrize("norm", ["layer", "batch", "weight"])
def test_start_values(make, norm):
    ours, theirs = twins(make, norm=norm)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, torch.zeros_like(theirs.bias))
    x = torch.randn(3, 3) if make is Linear else torch.randn(2, 4, 5, 3)
    if norm == "weight":
        torch.testing.assert_close(ours(x), theirs(x) - theirs.bias.reshape(-1, *[1] * (x.dim() - 2)))
    else:
        assert torch.equal(ours.gain, torch.ones_like(ours.bias))
    chosen, _ = twins(make, norm=norm, gain_init=0.1)
    assert torch.equal(chosen.gain, torch.full_like(chosen.bias, 0.1))


@pytest.mark.parametrize("norm", NORMS)
def test_reset_draws_again_and_forgets(norm):
    layer = Linear(3, 5, norm=norm)
    layer(torch.randn(4, 3))
    randomised(layer)
    torch.manual_seed(2)
    layer.reset_parameters()
    torch.manual_seed(2)
    fresh = Linear(3, 5, norm=norm)
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), fresh.state_dict().values(), strict=True))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_name_and_by_function(name, norm):
    options = {"dtype": torch.float64, "norm": norm}
    x = randn(4, 3)
    plain = randomised(Linear(3, 5, **options))(x)
    by_name = randomised(Linear(3, 5, **options, activation=name))(x)
    wanted = {
        "relu": plain.clamp(min=0),
        "tanh": plain.exp().sub((-plain).exp()) / plain.exp().add((-plain).exp()),
        "sigmoid": 1 / (1 + (-plain).exp()),
        "gelu": plain * 0.5 * (1 + torch.erf(plain / math.sqrt(2))),
        "silu": plain / (1 + (-plain).exp()),
        "identity": plain,
    }
    assert_same([by_name], [wanted[name]])
    assert_same([randomised(Linear(3, 5, **options, activation=torch.square))(x)], [plain.square()])


def test_an_activation_may_be_a_module_with_parameters():
    layer = Linear(3, 5, activation=nn.PReLU())
    assert "activation.weight" in layer.state_dict()
    with pytest.raises(InputError, match="Did you mean 'relu'"):
        Linear(3, 5, activation="rellu")
    with pytest.raises(TypeError, match="a name or a callable"):
        Linear(3, 5, activation=3)


@pytest.mark.parametrize("make", [Linear, Conv2d])
def test_batch_norm_evaluates_with_its_population(make):
    size, shape = ((3, 5), (8, 3)) if make is Linear else ((3, 5, 1), (8, 3, 2, 2))
    options = {"dtype": torch.float64, "norm": "batch"}
    x = 2 + randn(*shape)
    running = randomised(make(*size, **options, momentum=1.0))
    training = running(x)
    summed = (F.linear if make is Linear else F.conv2d)(x, running.weight).transpose(0, 1).flatten(1)
    assert_same([running.statistics.running_mean], [summed.mean(1)])
    assert_same([running.statistics.running_var], [summed.var(1)])
    exact = randomised(make(*size, **options, population="exact"))
    with pytest.raises(InputError, match="population_statistics"):
        exact.eval()(x)
    assert lamina.baselines.population_statistics(exact, [x[:5], x[5:]]) == 1
    assert_same([exact(x)], [training])


EVERY = {
    "LayerNorm": (lambda **k: LayerNorm(5, **k), (3, 5)),
    "LayerNorm-std": (lambda **k: LayerNorm((3, 5), eps_mode="std", **k), (3, 5)),
    "Noisy": (lambda **k: NoisyLayerNorm(5, 8, **k), (3, 5)),
    "Noisy-chi2": (lambda **k: NoisyLayerNorm(5, 8, noise="chi2", noise_shape="unit", **k), (3, 5)),
    **{f"Linear-{n}": (lambda n=n, **k: Linear(5, 7, norm=n, activation="tanh", **k), (3, 5)) for n in NORMS},
    **{f"Conv2d-{n}": (lambda n=n, **k: Conv2d(3, 4, 3, norm=n, activation="silu", **k), (2, 3, 5, 6)) for n in NORMS},
    **{
        f"Conv2d-neuron-{n}": (
            lambda n=n, **k: Conv2d(3, 4, 3, norm=n, gain_shape="neuron", input_size=(5, 6), **k),
            (2, 3, 5, 6),
        )
        for n in ("layer", "batch")
    },
}
every = pytest.mark.parametrize(("make", "shape"), EVERY.values(), ids=EVERY.keys())


@every
def test_copies_pickles_and_state_dicts(make, shape):
    layer = randomised(make(dtype=torch.float64))
    x = randn(*shape)
    layer(x)
    loaded = make(dtype=torch.float64)
    loaded.load_state_dict(layer.state_dict())
    layer.eval()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded.eval()):
        assert torch.equal(twin(x), layer(x))
        assert repr(twin) == repr(layer)


@every
def test_device_and_dtype_of_construction(make, shape):
    empty = make(device="meta")
    assert {t.device.type for t in empty.state_dict().values()} == {"meta"}
    assert empty(torch.empty(shape, device="meta")).device.type == "meta"
    torch.manual_seed(4)
    filled = empty.to_empty(device="cpu")
    filled.reset_parameters()
    torch.manual_seed(4)
    direct = make()
    for got, want in zip(filled.state_dict().values(), direct.state_dict().values(), strict=True):
        assert torch.equal(got, want)
    half = make(dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(randn(*shape).bfloat16()).dtype == torch.bfloat16
    assert half.eval()(randn(*shape).bfloat16()).dtype == torch.bfloat16


@pytest.fixture
def compiler():
    """Compile with nothing kept from earlier tests: their graphs count against the recompilation limit."""
    torch.compiler.reset()
    yield lambda layer, **options: torch.compile(layer, fullgraph=True, backend="aot_eager", **options)
    torch.compiler.reset()


@every
@pytest.mark.parametrize("training", [True, False])
def test_compiles_whole(compiler, make, shape, training):
    layer, twin = (randomised(make(dtype=torch.float64)).train(training) for _ in range(2))
    x = randn(*shape).requires_grad_()
    torch.manual_seed(5)
    want = layer(x)
    torch.manual_seed(5)
    got = compiler(twin)(x)
    assert_same([got], [want])
    wants, gots = (gradients([o], [x, *m.parameters()]) for o, m in ((want, layer), (got, twin)))
    assert_same(gots, wants)
    assert_same(list(twin.buffers()), list(layer.buffers()))


@pytest.mark.parametrize("norm", NORMS)
def test_compiles_with_sizes_left_open(compiler, norm):
    layer = randomised(Linear(5, 3, norm=norm, dtype=torch.float64)).eval()
    compiled = compiler(layer, dynamic=True)
    for cases in (4, 7):
        assert_same([compiled(randn(cases, 5))], [layer(randn(cases, 5))])


@every
@pytest.mark.filterwarnings(JIT_WARNING)
def test_function_transforms(make, shape):
    layer = randomised(make(dtype=torch.float64)).eval()
    parameters, x, direction = dict(layer.named_parameters()), randn(*shape), randn(*shape, seed=1)

    def run(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    want = layer(x)
    assert torch.equal(run(parameters, x), want)
    batch = torch.stack([x, direction, -x])
    assert_same(
        [torch.func.vmap(run, in_dims=(None, 0))(parameters, batch)], [torch.stack([layer(case) for case in batch])]
    )
    _, tangent = torch.func.jvp(lambda x: run(parameters, x), (x,), (direction,))
    step = 1e-6
    difference = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-7)
    got = torch.func.grad(lambda p: run(p, x).square().mean())(parameters)
    layer(x).square().mean().backward()
    assert_same([got[name] for name in parameters], [p.grad for p in parameters.values()])


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("how", ["autocast", "half"])
@pytest.mark.parametrize("kind", ["linear", "neuron"])
def test_half_products_get_float32_statistics(norm, how, kind):
    # summed inputs of mean 50 and deviation 1: statistics taken in 8 bits would be far off
    weight, x = randn(63, 31) / math.sqrt(31) + 50 / 31, 1 + randn(33, 31) / (math.sqrt(31) if norm == "layer" else 1)
    if kind == "linear":
        layer, product, x = Linear(31, 63, norm=norm), F.linear, x.float()
    else:
        layer = Conv2d(31, 63, 1, norm=norm, gain_shape="neuron", input_size=(3, 1))
        product, x = F.conv2d, x.reshape(11, 3, 31, 1).transpose(1, 2).float()
    randomised(layer).weight.data.copy_(weight.reshape(layer.weight.shape))
    rounded = product(x.bfloat16(), layer.weight.bfloat16())
    if how == "half":
        got = layer.bfloat16()(x.bfloat16())
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = layer(x)
        got.square().mean().backward()
        assert layer.weight.grad.dtype == torch.float32
    assert got.dtype == torch.bfloat16
    # one rounding to 8 bits, at the end
    torch.testing.assert_close(got.double(), formula(rounded.double(), layer.double()), rtol=1.01 * 2**-8, atol=1e-5)


@every
def test_autocast_runs_forward_and_backward(make, shape):
    layer = make()
    x = randn(*shape).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    (out.float() * randn(*out.shape).float()).sum().backward()
    assert torch.isfinite(out).all()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerNorm(0), "normalized_shape must be greater than zero"),
        (lambda: LayerNorm((3, -1)), "normalized_shape must be greater than zero"),
        (lambda: LayerNorm(()), "at least one axis"),
        (lambda: LayerNorm(3, eps=-1.0), "eps must be finite and not negative"),
        (lambda: LayerNorm(3, eps=math.inf), "eps must be finite"),
        (lambda: LayerNorm(3, eps_mode="vra"), "Did you mean 'var'"),
        (lambda: LayerNorm(3, backend="torhc"), "Did you mean 'torch'"),
        (lambda: Linear(0, 3), "in_features must be greater than zero"),
        (lambda: Linear(3, 0), "out_features must be greater than zero"),
        (lambda: Linear(3, 3, norm="layr"), "Did you mean 'layer'"),
        (lambda: Linear(3, 3, eps_mode="st"), "Did you mean 'std'"),
        (lambda: Linear(3, 3, gain_init=math.nan), "gain_init must be a finite number"),
        (lambda: Linear(3, 3, norm="batch", momentum=2), "momentum must be a number in"),
        (lambda: Linear(3, 3, norm="batch", population="ema"), "population must be one of"),
        (lambda: Conv2d(0, 3, 1), "in_channels must be greater than zero"),
        (lambda: Conv2d(3, 3, (3, 0)), "kernel_size must be greater than zero"),
        (lambda: Conv2d(3, 3, 3, stride=0), "stride must be greater than zero"),
        (lambda: Conv2d(3, 3, 3, padding_mode="zero"), "Did you mean 'zeros'"),
        (lambda: Conv2d(3, 3, 3, gain_shape="neurons"), "Did you mean 'neuron'"),
        (lambda: Conv2d(3, 3, 3, gain_shape="neuron"), r"input_size=\(H, W\)"),
        (lambda: Conv2d(3, 3, 3, gain_shape="neuron", input_size=(5, 5), norm="weight"), "norm='layer' or 'batch'"),
        (lambda: Conv2d(3, 3, 3, gain_shape="neuron", input_size=(5, 5), norm=None), "norm='layer' or 'batch'"),
        (lambda: Conv2d(3, 3, 3, gain_shape="neuron", input_size=(2, 5)), "at least one position"),
        (lambda: Conv2d(3, 3, 3, input_size=5), "two numbers"),
        (lambda: Conv2d(3, 3, 3, input_size=(5, 0)), "input_size must be greater than zero"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: LayerNorm(2.0), lambda: Linear(3.0, 2), lambda: Linear(3, 2, eps="small")])
def test_options_of_a_wrong_type(make):
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (LayerNorm(3), (3, 2), "ends in those axes"),
        (LayerNorm((2, 3)), (3,), "ends in those axes"),
        (NoisyLayerNorm(3, 8), (3, 2), "ends in those axes"),
        (Linear(3, 2), (3, 4), r"\[\.\.\., 3\]"),
        (Linear(3, 2, norm="batch"), (), r"\[\.\.\., 3\]"),
        (Conv2d(3, 2, 1), (3, 4), r"\[N, 3, H, W\] or \[3, H, W\]"),
        (Conv2d(3, 2, 1), (2, 4, 3, 3), r"\[N, 3, H, W\]"),
        (Conv2d(3, 2, 1, norm=None), (1, 1, 3, 3, 3), r"\[N, 3, H, W\]"),
        (Conv2d(3, 2, 1, gain_shape="neuron", input_size=(4, 5)), (2, 3, 5, 4), r"size \[4, 5\]"),
    ],
    ids=str,
)
def test_bad_shapes(layer, shape, message):
    with pytest.raises(InputError, match=message):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("layer", [LayerNorm(3), Linear(3, 2), Linear(3, 2, norm=None), Conv2d(3, 2, 1)], ids=str)
def test_bad_kinds(layer):
    shape = (2, 3, 3, 3)
    with pytest.raises(InputError, match=r"dtype of its parameters, torch\.float32"):
        layer(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(InputError, match="floating-point"):
        layer(torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(InputError, match="device of its parameters, cpu"):
        layer(torch.zeros(shape, device="meta"))
    with pytest.raises(TypeError, match="needs a tensor"):
        layer([1.0, 2.0, 3.0])


def test_explain_and_repr_name_what_was_chosen():
    assert lamina.explain(LayerNorm(3)).backend == "torch"
    assert lamina.explain(LayerNorm(3, elementwise_affine=False), torch.zeros(2, 3)).backend == "torch"
    assert lamina.explain(Linear(3, 2, eps_mode="std")).backend == "reference"
    for layer in (Linear(3, 2, norm="batch"), lamina.BatchNorm(3)):
        assert "nothing to choose" in lamina.explain(layer).reason
    with pytest.raises(BackendError, match="eps > 0"):
        Linear(3, 2, eps=0.0, backend="torch")(torch.zeros(1, 3))
    shown = repr(Linear(3, 2, norm="weight", activation="relu", gain_init=2.0))
    assert shown == "Linear(in_features=3, out_features=2, bias=True, norm='weight', activation='relu', gain_init=2.0)"
    assert "eps_mode='std', backend='reference'" in repr(LayerNorm(3, eps_mode="std", backend="reference"))
