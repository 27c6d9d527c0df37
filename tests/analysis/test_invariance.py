"""Table 1 cell by cell, and the same questions asked of whole networks."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lamina
from lamina.analysis import transforms
from lamina.analysis.invariance import BEYOND_ROWS, PAPER_ROWS, _layer, invariance_table
from lamina.analysis.networks import check_invariances
from lamina.analysis.transforms import Draw
from lamina.checks import InputError

# Written out once more, from the paper: a slip in the module's own table must not pass.
TABLE_1 = {
    "weight matrix scaled": {"batch": True, "weight": True, "layer": True},
    "weight matrix shifted": {"batch": False, "weight": False, "layer": True},
    "weight vector scaled": {"batch": True, "weight": True, "layer": False},
    "data set scaled": {"batch": True, "weight": False, "layer": True},
    "data set shifted": {"batch": True, "weight": False, "layer": False},
    "single case scaled": {"batch": False, "weight": False, "layer": True},
}
CELLS = [(row, norm) for row in TABLE_1 for norm in ("batch", "weight", "layer", None)]
F64 = torch.float64


@pytest.fixture(scope="module")
def exact():
    return invariance_table(beyond=True)


@pytest.mark.parametrize(("row", "norm"), CELLS)
def test_each_cell_of_table_1(exact, row, norm):
    entry, invariant = exact.entry(row, norm), TABLE_1[row].get(norm, False)
    assert entry.paper == entry.verdict == ("invariant" if invariant else "not")
    assert entry.deviation < 1e-10 if invariant else entry.deviation > 1e-3


@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(3, 9), st.sampled_from([0.01, 0.5, 2.0, 100.0]), st.integers(0, 10_000))
def test_the_table_holds_for_any_size_factor_and_draw(inputs, units, delta, seed):
    x = torch.randn(20, inputs, generator=torch.Generator().manual_seed(seed), dtype=F64)
    table = invariance_table(inputs=x, units=units, delta=delta, seed=seed)
    assert [e for e in table.rows if not e.agrees] == []
    assert all(e.deviation > 1e-3 for e in table.rows if e.paper == "not")


@pytest.mark.parametrize("delta", [0.1, 3.0])
def test_eps_moves_outputs_as_predicted(delta):
    entries = [e for e in invariance_table(eps=1e-5, delta=delta).rows if e.paper == "invariant"]
    assert all(e.within and e.deviation <= e.predicted + 1e-10 for e in entries)
    scaled = [e for e in entries if e.predicted]
    assert {(e.transform, e.norm) for e in scaled} == {
        ("weight matrix scaled", "batch"), ("weight matrix scaled", "layer"), ("weight vector scaled", "batch"),
        ("data set scaled", "batch"), ("data set scaled", "layer"), ("single case scaled", "layer"),
    }  # fmt: skip
    assert all(e.deviation > 1e-8 for e in scaled), "eps must be seen, or the bound says nothing"
    if delta == 3.0:  # to first order the bound is the value itself; at 0.1 eps/sigma^2 is no longer small
        assert all(e.deviation > 0.95 * e.predicted for e in scaled)


def test_the_eps_bound_fails_what_is_not_eps():
    table = invariance_table(norms=("batch",), eps=1e-5, training=False)
    assert table.entry("weight matrix scaled", "batch").within is False


def test_negative_factors_flip_the_sign_of_the_normalised_vector():
    table = invariance_table(delta=-2.0)
    for row, norms in TABLE_1.items():
        for norm, invariant in norms.items():
            scaled = "shifted" not in row
            expected = ("sign flips" if scaled else "invariant") if invariant else "not"
            assert table.entry(row, norm).verdict == expected, (row, norm)
    assert table.entry("weight matrix scaled", "layer").deviation > 1e-3


def test_stale_statistics_break_every_entry_of_batch_norm():
    table = invariance_table(training=False)
    assert all(e.verdict == "not" and e.deviation > 1e-3 for e in table.rows if e.norm == "batch")
    assert all(e.agrees for e in table.rows if e.norm != "batch")


def test_stale_statistics_are_those_of_the_data_as_it_was():
    x = torch.randn(20, 5, dtype=F64) + 2
    kept = _layer("batch", x, 7, 0.0, 0, training=False)
    assert torch.allclose(kept.statistics.running_mean, (x @ kept.weight.T).mean(0).detach(), atol=1e-12)
    assert not kept.training


def test_both_weight_changes_at_once_and_feature_shifting(exact):
    verdicts = {row: exact.entry(row, "layer") for row in BEYOND_ROWS}
    assert verdicts["weight matrix scaled and shifted"].deviation < 1e-10
    assert verdicts["single case's summed inputs shifted"].deviation < 1e-10
    assert verdicts["single case's inputs shifted"].deviation > 1e-3
    assert exact.entry("single case's summed inputs shifted", "batch").deviation > 1e-3


def test_forms_of_the_table(exact):
    data = exact.as_dict()
    assert list(data) == [*PAPER_ROWS, *BEYOND_ROWS]
    assert data["data set scaled"]["none"]["verdict"] == "not"
    lines = invariance_table().markdown().splitlines()
    assert len(lines) == 8
    assert lines[0] == "| transformation | batch norm | weight norm | layer norm | no norm |"
    assert [c.split(" (")[0].strip() for c in lines[5].split("|")[2:-1]] == ["Invariant", "No", "Invariant", "No"]
    assert exact.rich().row_count == 9


def test_the_table_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    invariance_table(beyond=True)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"inputs": torch.randn(1, 4)}, r"Linear.*at least two cases"),
        ({"inputs": torch.ones(6, 4)}, r"Linear.*vary over the cases"),
        ({"norms": ("layer",), "units": 1}, r"Linear.*vary over the units"),
        ({"norms": ("layers",)}, "Did you mean 'layer'"),
        ({"inputs": torch.randn(4)}, r"\[N, D\]"),
        ({"delta": 1.0}, "delta must be"),
        ({"delta": 0}, "delta must be"),
        ({"delta": float("nan")}, "delta must be"),
    ],
)
def test_the_table_refuses(given_, message):
    with pytest.raises(InputError, match=message):
        invariance_table(**given_)


def linear(norm, **options):
    return lamina.Linear(5, 6, dtype=F64, norm=norm, **options)


def randomised(model):
    """Gains and biases away from their start values, where they would hide a dependence."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gain" in name or "bias" in name:
                p.add_(0.3 * torch.rand_like(p))
    return model


