"""Fetch data sets with pooch: into a temporary folder, compared with their hashes, then moved into place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ...errors import RunError, fail
from .formats import BadFile, File
from .registry import EMBEDDED, Source, asked_root, default_root, find, lookup

TIMEOUT = 30.0  # seconds of silence
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def get(
    name: str, folder: str | os.PathLike[str] | None = None, *, base_urls: Sequence[str] | None = None
) -> list[Path]:
    """Fetch a data set into ``<folder>/<name>/`` and return its files; correct files are not fetched again.

    Args:
        name: name of the data set.
        folder: folder of data sets, as ``--data``; by default ``LAMINA_DATA``, or else the cache folder.
        base_urls: addresses to use in place of the published ones; file names are appended.
    """
    source, requested = lookup(name), asked_root(folder)
    if not source.remotes:
        remedy = f"Bring its files into a folder {name}: {_needed(source)}. Licence: {source.licence}."
        raise fail("a data set must have an address to be fetched", f"{name}, which has none", remedy)
    if requested == EMBEDDED:
        rule = "a data set is fetched into a folder"
        raise fail(rule, f"--data {EMBEDDED}", "Pass a folder; embedded data needs none.")
    root = Path(requested or default_root())
    local = find(source, root)
    if local is not None and not local.missing and all(_is_right(f, path) for f, path in local.files.items()):
        return list(local.files.values())
    home, bases = root / name, _checked(base_urls or source.bases)
    with _disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        return [_fetch(file, home, bases) for file in source.remotes]


def _needed(source: Source) -> str:
    """Return the names of the files of each layout."""
    return "; or ".join(", ".join(file.name for file in layout.files) for layout in source.layouts)


def _checked(bases: Sequence[str]) -> list[str]:
    for base in bases:
        if not base.startswith(("http://", "https://")):
            raise fail("an address must start with http:// or https://", repr(base), "Correct the address.")
    return [base.rstrip("/") + "/" for base in bases]


@contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    """Turn an error of the disk into one line."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or home}: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise RunError(f"the disk has no room for {what}. Make room and run the same command again") from None
        remedy = "Pass a folder that you may write with --data."
        raise fail(f"{home} must be a folder that can be written", what, remedy) from None


def _is_right(file: File, path: Path) -> bool:
    try:
        return bool(file.read(path))
    except BadFile:
        return False


def _fetch(file: File, home: Path, bases: Sequence[str]) -> Path:
    final, reasons = home / file.spellings[0], []
    if _is_right(file, final):
        return final
    for base in bases:
        reason = _attempt(base + final.name, file, final)
        if reason is None:
            return final
        reasons.append(f"{base}{final.name}: {reason}")
    remedy = f"Run the same command again, or bring the file into {home} by other means"
    raise RunError(f"{final.name} could not be fetched ({'; '.join(reasons)}). {remedy}")


def _attempt(url: str, file: File, final: Path) -> str | None:
    """Fetch a file from one address; return the reason if that fails."""
    import pooch
    import requests
    from tqdm import tqdm

    bar = tqdm(desc=final.name, total=file.size, unit="B", unit_scale=True, disable=None)  # None: on terminals alone
    download = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=TIMEOUT)
    with bar, TemporaryDirectory(prefix=".fetching-", dir=final.parent) as folder:
        part = Path(folder) / final.name
        try:
            download(url, str(part), None)
            file.read(part)
        except BadFile as error:
            return error.received
        except requests.RequestException as error:
            cause = getattr(error.args[0], "reason", error) if error.args else error
            return " ".join(str(cause).rpartition("): ")[2].split())  # without the connection's own name
        os.replace(part, final)
    return None
