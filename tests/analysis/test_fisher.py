"""Fisher information in closed form, by autograd and by sampling, against each other and against the KL divergence."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lamina
from lamina.analysis import evaluation
from lamina.analysis.families import FAMILIES, Gaussian, Poisson, family_of
from lamina.analysis.information import (
    FisherProduct,
    blocks,
    closed_jacobian,
    fisher,
    flat,
    jacobian,
    kl,
    metric,
    printed_jacobian,
    where,
)
from lamina.checks import InputError

NORMS = ("batch", "weight", "layer", None)
IDS = [str(norm) for norm in NORMS]
D, H, N = 5, 4, 12


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def glm(norm, inputs=D, units=H, seed=0, **options):
    """A normalised linear layer with nothing at its start value; gains of both signs."""
    layer = lamina.Linear(inputs, units, norm=norm, dtype=torch.float64, **{"eps": 0.0, **options})
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(0.7 * randn(*parameter.shape, seed=50 + 10 * seed + i))
    return layer


def error(found, right):
    return ((found - right).norm() / right.norm()).item()


def slope(sizes, values):
    """Exponent of values ~ sizes^slope by least squares."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (sizes, values))
    return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


def mlp(norm="layer"):
    return nn.Sequential(
        lamina.Linear(D, 6, norm=norm, activation="tanh", dtype=torch.float64),
        lamina.Linear(6, 3, norm=norm, dtype=torch.float64),
    )


class Last(nn.Module):
    """A recurrent layer and a readout of every step."""

    def __init__(self, norm="layer"):
        super().__init__()
        self.rnn = lamina.LSTM(D, 3, norm=norm, dtype=torch.float64)
        self.readout = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return self.readout(self.rnn(x)[0]), "a state nobody reads"


# Families


@pytest.mark.parametrize("phi", [1.0, 0.3])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_agree_with_torch_distributions(name, phi):
    a, b = randn(7, H), randn(7, H, seed=1)
    family = Gaussian(phi) if name == "gaussian" else FAMILIES[name]
    torchs = {
        "gaussian": lambda z: torch.distributions.Normal(z, math.sqrt(phi)),
        "bernoulli": lambda z: torch.distributions.Bernoulli(logits=z),
        "poisson": lambda z: torch.distributions.Poisson(z.exp()),
        "categorical": lambda z: torch.distributions.OneHotCategorical(logits=z),
    }[name]
    p, q = torchs(a), torchs(b)
    y = family.sample(a, torch.Generator().manual_seed(2))
    log_prob, divergence = p.log_prob(y), torch.distributions.kl_divergence(p, q)
    if name != "categorical":
        log_prob, divergence = log_prob.sum(-1), divergence.sum(-1)
    torch.testing.assert_close(family.log_prob(y, a), log_prob)
    torch.testing.assert_close(family.kl(a, b), divergence)
    torch.testing.assert_close(family.mean(a), p.mean)
    torch.testing.assert_close(family.variance(a), p.variance)
    torch.testing.assert_close(family.covariance(a).diagonal(dim1=1, dim2=2), p.variance)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_mean_and_covariance_of_their_family(name):
    family, count = (Gaussian(0.5) if name == "gaussian" else FAMILIES[name]), 40_000
    a = randn(1, 3)
    y = family.sample(a.expand(count, -1), torch.Generator().manual_seed(3))
    spread = family.variance(a).max().sqrt()
    assert (y.mean(0) - family.mean(a)[0]).abs().max() < 5 * spread / math.sqrt(count)
    assert error(torch.cov(y.T), family.covariance(a)[0]) < 0.03
    assert (family.covariance(a)[0] - family.covariance(a)[0].diagonal().diag()).any() == (name == "categorical")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weight_of_a_vector_is_the_covariance_over_phi_squared(name):
    family = Gaussian(0.5) if name == "gaussian" else FAMILIES[name]
    a, v = randn(6, 3), randn(6, 3, 2, seed=1)
    right = family.covariance(a) / family.phi**2 @ v
    torch.testing.assert_close(family.weigh(a, v), right)
    torch.testing.assert_close(family.weigh(a, v[..., 0]), right[..., 0])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_divergence_keeps_its_digits_for_tiny_changes(name):
    """A difference of log partition functions would be rounding error here: KL is 1e-19."""
    family, a, d = FAMILIES[name], randn(6, 3), randn(6, 3, seed=1) * 1e-9
    quadratic = 0.5 * (d * family.weigh(a, d)).sum(-1)
    torch.testing.assert_close(family.kl(a, a + d), quadratic, rtol=1e-5, atol=0)


