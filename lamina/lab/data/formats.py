"""Published files: compared with their size and SHA-256, then read as arrays."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError

Array = npt.NDArray[Any]
Reader = Callable[[Mapping[str, bytes]], dict[str, Array]]


class BadFile(InputError):
    """File that is not the published one; ``remedy`` is None if the file is to be fetched again."""

    def __init__(self, path: Path, expected: str, received: str, remedy: str | None = None) -> None:
        self.rule, self.received, self.remedy = f"{path} must be {expected}", " ".join(received.split()), remedy
        super().__init__(f"{self.rule}, got {self.received}. {remedy or 'Delete it and fetch it again.'}")


@dataclass(frozen=True)
class File:
    """One published file. Size and hash are of the unpacked content: mirrors differ in gzip headers.

    Files of the user's own making have no hash here; ``others`` are further names that such a file may have.
    """

    name: str
    size: int = 0
    sha256: str = ""
    packed: bool = False
    others: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Possible names on the disk: as published, unpacked, or with a dot as in some archives."""
        if not self.packed:
            return (self.name, *self.others)
        dotted = self.name.replace("-idx", ".idx")
        return (f"{self.name}.gz", self.name, f"{dotted}.gz", dotted)

    def read(self, path: Path) -> bytes:
        """Return the content; raise ``BadFile`` if a single byte differs from the published one."""
        expected = f"the published {self.name}"
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            received = "a folder" if path.is_dir() else "something that is no plain file"
            raise BadFile(path, expected, received, "Move it away and put the file in its place.")
        try:
            content = self._content(path)
        except EOFError:
            raise BadFile(path, expected, "a torn file: its compressed data ends too early") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadFile(path, expected, f"damaged data ({error})") from None
        except OSError as error:
            remedy = "See that the file is there and that you may read it."
            raise BadFile(path, expected, f"an error when reading it ({error.strerror or error})", remedy) from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise BadFile(path, expected, self._difference(content, digest))
        return content

    def _content(self, path: Path) -> bytes:
        """Return the content, cut one byte after its published size. Browsers unpack files but leave the ``.gz``."""
        with open(path, "rb") as file:
            packed = self.packed and file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return (gzip.GzipFile(fileobj=file) if packed else file).read(self.size + 1)

    def _difference(self, content: bytes, digest: str) -> str:
        text = content[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if not content:
            return "an empty file"
        if text.startswith((b"<!doctype", b"<html", b"<head", b"<body", b"<script", b"<?xml", b"<!--")):
            return "what looks like a web page (HTML)"
        if text.startswith(b"version https://git-lfs"):
            return "a git-lfs pointer, not the data it points to"
        if len(content) < self.size:
            return f"a truncated or different file: {len(content):,} of {self.size:,} bytes"
        if len(content) > self.size:
            return f"a file with more than its {self.size:,} bytes"
        return f"other content (sha256 {digest})"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file of any size, or of a folder's files and their names."""
    hashed = hashlib.sha256()
    if path.is_dir():
        for part in sorted(one for one in path.iterdir() if one.is_file()):
            hashed.update(part.name.encode(errors="surrogateescape") + b"\0" + bytes.fromhex(digest(part)))
        return hashed.hexdigest()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            hashed.update(block)
    return hashed.hexdigest()


def lines_array(lines: Iterable[str]) -> Array:
    """Return lines of text as bytes of UTF-8 with line ends between them: what a data set's arrays can hold."""
    # JSON can spell half of a surrogate pair, which UTF-8 cannot
    return np.frombuffer(bytearray("\n".join(lines).encode(errors="replace")), np.uint8)


def lines_in(array: Array) -> list[str]:
    """Return the lines that ``lines_array`` joined."""
    return array.tobytes().decode().split("\n") if array.size else []


# Readers: from the contents of verified files, by name, to arrays


def read_mnist(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the four IDX files of MNIST and Fashion-MNIST: a header of four bytes a number, then the pixels."""
    arrays: dict[str, Array] = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = np.frombuffer(files[f"{stem}-images-idx3-ubyte"], np.uint8, offset=16)
        labels = np.frombuffer(files[f"{stem}-labels-idx1-ubyte"], np.uint8, offset=8)
        arrays |= {f"{split}_x": images.reshape(-1, 28, 28).copy(), f"{split}_y": labels.copy()}
    return arrays


CIFAR_TRAIN, CIFAR_TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"


def read_cifar_bins(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the six files of CIFAR-10's binary version."""
    arrays: dict[str, Array] = {}
    for split, names in (("train", CIFAR_TRAIN), ("test", (CIFAR_TEST,))):
        content = b"".join(files[name] for name in names)
        records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)  # label; red, green and blue planes
        arrays |= {f"{split}_x": records[:, 1:].copy().reshape(-1, 3, 32, 32), f"{split}_y": records[:, 0].copy()}
    return arrays


def read_cifar_tar(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the archive of the binary version as published; nothing is unpacked onto the disk."""
    (content,) = files.values()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {PurePosixPath(member.name).name: archive.extractfile(member) for member in archive}
        return read_cifar_bins({name: file.read() for name, file in members.items() if file is not None})


def read_cifar_fifth(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the first fifth of CIFAR-10 from the archive of all of it."""
    return {name: array[: len(array) // 5].copy() for name, array in read_cifar_tar(files).items()}


def read_cifar_subset(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the first fifth of CIFAR-10 from an npz file."""
    return {"_".join(reversed(key.split("_"))): array for key, array in _npz(files).items()}  # "x_train" is "train_x"


def read_binarized_amat(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the text files of binarised MNIST: 784 digits a line, single spaces between them."""
    bits = (np.frombuffer(content, np.uint8)[::2] - ord("0") for content in files.values())
    return {f"{split}_x": part.reshape(-1, 784) for split, part in zip(("train", "valid", "test"), bits)}


def read_binarized_npz(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read binarised MNIST from an npz file with eight pixels in a byte."""
    return {f"{split}_x": np.unpackbits(np.ascontiguousarray(packed), axis=1) for split, packed in _npz(files).items()}


def _npz(files: Mapping[str, bytes]) -> dict[str, Array]:
    (content,) = files.values()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
