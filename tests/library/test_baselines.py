"""Batch norm, its population statistics and weight norm's start value, against torch and short formulas."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lamina import reference
from lamina.baselines import BatchNorm, StepStatistics, population_statistics, weight_norm_gain
from lamina.checks import InputError
from lamina.reference import Moments
from tests import cases

SHAPES = [(7, 1), (2, 17), (31, 3), (5, 3, 9), (1, 4, 2), (3, 2, 5, 1), (2, 3, 2, 3, 5)]
TORCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, want, tolerance=1e-12):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def with_random_affine(layer, seed=5):
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=seed + i))
    return layer


def formula(x, weight, bias, eps, eps_mode="var", unbiased=False):
    """Each feature in turn, so no axis can be mixed up."""
    columns = []
    for c in range(x.shape[1]):
        a = x[:, c]
        n = a.numel()
        centred = a - a.sum() / n
        var = (centred * centred).sum() / (n - 1 if unbiased else n)
        sigma = torch.sqrt(var + eps) if eps_mode == "var" else torch.sqrt(var) + eps
        columns.append(weight[c] * centred / sigma + bias[c])
    return torch.stack(columns, 1)


def gradients(function, inputs):
    out = function()
    return out, cases.gradients([out], inputs)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_follows_torch_through_training_and_evaluation(shape, momentum):
    ours = with_random_affine(BatchNorm(shape[1], 1e-3, momentum, dtype=torch.float64))
    theirs = TORCH_NORMS[len(shape)](shape[1], 1e-3, momentum, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    for step in range(3):
        x = (2 + 3 * randn(*shape, seed=step)).requires_grad_()
        got, got_grads = gradients(lambda x=x: ours(x), [x, *ours.parameters()])
        want, want_grads = gradients(lambda x=x: theirs(x), [x, *theirs.parameters()])
        close(got, want)
        for g, w in zip(got_grads, want_grads):
            close(g, w)
    for (name, got), (other, want) in zip(ours.state_dict().items(), theirs.state_dict().items()):
        assert name == other
        close(got, want)
    x = randn(*shape, seed=9).requires_grad_()
    ours.eval()
    theirs.eval()
    got, got_grads = gradients(lambda: ours(x), [x, *ours.parameters()])
    want, want_grads = gradients(lambda: theirs(x), [x, *theirs.parameters()])
    close(got, want)
    for g, w in zip(got_grads, want_grads):
        close(g, w)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (4, 5), (3, 2, 7)], ids=str)
def test_is_the_formula(shape, unbiased, eps_mode, eps):
    layer = BatchNorm(shape[1], eps, dtype=torch.float64, unbiased=unbiased, eps_mode=eps_mode)
    with_random_affine(layer)
    x = (5 + randn(*shape)).requires_grad_()
    leaves = [x, layer.weight, layer.bias]
    got, got_grads = gradients(lambda: layer(x), leaves)
    want, want_grads = gradients(lambda: formula(x, layer.weight, layer.bias, eps, eps_mode, unbiased), leaves)
    close(got, want)
    for g, w in zip(got_grads, want_grads):
        close(g, w, 1e-10 if eps == 0 else 1e-12)


def test_unbiased_variance_shrinks_a_batch_of_four_by_root_three_quarters():
    x = randn(4, 6)
    biased = BatchNorm(6, 0.0, dtype=torch.float64)(x)
    close(BatchNorm(6, 0.0, dtype=torch.float64, unbiased=True)(x), biased * 0.75**0.5)


@pytest.mark.parametrize("options", [{}, {"unbiased": True}, {"eps_mode": "std"}, {"eps": 0.0}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_first_and_second_order(options, training):
    layer = with_random_affine(BatchNorm(3, dtype=torch.float64, population="exact", **options))
    layer.num_batches_tracked.fill_(1)
    layer.train(training)
    x, weight, bias = randn(4, 3, 2).requires_grad_(), layer.weight, layer.bias

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


@pytest.mark.parametrize("options", [{}, {"eps_mode": "std"}, {"eps": 0.0}, {"unbiased": True}], ids=str)
def test_a_constant_feature_gives_the_bias_and_finite_gradients(options):
    layer = with_random_affine(BatchNorm(3, dtype=torch.float64, **options))
    x = randn(5, 3)
    x[:, 1] = 0.7
    x.requires_grad_()
    out, grads = gradients(lambda: layer(x), [x, *layer.parameters()])
    close(out[:, 1], layer.bias[1].detach().expand(5), 1e-9)
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("options", [{}, {"unbiased": True}, {"eps_mode": "std"}], ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=str)
def test_one_value_per_feature_trains(shape, options):
    layer = with_random_affine(BatchNorm(3, dtype=torch.float64, **options))
    x = randn(*shape).requires_grad_()
    out, grads = gradients(lambda: layer(x), [x, *layer.parameters()])
    close(out.flatten(), layer.bias.detach())
    assert all(torch.isfinite(g).all() for g in grads)
    close(layer.running_mean, 0.1 * x.detach().flatten())
    assert torch.equal(layer.running_var, torch.ones_like(layer.running_var))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("options", [{}, {"unbiased": True}], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)], ids=str)
def test_an_empty_batch_works_as_in_torch(shape, options):
    ours, theirs = BatchNorm(3, **options), nn.BatchNorm1d(3)
    x = torch.empty(shape)
    out = ours(x)
    assert out.shape == theirs(x).shape
    out.sum().backward()
    assert torch.equal(ours.weight.grad, torch.zeros(3))
    for name, value in theirs.named_buffers():
        assert torch.equal(getattr(ours, name), value)
    assert ours.eval()(x).shape == shape


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 3), (4, 3, 5)], ids=str)
def test_the_reference_follows_the_same_statistics(shape):
    layer = with_random_affine(BatchNorm(3, momentum=0.3, dtype=torch.float64))
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    x = 1 + randn(*shape)
    close(layer(x), reference.batch_norm(x, mean, var, layer.weight, layer.bias, True, 0.3))
    close(layer.running_mean, mean)
    close(layer.running_var, var)


def test_without_tracking_evaluation_uses_the_batch():
    layer = BatchNorm(3, affine=False, track_running_stats=False, dtype=torch.float64)
    x = randn(6, 3)
    close(layer.eval()(x), formula(x, torch.ones(3), torch.zeros(3), 1e-5))
    assert not layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"unbiased": True}], ids=str)
def test_half_inputs_get_float32_statistics(dtype, options):
    layer = BatchNorm(5, momentum=1.0, **options).to(dtype)
    assert layer.weight.dtype == dtype
    assert layer.running_var.dtype == torch.float32
    x = (100 + randn(63, 5)).to(dtype)
    exact = formula(x.double(), torch.ones(5), torch.zeros(5), 1e-5, unbiased=bool(options))
    got = layer(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2**-12)
    torch.testing.assert_close(layer.running_mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), x.double().var(0), rtol=1e-5, atol=0)
    assert layer.eval()(x).dtype == dtype


def test_moving_to_another_dtype_keeps_the_statistics_bits():
    layer = BatchNorm(3)
    layer(randn(8, 3, dtype=torch.float32))
    before = layer.running_mean.clone()
    assert torch.equal(layer.half().running_mean, before)
    assert torch.equal(layer.float().running_mean, before)
    assert layer.double().running_mean.dtype == torch.float64


def test_copies_pickles_and_meta_construction():
    layer = with_random_affine(BatchNorm(4, momentum=None, unbiased=True, population="exact"))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(twin) == repr(layer)
        assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), layer.state_dict().values()))
    empty = BatchNorm(4, gain_init=0.1, device="meta")
    assert {t.device.type for t in empty.state_dict().values()} == {"meta"}
    assert empty(torch.empty(2, 4, device="meta")).shape == (2, 4)
    filled = empty.to_empty(device="cpu")
    filled.reset_parameters()
    assert torch.equal(filled.weight, torch.full((4,), 0.1))
    assert torch.equal(filled.running_var, torch.ones(4))


@pytest.fixture
def compiler():
    """Compile with nothing kept from earlier tests: their graphs count against the recompilation limit."""
    torch.compiler.reset()
    yield lambda layer, **options: torch.compile(layer, fullgraph=True, backend="aot_eager", **options)
    torch.compiler.reset()


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"unbiased": True, "eps_mode": "std"}], ids=str)
def test_compiles_whole(compiler, options):
    layer, twin = BatchNorm(3, dtype=torch.float64, **options), BatchNorm(3, dtype=torch.float64, **options)
    compiled = compiler(twin)
    for training in (True, False):
        layer.train(training)
        twin.train(training)
        x = randn(5, 3, 2, seed=int(training))
        close(compiled(x), layer(x))
    close(twin.running_var, layer.running_var)
    assert twin.num_batches_tracked == 1


def test_an_ensemble_under_vmap_updates_its_stacked_buffers():
    layers = [with_random_affine(BatchNorm(3, dtype=torch.float64), seed) for seed in (1, 4, 7)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = randn(3, 6, 3)
    got = torch.func.vmap(lambda p, b, x: torch.func.functional_call(layers[0], (p, b), (x,)))(parameters, buffers, x)
    close(got, torch.stack([layer(case) for layer, case in zip(layers, x)]))
    close(buffers["running_var"], torch.stack([layer.running_var for layer in layers]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_derivatives():
    layer = with_random_affine(BatchNorm(3, dtype=torch.float64, population="exact"))
    x, direction = randn(5, 3), randn(5, 3, seed=1)
    out, tangent = torch.func.jvp(layer, (x,), (direction,))
    step = 1e-6
    difference = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    close(out, layer(x))
    torch.testing.assert_close(tangent, difference, rtol=1e-7, atol=1e-8)


def test_a_transform_that_would_lose_the_running_statistics_is_refused():
    layer = BatchNorm(3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"running statistics.*population='exact'"):
        torch.func.grad(lambda x: layer(x).square().sum())(randn(4, 3))
    assert layer.num_batches_tracked == 0


def test_exact_population_waits_for_its_pass():
    layer = BatchNorm(3, dtype=torch.float64, population="exact")
    x = 2 + 3 * randn(8, 3)
    layer(x)
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(InputError, match=r"no statistics.*population_statistics"):
        layer.eval()(x)
    assert population_statistics(layer, [x]) == 1
    close(layer(x), formula(x, layer.weight, layer.bias, 1e-5))
    loaded = BatchNorm(3, dtype=torch.float64, population="exact").eval()
    loaded.load_state_dict(layer.state_dict())
    close(loaded(x), layer(x))


@pytest.mark.parametrize("population", ["running", "exact"])
@pytest.mark.parametrize("rest", [(), (3,), (2, 5)], ids=str)
def test_population_statistics_are_those_of_all_cases_together(rest, population):
    layer = BatchNorm(5, dtype=torch.float64, population=population)
    # unequal sizes and means: an average over batches would be far off
    batches = [10 * i + (i + 1) * randn(n, 5, *rest, seed=i) for i, n in enumerate((1, 7, 2, 33, 1))]
    assert population_statistics(layer, iter(batches)) == 1
    whole = torch.cat(batches).transpose(0, 1).flatten(1)
    close(layer.running_mean, whole.mean(1))
    close(layer.running_var, whole.var(1, correction=0))
    assert layer.num_batches_tracked == 5


def test_population_statistics_keep_float32_data_exact():
    layer = BatchNorm(2)
    batches = [(1e4 + randn(50, 2, seed=i)).float() for i in range(20)]
    population_statistics(layer, batches)
    whole = torch.cat(batches).double()
    torch.testing.assert_close(layer.running_var.double(), whole.var(0, correction=0), rtol=1e-6, atol=0)


def stacked_model():
    torch.manual_seed(0)
    parts = [nn.Linear(4, 5), BatchNorm(5), nn.Dropout(0.5), nn.Linear(5, 3), BatchNorm(3, population="exact")]
    return nn.Sequential(*parts).double()


def test_in_a_stack_later_layers_see_minibatch_statistics_and_nothing_is_random():
    model = stacked_model()
    model[3].eval()
    batches = [randn(n, 4, seed=n) for n in (3, 8)]
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    assert population_statistics(model, [(x, "a target") for x in batches]) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes

    first = [model[0](x) for x in batches]
    close(model[1].running_mean, torch.cat(first).mean(0).detach())
    second = [model[3](formula(a, model[1].weight, model[1].bias, 1e-5)) for a in first]
    close(model[4].running_mean, torch.cat(second).mean(0).detach())
    close(model[4].running_var, torch.cat(second).var(0, correction=0).detach())


def test_a_failed_or_empty_pass_changes_nothing():
    model = stacked_model().eval()
    model[1].train()
    model[1](randn(6, 5))
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]

    def breaks(model, batch):
        model(batch)
        raise KeyError("half way")

    with pytest.raises(InputError, match="at least one batch"):
        population_statistics(model, [])
    with pytest.raises(KeyError, match="half way"):
        population_statistics(model, [randn(3, 4)], breaks)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m.collecting for m in model.modules() if isinstance(m, BatchNorm))


def test_population_pass_forward_sharing_and_unreached_layers():
    shared, unreached = BatchNorm(2, dtype=torch.float64), BatchNorm(2, dtype=torch.float64)
    model = nn.ModuleDict({"shared": shared, "unreached": unreached})
    a, b = randn(3, 2), 5 + randn(4, 2, seed=1)

    def forward(model, batch):
        for part in batch:
            model["shared"](part)

    assert population_statistics(model, [(a, b)], forward) == 1
    close(shared.running_var, torch.cat([a, b]).var(0, correction=0))
    assert unreached.num_batches_tracked == 0
    assert population_statistics(nn.Linear(2, 2).double(), [a]) == 0
    before = shared.running_var.clone()
    assert population_statistics(shared, [a[:0]]) == 0
    assert torch.equal(shared.running_var, before)


def test_population_pass_of_a_compiled_model(compiler):
    layer = BatchNorm(3, dtype=torch.float64)
    compiled = compiler(layer)
    batches = [randn(n, 3, seed=n) for n in (2, 5)]
    assert population_statistics(compiled, batches) == 1
    close(layer.running_var, torch.cat(batches).var(0, correction=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_features": 0}, "num_features must be greater than zero"),
        ({"eps": -1e-5}, "eps must be finite and not negative"),
        ({"eps": float("nan")}, "eps must be finite"),
        ({"momentum": 1.5}, "momentum must be a number in"),
        ({"population": "exakt"}, "Did you mean 'exact'"),
        ({"eps_mode": "sdt"}, "Did you mean 'std'"),
        ({"gain_init": float("inf")}, "gain_init must be a finite number"),
        ({"population": "exact", "track_running_stats": False}, "track_running_stats=True"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(InputError, match=message):
        BatchNorm(**{"num_features": 3, **arguments})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3), r"\[N, 3\] or \[N, 3, \*\]"),
        (torch.zeros(3, 4), r"shape \[3, 4\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype of its parameters, torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), "floating-point"),
        (torch.zeros(2, 3, device="meta"), "device of its parameters, cpu"),
    ],
)
def test_bad_inputs(x, message):
    with pytest.raises(InputError, match=message):
        BatchNorm(3)(x)


def test_an_input_that_is_no_tensor():
    with pytest.raises(TypeError, match="needs a tensor"):
        BatchNorm(3)([[1.0, 2.0, 3.0]])


def step_moments(steps, width, seed):
    return Moments(randn(steps, width, seed=seed), randn(steps, width, seed=seed + 100).square())


def test_steps_start_with_the_first_batch_then_average_then_forget():
    statistics = StepStatistics({"hh": 3}, momentum=0.25, dtype=torch.float64)
    values = [step_moments(1, 3, seed) for seed in range(7)]
    mean, var = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    for n, new in enumerate(values):
        statistics.observe({"hh": new})
        share = max(0.25, 1 / (n + 1))
        mean, var = (1 - share) * mean + share * new.mean, (1 - share) * var + share * new.var
        found = statistics.population()["hh"]
        close(found.mean, mean)
        close(found.var, var)
    assert statistics.batches.tolist() == [7]


def test_without_momentum_steps_average_over_all_batches():
    statistics = StepStatistics({"hh": 2}, momentum=None, dtype=torch.float64)
    values = [step_moments(3, 2, seed) for seed in range(23)]
    for new in values:
        statistics.observe({"hh": new})
    close(statistics.mean_hh, torch.stack([v.mean for v in values]).mean(0))
    close(statistics.var_hh, torch.stack([v.var for v in values]).mean(0))


def test_steps_grow_and_count_who_reached_them():
    statistics = StepStatistics({"ih": 2, "cell": 3}, dtype=torch.float64)
    long = {"ih": step_moments(4, 2, 0), "cell": step_moments(4, 3, 1)}
    long["ih"].mean[2:] = float("nan")  # what no case stands behind must not be read
    statistics.observe(long, torch.tensor([5, 2, 0, 0]))
    assert statistics.mean_cell.shape == (4, 3)
    assert statistics.batches.tolist() == [1, 1, 0, 0]
    found = statistics.population()
    close(found["ih"].mean, long["ih"].mean[[0, 1, 1, 1]])
    close(found["cell"].var, long["cell"].var[[0, 1, 1, 1]])
    assert torch.equal(statistics.var_ih[2:], torch.ones(2, 2, dtype=torch.float64))
    short = {"ih": step_moments(2, 2, 3), "cell": step_moments(2, 3, 4)}
    short["ih"].mean[1] = float("nan")
    statistics.observe(short, torch.tensor([4, 0]))
    assert statistics.batches.tolist() == [2, 1, 0, 0]
    close(statistics.mean_ih[1], long["ih"].mean[1])
    close(statistics.mean_ih[0], (long["ih"].mean[0] + short["ih"].mean[0]) / 2)
    late = {"ih": step_moments(2, 2, 5), "cell": step_moments(2, 3, 6)}
    statistics.observe(late, 9, first_step=4)
    assert statistics.batches.tolist() == [2, 1, 0, 0, 1, 1]
    close(statistics.population()["ih"].mean[4:], late["ih"].mean)
    close(statistics.population()["ih"].mean[3], long["ih"].mean[1])
    statistics.reset()
    assert statistics.batches.tolist() == [0]
    close(statistics.population()["cell"].var, torch.ones(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_steps_load_whatever_their_number(steps):
    saved = StepStatistics({"ih": 2, "hh": 3})
    saved.observe({"ih": step_moments(steps, 2, 0), "hh": step_moments(steps, 3, 1)})
    loaded = nn.ModuleDict({"norm": StepStatistics({"ih": 2, "hh": 3}, dtype=torch.float64)})
    loaded["norm"].observe({"ih": step_moments(3, 2, 7), "hh": step_moments(3, 3, 8)})
    loaded.load_state_dict({f"norm.{k}": v for k, v in saved.state_dict().items()})
    assert loaded["norm"].batches.tolist() == [1] * steps
    close(loaded["norm"].mean_hh, saved.mean_hh.double())
    assert loaded["norm"].mean_hh.dtype == torch.float64


def test_steps_refuse_a_checkpoint_that_does_not_fit():
    statistics, other = StepStatistics({"ih": 2}), StepStatistics({"ih": 3})
    with pytest.raises(RuntimeError, match="size mismatch for mean_ih"):
        statistics.load_state_dict(other.state_dict())
    state = statistics.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*batches"):
        statistics.load_state_dict({k: v for k, v in state.items() if k != "batches"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mean_hh"):
        statistics.load_state_dict({**state, "mean_hh": torch.zeros(1, 2)})
    torn = {**state, "mean_ih": torch.zeros(4, 2)}
    with pytest.raises(RuntimeError, match="size mismatch for mean_ih"):
        statistics.load_state_dict(torn)


def test_steps_copy_pickle_save_and_stay_in_float32():
    statistics = StepStatistics({"ih": 2}, dtype=torch.bfloat16)
    assert statistics.mean_ih.dtype == torch.float32
    statistics.observe({"ih": step_moments(3, 2, 0)})
    kept = statistics.mean_ih.clone()
    buffer = io.BytesIO()
    torch.save(statistics.state_dict(), buffer)
    buffer.seek(0)
    restored = StepStatistics({"ih": 2})
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (copy.deepcopy(statistics), pickle.loads(pickle.dumps(statistics)), restored, statistics.bfloat16()):
        assert torch.equal(twin.mean_ih, kept)
    assert statistics.to("meta").population()["ih"].mean.shape == (3, 2)
    restored.observe({"ih": step_moments(5, 2, 1)})
    assert restored.batches.tolist() == [2, 2, 2, 1, 1]


class Recurrent(nn.Module):
    """Stands in for a recurrent layer: per-step moments of its input, padding left out."""

    def __init__(self):
        super().__init__()
        self.statistics = StepStatistics({"ih": 3}, dtype=torch.float64)

    def forward(self, batch):
        x, counts = batch
        assert self.statistics.collecting or self.training
        mean = torch.stack([x[t, : counts[t]].mean(0) for t in range(len(counts))])
        var = torch.stack([(x[t, : counts[t]] - mean[t]).square().mean(0) for t in range(len(counts))])
        self.statistics.observe({"ih": Moments(mean, var)}, counts)


def test_step_statistics_pool_by_the_cases_behind_each_step():
    model = Recurrent().eval()
    stale = {"ih": step_moments(9, 3, 50)}
    model.statistics.observe(stale)
    batches = [
        (4 + randn(5, 6, 3, seed=1), torch.tensor([6, 5, 2, 0, 0])),
        (2 * randn(4, 3, 3, seed=2), torch.tensor([3, 3, 3, 1])),
    ]
    assert population_statistics(model, batches, lambda model, batch: model(batch)) == 1
    found = model.statistics.population()["ih"]
    for t in range(4):
        whole = torch.cat([x[t, : counts[t]] for x, counts in batches if t < len(counts)])
        close(found.mean[t], whole.mean(0))
        close(found.var[t], whole.var(0, correction=0))
    close(found.mean[4], found.mean[3])
    assert model.statistics.batches.tolist() == [2, 2, 2, 1, 0]
    assert not model.statistics.collecting


def test_pooling_steps_without_counts_is_refused_and_leaves_them():
    model = Recurrent()
    before = model.statistics.mean_ih.clone()
    with pytest.raises(InputError, match="number of cases of each step"):
        population_statistics(
            model.statistics, [0], lambda statistics, _: statistics.observe({"ih": step_moments(2, 3, 0)})
        )
    assert torch.equal(model.statistics.mean_ih, before)
    assert not model.statistics.collecting


@pytest.mark.parametrize(
    ("moments", "more", "message"),
    [
        ({"hh": step_moments(1, 2, 0)}, {}, "must cover the sites"),
        ({"ih": step_moments(1, 3, 0)}, {}, r"shape \[1, 2\]"),
        ({"ih": Moments(randn(2, 2), randn(1, 2))}, {}, r"shape \[2, 2\]"),
        ({"ih": step_moments(2, 2, 0)}, {"counts": torch.ones(3)}, r"counts must have shape \[2\]"),
        ({"ih": step_moments(2, 2, 0)}, {"first_step": -1}, "must not be negative"),
    ],
)
def test_bad_moments(moments, more, message):
    statistics = StepStatistics({"ih": 2})
    with pytest.raises(InputError, match=message):
        statistics.observe(moments, **more)
    assert statistics.batches.tolist() == [0]


@pytest.mark.parametrize("widths", [{}, {"ih": -1}, {"i.h": 2}, {3: 2}], ids=str)
def test_bad_sites(widths):
    with pytest.raises(InputError):
        StepStatistics(widths)


def test_observing_compiles_whole(compiler):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.statistics = StepStatistics({"ih": 3}, dtype=torch.float64)

        def forward(self, mean, var):
            self.statistics.observe({"ih": Moments(mean, var)})
            return mean + 1

    plain, holder = Holder(), Holder()
    compiled = compiler(holder)
    for steps in (2, 4):
        new = step_moments(steps, 3, steps)
        plain(*new)
        compiled(*new)
    close(holder.statistics.mean_ih, plain.statistics.mean_ih)
    assert holder.statistics.batches.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (4, 3, 2, 2)], ids=str)
def test_weight_norm_gain_is_each_rows_norm(shape):
    weight = randn(*shape)
    want = torch.stack([(row * row).sum().sqrt() for row in weight])
    close(weight_norm_gain(weight.requires_grad_()), want)
    assert weight_norm_gain(weight.bfloat16()).dtype == torch.bfloat16


def test_max_steps_keeps_the_first_steps_and_its_shape():
    """What the kept steps hold is what an unlimited keeper holds; nothing changes the shape."""
    free = StepStatistics({"ih": 2}, momentum=None, dtype=torch.float64)
    fixed = StepStatistics({"ih": 2}, momentum=None, dtype=torch.float64, max_steps=3)
    shape = (3, 2)
    assert fixed.mean_ih.shape == shape
    for steps, first in ((2, 0), (5, 0), (1, 2), (2, 4)):
        moments = {"ih": Moments(torch.randn(steps, 2).double(), torch.rand(steps, 2).double())}
        counts = torch.randint(0, 3, (steps,))
        for keeper in (free, fixed):
            keeper.observe(moments, counts, first)
        assert fixed.mean_ih.shape == shape
    for name in ("mean_ih", "var_ih", "batches"):
        assert torch.equal(getattr(fixed, name), getattr(free, name)[:3])
    again = StepStatistics({"ih": 2}, dtype=torch.float64, max_steps=3)
    again.load_state_dict(free.state_dict())
    assert torch.equal(again.mean_ih, fixed.mean_ih)
    longer = StepStatistics({"ih": 2}, dtype=torch.float64, max_steps=9)
    longer.load_state_dict(free.state_dict())
    assert longer.var_ih.shape == (9, 2)
    fixed.reset()
    assert fixed.mean_ih.shape == shape
    assert not fixed.batches.any()
    assert "max_steps=3" in repr(fixed)