def test_class_numbers_are_as_good_as_rows():
    a, family = randn(4, 3), FAMILIES["categorical"]
    classes = torch.tensor([2, 0, 1, 2])
    torch.testing.assert_close(family.log_prob(classes, a), family.log_prob(nn.functional.one_hot(classes), a))


# The exact ways


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("norm", NORMS, ids=IDS)
def test_closed_form_and_jacobian_agree(norm, name):
    layer, x = glm(norm), randn(N, D)
    assert error(fisher(layer, x, name, "closed"), fisher(layer, x, name)) < 1e-10


@pytest.mark.parametrize("norm", NORMS, ids=IDS)
def test_the_jacobian_is_that_of_finite_differences(norm):
    layer, x = glm(norm), randn(N, D)
    start, step, columns = flat(layer), 1e-6, []
    for direction in torch.eye(len(start), dtype=torch.float64) * step:
        ends = []
        for sign in (1, -1):
            nn.utils.vector_to_parameters(start + sign * direction, layer.parameters())
            ends.append(layer(x).detach())
        columns.append((ends[0] - ends[1]) / (2 * step))
    nn.utils.vector_to_parameters(start, layer.parameters())
    right = torch.stack(columns, -1)
    assert error(jacobian(layer, x), right) < 1e-8
    assert error(closed_jacobian(layer, x), right) < 1e-8


@settings(max_examples=40)
@given(
    norm=st.sampled_from(NORMS),
    eps=st.sampled_from([0.0, 1e-5, 0.3]),
    mode=st.sampled_from(["var", "std"]),
    bias=st.booleans(),
    unbiased=st.booleans(),
    frozen=st.sampled_from([None, "weight", "gain"]),
    sizes=st.tuples(st.integers(1, 6), st.integers(2, 6), st.integers(4, 9)),
    seed=st.integers(0, 50),
)
def test_closed_jacobians_for_any_layer(norm, eps, mode, bias, unbiased, frozen, sizes, seed):
    inputs, units, cases = sizes
    layer = glm(norm, inputs, units, seed, eps=eps, eps_mode=mode, bias=bias, unbiased=unbiased)
    if (bias or norm) and getattr(layer, frozen or "", None) is not None:
        getattr(layer, frozen).requires_grad_(False)
    x = randn(cases, inputs, seed=seed)
    right, found = jacobian(layer, x), closed_jacobian(layer, x)
    # Two units, or two cases, have normalised values of +-1 whatever W is: absolute beside relative.
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10 * right.abs().max().item())


def test_the_categorical_covariance_couples_the_units():
    layer, x = glm(None), randn(N, D)
    at = where(layer)["bias"]
    p = torch.softmax(layer(x), -1).detach()
    right = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
    torch.testing.assert_close(fisher(layer, x, "categorical")[at, at], right)


def test_the_gaussian_information_falls_with_its_variance():
    layer, x = glm("layer"), randn(N, D)
    torch.testing.assert_close(fisher(layer, x, Gaussian(4.0)), fisher(layer, x, "gaussian") / 4)


def test_batch_norm_in_evaluation_takes_its_running_statistics_for_constants():
    layer, x = glm("batch").eval(), randn(N, D)
    layer.statistics.running_var.fill_(4.0)
    found = jacobian(layer, x)[:, :, where(layer)["weight"]].reshape(N, H, H, D)
    right = torch.einsum("k,ki,nd->nkid", layer.gain / 2, torch.eye(H, dtype=torch.float64), x)
    torch.testing.assert_close(found, right.detach())


# The printed formula


