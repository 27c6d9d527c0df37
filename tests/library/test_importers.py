"""Every importer against the source's own equations, written out here with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.cells import GRUCell, LSTMCell
from lamina.checks import InputError
from lamina.importers import SOURCES, import_weights
from lamina.recurrent import GRU, LSTM

STEPS, BATCH = 7, 3
SIZES = [(3, 5), (1, 1), (17, 8), (2, 9)]
Weights = dict[str, Tensor]
State = tuple[Tensor, ...]


def normal(seed: int, **shapes: tuple[int, ...]) -> Weights:
    """Random arrays by name; a dot in a name is written as two underscores."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def norm(z: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(z, z.shape[-1:], gain, bias, eps)


def haste_lstm_weights(d: int, h: int, seed: int = 0) -> Weights:
    return normal(
        seed, kernel=(d, 4 * h), recurrent_kernel=(h, 4 * h), bias=(4 * h,), gamma=(2, 4 * h), gamma_h=(h,), beta_h=(h,)
    )


def haste_lstm_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    h, c = state
    v = norm(x @ w["kernel"], w["gamma"][0], None, eps) + norm(h @ w["recurrent_kernel"], w["gamma"][1], w["bias"], eps)
    i, g, f, o = v.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * norm(c, w["gamma_h"], w["beta_h"], eps).tanh(), c


def haste_gru_weights(d: int, h: int, seed: int = 0) -> Weights:
    return normal(
        seed, kernel=(d, 3 * h), recurrent_kernel=(h, 3 * h), bias=(3 * h,), recurrent_bias=(3 * h,), gamma=(2, 3 * h)
    )


def haste_gru_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    (h,) = state
    x_z, x_r, x_g = norm(x @ w["kernel"], w["gamma"][0], w["bias"], eps).chunk(3, -1)
    h_z, h_r, h_g = norm(h @ w["recurrent_kernel"], w["gamma"][1], w["recurrent_bias"], eps).chunk(3, -1)
    z, r = (x_z + h_z).sigmoid(), (x_r + h_r).sigmoid()
    return (z * h + (1 - z) * (x_g + r * h_g).tanh(),)


def fastrnns_weights(d: int, h: int, seed: int = 0) -> Weights:
    norms = {f"layernorm_{k}__{p}": (n,) for k, n in (("i", 4 * h), ("h", 4 * h), ("c", h)) for p in ("weight", "bias")}
    return normal(seed, weight_ih=(4 * h, d), weight_hh=(4 * h, h), **norms)


def fastrnns_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    h, c = state
    gates = norm(x @ w["weight_ih"].T, w["layernorm_i.weight"], w["layernorm_i.bias"], eps)
    gates = gates + norm(h @ w["weight_hh"].T, w["layernorm_h.weight"], w["layernorm_h.bias"], eps)
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    c = norm(c, w["layernorm_c.weight"], w["layernorm_c.bias"], eps)
    return o.sigmoid() * c.tanh(), c


def torchaudio_weights(d: int, h: int, seed: int = 0) -> Weights:
    return normal(
        seed, x2g__weight=(4 * h, d), p2g__weight=(4 * h, h), g_norm__weight=(4 * h,), g_norm__bias=(4 * h,),
        c_norm__weight=(h,), c_norm__bias=(h,),
    )  # fmt: skip


def torchaudio_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    h, c = state
    gates = norm(x @ w["x2g.weight"].T + h @ w["p2g.weight"].T, w["g_norm.weight"], w["g_norm.bias"], eps)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    c = norm(c, w["c_norm.weight"], w["c_norm.bias"], eps)
    return o.sigmoid() * c.tanh(), c


def plain_torchaudio_weights(d: int, h: int, seed: int = 0) -> Weights:
    return normal(seed, x2g__weight=(4 * h, d), x2g__bias=(4 * h,), p2g__weight=(4 * h, h))


def plain_torchaudio_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    h, c = state
    i, f, g, o = (x @ w["x2g.weight"].T + w["x2g.bias"] + h @ w["p2g.weight"].T).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def tf_addons_weights(d: int, h: int, seed: int = 0) -> Weights:
    found = normal(
        seed, kernel=(d, 4 * h), recurrent_kernel=(h, 4 * h), bias=(4 * h,),
        kernel_norm__gamma=(4 * h,), kernel_norm__beta=(4 * h,),
        recurrent_norm__gamma=(4 * h,), recurrent_norm__beta=(4 * h,), state_norm__gamma=(h,), state_norm__beta=(h,),
    )  # fmt: skip
    return {name.replace(".", "/"): tensor for name, tensor in found.items()}


