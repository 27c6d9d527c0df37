"""Files that commands read and pages that they write, checked before the work."""

from __future__ import annotations

from pathlib import Path

from ...errors import fail
from .jobs import writable_folder

LARGEST = 2**24  # bytes of a text


def text_of(path: Path, option: str, holds: str) -> str:
    """Return the text of an option's file; ``holds`` says what such a file has, for messages."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        received = f"{str(path)!r}, which {'is too large' if path.is_file() else 'is none'}"
        raise fail(f"{option} must be a text file", received, f"Pass a file with {holds}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise fail(f"{option} must be text in UTF-8", str(path), "Convert it.") from None
    except OSError as error:
        raise fail(f"{option} must be readable", f"{path}: {error.strerror}", "Change its rights.") from None


def page_of(run: str, page: str | None, name: str) -> Path:
    """Return the page's file, by default ``name`` in the run's folder, which is checked when the run is opened."""
    path = Path(run) / name if page is None else Path(page)
    if path.is_dir() or not path.name:
        raise fail("--page must be a file", repr(str(path)), "Pass a file name.")
    if page is not None:
        writable_folder(path.parent, "the folder of --page")
    return path