@pytest.mark.parametrize("norm", ["batch", "weight", None])
def test_the_printed_formula_is_right_without_layer_norm(norm):
    layer, x = glm(norm), randn(N, D)
    assert error(fisher(layer, x, "bernoulli", "printed"), fisher(layer, x, "bernoulli")) < 1e-10
    assert error(printed_jacobian(layer, x), jacobian(layer, x)) < 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_the_printed_formula_is_wrong_under_layer_norm(name):
    """Off by a third or so here; it sees W's own direction, which changes nothing, as a change."""
    layer, x = glm("layer"), randn(N, D)
    right, printed = fisher(layer, x, name), fisher(layer, x, name, "printed")
    off = {"gaussian": 0.389, "bernoulli": 0.387, "poisson": 0.309, "categorical": 0.355}
    assert error(printed, right) == pytest.approx(off[name], abs=1e-3)
    direction = torch.zeros_like(flat(layer))
    direction[where(layer)["weight"]] = layer.weight.detach().flatten()
    size = direction.square().sum() * right.diagonal().max()
    assert abs(direction @ right @ direction) < 1e-10 * size
    assert direction @ printed @ direction > 0.01 * size


def test_no_weight_block_of_layer_norm_is_zero_for_independent_outputs():
    x, at = randn(N, D), slice(0, H * D)
    first, second = slice(0, D), slice(D, 2 * D)
    layer = fisher(glm("layer"), x, "bernoulli")[at, at]
    assert layer[first, second].norm() > 0.01 * layer[first, first].norm()
    for norm in ("batch", "weight", None):
        assert not fisher(glm(norm), x, "bernoulli")[first, second].any()


# Sampling


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_information_is_the_outer_product_of_autograd_scores(norm, name):
    """Scores of single cases straight from log P, through a batch norm that all cases share."""
    layer, x, draws, family = glm(norm, 3, 3), randn(6, 3), 5, FAMILIES[name]
    y = family.sample(layer(x).repeat(draws, 1), torch.Generator().manual_seed(7))
    scores = []
    for rows in y.reshape(draws, 6, 3):
        log_prob = family.log_prob(rows, layer(x))
        for one in log_prob:
            parts = torch.autograd.grad(one, list(layer.parameters()), retain_graph=True)
            scores.append(torch.cat([part.flatten() for part in parts]))
    right = torch.stack(scores).T @ torch.stack(scores) / len(scores)
    found = fisher(layer, x, name, "sampled", draws, torch.Generator().manual_seed(7))
    assert error(found, right) < 1e-10


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("norm", NORMS, ids=IDS)
def test_the_sampling_error_falls_with_the_root_of_the_samples(norm, name):
    layer, x = glm(norm, 3, 3), randn(6, 3)
    right, counts, errors = fisher(layer, x, name), (200, 2000, 20_000), []
    generator = torch.Generator().manual_seed(8)
    for count in counts:
        found = [error(fisher(layer, x, name, "sampled", count, generator), right) ** 2 for _ in range(8)]
        errors.append(math.sqrt(sum(found) / len(found)))
    assert -0.62 < slope(counts, errors) < -0.38
    assert errors[-1] < 0.03


def test_samples_in_pieces_are_the_same_estimate(monkeypatch):
    layer, x = glm("layer"), randn(N, D)
    right = fisher(layer, x, "poisson")
    monkeypatch.setattr(evaluation, "CHUNK", 3 * N * H)
    assert error(fisher(layer, x, "poisson", "sampled", 4000, torch.Generator().manual_seed(9)), right) < 0.05


# KL


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("norm", NORMS, ids=IDS)
def test_the_divergence_is_the_metric_to_second_order(norm, name):
    """KL/(1/2 d^T F d) - 1 falls linearly in |d| over four decades."""
    layer, x = glm(norm), randn(N, D)
    direction = randn(len(flat(layer)), seed=3)
    direction /= direction.norm()
    sizes = [10.0**-k for k in range(1, 6)]
    errors = [abs(kl(layer, x, s * direction, name) / metric(layer, x, s * direction, name) - 1).item() for s in sizes]
    if norm is None and name == "gaussian":  # logits linear in the parameters, KL quadratic in the logits
        assert max(errors) < 1e-9
        return
    assert 0.9 < slope(sizes[1:], errors[1:]) < 1.1
    assert 1e-8 < errors[-1] < 1e-3 * errors[0]


