"""torch.fx and torch.jit.script of lamina's modules."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.fx import Proxy

from .checks import fail

Module = TypeVar("Module", bound=nn.Module)


def symbolic(input: object) -> bool:
    """Whether torch.fx traces the caller: its inputs stand for tensors."""
    return isinstance(input, Proxy)


def leaf(module: nn.Module, input: Any, **options: Any) -> Any:
    """Record a call of ``module`` as one node of the graph, as torch.fx does for the modules of torch.nn.

    torch.fx knows its leaves by the name "torch.nn", so ``forward`` meets the symbolic input and comes here.
    """
    path = input.tracer.path_of_module(module)
    if not path:
        raise fail(
            "torch.fx records a module of lamina as one node, so it cannot be the traced model itself",
            type(module).__name__,
            "Wrap it, for example in torch.nn.Sequential.",
        )
    given = {name: value for name, value in options.items() if value is not None}
    return input.tracer.create_proxy("call_module", path, (input,), given)


def refuse(module: nn.Module) -> Any:
    """Raise an error that names what serves instead of torch.jit.script."""
    raise fail(
        "of lamina's modules torch.jit.script compiles LayerNorm, and Linear with norm=None or 'layer', both with "
        "eps_mode='var', an eps above 0 and no activation",
        f"{type(module).__name__}({module.extra_repr()})",
        "Use torch.export, torch.compile or torch.jit.trace.",
    )


def scriptable(module: nn.Module, form: type[Module]) -> Module:
    """Return ``module`` as an instance of ``form``, with the same attributes and the same name."""
    found = form.__new__(form)
    found.__dict__ = module.__dict__
    return found
