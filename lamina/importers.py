"""Import of weights trained with other layer-normalised recurrences.

Each source below computes one row of ``lamina.placements``. The sources differ in names, gate order, transposed
matrices and epsilon. ``import_weights`` removes these differences and returns a lamina layer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .cells import GRUCell, LSTMCell
from .checks import describe, epsilon, fail, one_of
from .options import initial_values_discarded
from .recurrent import GRU, LSTM

ONE_CELL = re.compile(r"()()(.+)")
NUMBERED = re.compile(r"(?:(\d+)\.)?()(.+)")
FASTRNNS = re.compile(r"(?:layers\.(\d+)\.)?(?:directions\.([01])\.)?(?:cell\.)?(.+)")
# The last part of a Keras name, including the name of its norm if any: "kernel", "kernel_norm/gamma".
KERAS = re.compile(r"()()(?:.*?[/.])??((?:(?:kernel|recurrent|state)_norm[/.])?[^/.:]+)(?::\d+)?")

# Order of get_weights(): a layer's own variables first, then those of its sublayers.
KERAS_ORDER = (
    "kernel", "recurrent_kernel", "bias",
    "kernel_norm/gamma", "kernel_norm/beta",
    "recurrent_norm/gamma", "recurrent_norm/beta",
    "state_norm/gamma", "state_norm/beta",
)  # fmt: skip

FIXED_BY_SOURCE = (
    "input_size", "hidden_size", "num_layers", "bias", "bidirectional", "proj_size", "dtype", "norm", "placement",
    "eps_mode",
)  # fmt: skip
INITIAL_VALUES = ("gain_init", "forget_bias")


@dataclass(frozen=True)
class _Cell:
    """Weights of one cell under torch's names and in torch's gate order, with the epsilon of its source."""

    weights: dict[str, Tensor]
    norm: str | None
    placement: str | None
    eps: float | None  # None if the source uses several values, so that the caller must pass one

    @property
    def input_size(self) -> int:
        return self.weights["weight_ih"].shape[1]

    @property
    def hidden_size(self) -> int:
        return self.weights["weight_hh"].shape[1]


@dataclass
class _Bundle:
    """Arrays of one cell under its source's names; ``where[name]`` is the part of the key before that name."""

    source: str
    arrays: dict[str, Tensor] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, start: int, name: str, array: Tensor) -> None:
        if name in self.arrays:
            rule = f"{self.source} weights must hold {name!r} once for each cell"
            remedy = "Select one cell with prefix=, for example prefix='encoder.'."
            raise fail(rule, f"{self.where[name] + name!r} and {key!r}", remedy)
        self.arrays[name] = array
        self.where[name] = key[:start]

    def match(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Raise unless all required names are present and all other names are optional ones."""
        present = ", ".join(repr(self.where[name] + name) for name in list(self.arrays)[:12]) or "none"
        missing = [name for name in required if name not in self.arrays]
        if missing:
            which = f"no {', '.join(map(repr, missing))}" if len(missing) < len(required) else "none of them"
            rule = f"{self.source} weights need {', '.join(map(repr, required))}"
            raise fail(rule, f"{which} among {present}", "If the keys have a common prefix, pass it as prefix=.")
        unknown = [name for name in self.arrays if name not in (*required, *optional)]
        if unknown:
            rule = f"{self.source} weights are {', '.join(map(repr, (*required, *optional)))}"
            remedy = "Check source=, or select the keys of this cell with prefix=."
            raise fail(rule, f"also {', '.join(repr(self.where[name] + name) for name in unknown)}", remedy)

    def matrix(self, name: str) -> tuple[int, int]:
        array = self.arrays[name]
        if array.dim() != 2:
            raise self.wrong_shape(name, "[rows, columns]")
        return array.shape[0], array.shape[1]

    def take(self, name: str, *shape: int) -> Tensor:
        if tuple(self.arrays[name].shape) != shape:
            raise self.wrong_shape(name, str(list(shape)))
        return self.arrays[name]

    def wrong_shape(self, name: str, expected: str) -> Exception:
        rule = f"{self.source} {self.where[name] + name!r} must have shape {expected} to fit the other weights"
        return fail(rule, describe(self.arrays[name]), "Pass the weights of one model, unchanged.")


def _reorder(array: Tensor, order: Sequence[int]) -> Tensor:
    """Reorder blocks of H rows along the first axis; ``order[k]`` is the block that becomes block k."""
    blocks = array.chunk(len(order))
    return torch.cat([blocks[k] for k in order])


def _haste_lstm(bundle: _Bundle) -> _Cell:
    """Read v = LN(x K) gamma[0] + LN(h R) gamma[1] + bias; h = s(o) tanh(LN(c)); gates i, g, f, o."""
    bundle.match(("kernel", "recurrent_kernel", "bias", "gamma", "gamma_h", "beta_h"))
    d, h = bundle.matrix("kernel")[0], bundle.matrix("recurrent_kernel")[0]
    order, bias = (0, 2, 1, 3), bundle.take("bias", 4 * h)
    gamma = bundle.take("gamma", 2, 4 * h)
    weights = {
        "weight_ih": _reorder(bundle.take("kernel", d, 4 * h).T, order),
        "weight_hh": _reorder(bundle.take("recurrent_kernel", h, 4 * h).T, order),
        "bias_ih": _reorder(bias, order),
        "bias_hh": torch.zeros_like(bias),
        "gain_ih": _reorder(gamma[0], order),
        "gain_hh": _reorder(gamma[1], order),
        "gain_cell": bundle.take("gamma_h", h),
        "bias_cell": bundle.take("beta_h", h),
    }
    return _Cell(weights, "layer", "paper", 1e-5)


def _haste_gru(bundle: _Bundle) -> _Cell:
    """Read x = LN(x K) gamma[0] + bias, y = LN(h R) gamma[1] + recurrent_bias; gates z, r, g."""
    bundle.match(("kernel", "recurrent_kernel", "bias", "recurrent_bias", "gamma"))
    d, h = bundle.matrix("kernel")[0], bundle.matrix("recurrent_kernel")[0]
    order, gamma = (1, 0, 2), bundle.take("gamma", 2, 3 * h)
    weights = {
        "weight_ih": _reorder(bundle.take("kernel", d, 3 * h).T, order),
        "weight_hh": _reorder(bundle.take("recurrent_kernel", h, 3 * h).T, order),
        "bias_ih": _reorder(bundle.take("bias", 3 * h), order),
        "bias_hh": _reorder(bundle.take("recurrent_bias", 3 * h), order),
        "gain_ih": _reorder(gamma[0], order),
        "gain_hh": _reorder(gamma[1], order),
    }
    return _Cell(weights, "layer", "split", 1e-5)


def _fastrnns(bundle: _Bundle) -> _Cell:
    """Read gates = LN(W x) + LN(U h); c = LN(s(f) c' + s(i) tanh(g)), carried; h = s(o) tanh(c)."""
    norms = [f"layernorm_{k}.{part}" for k in "ihc" for part in ("weight", "bias")]
    bundle.match(("weight_ih", "weight_hh", *norms))
    d, h = bundle.matrix("weight_ih")[1], bundle.matrix("weight_hh")[1]
    weights = {
        "weight_ih": bundle.take("weight_ih", 4 * h, d),
        "weight_hh": bundle.take("weight_hh", 4 * h, h),
        "bias_ih": bundle.take("layernorm_i.bias", 4 * h),
        "bias_hh": bundle.take("layernorm_h.bias", 4 * h),
        "gain_ih": bundle.take("layernorm_i.weight", 4 * h),
        "gain_hh": bundle.take("layernorm_h.weight", 4 * h),
        "gain_cell": bundle.take("layernorm_c.weight", h),
        "bias_cell": bundle.take("layernorm_c.bias", h),
    }
    return _Cell(weights, "layer", "carry", None)


def _torchaudio(bundle: _Bundle) -> _Cell:
    """Read gates = LN(W x + U h); c = LN(s(f) c' + s(i) tanh(g)), carried; or a plain LSTM without layer norm."""
    plain = not any("_norm." in name for name in bundle.arrays)
    norms = [f"{k}_norm.{part}" for k in "gc" for part in ("weight", "bias")]
    bundle.match(("x2g.weight", "p2g.weight", *(["x2g.bias"] if plain else norms)))
    d, h = bundle.matrix("x2g.weight")[1], bundle.matrix("p2g.weight")[1]
    bias = bundle.take("x2g.bias" if plain else "g_norm.bias", 4 * h)
    weights = {
        "weight_ih": bundle.take("x2g.weight", 4 * h, d),
        "weight_hh": bundle.take("p2g.weight", 4 * h, h),
        "bias_ih": bias,
        "bias_hh": torch.zeros_like(bias),
    }
    if plain:
        return _Cell(weights, None, None, None)
    weights["gain_sum"] = bundle.take("g_norm.weight", 4 * h)
    weights["gain_cell"] = bundle.take("c_norm.weight", h)
    weights["bias_cell"] = bundle.take("c_norm.bias", h)
    return _Cell(weights, "layer", "joint", None)


def _tf_addons(bundle: _Bundle) -> _Cell:
    """Read gates = LN(x K) + LN(h R) + bias; c = LN(s(f) c' + s(i) tanh(g)), carried; gates i, f, c, o."""
    _check_keras_paths(bundle)
    bundle.match(tuple(name for name in KERAS_ORDER if name != "bias"), ("bias",))
    d, h = bundle.matrix("kernel")[0], bundle.matrix("recurrent_kernel")[0]
    bias = bundle.take("kernel_norm/beta", 4 * h)
    if "bias" in bundle.arrays:
        bias = bias + bundle.take("bias", 4 * h)
    weights = {
        "weight_ih": bundle.take("kernel", d, 4 * h).T,
        "weight_hh": bundle.take("recurrent_kernel", h, 4 * h).T,
        "bias_ih": bias,
        "bias_hh": bundle.take("recurrent_norm/beta", 4 * h),
        "gain_ih": bundle.take("kernel_norm/gamma", 4 * h),
        "gain_hh": bundle.take("recurrent_norm/gamma", 4 * h),
        "gain_cell": bundle.take("state_norm/gamma", h),
        "bias_cell": bundle.take("state_norm/beta", h),
    }
    return _Cell(weights, "layer", "carry", None)


def _check_keras_paths(bundle: _Bundle) -> None:
    """Raise unless all keys come from one cell, since Keras names are identified by their last part only."""
    for names in (KERAS_ORDER[:3], KERAS_ORDER[3:]):
        paths = {bundle.where[name] for name in names if name in bundle.arrays}
        if len(paths) > 1:
            rule = "tf_addons weights must come from one cell"
            remedy = "Select one with prefix=, or pass cell.get_weights()."
            raise fail(rule, f"keys under {', '.join(map(repr, sorted(paths)))}", remedy)
    if "gamma" in bundle.arrays or "beta" in bundle.arrays:
        raise fail(
            "the key of a tf_addons gamma or beta must say which norm it belongs to",
            ", ".join(repr(bundle.where[name] + name) for name in ("gamma", "beta") if name in bundle.arrays),
            "Name it kernel_norm/gamma, recurrent_norm/gamma, ..., or pass the list cell.get_weights().",
        )


def _dreamer(bundle: _Bundle) -> _Cell:
    if any(name.startswith(("_layer.", "_norm.")) for name in bundle.arrays):
        return _joint_gru(bundle, "_layer", "_norm", None, hidden_first=False)
    return _joint_gru(bundle, "layers.GRU_linear", "layers.GRU_norm", 1e-3, hidden_first=False)


def _sheeprl(bundle: _Bundle) -> _Cell:
    return _joint_gru(bundle, "linear", "layer_norm", None, hidden_first=True)


def _joint_gru(bundle: _Bundle, linear: str, norm: str, eps: float | None, *, hidden_first: bool) -> _Cell:
    """Read [reset, cand, update] = LN(W [x; h]); h = u tanh(s(reset) cand) + (1 - u) h, u = s(update - 1)."""
    bundle.match((f"{linear}.weight", f"{norm}.weight", f"{norm}.bias"), (f"{linear}.bias",))
    rows, columns = bundle.matrix(f"{linear}.weight")
    h = rows // 3
    weight = bundle.take(f"{linear}.weight", 3 * h, columns)
    if columns <= h:
        raise bundle.wrong_shape(f"{linear}.weight", "[3H, D + H] with D > 0")
    if f"{linear}.bias" in bundle.arrays:
        _check_cancels(f"{bundle.source} {linear}.bias", bundle.take(f"{linear}.bias", 3 * h))
    of_hidden, of_input = (weight[:, :h], weight[:, h:]) if hidden_first else (weight[:, -h:], weight[:, :-h])
    order, bias = (0, 2, 1), bundle.take(f"{norm}.bias", 3 * h)
    weights = {
        "weight_ih": _reorder(of_input, order),
        "weight_hh": _reorder(of_hidden, order),
        "bias_ih": _reorder(bias, order),
        "bias_hh": torch.zeros_like(bias),
        "gain_sum": _reorder(bundle.take(f"{norm}.weight", 3 * h), order),
    }
    return _Cell(weights, "layer", "joint", eps)


def _check_cancels(what: str, bias: Tensor) -> None:
    """Raise unless all entries of a bias inside a norm are equal: then they shift the mean too and cancel."""
    if bool((bias != bias[0]).any()):
        low, high = bias.min().item(), bias.max().item()
        rule = f"{what} is inside the norm, where lamina has no bias, so all its entries must be equal"
        remedy = "Import weights that were trained with bias=False in that layer."
        raise fail(rule, f"values from {low:.4g} to {high:.4g}", remedy)


@dataclass(frozen=True)
class _Source:
    layer: type[nn.Module]
    cell: type[nn.Module]
    as_layer: bool  # default of import_weights' as_layer
    read: Callable[[_Bundle], _Cell]
    key: re.Pattern[str] = ONE_CELL  # groups: layer number, direction, name
    eps: str = ""  # remedy shown if the source uses several epsilons


SOURCES = {
    "haste_lstm": _Source(LSTM, LSTMCell, True, _haste_lstm),
    "haste_gru": _Source(GRU, GRUCell, True, _haste_gru),
    "fastrnns": _Source(
        LSTM, LSTMCell, True, _fastrnns, FASTRNNS, "Pass 1e-5, or 0 for a model built with decompose_layernorm=True."
    ),
    "torchaudio": _Source(
        LSTM, LSTMCell, True, _torchaudio, NUMBERED,
        "Pass the layer_norm_epsilon of its _CustomLSTM: 1e-3 in emformer_rnnt_base, 1e-5 by default.",
    ),
    "tf_addons": _Source(LSTM, LSTMCell, True, _tf_addons, KERAS, "Pass the cell's norm_epsilon, by default 1e-3."),
    "dreamer": _Source(
        GRU, GRUCell, False, _dreamer, eps="Pass the eps of the port's nn.LayerNorm; both 1e-3 and 1e-5 are in use."
    ),
    "sheeprl": _Source(
        GRU, GRUCell, False, _sheeprl, eps="Pass the eps of its layer_norm: 1e-3 in DreamerV3, 1e-5 in DreamerV2."
    ),
}  # fmt: skip


def import_weights(
    weights: Mapping[str, Any] | Sequence[Any], source: str,
    *, prefix: str = "", eps: float | None = None, as_layer: bool | None = None, **layer_options: Any,
) -> nn.Module:  # fmt: skip
    """Build a lamina layer or cell that computes the same function as the model the weights come from.

    ===============  ==================================================  =====================  ========
    source           weights of                                          result                 eps
    ===============  ==================================================  =====================  ========
    ``haste_lstm``   Haste ``LayerNormLSTM``                             LSTM, ``"paper"``      1e-5
    ``haste_gru``    Haste ``LayerNormGRU``                              GRU, ``"split"``       1e-5
    ``fastrnns``     PyTorch benchmarks/fastrnns LayerNorm LSTM: stack,  LSTM, ``"carry"``      required
                     bidirectional stack, one layer or a bare cell
    ``torchaudio``   torchaudio RNN-T ``_CustomLSTM``, one layer or a    LSTM, ``"joint"`` or   required
                     numbered list of them                               ``norm=None``
    ``tf_addons``    TensorFlow Addons ``LayerNormLSTMCell``             LSTM, ``"carry"``      required
    ``dreamer``      GRU cell of the DreamerV2/V3 PyTorch ports          GRUCell, ``"joint"``   1e-3 [1]
    ``sheeprl``      sheeprl ``LayerNormGRUCell``                        GRUCell, ``"joint"``   required
    ===============  ==================================================  =====================  ========

    The values are copied and keep their dtype. A single bias of a sum becomes ``bias_ih``, and ``bias_hh`` is zero.
    The call raises unless every key is known, present and of the right shape.

    Args:
        weights: a ``state_dict`` or another mapping from names to tensors or arrays; for ``tf_addons`` also the
            list that Keras' ``get_weights()`` returns.
        source: origin of the weights, a name in the table.
        prefix: use the keys under this prefix and ignore all others, e.g. ``"predictor.lstm_layers."``.
        eps: epsilon of the norms. A state_dict does not contain it, so it is required for every source that uses
            several values, such as torchaudio: 1e-3 in ``emformer_rnnt_base``, 1e-5 by default.
            [1]: 1e-3 for keys ``layers.GRU_linear``, ``layers.GRU_norm``; required for ``_layer``, ``_norm``.
        as_layer: True for a layer over whole sequences, False for a cell; the default is in the table.
        **layer_options: further options of the result, such as ``batch_first``, ``zoneout`` or ``device``.
    """
    one_of("source", source, SOURCES)
    origin = SOURCES[source]
    cells = _read_cells(source, _select(weights, source, prefix))
    layers, directions = _check_stack(source, cells)
    layer = origin.as_layer if as_layer is None else as_layer
    if not layer and len(cells) > 1:
        raise fail("a cell takes one layer in one direction", f"{len(cells)} cells", "Pass as_layer=True.")
    module_type = origin.layer if layer else origin.cell
    _check_options(module_type, layer_options)
    options = {**_norm_options(source, cells[0, 0], eps), **layer_options}
    if layer:
        options.update(num_layers=layers, bidirectional=directions == 2)
    return _build(module_type, cells, layer, options)


def _select(weights: Mapping[str, Any] | Sequence[Any], source: str, prefix: str) -> dict[str, Tensor]:
    """Return the arrays under ``prefix`` as tensors, with the prefix removed from their names."""
    if not isinstance(weights, Mapping):
        weights = _keras_list(weights, source)
    if prefix and prefix[-1] not in "./":
        prefix += "/" if any(str(key).startswith(f"{prefix}/") for key in weights) else "."
    named = {str(key): value for key, value in weights.items()}
    selected = {key[len(prefix) :]: value for key, value in named.items() if key.startswith(prefix)}
    if not weights:
        raise fail(f"{source} weights must hold the arrays of a cell", "an empty mapping", "Pass the state_dict.")
    if not selected:
        some = ", ".join(map(repr, list(weights)[:6]))
        raise fail(f"keys must begin with prefix={prefix!r}", some, "Pass the part of the keys before the names.")
    return {key: _tensor(prefix + key, value) for key, value in selected.items()}


def _keras_list(weights: Sequence[Any], source: str) -> dict[str, Any]:
    if source != "tf_addons" or not isinstance(weights, (list, tuple)):
        expected = "a mapping of names to arrays" + (" or a list of arrays" if source == "tf_addons" else "")
        remedy = "Pass its state_dict()." if isinstance(weights, nn.Module) else "Pass a state_dict."
        raise TypeError(f"{source} weights must be {expected}, got {type(weights).__name__}. {remedy}")
    names = [name for name in KERAS_ORDER if name != "bias" or len(weights) == len(KERAS_ORDER)]
    if len(weights) != len(names):
        rule = "get_weights() of a LayerNormLSTMCell holds 9 arrays, or 8 without a bias"
        raise fail(rule, f"{len(weights)} arrays", "Pass cell.get_weights() of the cell alone.")
    return dict(zip(names, weights))


def _tensor(key: str, value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else _from_array(key, value)
    if not tensor.is_floating_point():
        raise fail(f"{key!r} must hold floating-point numbers", describe(tensor), "Pass the weights themselves.")
    return tensor


def _from_array(key: str, value: Any) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"{key!r} must be a tensor or an array of numbers, got {type(value).__name__}. Convert it first."
        )
    # Copy, because the array may be read-only; convert to native byte order, because files may use the other one.
    return torch.tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def _read_cells(source: str, arrays: dict[str, Tensor]) -> dict[tuple[int, int], _Cell]:
    """Return the cells by layer and direction."""
    bundles: dict[tuple[int, int], _Bundle] = {}
    for key, array in arrays.items():
        match = SOURCES[source].key.fullmatch(key)
        if match is None:
            raise fail(f"{source} keys must end in a name", repr(key), "Drop that entry.")
        place = (int(match[1] or 0), int(match[2] or 0))
        name = match[3].replace(".", "/") if source == "tf_addons" else match[3]
        bundles.setdefault(place, _Bundle(source)).add(key, match.start(3), name, array)
    return {place: SOURCES[source].read(bundle) for place, bundle in sorted(bundles.items())}


def _check_stack(source: str, cells: Mapping[tuple[int, int], _Cell]) -> tuple[int, int]:
    """Return the numbers of layers and directions; raise unless the cells form a complete stack."""
    layers, directions = 1 + max(k for k, _ in cells), 1 + max(d for _, d in cells)
    expected = {(k, d) for k in range(layers) for d in range(directions)}
    if set(cells) != expected:
        names = [f"layer {k}, direction {d}" for k, d in sorted(expected - set(cells))]
        raise fail(f"{source} layers must be complete", f"no {'; '.join(names[:4])}", "Pass the whole state_dict.")
    first = cells[0, 0]
    for (k, _), cell in cells.items():
        inputs = first.input_size if k == 0 else directions * first.hidden_size
        if (cell.input_size, cell.hidden_size, cell.norm) != (inputs, first.hidden_size, first.norm):
            rule = f"{source} layer {k} must have input {inputs}, hidden {first.hidden_size}, norm {first.norm!r}"
            remedy = "A lamina layer has one hidden size. Import such layers one by one with prefix=."
            raise fail(rule, f"input {cell.input_size}, hidden {cell.hidden_size}, norm {cell.norm!r}", remedy)
    return layers, directions


def _norm_options(source: str, cell: _Cell, eps: float | None) -> dict[str, Any]:
    if cell.norm is None:
        if eps is not None:
            raise fail("eps= belongs to a norm", f"eps={eps}, and weights without a norm", "Drop eps=.")
        return {"norm": None}
    if eps is None and cell.eps is None:
        rule = f"{source} weights need eps=, because models of this source use different values and do not store them"
        raise fail(rule, "eps=None", SOURCES[source].eps)
    value = cell.eps if eps is None else epsilon(eps)
    return {"norm": cell.norm, "placement": cell.placement, "eps": value}


def _check_options(module_type: type[nn.Module], options: Mapping[str, Any]) -> None:
    """Raise if an option is unknown or determined by the weights."""
    known = inspect.signature(module_type).parameters
    reasons = dict.fromkeys(FIXED_BY_SOURCE, "is determined by the weights")
    reasons |= dict.fromkeys(INITIAL_VALUES, "sets initial values, which the weights replace")
    for name, value in options.items():
        if name in reasons:
            raise fail(f"{name} {reasons[name]}", f"{name}={value!r}", f"Drop {name}=.")
        one_of(f"an option of {module_type.__name__}", name, [k for k in known if k not in reasons])


def _build(
    module_type: type[nn.Module], cells: Mapping[tuple[int, int], _Cell], layer: bool, options: dict[str, Any]
) -> nn.Module:
    named = {
        name + (f"_l{k}{'_reverse' if d else ''}" if layer else ""): tensor
        for (k, d), cell in cells.items()
        for name, tensor in cell.weights.items()
    }
    first = cells[0, 0]
    device = torch.device(options.pop("device", None) or first.weights["weight_ih"].device)
    with initial_values_discarded(device):
        module = module_type(first.input_size, first.hidden_size, device=device, dtype=_one_dtype(named), **options)
    with torch.no_grad():
        for name, tensor in named.items():
            module.get_parameter(name).copy_(tensor)
    return module


def _one_dtype(named: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in named.values()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise fail("all weights must have one dtype", names, "Convert them to one dtype first.")
    return dtypes.pop()
