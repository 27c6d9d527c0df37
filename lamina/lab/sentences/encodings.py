"""Vectors of a task's sentences: checked, each different sentence encoded once, and kept on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import fail, show
from ..data import array_cache
from ..data.formats import Array
from .tasks import Task

Encode = Callable[[list[str]], Any]
Say = Callable[[str], object]
BLOCK = 1024  # sentences for one call of an encoder
PROBED = 4  # sentences whose vectors tell one encoder from another
CLOSE = 1e-3  # relative difference that another batch size or device may make


class Encoder:
    """A caller's ``encode``, with checks of what it returns, and a folder for the vectors."""

    def __init__(self, encode: Encode, cache: Path | None, say: Say) -> None:
        self._encode, self._cache, self._say = encode, cache, say
        self._width: int | None = None

    def probe(self, task: Task) -> list[float]:
        """Return eight numbers that tell this encoder's vectors of the task from another's."""
        vectors = self._checked([*dict.fromkeys(task.texts())][:PROBED]).astype(np.float64)
        waves = np.cos(np.outer(np.arange(vectors.shape[1]), (0.7, 1.9)))
        return [float(f"{number:.6g}") for number in (vectors @ waves).ravel()]

    def vectors(self, task: Task, probe: Sequence[float]) -> dict[str, Array]:
        """Return the vector of each sentence, from the cache if it holds this encoder's."""
        texts = [*dict.fromkeys(task.texts())]
        matrix = self._cached(task.name, texts, probe) if self._cache else self._encoded(task.name, texts)
        return dict(zip(texts, matrix))

    def _cached(self, name: str, texts: list[str], probe: Sequence[float]) -> Array:
        folder = Path(str(self._cache)) / name
        digest = hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()
        held = array_cache.read(folder)
        if held and held[1].get("sentences") == digest and same_encoder(held[1].get("probe", ()), probe):
            return held[0]["vectors"]
        matrix = self._encoded(name, texts)
        if not array_cache.write(folder, {"vectors": matrix}, {"sentences": digest, "probe": [*probe]}):
            self._say(f"{name}: the vectors could not be kept in {folder}")
        return matrix

    def _encoded(self, name: str, texts: list[str]) -> Array:
        blocks = []
        for start in range(0, len(texts), BLOCK):
            blocks.append(self._checked(texts[start : start + BLOCK]))
            self._say(f"{name}: {min(start + BLOCK, len(texts)):,} of {len(texts):,} sentences encoded")
        return np.concatenate(blocks)

    def _checked(self, sentences: list[str]) -> Array:
        """Return vectors as float32 [sentences, D]."""
        vectors = _array(self._encode(list(sentences)))
        shaped = vectors.ndim == 2 and len(vectors) == len(sentences) and vectors.size
        if not shaped or vectors.dtype.kind not in "fiu":
            rule = f"encode must return numbers [{len(sentences)}, D] for {len(sentences)} sentences"
            raise fail(rule, show(vectors), "Return one vector for each sentence, in their order.")
        if self._width not in (None, vectors.shape[1]):
            received = f"{vectors.shape[1]} after {self._width}"
            raise fail("encode must return vectors of one size D", received, "Return the same D for every list.")
        self._width = vectors.shape[1]
        finite = (np.abs(vectors) <= np.finfo(np.float32).max).all(1)
        if not finite.all():
            received = f"NaN, infinity or more than float32 holds for {sentences[int(finite.argmin())][:60]!r}"
            raise fail("encode must return finite numbers", received, "Correct the encoder.")
        return vectors.astype(np.float32)


def _array(returned: Any) -> Array:
    """Return an array, or a tensor of any device and precision, as an array."""
    if isinstance(returned, Tensor):
        returned = returned.detach().float().cpu()  # numpy has no bfloat16
    try:
        return np.asarray(returned)
    except ValueError:  # rows of different lengths
        return np.empty(0, np.object_)


def same_encoder(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two probes are equal but for rounding."""
    scale = max(map(abs, (*a, *b)), default=0.0)
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=CLOSE, atol=CLOSE * scale))