def test_the_divergence_is_from_the_parameters_to_the_others():
    """Not the other way round, which has the same second order."""
    layer, x = glm(None), randn(N, D)
    direction = torch.zeros_like(flat(layer))
    direction[where(layer)["bias"]] = 1.0
    here = torch.distributions.Poisson(layer(x).detach().exp())
    there = torch.distributions.Poisson((layer(x).detach() + 1).exp())
    right = torch.distributions.kl_divergence(here, there).sum(-1).mean()
    torch.testing.assert_close(kl(layer, x, direction, "poisson"), right)


def test_the_metric_is_the_quadratic_form():
    model, x = mlp(), randn(N, D)
    direction = randn(len(flat(model)), seed=3)
    torch.testing.assert_close(
        metric(model, x, direction, "categorical"), 0.5 * direction @ fisher(model, x, "categorical") @ direction
    )


# Products and blocks


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("build", ["mlp", "batch", "lstm", "lstm-batch"])
def test_products_are_those_of_the_dense_matrix(build, name):
    model = {"mlp": mlp, "batch": lambda: mlp("batch"), "lstm": Last, "lstm-batch": lambda: Last("batch")}[build]()
    x = randn(4, N, D) if "lstm" in build else randn(N, D)
    dense, product = fisher(model, x, name), FisherProduct(model, x, name)
    assert product.shape == (product.size, product.size) == tuple(dense.shape)
    for seed in range(2):
        vector = randn(product.size, seed=seed)
        assert error(product @ vector, dense @ vector) < 1e-10


def test_a_product_where_the_dense_matrix_would_not_fit():
    """200,000 parameters: 320 GB. Checked against v^T F v from forward mode alone."""
    torch.manual_seed(1)
    model = nn.Sequential(lamina.Linear(400, 400, activation="tanh"), lamina.Linear(400, 100)).double()
    x = randn(8, 400)
    product = FisherProduct(model, x, "categorical")
    assert product.size > 200_000
    vector = randn(product.size)
    torch.testing.assert_close(vector @ (product @ vector), 2 * metric(model, x, vector, "categorical"))


@pytest.mark.parametrize("build", ["mlp", "lstm"])
def test_blocks_are_the_diagonal_blocks_of_the_dense_matrix(build):
    model, x = (mlp(), randn(N, D)) if build == "mlp" else (Last(), randn(4, N, D))
    dense, found, places = fisher(model, x), blocks(model, x), where(model)
    assert list(found) == (["0", "1"] if build == "mlp" else ["rnn", "readout"])
    for owner, block in found.items():
        at = [places[name] for name, _ in model.named_parameters() if name.startswith(owner + ".")]
        whole = slice(at[0].start, at[-1].stop)
        assert error(block, dense[whole, whole]) < 1e-10
    assert list(blocks(glm("layer"), randn(N, D))) == [""]


def test_jacobians_in_pieces_are_the_same(monkeypatch):
    model, x = mlp("batch"), randn(N, D)
    right, matrix = jacobian(model, x), fisher(model, x)
    monkeypatch.setattr(evaluation, "CHUNK", 1)
    torch.testing.assert_close(jacobian(model, x), right)
    torch.testing.assert_close(fisher(model, x), matrix)