EXPECTED = {  # scaled, shifted, both, rows
    "layer": ("invariant", "invariant", "invariant", "not"),
    "batch": ("invariant", "not", "not", "invariant"),
    "weight": ("invariant", "not", "not", "invariant"),
    None: ("not", "not", "not", "not"),
}
CHANGES = ("scaled", "shifted", "scaled and shifted", "rows scaled separately")


def verdicts(report, where):
    return tuple(report.verdict(where, change) for change in CHANGES)


@pytest.mark.parametrize("norm", EXPECTED)
def test_each_layer_of_a_network(norm):
    model = randomised(nn.Sequential(linear(norm, eps=0.0, activation="tanh"), nn.Linear(6, 3, dtype=F64)))
    report = check_invariances(model, torch.randn(16, 5, dtype=F64))
    assert verdicts(report, "0.weight") == EXPECTED[norm]
    assert verdicts(report, "1.weight") == ("not",) * 4
    assert report.verdict("inputs", "scaled") == ("invariant" if norm in ("layer", "batch") else "not")
    assert report.verdict("inputs", "shifted") == ("invariant" if norm == "batch" else "not")
    assert report.verdict("inputs", "one case scaled") == ("invariant" if norm == "layer" else "not")


@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_eps_is_told_from_a_real_dependence(norm, eps_mode):
    model = nn.Sequential(linear(norm, eps=1e-3, eps_mode=eps_mode), nn.Linear(6, 3, dtype=F64))
    report = check_invariances(model, torch.randn(16, 5, dtype=F64))
    found = report.finding("0.weight", "scaled")
    assert found.verdict == "invariant but for eps"
    assert found.without_eps < 1e-12 < 1e-5 < found.deviation <= found.eps_bound
    real = report.finding("1.weight", "scaled")
    assert real.verdict == "not"
    assert min(real.deviation, real.without_eps) > 50 * real.eps_bound


