"""Readers of the files that data sets are published in: IDX, CIFAR-10 binary, amat text, npz.

A reader believes nothing that a file says about itself before it has been held against the file's size, and answers
every malformed file with one line: the file, what it must be, what it is.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError

Array = npt.NDArray[Any]
Stream = IO[bytes] | gzip.GzipFile

BLOCK = 1 << 20
MOST_DEFLATE = 1032  # deflate makes nothing smaller than by this factor, so a header that claims more lies
CLASSES = 10
REFETCH = "Delete it and fetch it again."


class BadFile(InputError):
    """A file that is not what it must be; ``remedy`` is None where fetching it again is the remedy."""

    def __init__(self, path: Path, expected: str, found: str, remedy: str | None = None) -> None:
        self.rule, self.found, self.remedy = f"{path} must be {expected}", " ".join(found.split()), remedy
        super().__init__(f"{self.rule}, got {self.found}. {remedy or REFETCH}")


@dataclass
class Contents:
    """Arrays by name, and the sha256 of each file's uncompressed content."""

    arrays: dict[str, Array] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)


Reader = Callable[[Mapping[str, Path]], Contents]


def digest(*parts: bytes | bytearray | Array) -> str:
    """The sha256 of the parts' bytes, one after the other; arrays in C order whatever their layout."""
    total = hashlib.sha256()
    for part in parts:
        total.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return total.hexdigest()


def guise(head: bytes) -> str | None:
    """What the first bytes of a file look like, where that is something often found in place of data."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "an empty file"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<body", b"<script", b"<?xml", b"<!--")):
        return "what looks like a web page (HTML)"
    if text.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the data it points to"
    if head.startswith(b"MATLAB 5.0 MAT-file"):
        return "a MATLAB file"
    return None


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one ``BadFile``."""
    try:
        _check_regular(path, expected)
        yield
    except BadFile:
        raise
    except EOFError:
        raise BadFile(path, expected, "a torn file: its compressed data ends too early") from None
    except (gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise BadFile(path, expected, f"damaged data ({error})") from None
    except OSError as error:
        remedy = "See that the file is there and that you may read it."
        raise BadFile(path, expected, f"an error when reading it ({error.strerror or error})", remedy) from None
    except (ValueError, RuntimeError, NotImplementedError, struct.error, KeyError) as error:
        # what zipfile, tarfile and numpy's header parser raise for damage they do not foresee
        raise BadFile(path, expected, f"damaged data ({error})") from None


def _check_regular(path: Path, expected: str) -> None:
    """A folder cannot be read, and opening a pipe would wait for ever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "something that is no plain file"
        raise BadFile(path, expected, found, "Move it away and put the file in its place.")
    with open(path, "rb") as file:
        found_instead = guise(file.read(512))
    if found_instead:
        raise BadFile(path, expected, found_instead)


@contextmanager
def opened(path: Path, unpack: bool = True) -> Iterator[tuple[Stream, int]]:
    """The content, and the most bytes it can have. Gzip is told by its first bytes, not by the name: browsers unpack
    files and leave ``.gz`` in the name."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        packed = unpack and file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            yield file, size
            return
        with gzip.GzipFile(fileobj=file, mode="rb") as content:
            yield content, size * MOST_DEFLATE


def file_sha256(path: Path, unpack: bool) -> str:
    """The sha256 of a file as it is, or of what a gzip file holds."""
    total = hashlib.sha256()
    with reading(path, "a readable file"), opened(path, unpack) as (file, _):
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def _read_exactly(file: Stream, size: int, path: Path, expected: str) -> bytearray:
    """``size`` bytes and then the end; in blocks, so that memory follows what is there and not what is claimed."""
    content = bytearray()
    while len(content) < size:
        block = file.read(min(BLOCK, size - len(content)))
        if not block:
            raise BadFile(path, expected, f"a truncated file: {len(content):,} of {size:,} bytes of data")
        content += block
    if file.read(1):
        raise BadFile(path, expected, f"trailing bytes after the {size:,} bytes of data")
    return content


# IDX: the format of MNIST
def idx_names(stem: str) -> tuple[str, ...]:
    """The names a file may have: as published, unpacked, or with a dot as some archives write it."""
    dotted = stem.replace("-idx", ".idx")
    return (f"{stem}.gz", stem, f"{dotted}.gz", dotted)


def read_idx(path: Path, item: tuple[int, ...] = ()) -> tuple[Array, str]:
    """Array of uint8 [N, *item] and the sha256 of the uncompressed file."""
    expected = f"an IDX file of {'x'.join(map(str, item))} images" if item else "an IDX file of labels"
    with reading(path, expected), opened(path) as (file, most):
        head = file.read(4 * (2 + len(item)))
        count = _idx_count(head, item, path, expected)
        size = count * math.prod(item)
        if len(head) + size > most:
            raise BadFile(path, expected, f"a truncated file: its header claims {count:,} items ({size:,} bytes)")
        body = _read_exactly(file, size, path, expected)
    return np.frombuffer(body, np.uint8).reshape(count, *item), digest(head, body)


def _idx_count(head: bytes, item: tuple[int, ...], path: Path, expected: str) -> int:
    magic = bytes([0, 0, 8, 1 + len(item)])  # 8: unsigned bytes; then the number of dimensions
    if head[:4] != magic:
        raise BadFile(path, expected, guise(head) or f"first bytes {head[:4].hex(' ')}, not {magic.hex(' ')}")
    if len(head) < 4 * (2 + len(item)):
        raise BadFile(path, expected, f"a truncated file: a header of {len(head)} bytes")
    count, *shape = struct.unpack(f">{1 + len(item)}I", head[4:])
    if tuple(shape) != item:
        raise BadFile(path, expected, f"items of {'x'.join(map(str, shape))}")
    if count == 0:
        raise BadFile(path, expected, "a file of 0 items")
    return int(count)


def _check_labels(path: Path, labels: Array, images: int, what: str = "labels") -> None:
    if len(labels) != images:
        raise BadFile(path, f"{what} of {images:,} images", f"{len(labels):,} labels")
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= CLASSES))):
        found = f"label {labels[wrong[0]]} at place {wrong[0]:,}"
        raise BadFile(path, f"{what} from 0 to {CLASSES - 1}", found)


