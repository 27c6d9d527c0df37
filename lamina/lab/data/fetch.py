"""Fetch data sets over HTTP: resumed where a transfer broke off, checked to the byte, put in place all at once."""

from __future__ import annotations

import errno
import http.client
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, RunError, fail
from .formats import BLOCK, BadFile, file_sha256, guise
from .registry import EMBEDDED, SOURCES, Remote, Source, asked_root, default_root, find, lookup, read

Progress = Callable[[int, int | None, str], None]

ATTEMPTS = 5  # at one address, before the next one is tried
PAUSE = 1.0  # seconds before the second attempt; doubled each time
TIMEOUT = 30.0  # seconds of silence
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Failed(Exception):
    """One address did not give the file. again: the same request may well succeed later."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.again = again


@dataclass(frozen=True)
class Status:
    """Where a data set is looked for and what is there. Files are not opened: ``load`` checks their content."""

    name: str
    title: str
    folder: Path
    state: str  # "present", "incomplete", "absent" or "unreadable"
    size: int  # bytes on the disc, of what is there
    missing: tuple[str, ...]
    licence: str


def status(root: str | os.PathLike[str] | None = None) -> list[Status]:
    """One line for each known data set, for ``lamina data``."""
    folder = _root(root)
    return [_status(source, folder) for source in SOURCES.values()]


def _status(source: Source, root: Path) -> Status:
    """Describe one set; a folder that cannot be read must not hide the other sets."""
    try:
        return _seen(source, root)
    except (InputError, OSError):
        files = source.layouts[0].files
        return Status(source.name, source.title, root / source.name, "unreadable", 0, files, source.licence)


def _seen(source: Source, root: Path) -> Status:
    found = find(source, root)
    if found is None:
        files = source.layouts[0].files
        return Status(source.name, source.title, root / source.name, "absent", 0, files, source.licence)
    size = sum(path.stat().st_size for path in found.files.values() if path.is_file())
    title = found.layout.subset_title or source.title
    state = "incomplete" if found.missing else "present"
    return Status(source.name, title, found.folder, state, size, found.missing, source.licence)


def get(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    base_urls: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Fetch a data set into ``<folder>/<name>/`` and return its files; what is there and right is not fetched again.

    Args:
        name: of the data set.
        folder: the folder of data sets, as ``--data``; by default ``LAMINA_DATA``, else the cache folder.
        base_urls: addresses to which file names are added, in place of the published ones.
        progress: called with bytes so far, bytes in all (None: unknown) and the file's name.
    """
    source, root = lookup(name), _root(folder, forbid_embedded=True)
    present = _present(source, root)
    if present is not None:
        return present
    home, urls = root / name, [_urls(remote, base_urls) for remote in source.remotes]
    with _on_disc(home), _only_one(home):
        return [_fetch(source, remote, home, known, progress) for remote, known in zip(source.remotes, urls)]


def _root(root: str | os.PathLike[str] | None, forbid_embedded: bool = False) -> Path:
    asked = asked_root(root)
    if asked == EMBEDDED and forbid_embedded:
        raise fail(
            "a data set is fetched into a folder", f"--data {EMBEDDED}", "Pass a folder; embedded data needs none."
        )
    return default_root() if asked in (None, EMBEDDED) else Path(str(asked))


def _present(source: Source, root: Path) -> list[Path] | None:
    """The files of the whole set, where all are there in some layout and right."""
    found = find(source, root)
    if found is None or found.missing or found.layout.subset_title:
        return None
    try:
        read(found)
    except InputError:
        return None
    return list(found.files.values())


def _urls(remote: Remote, base_urls: Sequence[str] | None) -> tuple[str, ...]:
    if not base_urls:
        return remote.urls
    bases = [base_urls] if isinstance(base_urls, str) else base_urls
    for base in bases:
        if not base.startswith(("http://", "https://")):
            raise fail("an address must start with http:// or https://", repr(base), "Correct the address.")
    return tuple(base.rstrip("/") + "/" + remote.name for base in bases)


@contextmanager
def _on_disc(home: Path) -> Iterator[None]:
    """Make the folder, and turn what the disc refuses into one line."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        what = f"{error.filename or home}: {error.strerror or error}"
        if error.errno in NO_ROOM:
            kept = "What has arrived is kept: make room, and the same command goes on from there."
            raise RunError(f"the disc has no room for {what}. {kept}") from None
        remedy = "Pass a folder that you may write with --data."
        raise fail(f"{home} must be a folder that can be written", what, remedy) from None


@contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Let one process fetch into a folder; others wait, then find the files there. The lock dies with its owner."""
    with open(home / ".lock", "ab") as file:
        while not _lock(file.fileno()):
            time.sleep(0.1)
        yield


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _fetch(source: Source, remote: Remote, home: Path, urls: Sequence[str], progress: Progress | None) -> Path:
    final, part = home / remote.name, Part(home / f"{remote.name}.part")
    if os.path.lexists(final) and _fault(remote, final) is None:
        return final
    failures: list[_Failed] = []
    for url in urls:
        try:
            _fetch_from(url, remote, part, progress)
            part.finish(final)
            return final
        except _Failed as failure:
            failures.append(failure)
    reasons = "; ".join(f"{url}: {failure}" for url, failure in zip(urls, failures))
    raise _no_source(source, final, part, reasons, cut=any(failure.again for failure in failures))