@settings(max_examples=15)
@given(st.floats(1e-8, 1.0), st.sampled_from([0.1, 2.0, 30.0]), st.integers(0, 1000))
def test_eps_never_does_more_than_its_bound(eps, delta, seed):
    torch.manual_seed(seed)
    layers = linear("layer", eps=eps, activation="tanh"), nn.Linear(6, 4, dtype=F64), nn.LayerNorm(4, eps, dtype=F64)
    model = nn.Sequential(*layers)
    report = check_invariances(model, torch.randn(9, 5, dtype=F64), delta=delta)
    for found in report.findings:
        assert found.deviation <= found.eps_bound + found.without_eps + 1e-12
    assert report.finding("0.weight", "scaled").without_eps < 1e-9


def test_torch_norms_after_linear_and_the_bias_between():
    def model(norm, bias):
        return nn.Sequential(nn.Linear(5, 6, bias=bias, dtype=F64), norm, nn.Tanh())

    x = torch.randn(16, 5, dtype=F64)
    layer, batch = nn.LayerNorm(6, dtype=F64), nn.BatchNorm1d(6, dtype=F64)
    found = verdicts(check_invariances(model(layer, False), x), "0.weight")
    assert found == ("invariant but for eps", "invariant", "invariant but for eps", "not")
    # W scaled without the bias that stands before the norm: their ratio changes, unless the norm takes the bias out.
    assert verdicts(check_invariances(model(layer, True), x), "0.weight") == ("not", "invariant", "not", "not")
    found = verdicts(check_invariances(model(batch, True), x), "0.weight")
    assert found == ("invariant but for eps", "not", "not", "invariant but for eps")


def test_torch_weight_norm():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6, dtype=F64))
    assert verdicts(check_invariances(model, torch.randn(8, 5, dtype=F64)), "weight") == EXPECTED["weight"]


def test_layer_norm_before_the_weights():
    model = nn.Sequential(lamina.LayerNorm(5, dtype=F64), nn.Linear(5, 6, dtype=F64))
    report = check_invariances(model, torch.randn(8, 5, dtype=F64))
    assert verdicts(report, "1.weight") == ("not",) * 4
    assert report.verdict("inputs", "one case scaled") == "invariant but for eps"


def test_batch_norm_in_evaluation():
    model, x = linear("batch", eps=0.0), torch.randn(16, 5, dtype=F64)
    model(x)
    assert verdicts(check_invariances(model, x), "weight")[0] == "invariant"
    report = check_invariances(model.eval(), x)
    assert {f.verdict for f in report.findings} == {"not"}


def test_negative_factors_are_no_invariance():
    report = check_invariances(linear("layer", eps=0.0), torch.randn(8, 5, dtype=F64), delta=-3.0)
    assert verdicts(report, "weight") == ("not", "invariant", "not", "not")


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        # gamma adds gamma * x, which differs between positions, and the norm runs over those too.
        ("layer", ("invariant", "not", "not", "not")),
        ("batch", ("invariant", "not", "not", "invariant")),
        ("weight", ("invariant", "not", "not", "invariant")),
    ],
)
def test_convolutions(norm, expected):
    model = lamina.Conv2d(2, 4, 3, padding=1, dtype=F64, norm=norm, eps=0.0)
    assert verdicts(check_invariances(model, torch.randn(4, 2, 5, 5, dtype=F64)), "weight") == expected


