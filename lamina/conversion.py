"""Swap every torch.nn recurrence and LayerNorm inside a model for lamina's, weights and hooks kept."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from .baselines import weight_norm_gain
from .cells import GRUCell, LSTMCell, RNNCell
from .checks import describe, fail, one_of
from .layers import LayerNorm
from .options import Options
from .placements import NORMS
from .recurrent import GRU, LSTM, RNN
from .recurrent_base import RecurrentModule

LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}
CELLS: dict[type[nn.Module], type[nn.Module]] = {nn.RNNCell: RNNCell, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell}
RECURRENT = {**LAYERS, **CELLS}


@dataclass(frozen=True)
class Change:
    """One module that was replaced: its path and what stood and stands there, as text."""

    path: str
    before: str
    after: str
    shared: tuple[str, ...] = ()  # further paths to the same module
    added: tuple[str, ...] = ()  # full names of parameters that were not there before: the gains


@dataclass(frozen=True)
class Skipped:
    """One module that looks convertible and was left alone."""

    path: str
    kind: str
    reason: str


class Changes(list[Change]):
    """What ``convert`` did; ``str`` gives a table. ``skipped`` lists what it left alone and why."""

    def __init__(self, changes: list[Change], skipped: list[Skipped]) -> None:
        super().__init__(changes)
        self.skipped = skipped

    def __str__(self) -> str:
        rows = [(_shown_path(c.path, c.shared), c.before, f"-> {c.after}") for c in self]
        text = _table(f"{len(self)} converted", rows)
        left = [(_shown_path(s.path), s.kind, s.reason) for s in self.skipped]
        return text + ("\n" + _table(f"{len(left)} left alone", left) if left else "")


class Conversion(NamedTuple):
    """``model, changes = lamina.convert(model)``."""

    model: nn.Module
    changes: Changes


def _shown_path(path: str, shared: tuple[str, ...] = ()) -> str:
    return ", ".join(name or "(the model itself)" for name in (path, *shared))


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    return "\n".join([title, *lines])


@dataclass
class _Plan:
    """The replacements of a model's modules, built and not yet put in place."""

    replacements: dict[nn.Module, nn.Module] = field(default_factory=dict)
    paths: dict[nn.Module, list[str]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def convert(model: nn.Module, norm: str | None = "layer", *, layer_norm: bool = True, **options: Any) -> Conversion:
    """Replace in place every RNN, LSTM, GRU, their cells and LayerNorm of ``torch.nn`` by lamina's.

    Parameters stay the same objects, so optimisers, tied weights and ``requires_grad`` go on as before; devices,
    dtypes, training flags and hooks stay too. With ``norm=None`` the numbers stay the same; with a norm the model
    gains parameters (``Change.added``), frozen where all of the module's own were. An optimiser that was built
    before does not know them::

        model, changes = lamina.convert(model)
        new = [model.get_parameter(name) for change in changes for name in change.added]
        optimizer.add_param_group({"params": new})

    Args:
        model: any module; where it is itself an LSTM or the like, the returned model is a new object.
        norm: "layer", "batch", "weight" or None, for the recurrent modules.
        layer_norm: whether to replace ``nn.LayerNorm`` too.
        **options: options of the recurrent modules, such as ``placement``, ``eps``, ``zoneout`` or ``backend``. An
            option that does not suit one of the modules is refused before anything is changed.

    Returns:
        (model, changes): ``print(changes)`` shows what was replaced and what was left alone, such as a subclass
        of nn.LSTM, or an nn.LSTM under weight normalisation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, got {describe(model)}. Pass the model itself.")
    one_of("norm", norm, NORMS)
    _check_options(options)
    plan = _plan(model, {"norm": norm, **options}, layer_norm)
    changes = [_change(plan.paths[old], old, new) for old, new in plan.replacements.items()]
    for old, new in plan.replacements.items():
        _move_hooks(old, new)
    _swap(model, plan.replacements)
    return Conversion(plan.replacements.get(model, model), Changes(changes, plan.skipped))


def _check_options(options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Options) if f.name not in ("norm", "forget_bias")]
    for name, value in options.items():
        if name == "forget_bias":
            raise fail(
                "forget_bias sets a start value, and convert keeps the biases the model has",
                f"forget_bias={value!r}",
                "Drop it; fill the forget quarter of bias_ih yourself if you want it changed.",
            )
        one_of("an option of convert", name, known)


def _plan(model: nn.Module, options: dict[str, Any], layer_norm: bool) -> _Plan:
    plan = _Plan(paths=_paths(model))
    kinds = (*RECURRENT, RecurrentModule, *((nn.LayerNorm, LayerNorm) if layer_norm else ()))
    for path, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        reason = _reason_to_skip(module)
        if reason is None:
            plan.replacements[module] = _replacement(module, options)
        else:
            plan.skipped.append(Skipped(path, _kind(module), reason))
    return plan


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every path at which a parent holds each module; parents by their first path, so cycles do no harm."""
    paths: dict[nn.Module, list[str]] = {model: [""]}
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                paths.setdefault(child, []).append(f"{path}.{name}" if path else name)
    return paths


def _kind(module: nn.Module) -> str:
    where = type(module).__module__
    return f"{'nn' if where.startswith('torch.nn.') else where}.{type(module).__qualname__}"


def _reason_to_skip(module: nn.Module) -> str | None:
    if isinstance(module, (RecurrentModule, LayerNorm)):
        return "is lamina's already"
    if parametrize.is_parametrized(module):
        return "has parametrizations; remove them first or use norm='weight' in place of weight norm"
    if type(module) not in RECURRENT and type(module) is not nn.LayerNorm:
        return "is a subclass that may compute something else; convert it by hand"
    if "forward" in vars(module):
        return "has a forward of its own on the instance"
    return _reason_of_contents(module)


def _reason_of_contents(module: nn.Module) -> str | None:
    """Weight norm, spectral norm and pruning by hooks rename parameters; others may have added their own."""
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    strange = own ^ _torch_parameters(module)
    strange |= {name for name, _ in module.named_buffers(recurse=False)} | set(module._modules)
    if not strange:
        return None
    return f"its parameters are not those of a plain {type(module).__name__}: {', '.join(sorted(strange))}"


def _torch_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters that torch gives to a module of this kind and these options."""
    if isinstance(module, nn.LayerNorm):
        return {"weight", *(["bias"] if module.bias is not None else [])} if module.elementwise_affine else set()
    if isinstance(module, nn.RNNBase):
        return {name for cell in module._all_weights for name in cell}
    return {"weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])}


def _replacement(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    like = next(module.parameters(), None)
    factory: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    with _undisturbed(like), warnings.catch_warnings():
        # nn.LSTM has said so already.
        warnings.filterwarnings("ignore", message="dropout acts between recurrent layers")
        if isinstance(module, nn.LayerNorm):
            new: nn.Module = LayerNorm(**_layer_norm_arguments(module), **factory)
        else:
            new = RECURRENT[type(module)](**_recurrent_arguments(module), **factory, **options)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(new, name, parameter)
    _settle_added(new, module)
    _copy_attributes(module, new)
    return new.train(module.training)


def _undisturbed(like: torch.Tensor | None) -> AbstractContextManager[None]:
    """Start values are drawn and thrown away: leave the user's random numbers as they were."""
    return torch.random.fork_rng(devices=[like.device] if like is not None and like.is_cuda else [])


def _layer_norm_arguments(module: nn.LayerNorm) -> dict[str, Any]:
    return {
        "normalized_shape": module.normalized_shape,
        "eps": module.eps,
        "elementwise_affine": module.elementwise_affine,
        "bias": module.bias is not None,
    }


def _recurrent_arguments(module: nn.Module) -> dict[str, Any]:
    names = ["input_size", "hidden_size", "bias"]
    if isinstance(module, nn.RNNBase):
        names += ["num_layers", "batch_first", "dropout", "bidirectional"]
    if isinstance(module, nn.LSTM):
        names.append("proj_size")
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        names.append("nonlinearity")
    flags = ("bias", "batch_first", "bidirectional")  # torch takes any value for some of them
    return {name: bool(getattr(module, name)) if name in flags else getattr(module, name) for name in names}


def _added(new: nn.Module, old: nn.Module) -> list[str]:
    return [name for name, _ in new.named_parameters() if name not in old._parameters]


def _settle_added(new: nn.Module, old: nn.Module) -> None:
    """Weight norm's gains start at the row norms of the kept weights; the gains of a frozen module are frozen."""
    frozen = not any(parameter.requires_grad for parameter in old.parameters())
    follow_weights = isinstance(new, RecurrentModule) and new.norm == "weight" and new.options.gain_init is None
    for name in _added(new, old):
        parameter = new.get_parameter(name).requires_grad_(not frozen)
        if follow_weights and name.startswith("gain_"):
            with torch.no_grad():
                parameter.copy_(weight_norm_gain(new.get_parameter(name.replace("gain", "weight"))))


def _copy_attributes(old: nn.Module, new: nn.Module) -> None:
    """Attributes that the user hung on the module, which the code around it may read."""
    blank = type(old)(1, device="meta") if isinstance(old, nn.LayerNorm) else type(old)(1, 1, device="meta")
    for name, value in vars(old).items():
        if name not in vars(blank) and not hasattr(new, name):
            setattr(new, name, value)


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand over the very dictionaries: the handles that remove hooks hold references to them."""
    for name, kept in vars(old).items():
        if "_hook" not in name:
            continue
        if isinstance(kept, dict):
            kept.update(vars(new)[name])
        vars(new)[name] = kept
    for hook in vars(new)["_load_state_dict_pre_hooks"].values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # such a hook holds the module it was registered on, and that one goes


def _swap(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _change(paths: list[str], old: nn.Module, new: nn.Module) -> Change:
    before, after = (f"{where}.{type(m).__name__}({m.extra_repr()})" for where, m in (("nn", old), ("lamina", new)))
    path, *shared = paths
    added = tuple(f"{path}.{name}" if path else name for name in _added(new, old))
    return Change(path, before, after, tuple(shared), added)