def read_mnist(files: Mapping[str, Path]) -> Contents:
    """The four IDX files of MNIST and Fashion-MNIST."""
    contents = Contents()
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"
        x, contents.sha256[images] = read_idx(files[images], (28, 28))
        y, contents.sha256[labels] = read_idx(files[labels])
        _check_labels(files[labels], y, len(x))
        contents.arrays |= {f"{split}_x": x, f"{split}_y": y}
    return contents


# CIFAR-10, binary version

CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_FILES = (*CIFAR_TRAIN, "test_batch.bin")
CIFAR_EXPECTED = f"a CIFAR-10 file of {CIFAR_RECORD}-byte records"
CIFAR_FOLDER = "cifar-10-batches-bin"


def read_cifar_bins(files: Mapping[str, Path]) -> Contents:
    """The six unpacked files."""
    bodies = {}
    for name in CIFAR_FILES:
        path = files[name]
        with reading(path, CIFAR_EXPECTED), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            bodies[name] = _read_exactly(file, _cifar_size(path, path.name, size), path, CIFAR_EXPECTED)
    return _cifar_contents(bodies, files)


def read_cifar_tar(files: Mapping[str, Path]) -> Contents:
    """The archive as published, read in one pass; nothing is unpacked onto the disc."""
    (path,) = files.values()
    expected = "the archive of CIFAR-10 in its binary version (tar.gz)"
    bodies: dict[str, bytearray] = {}
    with reading(path, expected), opened(path) as (file, most):
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                name = _cifar_member(path, expected, member, most)
                content = archive.extractfile(member) if name else None
                if name and content is not None:
                    if name in bodies:
                        raise BadFile(path, expected, f"two members named {name}")
                    bodies[name] = _read_exactly(content, _cifar_size(path, name, member.size), path, expected)
        while file.read(BLOCK):  # the checksum of gzip stands at its end, beyond that of the tar
            pass
    missing = [name for name in CIFAR_FILES if name not in bodies]
    if missing:
        raise BadFile(path, expected, f"an archive without {', '.join(missing)}")
    return _cifar_contents(bodies, dict.fromkeys(CIFAR_FILES, path))


