"""Layer Normalization (Ba, Kiros, Hinton 2016) for PyTorch.

Layers are drop-in for ``torch.nn``: ``lamina.LSTM(128, 256)`` where ``torch.nn.LSTM(128, 256)`` stood, or
``lamina.convert(model)`` for a whole model. ``lamina.reference`` holds the equations, ``lamina.placements`` the
published variants, ``lamina.explain(layer)`` says which backend runs and why.
"""

from . import baselines, functional, placements, reference
from .baselines import BatchNorm
from .cells import GRUCell, LSTMCell, RNNCell
from .checks import BackendError, InputError
from .convert import convert
from .functional import explain
from .importers import import_weights
from .layers import Conv2d, LayerNorm, Linear, NoisyLayerNorm
from .recurrent import GRU, LSTM, RNN

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
    # which backend, and why
    "explain",
    "BackendError",
    "InputError",
    # rooms
    "baselines",
    "functional",
    "placements",
    "reference",
]