def tf_addons_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    h, c = state
    z = norm(x @ w["kernel"], w["kernel_norm/gamma"], w["kernel_norm/beta"], eps)
    z = z + norm(h @ w["recurrent_kernel"], w["recurrent_norm/gamma"], w["recurrent_norm/beta"], eps)
    i, f, g, o = (z + w["bias"] if "bias" in w else z).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    c = norm(c, w["state_norm/gamma"], w["state_norm/beta"], eps)
    return o.sigmoid() * c.tanh(), c


def dreamer_weights(d: int, h: int, seed: int = 0) -> Weights:
    found = normal(seed, linear=(3 * h, d + h), gain=(3 * h,), bias=(3 * h,))
    names = ("layers.GRU_linear.weight", "layers.GRU_norm.weight", "layers.GRU_norm.bias")
    return dict(zip(names, found.values()))


def dreamer_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    (h,) = state
    linear, gain, bias = w.values()
    reset, cand, update = norm(torch.cat([x, h], -1) @ linear.T, gain, bias, eps).chunk(3, -1)
    update = (update - 1).sigmoid()
    return (update * (reset.sigmoid() * cand).tanh() + (1 - update) * h,)


def sheeprl_weights(d: int, h: int, seed: int = 0) -> Weights:
    return dict(zip(("linear.weight", "layer_norm.weight", "layer_norm.bias"), dreamer_weights(d, h, seed).values()))


def sheeprl_step(w: Weights, x: Tensor, state: State, eps: float) -> State:
    (h,) = state
    parts = norm(torch.cat([h, x], -1) @ w["linear.weight"].T, w["layer_norm.weight"], w["layer_norm.bias"], eps)
    reset, cand, update = parts.chunk(3, -1)
    update = (update - 1).sigmoid()
    return (update * (reset.sigmoid() * cand).tanh() + (1 - update) * h,)


Step = Callable[[Weights, Tensor, State, float], State]
# source: weights, step, states, the source's own epsilon, class, placement
CASES: dict[str, tuple[Callable[..., Weights], Step, int, float, type, str | None]] = {
    "haste_lstm": (haste_lstm_weights, haste_lstm_step, 2, 1e-5, LSTM, "paper"),
    "haste_gru": (haste_gru_weights, haste_gru_step, 1, 1e-5, GRU, "split"),
    "fastrnns": (fastrnns_weights, fastrnns_step, 2, 1e-5, LSTM, "carry"),
    "torchaudio": (torchaudio_weights, torchaudio_step, 2, 1e-5, LSTM, "joint"),
    "tf_addons": (tf_addons_weights, tf_addons_step, 2, 1e-3, LSTM, "carry"),
    "dreamer": (dreamer_weights, dreamer_step, 1, 1e-3, GRUCell, "joint"),
    "sheeprl": (sheeprl_weights, sheeprl_step, 1, 1e-3, GRUCell, "joint"),
}


ONE_EPS = {"haste_lstm", "haste_gru", "dreamer"}  # the others have more than one, so import_weights asks


def load(w: Any, source: str, **options: Any) -> nn.Module:
    """import_weights, with the epsilon of the table where the caller has to say it."""
    known = {} if source in ONE_EPS else {"eps": CASES[source][3]}
    return import_weights(w, source, **{**known, **options})


def unroll(step: Step, w: Weights, x: Tensor, state: State, eps: float) -> tuple[Tensor, State]:
    outputs = []
    for x_t in x:
        state = step(w, x_t, state, eps)
        outputs.append(state[0])
    return torch.stack(outputs), state


def run_layer(layer: nn.Module, x: Tensor, state: State) -> tuple[Tensor, State]:
    hx = tuple(s.unsqueeze(0) for s in state)
    output, last = layer(x, hx if len(hx) == 2 else hx[0])
    return output, tuple(s.squeeze(0) for s in (last if isinstance(last, tuple) else (last,)))


def run_cell(cell: nn.Module, x: Tensor, state: State) -> tuple[Tensor, State]:
    outputs = []
    for x_t in x:
        new = cell(x_t, state if len(state) == 2 else state[0])
        state = new if isinstance(new, tuple) else (new,)
        outputs.append(state[0])
    return torch.stack(outputs), state


def run_module(module: nn.Module, x: Tensor, state: State) -> tuple[Tensor, State]:
    return (run_layer if isinstance(module, (LSTM, GRU)) else run_cell)(module, x, state)


