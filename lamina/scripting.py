"""Support for torch.fx and torch.jit.script."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.fx import Proxy

from .checks import fail

Module = TypeVar("Module", bound=nn.Module)


def symbolic(input: object) -> bool:
    """Return whether torch.fx is tracing the caller, which then receives a proxy instead of a tensor."""
    return isinstance(input, Proxy)


def leaf(module: nn.Module, input: Any, **options: Any) -> Any:
    """Record a call of ``module`` as one node of the graph, as torch.fx does for the modules of torch.nn.

    torch.fx recognises leaf modules by the name "torch.nn" only, so it traces into ``forward``, which calls this.
    """
    path = input.tracer.path_of_module(module)
    if not path:
        rule = "torch.fx records a lamina module as one node, so it cannot trace the module on its own"
        raise fail(rule, type(module).__name__, "Wrap it in another module, for example torch.nn.Sequential.")
    keywords = {name: value for name, value in options.items() if value is not None}
    return input.tracer.create_proxy("call_module", path, (input,), keywords)


def refuse(module: nn.Module) -> Any:
    """Raise an error that names the alternatives to torch.jit.script."""
    raise fail(
        "torch.jit.script compiles only two of lamina's modules: LayerNorm, and Linear with norm=None or 'layer', each "
        "with eps_mode='var', an eps above 0 and no activation",
        f"{type(module).__name__}({module.extra_repr()})",
        "Use torch.export, torch.compile or torch.jit.trace.",
    )


def scriptable(module: nn.Module, form: type[Module]) -> Module:
    """Return ``module`` as an instance of ``form``, with the same attributes and the same name."""
    converted = form.__new__(form)
    converted.__dict__ = module.__dict__
    return converted
