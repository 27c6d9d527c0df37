"""Layer Normalization (Ba, Kiros, Hinton 2016) for PyTorch.

Layers are drop-in for ``torch.nn``: ``lamina.LSTM(128, 256)`` where ``torch.nn.LSTM(128, 256)`` stood, or
``lamina.convert(model)`` for a whole model. ``lamina.reference`` holds the equations, ``lamina.placements`` the
published variants, ``lamina.explain(layer)`` says which backend runs and why.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Names are fetched when first used: torch takes seconds to import, and ``lamina --help`` needs none of it.
if TYPE_CHECKING:
    from . import analysis, baselines, functional, optim, options, placements, reference
    from .baselines import BatchNorm
    from .cells import GRUCell, LSTMCell, RNNCell
    from .checks import BackendError, InputError
    from .conversion import convert
    from .functional import explain
    from .importers import import_weights
    from .layers import Conv2d, LayerNorm, Linear, NoisyLayerNorm
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
    # moving in
    "convert",
    "import_weights",
    # one frame at a time
    "stream",
    # which backend, and why
    "explain",
    "BackendError",
    "InputError",
    # rooms
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
    },
}


# A saved program (torch.export, AOTInductor) finds lamina's operators by name: ``functional`` registers them. It is
# loaded at once where torch is there already, else with the first layer.
if sys.modules.get("torch") is not None:
    import_module(".functional", __name__)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        if _HOME[name] != "errors":
            import_module(".functional", __name__)
        found = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name in __all__:
        found = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