def example(d: int, h: int, states: int, seed: int = 1) -> tuple[Tensor, State]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(STEPS, BATCH, d, generator=generator, dtype=torch.float64)
    state = tuple(torch.randn(BATCH, h, generator=generator, dtype=torch.float64) for _ in range(states))
    return x, state


def outputs_and_gradients(
    run: Callable[[Tensor, State], tuple[Tensor, State]], x: Tensor, state: State
) -> list[Tensor]:
    """Outputs, final states and the gradients of x and the first state under one fixed random upstream."""
    x, state = x.clone().requires_grad_(), tuple(s.clone().requires_grad_() for s in state)
    output, last = run(x, state)
    generator = torch.Generator().manual_seed(2)
    results = [output, *last]
    upstream = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
    return [r.detach() for r in results] + list(torch.autograd.grad(results, (x, *state), upstream))


def assert_same(run: Any, expected: Any, x: Tensor, state: State) -> None:
    for ours, theirs in zip(outputs_and_gradients(run, x, state), outputs_and_gradients(expected, x, state)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def assert_computes(module: nn.Module, step: Step, w: Weights, states: int, eps: float, d: int, h: int) -> None:
    x, state = example(d, h, states)
    assert_same(lambda x, s: run_module(module, x, s), lambda x, s: unroll(step, w, x, s, eps), x, state)


@pytest.mark.parametrize(("d", "h"), SIZES)
@pytest.mark.parametrize("source", CASES)
def test_source_is_reproduced(source: str, d: int, h: int) -> None:
    make, step, states, eps, kind, placement = CASES[source]
    w = make(d, h)
    module = load(w, source)
    assert type(module) is kind
    assert (module.input_size, module.hidden_size, module.placement, module.eps) == (d, h, placement, eps)
    assert_computes(module, step, w, states, eps, d, h)


def test_every_source_is_tried() -> None:
    assert set(CASES) == set(SOURCES)


@pytest.mark.parametrize("source", [source for source in CASES if source not in ONE_EPS])
def test_eps_must_be_given_where_the_source_has_more_than_one(source: str) -> None:
    with pytest.raises(InputError, match=rf"{source} weights need eps=.*got eps=None\. Pass .*1e-[35]"):
        import_weights(CASES[source][0](3, 5), source)


@pytest.mark.parametrize("source", CASES)
def test_given_eps_and_the_other_form(source: str) -> None:
    """A layer in place of a cell and a cell in place of a layer, with the caller's epsilon."""
    make, step, states, _, kind, _ = CASES[source]
    w, layer = make(3, 5), kind in (LSTM, GRU)
    module = import_weights(w, source, eps=0.25, as_layer=not layer)
    assert type(module) is {LSTM: LSTMCell, GRU: GRUCell, GRUCell: GRU}[kind]
    assert module.eps == 0.25
    assert_computes(module, step, w, states, 0.25, 3, 5)


@pytest.mark.parametrize("source", CASES)
def test_gradients_of_the_parameters_flow_and_the_source_is_untouched(source: str) -> None:
    make, _, states, _, _, _ = CASES[source]
    w = make(3, 5)
    before = {name: tensor.clone() for name, tensor in w.items()}
    module = load(w, source)
    x, state = example(3, 5, states)
    output, _ = run_module(module, x, state)
    output.mul(torch.randn_like(output)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(w[name], before[name]) for name in w)


def test_torchaudio_without_layer_norm() -> None:
    w = plain_torchaudio_weights(3, 5)
    module = import_weights(w, "torchaudio")
    assert module.norm is None
    assert dict(module.named_parameters()).keys() == dict(nn.LSTM(3, 5).named_parameters()).keys()
    assert_computes(module, plain_torchaudio_step, w, 2, 0.0, 3, 5)
    with pytest.raises(InputError, match="eps= belongs to a norm"):
        import_weights(w, "torchaudio", eps=1e-3)


def under(prefix: str, w: Weights) -> Weights:
    return {prefix + name: tensor for name, tensor in w.items()}


def test_torchaudio_list_of_layers() -> None:
    parts = [torchaudio_weights(3, 5, seed=0), torchaudio_weights(5, 5, seed=1), torchaudio_weights(5, 5, seed=2)]
    w = {"predictor.embedding.weight": torch.zeros(4, 3, dtype=torch.float32), "joiner.linear.bias": torch.zeros(1)}
    for k, part in enumerate(parts):
        w |= under(f"predictor.lstm_layers.{k}.", part)
    x, _ = example(3, 5, 2)
    state = tuple(torch.randn(3, BATCH, 5, dtype=torch.float64) for _ in range(2))

    def expected(x: Tensor, state: State) -> tuple[Tensor, State]:
        finals = []
        for k, part in enumerate(parts):
            x, last = unroll(torchaudio_step, part, x, tuple(s[k] for s in state), 1e-3)
            finals.append(last)
        return x, tuple(torch.stack(s) for s in zip(*finals))

    for prefix in ("predictor.lstm_layers.", "predictor.lstm_layers"):
        layer = import_weights(w, "torchaudio", prefix=prefix, eps=1e-3)
        assert layer.num_layers == 3
        assert_same(layer, expected, x, state)


@pytest.mark.parametrize("prefix", ["", "cell.", "layers.0.cell."])
def test_fastrnns_single_layers(prefix: str) -> None:
    w = fastrnns_weights(3, 5)
    layer = import_weights(under(prefix, w), "fastrnns", eps=0)
    assert type(layer) is LSTM
    assert (layer.num_layers, layer.bidirectional) == (1, False)
    assert_computes(layer, fastrnns_step, w, 2, 0.0, 3, 5)


def test_fastrnns_bidirectional_stack() -> None:
    parts = {(k, d): fastrnns_weights(3 if k == 0 else 10, 5, seed=2 * k + d) for k in range(3) for d in range(2)}
    w: Weights = {}
    for (k, d), part in parts.items():
        w |= under(f"layers.{k}.directions.{d}.cell.", part)
    x, _ = example(3, 5, 2)
    state = tuple(torch.randn(6, BATCH, 5, dtype=torch.float64) for _ in range(2))

    def expected(x: Tensor, state: State) -> tuple[Tensor, State]:
        finals = []
        for k in range(3):
            first = tuple(s[2 * k] for s in state), tuple(s[2 * k + 1] for s in state)
            ahead, last = unroll(fastrnns_step, parts[k, 0], x, first[0], 1e-5)
            back, last_back = unroll(fastrnns_step, parts[k, 1], x.flip(0), first[1], 1e-5)
            x = torch.cat([ahead, back.flip(0)], -1)
            finals += [last, last_back]
        return x, tuple(torch.stack(s) for s in zip(*finals))

    layer = load(w, "fastrnns")
    assert (layer.num_layers, layer.bidirectional) == (3, True)
    assert_same(layer, expected, x, state)
    with pytest.raises(InputError, match="a cell takes one layer in one direction, got 6 cells"):
        import_weights(w, "fastrnns", as_layer=False)


def keras_names(w: Weights, path: str, end: str) -> dict[str, np.ndarray]:
    return {f"{path}{name}{end}": tensor.numpy() for name, tensor in w.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("path", "end"), [("", ""), ("", ":0"), ("model/rnn/layer_norm_lstm_cell/", ":0")])
def test_tf_addons_names_and_lists(path: str, end: str, bias: bool) -> None:
    w = tf_addons_weights(3, 5)
    if not bias:
        del w["bias"]
    named, listed = keras_names(w, path, end), [tensor.numpy() for tensor in w.values()]
    listed[0].setflags(write=False)
    listed[1] = listed[1].astype(">f8")
    for given in (named, listed, tuple(listed), dict(reversed(named.items()))):
        layer = load(given, "tf_addons")
        assert_computes(layer, tf_addons_step, w, 2, 1e-3, 3, 5)


def test_tf_addons_prefix_and_dotted_names() -> None:
    first, second = tf_addons_weights(3, 5, seed=0), tf_addons_weights(5, 4, seed=1)
    both = keras_names(first, "rnn/", ":0") | keras_names(second, "rnn_1/", ":0")
    for prefix in ("rnn_1", "rnn_1/"):
        layer = load(both, "tf_addons", prefix=prefix)
        assert_computes(layer, tf_addons_step, second, 2, 1e-3, 5, 4)
    with pytest.raises(InputError, match=r"'kernel' once.*'rnn/kernel' and 'rnn_1/kernel:0'.*prefix="):
        import_weights(both, "tf_addons")
    dotted = {name.replace("/", "."): tensor for name, tensor in first.items()}
    assert_computes(load(dotted, "tf_addons"), tf_addons_step, first, 2, 1e-3, 3, 5)


def test_tf_addons_refusals() -> None:
    w = keras_names(tf_addons_weights(3, 5), "rnn/", ":0")
    stray = {name: array for name, array in w.items() if name != "rnn/bias:0"} | {"dense/bias:0": w["rnn/bias:0"]}
    with pytest.raises(InputError, match="must come from one cell, got keys under 'dense/', 'rnn/'"):
        import_weights(stray, "tf_addons")
    unnamed = {"kernel:0": w["rnn/kernel:0"], "gamma:0": w["rnn/state_norm/gamma:0"]}
    with pytest.raises(InputError, match=r"which norm.*got 'gamma'.*get_weights"):
        import_weights(unnamed, "tf_addons")
    with pytest.raises(InputError, match="9 arrays, or 8 without a bias, got 7 arrays"):
        import_weights(list(w.values())[:7], "tf_addons")


def test_old_dreamer_spelling() -> None:
    names = ("_layer.weight", "_norm.weight", "_norm.bias")
    w = dict(zip(names, dreamer_weights(3, 5).values()))
    with pytest.raises(InputError, match=r"dreamer weights need eps=.*1e-3 and 1e-5"):
        import_weights(w, "dreamer")
    for extra in ({}, {"_layer.bias": torch.full((15,), 0.75, dtype=torch.float64)}):
        cell = import_weights(w | extra, "dreamer", eps=1e-5)
        assert type(cell) is GRUCell
        assert_computes(cell, dreamer_step, w, 1, 1e-5, 3, 5)


@pytest.mark.parametrize(("source", "linear"), [("dreamer", "layers.GRU_linear"), ("sheeprl", "linear")])
def test_bias_inside_the_norm_is_taken_only_where_it_cancels(source: str, linear: str) -> None:
    make, step, states, eps, _, _ = CASES[source]
    w = make(3, 5)
    constant = torch.full((15,), -2.5, dtype=torch.float64)
    assert_computes(load(w | {f"{linear}.bias": constant}, source), step, w, states, eps, 3, 5)
    constant[7] = -2.25
    with pytest.raises(InputError, match=r"inside the norm.*values from -2.5 to -2.25"):
        import_weights(w | {f"{linear}.bias": constant}, source)
    with pytest.raises(InputError, match=r"bias' must have shape \[15\].*got shape \[14\]"):
        import_weights(w | {f"{linear}.bias": constant[1:]}, source)


GATE_AXIS = {"haste_lstm": -1, "haste_gru": -1, "tf_addons": -1}  # kernels [D, G*H]; elsewhere [G*H, D]


@pytest.mark.parametrize("source", CASES)
def test_missing_unknown_and_misshapen_keys_are_named(source: str) -> None:
    w = CASES[source][0](3, 5)
    for name, tensor in w.items():
        if source == "tf_addons" and name == "bias":
            continue  # the one array a source may lack
        rest = {key: value for key, value in w.items() if key != name}
        with pytest.raises(InputError, match=f"no .*{name!r}"):
            import_weights(rest, source)
        doubled = torch.cat([tensor, tensor], GATE_AXIS.get(source, 0))
        with pytest.raises(InputError, match=r"must have shape \[.*got shape \[.*\]"):
            import_weights({**w, name: doubled}, source)
        with pytest.raises(InputError, match=r"shape \[.*got shape \[1, "):
            import_weights({**w, name: tensor.unsqueeze(0)}, source)
    with pytest.raises(InputError, match="also 'stray'"):
        import_weights({**w, "stray": torch.zeros(1)}, source)


def test_wrong_shape_shows_both_shapes() -> None:
    w = haste_lstm_weights(3, 5) | {"gamma": torch.ones(2, 15, dtype=torch.float64)}
    with pytest.raises(InputError, match=r"haste_lstm 'gamma' must have shape \[2, 20\].*got shape \[2, 15\]"):
        import_weights(w, "haste_lstm")


def test_prefix_ignores_what_lies_elsewhere() -> None:
    w = haste_gru_weights(3, 5)
    whole = {**under("core.rnn.", w), "core.rnn2.kernel": torch.zeros(1), "step": 17, "core.name": "x"}
    layer = import_weights(whole, "haste_gru", prefix="core.rnn")
    assert_computes(layer, haste_gru_step, w, 1, 1e-5, 3, 5)
    with pytest.raises(InputError, match=r"begin with prefix='encoder\.', got 'core.rnn.kernel'"):
        import_weights(whole, "haste_gru", prefix="encoder")
    with pytest.raises(InputError, match=r"none of them among 'core.rnn.kernel'.*prefix="):
        import_weights(under("core.rnn.", w), "haste_gru")


def test_source_names_and_containers() -> None:
    w = haste_gru_weights(3, 5)
    with pytest.raises(InputError, match=r"must hold the arrays of a cell, got an empty mapping\. Pass the state_dict"):
        import_weights({}, "haste_gru")
    with pytest.raises(InputError, match="Did you mean 'haste_gru'"):
        import_weights(w, "haste_gpu")
    with pytest.raises(TypeError, match=r"got GRU. Pass its state_dict\(\)"):
        import_weights(nn.GRU(3, 5), "haste_gru")
    with pytest.raises(TypeError, match="must be a mapping of names to arrays, got list"):
        import_weights(list(w.values()), "haste_gru")
    with pytest.raises(InputError, match="'kernel' must hold floating-point numbers"):
        import_weights(w | {"kernel": torch.zeros(3, 15, dtype=torch.int64)}, "haste_gru")
    with pytest.raises(TypeError, match="'kernel' must be a tensor or an array of numbers, got str"):
        import_weights(w | {"kernel": "a.bin"}, "haste_gru")


def test_stacks_must_be_complete_and_fit() -> None:
    whole = under("0.", torchaudio_weights(3, 5)) | under("1.", torchaudio_weights(5, 5))
    gap = under("0.", torchaudio_weights(3, 5)) | under("2.", torchaudio_weights(5, 5))
    with pytest.raises(InputError, match="must be complete, got no layer 1, direction 0"):
        import_weights(gap, "torchaudio")
    with pytest.raises(InputError, match=r"layer 2 must have input 5, hidden 5.*got input 5, hidden 4.*one by one"):
        import_weights(whole | under("2.", torchaudio_weights(5, 4)), "torchaudio")
    with pytest.raises(InputError, match=r"layer 2 must have.*norm 'layer', got.*norm None"):
        import_weights(whole | under("2.", plain_torchaudio_weights(5, 5)), "torchaudio")
    one_way = under("layers.0.directions.0.cell.", fastrnns_weights(3, 5))
    one_way |= under("layers.1.directions.0.cell.", fastrnns_weights(10, 5))
    one_way |= under("layers.1.directions.1.cell.", fastrnns_weights(10, 5))
    with pytest.raises(InputError, match="no layer 0, direction 1"):
        import_weights(one_way, "fastrnns")
    twice = fastrnns_weights(3, 5) | under("cell.", fastrnns_weights(3, 5))
    with pytest.raises(InputError, match=r"'weight_ih' once for each cell, got 'weight_ih' and 'cell\.weight_ih'"):
        import_weights(twice, "fastrnns")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    w = {name: tensor.to(dtype) for name, tensor in haste_lstm_weights(3, 5).items()}
    layer = import_weights(w, "haste_lstm")
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert torch.equal(layer.gain_cell_l0, w["gamma_h"])
    w["bias"] = w["bias"].to(torch.float16)
    with pytest.raises(InputError, match=r"one dtype, got torch\.\w+, torch\.\w+\."):
        import_weights(w, "haste_lstm")


def test_options_reach_the_layer() -> None:
    w = haste_lstm_weights(3, 5)
    layer = import_weights(w, "haste_lstm", batch_first=True, zoneout=0.1, learn_initial_state=True, device="cpu")
    assert layer.batch_first
    assert layer.options.zoneout == 0.1
    assert torch.equal(layer.initial_h_l0, torch.zeros(5, dtype=torch.float64))
    meta = import_weights(w, "haste_lstm", device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_options_that_are_not_the_callers() -> None:
    w = haste_lstm_weights(3, 5)
    with pytest.raises(InputError, match="placement is determined by the weights, got placement='joint'"):
        import_weights(w, "haste_lstm", placement="joint")
    with pytest.raises(InputError, match="forget_bias sets initial values, which the weights replace"):
        import_weights(w, "haste_lstm", forget_bias=1.0)
    with pytest.raises(InputError, match=r"an option of LSTM.*Did you mean 'batch_first'"):
        import_weights(w, "haste_lstm", batchfirst=True)
    with pytest.raises(InputError, match="an option of LSTMCell"):
        import_weights(w, "haste_lstm", as_layer=False, batch_first=True)
    with pytest.raises(InputError, match="eps must be finite and not negative"):
        import_weights(w, "haste_lstm", eps=-1.0)


def test_random_numbers_of_the_user_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    import_weights(haste_lstm_weights(3, 5), "haste_lstm")
    assert torch.equal(torch.rand(4), expected)