@pytest.mark.parametrize("kind", [lamina.LSTM, lamina.GRU])
def test_w_ih_and_w_hh_are_free_of_each_other_in_lstm_and_gru(kind):
    model = kind(4, 5, num_layers=2, bidirectional=True, dtype=F64, eps=0.0)
    report = check_invariances(randomised(model), torch.randn(6, 3, 4, dtype=F64))
    for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
        for where in (f"weight_ih_{end}", f"weight_hh_{end}", f"weight_ih_{end} + weight_hh_{end}"):
            assert verdicts(report, where) == EXPECTED["layer"], where
    assert report.verdict("inputs", "one case scaled") == "invariant"


def test_the_plain_rnn_allows_joint_scaling_only():
    report = check_invariances(randomised(lamina.RNN(4, 5, dtype=F64, eps=0.0)), torch.randn(6, 3, 4, dtype=F64))
    assert verdicts(report, "weight_ih_l0") == ("not", "invariant", "not", "not")
    assert verdicts(report, "weight_hh_l0") == ("not", "invariant", "not", "not")
    assert verdicts(report, "weight_ih_l0 + weight_hh_l0") == EXPECTED["layer"]


def test_recurrences_with_other_norms_and_with_eps():
    x = torch.randn(6, 8, 4, dtype=F64)
    batch = check_invariances(lamina.LSTM(4, 5, dtype=F64, norm="batch", eps=0.0, gain_init=1.0), x)
    assert verdicts(batch, "weight_ih_l0") == verdicts(batch, "weight_hh_l0") == EXPECTED["batch"]
    plain = check_invariances(nn.LSTM(4, 5, dtype=F64), x)
    assert {f.verdict for f in plain.findings} == {"not"}
    assert verdicts(check_invariances(lamina.GRU(4, 5, dtype=F64), x), "weight_hh_l0")[0] == "invariant but for eps"
    assert verdicts(check_invariances(lamina.LSTMCell(4, 5, dtype=F64), x[0]), "weight_ih") == (
        "invariant but for eps", "invariant", "invariant but for eps", "not",
    )  # fmt: skip


def test_weights_that_nothing_depends_on():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    report = check_invariances(Spare(), torch.randn(4, 3))
    assert verdicts(report, "spare.weight") == ("no effect",) * 4
    assert verdicts(report, "used.weight") == ("not",) * 4


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_state_stay_as_they_were(training):
    model = nn.Sequential(
        linear("batch"), nn.Dropout(0.5), nn.Linear(6, 4, dtype=F64), nn.BatchNorm1d(4, dtype=F64), nn.ReLU(True)
    ).train(training)
    model[2].weight.requires_grad_(False)
    x = torch.randn(8, 5, dtype=F64)
    state, given_, seed = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    report = check_invariances(model, x)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())
    assert torch.equal(given_, x)
    assert (model.training, model[0].eps, model[0].statistics.eps, model[3].eps) == (training, 1e-5, 1e-5, 1e-5)
    assert not model[2].weight.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    # One mask for all passes: with a fresh one the dropout would read as a dependence.
    assert report.verdict("0.weight", "scaled") == ("invariant but for eps" if training else "not")


def test_a_report_does_not_depend_on_the_random_state():
    model, x = nn.Sequential(linear("layer"), nn.Dropout(0.5)), torch.randn(8, 5, dtype=F64)
    first = check_invariances(model, x)
    torch.manual_seed(99)
    assert check_invariances(model, x) == first


def test_a_model_that_writes_into_its_input():
    model, x = nn.Sequential(nn.ReLU(inplace=True), linear("layer")), torch.randn(8, 5, dtype=F64)
    given_ = x.clone()
    check_invariances(model, x)
    assert torch.equal(given_, x)


@pytest.mark.parametrize(("batch_first", "axis"), [(False, 1), (True, 0)])
def test_the_axis_of_the_cases_is_found(batch_first, axis):
    model, x = lamina.RNN(4, 5, dtype=F64, batch_first=batch_first), torch.randn(6, 3, 4, dtype=F64)
    found, said, other = (
        check_invariances(model, x, case_axis=a).finding("inputs", "one case scaled") for a in (None, axis, 1 - axis)
    )
    assert found == said != other


