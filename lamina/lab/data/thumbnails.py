"""Small pictures of captioned images, to look at: training needs none of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

from . import registry, scenes

Picture = tuple[str, bytes]  # its kind ("image/png") and its file


def thumbnails(dataset: str, kind: str, root: str | None, names: Sequence[str]) -> dict[str, Picture]:
    """Return the pictures of these images, as far as the folder of the data has them.

    Args:
        dataset: name of the data set.
        kind: "real", or "embedded" for the drawn scenes.
        root: as for ``registry.load``.
        names: of images.
    """
    if kind == registry.EMBEDDED:
        return {name: ("image/png", _drawn(name)) for name in names}
    for file, path in registry.extras(dataset, root).items():
        with zipfile.ZipFile(io.BytesIO(file.read(path))) as archive:
            held = set(archive.namelist())
            return {name: ("image/jpeg", archive.read(name)) for name in names if name in held}
    return {}


def _drawn(name: str) -> bytes:
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, scenes.picture(name), format="png")
    return file.getvalue()