def _cifar_member(path: Path, expected: str, member: tarfile.TarInfo, most: int) -> str | None:
    """The name of a wanted file; None for folders and for what else is in the archive."""
    place = PurePosixPath(member.name)
    if place.is_absolute() or ".." in place.parts:
        raise BadFile(path, expected, f"a member that points out of the archive: {member.name!r}")
    if member.size > most:  # tarfile would step over such a member block by block, for years
        raise BadFile(path, expected, f"a member that claims {member.size:,} bytes: {member.name!r}")
    if place.name not in CIFAR_FILES or place.parent.name not in (CIFAR_FOLDER, ""):
        return None
    if not member.isreg() or member.issparse():
        raise BadFile(path, expected, f"a member that is no plain file: {member.name!r}")
    return place.name


def _cifar_size(path: Path, name: str, size: int) -> int:
    if size == 0 or size % CIFAR_RECORD:
        raise BadFile(path, CIFAR_EXPECTED, f"{size:,} bytes in {name}, not a multiple of {CIFAR_RECORD}")
    return size


def _cifar_contents(bodies: Mapping[str, bytearray], paths: Mapping[str, Path]) -> Contents:
    contents = Contents(sha256={name: digest(bodies[name]) for name in CIFAR_FILES})
    for split, names in (("train", CIFAR_TRAIN), ("test", CIFAR_FILES[-1:])):
        parts = [np.frombuffer(bodies[name], np.uint8).reshape(-1, CIFAR_RECORD) for name in names]
        for name, part in zip(names, parts):
            _check_labels(paths[name], part[:, 0], len(part), f"{name} with labels")
        records = np.concatenate(parts)
        contents.arrays[f"{split}_x"] = records[:, 1:].reshape(-1, 3, 32, 32).copy()
        contents.arrays[f"{split}_y"] = records[:, 0].copy()
    return contents


# binarised MNIST: text (amat) or npz

PIXELS = 784
SPLITS = ("train", "valid", "test")


def amat_name(split: str) -> str:
    return f"binarized_mnist_{split}.amat"


def amat_text(bits: Array) -> bytes:
    """The bits as Larochelle's files write them: numbers between single spaces, one image a line."""
    text = np.full((len(bits), 2 * bits.shape[1]), ord(" "), np.uint8)
    text[:, ::2] = bits + ord("0")
    text[:, -1] = ord("\n")
    return text.tobytes()


def read_amat(path: Path, width: int = PIXELS) -> Array:
    """Bits, uint8 [N, width], of a text file."""
    expected = f"a text file of lines with {width} numbers, each 0 or 1"
    parts: list[Array] = []
    with reading(path, expected), open(path, "rb") as file:
        lines = 0
        for block in iter(lambda: file.readlines(4 * BLOCK), []):
            parts.append(_amat_block(b"".join(block), lines, width, path, expected))
            lines += len(block)
    return np.concatenate(parts)


def _amat_block(text: bytes, lines_before: int, width: int, path: Path, expected: str) -> Array:
    codes = np.frombuffer(text if text.endswith(b"\n") else text + b"\n", np.uint8)
    digits, ends = (codes == ord("0")) | (codes == ord("1")), codes == ord("\n")
    blank = ends | (codes == ord(" ")) | (codes == ord("\t")) | (codes == ord("\r"))

    def complain(at: int, found: str) -> BadFile:
        return BadFile(path, expected, f"{found} on line {lines_before + 1 + int(ends[:at].sum()):,}")

    if len(strange := np.flatnonzero(~(digits | blank))):
        raise complain(strange[0], repr(chr(codes[strange[0]])))
    if len(glued := np.flatnonzero(digits[1:] & digits[:-1])):
        raise complain(glued[0], "numbers with no space between")
    counts = np.diff(np.cumsum(digits)[ends], prepend=0)
    if len(wrong := np.flatnonzero(counts != width)):
        raise BadFile(path, expected, f"{counts[wrong[0]]} numbers on line {lines_before + 1 + wrong[0]:,}")
    bits: Array = codes[digits] - ord("0")
    return bits.reshape(-1, width)