def test_tuples_of_arguments_integer_inputs_and_float32():
    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(7, 4), lamina.LSTM(4, 5)

        def forward(self, tokens, scale):
            return {"out": self.rnn(self.embed(tokens))[0] * scale, "tokens": tokens}

    report = check_invariances(Tagged(), (torch.randint(7, (6, 3)), 2.0), tolerance=1e-2)
    cell = ("weight_ih_l0", "weight_hh_l0", "weight_ih_l0 + weight_hh_l0")
    assert {f.where for f in report.findings} == {f"rnn.{name}" for name in cell}
    assert report.verdict("rnn.weight_ih_l0", "shifted") == "invariant"
    assert report.verdict("rnn.weight_ih_l0", "rows scaled separately") == "not"


def test_one_case_is_counted_along_the_right_axis():
    model = lamina.LSTM(4, 5, dtype=F64, eps=0.0, batch_first=True, norm="batch")
    x = torch.randn(3, 6, 4, dtype=F64)
    draw = Draw(2.0, case_axis=1)
    assert torch.equal(transforms.scale_case(x, draw)[:, 0], 2 * x[:, 0])
    assert torch.equal(transforms.scale_case(x, draw)[:, 1:], x[:, 1:])
    with pytest.raises(InputError, match="at least two cases"):
        check_invariances(model, x[:1])
    check_invariances(model, x)


def test_forms_of_the_report():
    report = check_invariances(linear("layer"), torch.randn(8, 5, dtype=F64))
    assert list(report.as_dict()) == ["weight", "inputs"]
    assert report.as_dict()["weight"]["shifted"]["verdict"] == "invariant"
    assert len(report.markdown().splitlines()) == 2 + 4 + 3
    assert report.rich().row_count == 7
    with pytest.raises(InputError, match=r"weight and transformation must be one of \('weight', 'scaled'\)"):
        report.finding("weights", "scaled")


def constant():
    layer = linear("layer", eps=0.0)
    nn.init.ones_(layer.weight)
    return nn.Sequential(nn.Identity(), layer)


def overflowing():
    return nn.Sequential(nn.Linear(5, 6, dtype=F64), nn.Linear(6, 2, dtype=F64), Exponential())


class Exponential(nn.Module):
    def forward(self, x):
        return (1e5 * x).exp()


@pytest.mark.parametrize(
    ("model", "cases", "message"),
    [
        (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(5, dtype=F64)), 4, "needs a linear.*Sequential without"),
        (lambda: nn.Sequential(nn.Tanh(), linear("batch")), 1, r"layer '1', Linear.*at least two cases"),
        (
            lambda: nn.Sequential(nn.Linear(5, 6, dtype=F64), nn.BatchNorm1d(6, dtype=F64)),
            1,
            r"layer '1', BatchNorm1d.*two cases",
        ),
        (constant, 4, r"layer '1', Linear.*vary over the units"),
        (overflowing, 4, r"finite.*layer 2 \(Exponential\) with nothing transformed"),
    ],
)
def test_errors_name_the_layer(model, cases, message):
    with pytest.raises(InputError, match=message):
        check_invariances(model(), torch.randn(cases, 5, dtype=F64))


def test_outputs_that_only_a_transformation_makes_infinite():
    model = nn.Sequential(nn.Linear(5, 6, dtype=F64), nn.Softplus(), Exponential())
    with torch.no_grad():
        model[0].weight.mul_(1e-5)
        model[0].bias.fill_(-6.0)
    with pytest.raises(InputError, match=r"layer 2 \(Exponential\) with 0.weight transformed"):
        check_invariances(model, torch.randn(4, 5, dtype=F64), delta=1e7)


def test_a_model_that_returns_no_numbers():
    class Chosen(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(InputError, match="Chosen must return floating-point"):
        check_invariances(Chosen(5, 3, dtype=F64), torch.randn(4, 5, dtype=F64))
