"""``lamina search``: look for images by a text, and for captions and images by an image, in a trained model's space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError, fail
from ..options import Settings, whole
from .files import page_of
from .jobs import DeviceOption
from .screen import KINDS, say, show_notes, table

if TYPE_CHECKING:  # torch takes seconds to import
    from ..experiments.order_embeddings.search import Hit, ImageResult, Opened, TextResult

PAGE = "search.html"


def search(
    run: Annotated[str, typer.Argument(help="folder of one run of order_embeddings")],
    text: Annotated[str | None, typer.Option(help='find images: --text "two dogs run on the beach"')] = None,
    image: Annotated[str | None, typer.Option(help="find captions and images: the name of an image")] = None,
    top: Annotated[int, whole("how many to show", 1, 1000, panel=None)] = 5,
    split: Annotated[str, typer.Option(help="train, valid or test: where to look")] = "test",
    page: Annotated[str | None, typer.Option(help="HTML file with the pictures (default: search.html in RUN)")] = None,
    data: Annotated[str | None, typer.Option(help="folder of data sets, as in training")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Search with a trained model: the images nearest to a text, or the captions and images nearest to an image."""
    asked = _checked(text, image)
    target = page_of(run, page, PAGE)
    from ..experiments.order_embeddings import search as lookup

    opened = lookup.open_run(Path(run), Settings(root=data, device=device), split)
    found = opened.library.by_text(asked, top) if text is not None else opened.library.by_image(asked, top)
    said = f"{KINDS[opened.data['kind']]}: {opened.data['label']}"
    say(f"{said}; {split} split; checkpoint at update {opened.update:,}")
    if isinstance(found, lookup.TextResult):
        _show_text(found, opened)
    else:
        _show_image(found, opened, lookup.NEARNESS)
    say(f"page: {_write(target, found, opened, asked, split)}")


def _checked(text: str | None, image: str | None) -> str:
    """Return what was asked for: one of the two options, not empty."""
    if (text is None) == (image is None):
        received = "neither" if text is None else "both"
        raise fail("lamina search needs --text or --image", received, "Pass one of them.")
    asked, option = (image, "--image") if text is None else (text, "--text")
    if asked is None or not asked.strip():
        raise fail(f"{option} must not be empty", repr(asked), "Pass a sentence, or the name of an image.")
    return asked.strip()


def _show_text(found: TextResult, opened: Opened) -> None:
    for word, near in found.unknown.items():
        similar = f" Did you mean {' or '.join(near)}?" if near else ""
        say(f"{word!r} is not in the vocabulary and is read as an unknown word.{similar}")
    title = f"Images nearest to: {' '.join(found.words)}"
    table(title, ["", "Image", opened.library.measure, "Its first caption"], _rows(found.images))


def _show_image(found: ImageResult, opened: Opened, nearness: str) -> None:
    say(f"{found.image}, written by people:")
    for caption in found.written:
        say(f"  {caption}")
    rows = [[*row, "yes" if hit.own else ""] for row, hit in zip(_rows(found.captions), found.captions)]
    columns = ["", "Of image", opened.library.measure, "Caption", "Its own"]
    table(f"Captions nearest to {found.image}", columns, rows)
    table(f"Images nearest to {found.image}", ["", "Image", nearness, "Its first caption"], _rows(found.images))


def _rows(hits: Sequence[Hit]) -> list[list[str]]:
    return [[str(rank), hit.image, f"{hit.value:.4f}", hit.caption] for rank, hit in enumerate(hits, 1)]


def _write(path: Path, found: TextResult | ImageResult, opened: Opened, asked: str, split: str) -> Path:
    """Write the page, with pictures where the folder of the data has them."""
    from ..data.registry import SOURCES
    from ..data.thumbnails import thumbnails
    from ..experiments.order_embeddings.search import NEARNESS
    from ..reports.drawings import address
    from ..reports.page import rendered
    from ..runs.files import make_folder, write_atomically

    names = list(dict.fromkeys([getattr(found, "image", ""), *(hit.image for hit in found.images)]))
    try:
        pictures = thumbnails(opened.data["name"], opened.data["kind"], opened.root, [name for name in names if name])
    except InputError as error:  # a page without pictures is better than none
        pictures = {}
        show_notes([f"no pictures: {error}"])
    addresses = {name: address(kind, content) for name, (kind, content) in pictures.items()}
    source = SOURCES.get(opened.data["name"])
    licence = source.licence if source and opened.data["kind"] == "real" else ""
    shown = {"asked": asked, "split": split, "nearness": NEARNESS, "licence": licence, "kinds": KINDS}
    html = rendered("search.html.j2", found=found, opened=opened, pictures=addresses, **shown)
    make_folder(path.parent)
    write_atomically(path, html.encode())
    return path