def read_binarized_amat(files: Mapping[str, Path]) -> Contents:
    return _binarized({split: read_amat(files[amat_name(split)]) for split in SPLITS})


def read_binarized_npz(files: Mapping[str, Path]) -> Contents:
    """Arrays train, valid and test: bits packed eight to a byte (N, 98), or plain 0 and 1 (N, 784)."""
    (path,) = files.values()
    arrays = read_npz(path, SPLITS)
    return _binarized({split: _bits(path, split, arrays[split]) for split in SPLITS})


def _bits(path: Path, key: str, array: Array) -> Array:
    expected = f"an npz file with {key!r} of bits: uint8 (N, {PIXELS // 8}) packed or (N, {PIXELS}) plain"
    shaped = array.ndim == 2 and len(array) > 0 and array.shape[1] in (PIXELS // 8, PIXELS)
    if not shaped or array.dtype not in (np.uint8, np.bool_):
        raise BadFile(path, expected, f"{array.dtype} {array.shape}")
    if array.shape[1] != PIXELS:
        return np.unpackbits(array.view(np.uint8), axis=1)
    if array.max() > 1:
        raise BadFile(path, expected, f"the value {array.max()}")
    return array.astype(np.uint8)


def _binarized(bits: Mapping[str, Array]) -> Contents:
    """Hashes are those of the published text, whichever form the bits came in."""
    arrays = {f"{split}_x": np.ascontiguousarray(bits[split]) for split in SPLITS}
    return Contents(arrays, {amat_name(split): digest(amat_text(bits[split])) for split in SPLITS})


def read_npz(path: Path, keys: Iterable[str]) -> dict[str, Array]:
    """Arrays of whole numbers. numpy would make room for whatever a header claims; here claims are checked first."""
    wanted = list(keys)
    expected = f"an npz file with the arrays {', '.join(wanted)}"
    with reading(path, expected), zipfile.ZipFile(path) as archive:
        held = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [key for key in wanted if key not in held]
        if missing:
            found = ", ".join(map(repr, held[:8])) or "none"
            raise BadFile(path, expected, f"no {', '.join(missing)} among its arrays ({found})")
        return {key: _read_npy(path, archive, key) for key in wanted}


def _read_npy(path: Path, archive: zipfile.ZipFile, key: str) -> Array:
    expected = f"an npz file with {key!r} as an array of whole numbers"
    info = archive.getinfo(f"{key}.npy")
    most = min(info.file_size, os.path.getsize(path) * MOST_DEFLATE)
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise BadFile(path, expected, "pickled objects, which can run code when loaded")
        if dtype.kind not in "uib":
            raise BadFile(path, expected, f"dtype {dtype}")
        size = math.prod(shape) * dtype.itemsize
        if size > most:
            raise BadFile(path, expected, f"a truncated array: its header claims {shape}")
        body = _read_exactly(file, size, path, expected)
    array = np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    return np.ascontiguousarray(array, dtype.newbyteorder("="))


def read_cifar_subset(files: Mapping[str, Path]) -> Contents:
    """Part of CIFAR-10 as x_train, y_train, x_test, y_test; hashes are those of the arrays' bytes."""
    (path,) = files.values()
    raw = read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
    contents = Contents(sha256={f"{path.name}/{key}": digest(array) for key, array in raw.items()})
    for split in ("train", "test"):
        x, y = raw[f"x_{split}"], raw[f"y_{split}"]
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (3, 32, 32) or not len(x):
            raise BadFile(path, f"an npz file with 'x_{split}' uint8 (N, 3, 32, 32)", f"{x.dtype} {x.shape}")
        if y.ndim != 1 or y.dtype.kind not in "ui":
            raise BadFile(path, f"an npz file with 'y_{split}' integers (N,)", f"{y.dtype} {y.shape}")
        _check_labels(path, y, len(x), f"an npz file with labels 'y_{split}'")
        contents.arrays |= {f"{split}_x": x, f"{split}_y": y}
    return contents