def _no_source(source: Source, final: Path, part: Part, reasons: str, cut: bool) -> Exception:
    kept = f" {part.size:,} bytes are kept, and the same command goes on from there." if part.size else ""
    if cut and kept:
        return RunError(f"{final.name} could not be fetched whole ({reasons}).{kept}")
    root, home = final.parent.parent, final.parent
    urls = " ".join(remote.urls[0] for remote in source.remotes)
    remedy = f"Without a network: bring {urls} into {home} by other means, then pass `--data {root}`.{kept}"
    return fail(f"{final.name} must be fetched from a server that has it", reasons, remedy)


def _fault(remote: Remote, path: Path) -> str | None:
    """What is wrong with a whole file; None where it is the published one."""
    try:
        value = file_sha256(path, remote.unpacked)
    except BadFile as error:
        return error.found
    return None if value == remote.sha256 else f"other content than the published file (sha256 {value})"


class Part:
    """A file that is still arriving, and beside it the mark by which its server knows that version of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.mark_path = path, Path(f"{path}.mark")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def mark(self, url: str) -> str | None:
        """The ETag or date that ``url`` gave for the bytes at hand."""
        if not self.mark_path.exists():
            return None
        origin, _, mark = self.mark_path.read_text("utf-8").partition("\n")
        return mark if origin == url and mark else None

    def begin(self, url: str, mark: str | None) -> None:
        """Forget what had arrived; what comes now is this version of ``url``."""
        self.path.write_bytes(b"")
        self.mark_path.write_text(f"{url}\n{mark or ''}", "utf-8")

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self.mark_path.unlink(missing_ok=True)

    def finish(self, final: Path) -> None:
        """Put the file in its place in one step that a power cut does not halve."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path, final)
        self.mark_path.unlink(missing_ok=True)
        if os.name == "posix":
            folder = os.open(final.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def _fetch_from(url: str, remote: Remote, part: Part, progress: Progress | None) -> None:
    """The whole file into ``part``, checked; several attempts, each from where the last one broke off."""
    for attempt in range(ATTEMPTS):
        try:
            _transfer(url, remote, part, progress)
            break
        except _Failed as failure:
            if not failure.again or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE * 2**attempt)
    fault = _fault(remote, part.path)
    if fault is not None:
        part.drop()
        raise _Failed(fault)


def _transfer(url: str, remote: Remote, part: Part, progress: Progress | None) -> None:
    have = part.size
    try:
        response = _open(url, have, part.mark(url))
    except urllib.error.HTTPError as error:
        error.close()
        return _refused(error, have, part)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise _Failed(f"no connection ({reason})", isinstance(reason, (TimeoutError, ConnectionResetError))) from None
    with response:
        start, total = _range(response, have)
        if start not in (0, have):
            part.drop()
            raise _Failed(f"the server sent bytes from {start:,} on when asked for {have:,}", again=True)
        _receive(response, url, remote, part, start, total, progress)


def _open(url: str, have: int, mark: str | None) -> http.client.HTTPResponse:
    """Ask for the rest where some has arrived. Proxies are read anew, as the environment has them now."""
    headers = {"User-Agent": "lamina", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    if have and mark:
        headers["If-Range"] = mark  # a file that changed since comes whole
    request = urllib.request.Request(url, headers=headers)
    response: http.client.HTTPResponse = urllib.request.build_opener().open(request, timeout=TIMEOUT)
    return response


def _refused(error: urllib.error.HTTPError, have: int, part: Part) -> None:
    """Status 416 is the answer when nothing is left to send; any other means that this address does not serve."""
    if error.code != 416:
        raise _Failed(f"HTTP {error.code} {error.reason}", again=error.code == 429 or error.code >= 500)
    total = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
    if total is None or int(total[1]) != have:
        part.drop()
        raise _Failed("more bytes at hand than the server has", again=True)


def _range(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """The place of the answer's first byte, and the size of the whole file where the server says so."""
    sent = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status == 206 and sent:
        return int(sent[1]), None if sent[2] == "*" else int(sent[2])
    if response.status == 206:
        return have, None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _receive(
    response: http.client.HTTPResponse,
    url: str,
    remote: Remote,
    part: Part,
    start: int,
    total: int | None,
    progress: Progress | None,
) -> None:
    block = _read(response, whole=True)
    if not block and start == 0:
        raise _Failed("the connection was cut before the first byte", again=True)
    page = "html" in response.headers.get("Content-Type", "") or "HTML" in (guise(block) or "")
    if page and start == 0:
        raise _Failed("the answer looks like a web page (HTML), not the file")
    if start == 0:  # only now: what is at hand was not to be given up for less
        part.begin(url, _validator(response))
    done = start
    with open(part.path, "ab") as file:
        while block:
            file.write(block)
            done += len(block)
            if progress is not None:
                progress(done, total, remote.name)
            block = _read(response)
    if total is not None and done != total:
        raise _Failed(f"the connection was cut after {done:,} of {total:,} bytes", again=True)


def _read(response: http.client.HTTPResponse, whole: bool = False) -> bytes:
    """What has arrived, at once: a connection that breaks later takes no more with it. whole: enough to judge by."""
    try:
        return bytes(response.read(512) if whole else response.read1(BLOCK))
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"the connection was cut ({error})", again=True) from None


def _validator(response: http.client.HTTPResponse) -> str | None:
    """What If-Range may carry: a strong ETag, else a date."""
    tag = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")
