"""Layer Normalization (Ba, Kiros, Hinton 2016) for PyTorch.

Layers are drop-in replacements for ``torch.nn``: write ``lamina.LSTM(128, 256)`` for ``torch.nn.LSTM(128, 256)``, or
call ``lamina.convert(model)`` on a whole model. ``lamina.reference`` holds the equations, ``lamina.placements`` the
published variants, and ``lamina.explain(layer)`` reports which backend runs and why.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Names are imported lazily: torch takes seconds to import, and ``lamina --help`` does not need it.
if TYPE_CHECKING:
    from . import analysis, baselines, functional, optim, options, placements, reference
    from .baselines import BatchNorm
    from .cells import GRUCell, LSTMCell, RNNCell
    from .checks import BackendError, InputError
    from .conversion import convert
    from .functional import explain
    from .importers import import_weights
    from .layers import Conv2d, LayerNorm, Linear, NoisyLayerNorm
    from .looping import loop
    from .recurrent import GRU, LSTM, RNN
    from .streaming import stream

__version__ = "0.1.0"

__all__ = [
    # recurrent layers and cells
    "RNN",
    "LSTM",
    "GRU",
    "RNNCell",
    "LSTMCell",
    "GRUCell",
    # feed-forward layers
    "LayerNorm",
    "NoisyLayerNorm",
    "Linear",
    "Conv2d",
    "BatchNorm",
    # migration
    "convert",
    "import_weights",
    # a frame at a time, a step at a time
    "stream",
    "loop",
    # backends and errors
    "explain",
    "BackendError",
    "InputError",
    # submodules
    "analysis",
    "baselines",
    "functional",
    "optim",
    "options",
    "placements",
    "reference",
]

_HOME = {
    **dict.fromkeys(("RNN", "LSTM", "GRU"), "recurrent"),
    **dict.fromkeys(("RNNCell", "LSTMCell", "GRUCell"), "cells"),
    **dict.fromkeys(("LayerNorm", "NoisyLayerNorm", "Linear", "Conv2d"), "layers"),
    **dict.fromkeys(("BackendError", "InputError"), "errors"),
    **{
        "BatchNorm": "baselines",
        "convert": "conversion",
        "import_weights": "importers",
        "explain": "functional",
        "stream": "streaming",
        "loop": "looping",
    },
}


# Saved programs (torch.export, AOTInductor) look up lamina's operators by name, and importing ``functional`` registers
# them. Import it now if torch is already loaded, otherwise together with the first layer.
if sys.modules.get("torch") is not None:
    import_module(".functional", __name__)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        if _HOME[name] != "errors":
            import_module(".functional", __name__)
        member = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name in __all__:
        member = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = member
    return member


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