class Awkward(torch.autograd.Function):
    """Cubes its input; no forward mode, and a backward that vmap cannot take."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**3

    @staticmethod
    def backward(ctx, upstream):
        (z,) = ctx.saved_tensors
        float(upstream.detach().sum())  # vmap lets no number out
        return 3 * z**2 * upstream


def test_operators_without_forward_mode_or_batched_backward_are_no_obstacle(monkeypatch):
    used = []

    def spied(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: used.append(name) or real(*args, **options))

    class Cubed(nn.Module):
        def __init__(self, cube):
            super().__init__()
            self.layer, self.cube = glm("layer"), cube

        def forward(self, x):
            return self.cube(self.layer(x))

    x, awkward, plain = randn(N, D), Cubed(Awkward.apply), Cubed(lambda z: z**3)
    vector = randn(len(flat(plain)))
    right = jacobian(plain, x), FisherProduct(plain, x) @ vector
    spied(evaluation, "_flat_gradient")
    spied(evaluation.Evaluation, "_jvp_by_reverse")
    torch.testing.assert_close(jacobian(awkward, x), right[0])
    assert used == ["_flat_gradient"] * (N * H)  # one backward pass for each output of each case
    torch.testing.assert_close(FisherProduct(awkward, x) @ vector, right[1])
    assert used[N * H :] == ["_jvp_by_reverse", "_flat_gradient"]


def test_torchs_fused_recurrences_have_a_forward_mode_too(monkeypatch):
    """By their plain form; the detour by the reverse mode would fail where a fused one has no second derivative."""
    monkeypatch.delattr(evaluation.Evaluation, "_jvp_by_reverse")
    model, x = nn.LSTM(D, 3), randn(4, N, D).float()
    dense, vector = fisher(model, x), randn(len(flat(model))).float()
    before = torch._C._get_mkldnn_enabled()
    torch.testing.assert_close(FisherProduct(model, x) @ vector, dense @ vector, rtol=1e-4, atol=1e-5)
    assert torch._C._get_mkldnn_enabled() == before


def test_a_parameter_that_is_not_used_has_no_information():
    model, x = mlp(), randn(N, D)
    model.register_parameter("idle", nn.Parameter(randn(3)))
    at = where(model)["idle"]
    matrix, vector = fisher(model, x), randn(len(flat(model)))
    assert not matrix[at].any()
    torch.testing.assert_close(FisherProduct(model, x) @ vector, matrix @ vector)


# The model stays as it was


def test_nothing_of_the_model_changes():
    model = nn.Sequential(
        lamina.Linear(D, 6, norm="batch"), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    ).double()
    model[3].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, x = copy.deepcopy(model.state_dict()), randn(N, D)
    random, size = torch.get_rng_state(), sum(p.numel() for p in model.parameters()) - 3
    with torch.no_grad():
        vector = randn(size)
        assert fisher(model, x).shape == (size, size)
        results = FisherProduct(model, x) @ vector, metric(model, x, vector), kl(model, x, vector), flat(model)
    blocks(model, x)
    assert not any(result.requires_grad for result in results)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["3.bias"]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[1].weight.grad is None
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(m.training for m in model.modules())


def test_every_pass_sees_the_same_dropout():
    model, x = nn.Sequential(glm("layer"), nn.Dropout(0.5)), randn(N, D)
    dense, vector = fisher(model, x), randn(len(flat(model)))
    torch.manual_seed(99)
    assert error(FisherProduct(model, x) @ vector, dense @ vector) < 1e-10
    assert kl(model, x, torch.zeros_like(vector)) == 0
    assert error(kl(model, x, 1e-5 * vector), metric(model, x, 1e-5 * vector)) < 1e-3


def test_the_flat_vector_is_in_the_order_of_named_parameters():
    model = mlp()
    model[0].gain.requires_grad_(False)
    vector, places = flat(model), where(model)
    assert "0.gain" not in places
    for name, place in places.items():
        assert torch.equal(vector[place], model.get_parameter(name).flatten())
    assert sum(place.stop - place.start for place in places.values()) == len(vector)


# Mistakes


class Returns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = glm("layer"), change

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda z: z.argmax(-1), r"Returns must be floating-point logits.*int64"),
        (lambda z: z.sum(), r"Returns must be floating-point logits.*shape \[\]"),
        (lambda z: {"logits": z}, r"Returns must be floating-point logits.*dict"),
        (lambda z: z[:, :1], "Returns one output for each of at least two classes"),
        (lambda z: z / 0, "Returns must be finite logits"),
        (lambda z: z.detach(), "must depend on its parameters"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        fisher(Returns(change), randn(N, D), "categorical")


def test_rates_that_overflow_are_refused():
    with pytest.raises(InputError, match="finite means of the poisson family"):
        fisher(Returns(lambda z: z * 1e6), randn(N, D), "poisson")


@pytest.mark.parametrize("method", ["closed", "printed"])
def test_closed_forms_say_what_they_are_for(method):
    x = randn(N, D)
    with pytest.raises(InputError, match=r"a single lamina.Linear, got a Sequential.*method='jacobian'"):
        fisher(mlp(), x, "bernoulli", method)
    with pytest.raises(InputError, match=r"Linear\(5, 4, norm='layer'\) needs the identity.*'tanh'"):
        fisher(glm("layer", activation="tanh"), x, "bernoulli", method)
    with pytest.raises(InputError, match=r"Linear\(5, 4, norm='batch'\) is that of training.*evaluation"):
        fisher(glm("batch").eval(), x, "bernoulli", method)
    fisher(glm("layer", activation="identity"), x, "bernoulli", method)


def test_singular_statistics_are_refused_by_the_name_of_the_layer():
    first = nn.Sequential(nn.Linear(D, 3), lamina.Linear(3, 4, norm="batch")).double()
    with pytest.raises(InputError, match=r"layer '1', Linear.*at least two cases"):
        fisher(first, randn(1, D))
    with pytest.raises(InputError, match=r"layer '1', Linear.*vary over the cases, got 4 constant units"):
        fisher(first, randn(1, D).expand(5, -1))
    with pytest.raises(InputError, match=r"layer '1', BatchNorm1d, takes.*at least two cases"):
        fisher(nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3)).double(), randn(1, D))
    with pytest.raises(InputError, match=r"layer 'rnn', LSTM, takes.*at least two cases"):
        fisher(Last("batch"), randn(4, 1, D))
    x = randn(N, D)
    x[3] = 0
    with pytest.raises(InputError, match=r"Linear\(5, 4, norm='layer'\) needs.*over the units, got 1 constant cases"):
        fisher(glm("layer"), x, method="closed")
    assert torch.isfinite(fisher(glm("layer", eps=1e-5), x)).all()
    with pytest.raises(InputError, match=r"Linear\(5, 1, norm='layer'\).*over the units"):
        fisher(glm("layer", D, 1, eps=1e-5), randn(N, D))
    layer = glm("weight")
    layer.weight.data[1] = 0
    with pytest.raises(InputError, match="weights that are not 0, got row 1 of zeros"):
        fisher(layer, randn(N, D))


def test_other_mistakes_are_named():
    layer, x = glm("layer"), randn(N, D)
    with pytest.raises(InputError, match=r"family .* must be one of.*'bernouli'.*Did you mean 'bernoulli'"):
        fisher(layer, x, "bernouli")
    with pytest.raises(InputError, match=r"family \(a name or a Family\) must be one of"):
        family_of(3)
    with pytest.raises(InputError, match="method must be one of"):
        fisher(layer, x, "bernoulli", "exact")
    wide = nn.Linear(10_000, 1_000, device="cpu")
    for call in (fisher, blocks):
        with pytest.raises(InputError, match=r"P = 10,001,000 parameters, which need .*GiB\. Use FisherProduct"):
            call(wide, torch.zeros(2, 10_000), "gaussian")
    with pytest.raises(InputError, match="samples must be greater than zero"):
        fisher(layer, x, "bernoulli", "sampled", 0)
    with pytest.raises(InputError, match=r"direction of Linear must be a vector \[28\].*shape \[3\]"):
        metric(layer, x, randn(3))
    with pytest.raises(InputError, match=r"vector \[28\]"):
        FisherProduct(layer, x) @ randn(28, 2)
    with pytest.raises(InputError, match="parameters that require grad, got a ReLU"):
        flat(nn.ReLU())
    with pytest.raises(InputError, match="at least one case"):
        fisher(layer, x[:0])
    with pytest.raises(InputError, match="poisson family has dispersion 1"):
        Poisson(2.0)
    with pytest.raises(InputError, match="phi is a variance"):
        Gaussian(0.0)
