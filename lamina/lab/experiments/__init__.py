"""The experiments' sheets: settings, the paper's claims and how each is judged and drawn. No torch in this room."""

from __future__ import annotations

from ...errors import one_of
from ..experiment import Sheet
from .attentive_reader.settings import SHEET as ATTENTIVE_READER
from .convnet.settings import SHEET as CONVNET
from .mnist.settings import SHEET as MNIST
from .order_embeddings.settings import SHEET as ORDER_EMBEDDINGS
from .skip_thoughts.settings import SHEET as SKIP_THOUGHTS

_SHEETS = MNIST, CONVNET, ORDER_EMBEDDINGS, ATTENTIVE_READER, SKIP_THOUGHTS
SHEETS: dict[str, Sheet] = {sheet.name: sheet for sheet in _SHEETS}


def find(name: str) -> Sheet:
    """Return the sheet of an experiment; an unknown name gets the nearest one suggested."""
    one_of("experiment", name, SHEETS)
    return SHEETS[name]
