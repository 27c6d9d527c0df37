"""Replacement of every torch.nn recurrence and LayerNorm in a model by lamina's, with weights and hooks kept."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from .baselines import weight_norm_gain
from .cells import GRUCell, LSTMCell, RNNCell
from .checks import describe, fail, one_of
from .layers import LayerNorm
from .options import Options, initial_values_discarded
from .placements import NORMS
from .recurrent import GRU, LSTM, RNN
from .recurrent_module import RecurrentModule

LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}
CELLS: dict[type[nn.Module], type[nn.Module]] = {nn.RNNCell: RNNCell, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell}
RECURRENT = {**LAYERS, **CELLS}

Selection = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class Change:
    """Record of one replaced module: its path and the reprs before and after."""

    path: str
    before: str
    after: str
    shared: tuple[str, ...] = ()  # further paths to the same module
    added: tuple[str, ...] = ()  # full names of new parameters: the gains


@dataclass(frozen=True)
class Skipped:
    """Record of one module of a convertible type that was not replaced."""

    path: str
    kind: str
    reason: str


class Changes(list[Change]):
    """List of the replaced modules; ``str`` returns a table. ``skipped`` lists the others with reasons."""

    def __init__(self, changes: list[Change], skipped: list[Skipped]) -> None:
        super().__init__(changes)
        self.skipped = skipped

    def __str__(self) -> str:
        rows = [(_shown_path(c.path, c.shared), c.before, f"-> {c.after}") for c in self]
        text = _table(f"{len(self)} converted", rows)
        skipped = [(_shown_path(s.path), s.kind, s.reason) for s in self.skipped]
        return text + ("\n" + _table(f"{len(skipped)} left alone", skipped) if skipped else "")


class Conversion(NamedTuple):
    """Result of ``model, changes = lamina.convert(model)``."""

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
    """Replacements of a model's modules, built but not yet installed."""

    replacements: dict[nn.Module, nn.Module] = field(default_factory=dict)
    paths: dict[nn.Module, list[str]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def convert(
    model: nn.Module,
    norm: str | None = "layer",
    *,
    layer_norm: bool = True,
    include: Selection = None,
    exclude: Selection = None,
    **options: Any,
) -> Conversion:
    """Replace every RNN, LSTM, GRU, cell and LayerNorm of ``torch.nn`` in a model by lamina's, in place.

    Parameters stay the same objects, so tied weights and ``requires_grad`` are kept, as are devices, dtypes, training
    flags and hooks. With ``norm=None`` the model computes the same function up to rounding. With a norm it computes
    another one: convert first, then train or fine-tune. Converting trained weights to a norm raises a warning.

    The gains of a norm are new parameters (``Change.added``), frozen if all parameters of the module were. Create the
    optimiser after converting, or add them to the existing one::

        model, changes = lamina.convert(model)
        new = [model.get_parameter(name) for change in changes for name in change.added]
        optimizer.add_param_group({"params": new})

    Args:
        model: any module. If it is itself an LSTM or another convertible module, the returned model is a new object.
        norm: "layer", "batch", "weight" or None, for the recurrent modules. "weight" keeps the function too.
        layer_norm: replace ``nn.LayerNorm`` too.
        include: modules to replace, by default all: a pattern for their paths such as ``"encoder.*"``, a list of
            patterns, or a predicate ``(path, module) -> bool``.
        exclude: modules to keep, in the same form.
        **options: options of the recurrent modules, such as ``placement``, ``eps``, ``zoneout`` or ``backend``, see
            ``lamina.LSTM``. An option that does not fit one of the modules raises before anything is changed.

    Returns:
        (model, changes): ``print(changes)`` shows which modules were replaced and which were left alone, such as a
        subclass of nn.LSTM, or an nn.LSTM under weight normalisation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, got {describe(model)}. Pass the model itself.")
    one_of("norm", norm, NORMS)
    _check_options(options)
    plan = _plan(model, {"norm": norm, **options}, layer_norm, {"include": include, "exclude": exclude})
    _warn_if_function_changes(plan, {"norm": norm, **options})
    changes = [_change(plan.paths[old], old, new) for old, new in plan.replacements.items()]
    for old, new in plan.replacements.items():
        _move_hooks(old, new)
    _swap(model, plan.replacements)
    return Conversion(plan.replacements.get(model, model), Changes(changes, plan.skipped))


def _check_options(options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Options) if f.name not in ("norm", "forget_bias")]
    for name, value in options.items():
        if name == "forget_bias":
            rule = "convert keeps the biases of the model, so it cannot set forget_bias"
            remedy = "Drop it. To change the forget bias, fill the forget quarter of bias_ih after converting."
            raise fail(rule, f"forget_bias={value!r}", remedy)
        one_of("an option of convert", name, known)


def _plan(model: nn.Module, options: dict[str, Any], layer_norm: bool, selections: Mapping[str, Selection]) -> _Plan:
    plan = _Plan(paths=_paths(model))
    types = (*RECURRENT, RecurrentModule, *((nn.LayerNorm, LayerNorm) if layer_norm else ()))
    candidates = {module: plan.paths[module] for module in model.modules() if isinstance(module, types)}
    for name, selection in selections.items():
        _check_selection(name, selection, [path for paths in candidates.values() for path in paths])
    for module, paths in candidates.items():
        reason = _reason_not_chosen(paths, module, **selections) or _reason_to_skip(module)
        if reason is None:
            plan.replacements[module] = _replacement(module, options)
        else:
            plan.skipped.append(Skipped(paths[0], _kind(module), reason))
    return plan


def _check_selection(name: str, selection: Selection, paths: Sequence[str]) -> None:
    """Raise unless ``selection`` is None, a predicate or patterns that each match a module."""
    if isinstance(selection, type) or not (selection is None or callable(selection) or isinstance(selection, Iterable)):
        raise TypeError(
            f"{name} must be a pattern, a list of patterns or a predicate, got {describe(selection)}. "
            "Pass for example 'encoder.*' or lambda path, module: isinstance(module, nn.LSTM)."
        )
    for pattern in _patterns(selection):
        if not any(fnmatchcase(path, pattern) for path in paths):
            known = ", ".join(map(repr, paths[:12])) or "none"
            raise fail(f"{name} must match a module to convert", repr(pattern), f"Choose from these paths: {known}.")


def _patterns(selection: Selection) -> Sequence[str]:
    if selection is None or callable(selection):
        return ()
    return (selection,) if isinstance(selection, str) else selection


def _matches(selection: Selection, paths: Sequence[str], module: nn.Module) -> bool:
    if callable(selection):
        return any(selection(path, module) for path in paths)
    return any(fnmatchcase(path, pattern) for path in paths for pattern in _patterns(selection))


def _reason_not_chosen(paths: Sequence[str], module: nn.Module, include: Selection, exclude: Selection) -> str | None:
    if include is not None and not _matches(include, paths, module):
        return "does not match include="
    return "matches exclude=" if _matches(exclude, paths, module) else None


def _warn_if_function_changes(plan: _Plan, options: Mapping[str, Any]) -> None:
    """Warn, before anything is changed, if trained modules will compute another function."""
    same = options["norm"] is None or (options["norm"] == "weight" and options.get("gain_init") is None)
    if same and not options.get("zoneout"):
        return
    trained = [plan.paths[old][0] or "the model itself" for old in plan.replacements if _trained(old)]
    if trained:
        warnings.warn(
            f"convert with norm={options['norm']!r} changes what the model computes, and these modules have weights "
            f"that were trained or set by hand: {', '.join(trained)}. Fine-tune the converted model with an optimiser "
            "created after convert, or pass norm=None to keep its function.",
            stacklevel=3,
        )


def _trained(module: nn.Module) -> bool:
    """Return whether a weight lies outside the interval of torch.nn's initialisation, +-1/sqrt(hidden_size)."""
    if type(module) not in RECURRENT:
        return False
    bound = 1.01 / math.sqrt(module.hidden_size or 1)  # type: ignore[arg-type]  # 1 %: rounding to bfloat16
    weights = [p for name, p in module.named_parameters() if name.startswith("weight_") and not p.is_meta]
    return any(bool((weight.detach().abs() > bound).any()) for weight in weights)


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all paths of each module; parents count under their first path only, so cycles terminate."""
    paths: dict[nn.Module, list[str]] = {model: [""]}
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                paths.setdefault(child, []).append(f"{path}.{name}" if path else name)
    return paths


def _kind(module: nn.Module) -> str:
    home = type(module).__module__
    return f"{'nn' if home.startswith('torch.nn.') else home}.{type(module).__qualname__}"


def _reason_to_skip(module: nn.Module) -> str | None:
    if isinstance(module, (RecurrentModule, LayerNorm)):
        return "is already a lamina module"
    if parametrize.is_parametrized(module):
        return "has parametrizations; remove them first or use norm='weight' in place of weight norm"
    if type(module) not in RECURRENT and type(module) is not nn.LayerNorm:
        return "is a subclass that may compute something else; convert it by hand"
    if "forward" in vars(module):
        return "has its own forward on the instance"
    return _reason_of_contents(module)


def _reason_of_contents(module: nn.Module) -> str | None:
    """Return why the parameters prevent conversion: renamed by weight norm, spectral norm or pruning, or added."""
    expected, names = ({n for n, p in m._parameters.items() if p is not None} for m in (_plain(module), module))
    unexpected = (names ^ expected) | {name for name, _ in module.named_buffers(recurse=False)} | set(module._modules)
    if not unexpected:
        return None
    return f"its parameters are not those of a plain {type(module).__name__}: {', '.join(sorted(unexpected))}"


def _plain(module: nn.Module) -> nn.Module:
    return _built(type(module), module, torch.device("meta"))


def _replacement(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    like = next(module.parameters(), None)
    factory: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    if type(module) is nn.LayerNorm:
        new = _built(LayerNorm, module, **factory)
    else:
        new = _built(RECURRENT[type(module)], module, **factory, **options)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(new, name, parameter)
    _initialise_added(new, module)
    _copy_attributes(module, new)
    return new.train(module.training)


def _built(kind: type[nn.Module], like: nn.Module, device: Any = None, **options: Any) -> nn.Module:
    """Build a module of type ``kind``, torch's or lamina's, with the constructor arguments of ``like``."""
    with initial_values_discarded(device), warnings.catch_warnings():
        # nn.LSTM has already given the warning.
        warnings.filterwarnings("ignore", message="dropout (option adds|acts between recurrent layers)")
        return kind(**_arguments(like), device=device, **options)


def _arguments(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.LayerNorm):
        same = {name: getattr(module, name) for name in ("normalized_shape", "eps", "elementwise_affine")}
        return {**same, "bias": module.bias is not None}
    parameters = inspect.signature(RECURRENT[type(module)]).parameters.values()  # torch's come first, by position
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in ("device", "dtype")]
    flags = ("bias", "batch_first", "bidirectional")  # torch does not check the type of some of them
    return {name: bool(getattr(module, name)) if name in flags else getattr(module, name) for name in names}


def _added(new: nn.Module, old: nn.Module) -> list[str]:
    return [name for name, _ in new.named_parameters() if name not in old._parameters]


def _initialise_added(new: nn.Module, old: nn.Module) -> None:
    """Set weight norm's gains to the row norms of the kept weights, and freeze the gains of a frozen module."""
    frozen = not any(parameter.requires_grad for parameter in old.parameters())
    follow_weights = isinstance(new, RecurrentModule) and new.norm == "weight" and new.options.gain_init is None
    for name in _added(new, old):
        parameter = new.get_parameter(name).requires_grad_(not frozen)
        if follow_weights and name.startswith("gain_"):
            with torch.no_grad():
                parameter.copy_(weight_norm_gain(new.get_parameter(name.replace("gain", "weight"))))


def _copy_attributes(old: nn.Module, new: nn.Module) -> None:
    """Copy attributes that the user added to the module, since other code may read them."""
    plain = vars(_plain(old))
    for name, value in vars(old).items():
        if name not in plain and not hasattr(new, name):
            setattr(new, name, value)


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the same dict objects, because the handles that remove hooks hold references to them."""
    for name, hooks in vars(old).items():
        if "_hook" not in name:
            continue
        if isinstance(hooks, dict):
            hooks.update(vars(new)[name])
        vars(new)[name] = hooks
    for hook in vars(new)["_load_state_dict_pre_hooks"].values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # it refers to the module it was registered on, which is replaced


def _swap(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _change(paths: list[str], old: nn.Module, new: nn.Module) -> Change:
    before, after = (f"{package}.{type(m).__name__}({m.extra_repr()})" for package, m in (("nn", old), ("lamina", new)))
    path, *shared = paths
    added = tuple(f"{path}.{name}" if path else name for name in _added(new, old))
    return Change(path, before, after, tuple(shared), added)
