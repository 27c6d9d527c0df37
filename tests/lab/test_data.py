"""Data sets: formats round trip, malformed files end in one clear line, the stand-in is fixed, downloads survive."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import InputError, RunError
from lamina.lab.data import fetch as download
from lamina.lab.data import formats, registry

REAL = os.environ.get("LAMINA_TEST_DATA")
needs_real = pytest.mark.skipif(not REAL, reason="needs the published files: set LAMINA_TEST_DATA to their folder")


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    """No folder, cache or proxy of the machine; no waiting between attempts."""
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.0)


def unpinned(source: registry.Source) -> registry.Source:
    """The same data set, where any content and any number of images will do."""
    layouts = tuple(dataclasses.replace(layout, counts={}, sha256={}) for layout in source.layouts)
    return dataclasses.replace(source, layouts=layouts)


@pytest.fixture
def loose(monkeypatch):
    for name, source in list(registry.SOURCES.items()):
        monkeypatch.setitem(registry.SOURCES, name, unpinned(source))


# Small sets in the published formats


def rng():
    return np.random.default_rng(0)


def idx_bytes(array) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def grey(count: int) -> tuple[np.ndarray, np.ndarray]:
    return rng().integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10


def write_mnist(folder: Path, spell="{}-{}.gz") -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, stem, count in (("train", "train", 12), ("test", "t10k", 11)):
        arrays[f"{split}_x"], arrays[f"{split}_y"] = grey(count)
        for part, kind, array in (("images", "idx3-ubyte", f"{split}_x"), ("labels", "idx1-ubyte", f"{split}_y")):
            name = spell.format(f"{stem}-{part}", kind)
            content = idx_bytes(arrays[array])
            (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return arrays


def cifar_bytes(count: int = 3, seed: int = 0) -> bytes:
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


def write_cifar(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: cifar_bytes(seed=seed) for seed, name in enumerate(formats.CIFAR_FILES)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def member(name: str, content: bytes = b"", **attributes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def tar_bytes(*members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def cifar_members(folder="cifar-10-batches-bin/", leave_out=()):
    names = [name for name in formats.CIFAR_FILES if name not in leave_out]
    return [member(f"{folder}{name}", cifar_bytes(seed=formats.CIFAR_FILES.index(name))) for name in names]


def bits(count: int) -> np.ndarray:
    return rng().integers(0, 2, (count, 784)).astype(np.uint8)


def write_amat(folder: Path) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {split: bits(count) for split, count in (("train", 5), ("valid", 3), ("test", 2))}
    for split, array in arrays.items():
        np.savetxt(folder / f"binarized_mnist_{split}.amat", array, fmt="%d")
    return arrays


def npz_bytes(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def subset_arrays(**change):
    x = rng().integers(0, 256, (4, 3, 32, 32), np.uint8)
    y = np.arange(4, dtype=np.int64)
    return {"x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[:2]} | change


def usable(dataset: registry.Dataset) -> None:
    """Arrays that torch takes with no warning: plain memory, writable."""
    for array in dataset.arrays.values():
        assert array.flags.c_contiguous
        assert torch.from_numpy(array).shape == array.shape


# Round trips


@pytest.mark.parametrize("spell", ["{}-{}.gz", "{}-{}", "{}.{}", "{}.{}.gz"])
@pytest.mark.parametrize("place", ["mnist", ".", "MNIST/raw"])
def test_idx_round_trip(tmp_path, loose, spell, place):
    arrays = write_mnist(tmp_path / place, spell)
    got = registry.load("mnist", tmp_path)
    usable(got)
    assert got.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert got.arrays[name].dtype == np.uint8
        np.testing.assert_array_equal(got.arrays[name], array)
    content = hashlib.sha256(idx_bytes(arrays["train_x"])).hexdigest()
    assert got.sha256["train-images-idx3-ubyte"] == content
    assert got.describe() == {
        "name": "mnist",
        "kind": "real",
        "label": "MNIST (real: 12 + 11)",
        "sizes": {"train": 12, "test": 11},
        "sha256": got.sha256,
    }


def test_idx_unpacked_by_a_browser_under_its_packed_name(tmp_path, loose):
    arrays = write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(idx_bytes(arrays["train_x"]))
    np.testing.assert_array_equal(registry.load("mnist", tmp_path).arrays["train_x"], arrays["train_x"])


def test_a_folder_of_the_same_name_beside_the_file(tmp_path, loose):
    arrays = write_mnist(tmp_path, "{}.{}")
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    np.testing.assert_array_equal(registry.load("mnist", tmp_path).arrays["train_x"], arrays["train_x"])


@pytest.mark.parametrize("place", ["cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "."])
def test_cifar_bins_round_trip(tmp_path, loose, place):
    files = write_cifar(tmp_path / place)
    check_cifar(registry.load("cifar10", tmp_path), files)


@pytest.mark.parametrize("place", ["cifar10", "."])
@pytest.mark.parametrize("inside", ["cifar-10-batches-bin/", "./cifar-10-batches-bin/", ""])
def test_cifar_straight_from_the_archive(tmp_path, loose, place, inside):
    (tmp_path / place).mkdir(exist_ok=True)
    others = [member("cifar-10-batches-bin", type=tarfile.DIRTYPE), member(f"{inside}readme.html", b"<html>")]
    (tmp_path / place / "cifar-10-binary.tar.gz").write_bytes(tar_bytes(*others, *cifar_members(inside)))
    files = {name: cifar_bytes(seed=seed) for seed, name in enumerate(formats.CIFAR_FILES)}
    check_cifar(registry.load("cifar10", tmp_path), files)
    assert len(list(tmp_path.rglob("*.bin"))) == 0  # nothing was unpacked


def check_cifar(got: registry.Dataset, files: dict[str, bytes]) -> None:
    usable(got)
    assert got.label == "CIFAR-10 (real: 15 + 3)"
    assert got.arrays["train_x"].shape == (15, 3, 32, 32)
    fourth = np.frombuffer(files["data_batch_2.bin"], np.uint8)[:3073]
    assert got.arrays["train_y"][3] == fourth[0]
    # red, green and blue planes, each row by row
    np.testing.assert_array_equal(got.arrays["train_x"][3, 2, 5], fourth[1 + 2 * 1024 + 5 * 32 :][:32])
    np.testing.assert_array_equal(got.arrays["test_y"], np.frombuffer(files["test_batch.bin"], np.uint8)[::3073])
    assert got.sha256 == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.mark.parametrize("place", ["cifar10_subset", "cifar10", "."])
def test_cifar_subset_round_trip(tmp_path, loose, place):
    (tmp_path / place).mkdir(exist_ok=True)
    arrays = subset_arrays(x_train=np.asfortranarray(subset_arrays()["x_train"]))
    (tmp_path / place / "cifar10_subset.npz").write_bytes(npz_bytes(**arrays))
    got = registry.load("cifar10", tmp_path)
    usable(got)
    assert got.label == "CIFAR-10 subset (real: 4 + 2)"
    np.testing.assert_array_equal(got.arrays["train_x"], arrays["x_train"])
    np.testing.assert_array_equal(got.arrays["test_y"], arrays["y_test"])
    assert got.sha256["cifar10_subset.npz/x_train"] == hashlib.sha256(arrays["x_train"].tobytes("C")).hexdigest()


def test_the_whole_set_comes_before_the_subset(tmp_path, loose):
    (tmp_path / "cifar10_subset").mkdir()
    (tmp_path / "cifar10_subset/cifar10_subset.npz").write_bytes(npz_bytes(**subset_arrays()))
    assert "subset" in registry.load("cifar10", tmp_path).label
    write_cifar(tmp_path / "cifar10")
    assert "subset" not in registry.load("cifar10", tmp_path).label
    (tmp_path / "cifar10/data_batch_3.bin").unlink()  # a set that is not whole must not turn into a subset
    with pytest.raises(InputError, match=r"no data_batch_3\.bin"):
        registry.load("cifar10", tmp_path)


@pytest.mark.parametrize("form", ["amat", "amat, CRLF", "packed", "plain", "bool", "fortran"])
def test_binarised_round_trip(tmp_path, loose, form):
    arrays = write_amat(tmp_path)
    texts = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if form == "amat, CRLF":
        for name, text in texts.items():
            (tmp_path / name).write_bytes(text.replace(b"\n", b" \r\n"))
    elif form != "amat":
        for name in texts:
            (tmp_path / name).unlink()
        change = {
            "packed": lambda a: np.packbits(a, axis=1),
            "fortran": lambda a: np.asfortranarray(np.packbits(a, axis=1)),
            "plain": lambda a: a,
            "bool": lambda a: a.astype(bool),
        }[form]
        (tmp_path / "binarized_mnist.npz").write_bytes(npz_bytes(**{k: change(v) for k, v in arrays.items()}))
    got = registry.load("binarized_mnist", tmp_path)
    usable(got)
    assert got.label == "Binarised MNIST (real: 5 + 3 + 2)"
    assert got.arrays.keys() == {"train_x", "valid_x", "test_x"}
    for split, array in arrays.items():
        np.testing.assert_array_equal(got.arrays[f"{split}_x"], array)
    # one hash, that of the published text, for every form
    assert got.sha256 == {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def test_amat_over_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK", 1000)
    path, array = tmp_path / "x.amat", bits(40)
    path.write_bytes(formats.amat_text(array)[:-1])  # no end of line at the end
    np.testing.assert_array_equal(formats.read_amat(path), array)
    text = bytearray(formats.amat_text(array))
    text[20 * 1568 + 4] = ord("2")
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"'2' on line 21\."):
        formats.read_amat(path)


# Malformed files: data set, file to write, its content (None: no file), words of the message. ``whole`` data sets
# lie around it, so that nothing but the one file is wrong.

HTML = b"\n<!DOCTYPE html><html><body>Log in to the network</body></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
IMAGES, LABELS = (idx_bytes(array) for array in grey(12))
PACKED = gzip.compress(IMAGES)
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
AMAT = "binarized_mnist_valid.amat"
LINES = formats.amat_text(bits(3)).split(b"\n")[:-1]
FOLDER = object()  # a folder in place of the file
LOOP = object()  # a link to itself: nobody can read it, not even root
PIPE = object()
TAR, BITS, SUBSET = "cifar-10-binary.tar.gz", "binarized_mnist.npz", "cifar10_subset.npz"


def with_bits(**change) -> bytes:
    return npz_bytes(**({split: np.packbits(bits(2), axis=1) for split in formats.SPLITS} | change))


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def npz_with_header(shape: str, key="train", descr="|u1") -> bytes:
    """An npz whose array claims a shape that its data does not have."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(98)
    buffer = io.BytesIO(with_bits(valid=np.zeros((1, 98), np.uint8)))
    with zipfile.ZipFile(buffer) as old:
        kept = {name: old.read(name) for name in old.namelist() if name != f"{key}.npy"}
    with zipfile.ZipFile(out := io.BytesIO(), "w") as new:
        for name, content in {**kept, f"{key}.npy": npy}.items():
            new.writestr(name, content)
    return out.getvalue()


MALFORMED = {
    "idx truncated": ("mnist", TRAIN_IMAGES, IMAGES[:-1], "truncated"),
    "idx truncated, packed": ("mnist", TRAIN_IMAGES, gzip.compress(IMAGES[:-100]), "truncated"),
    "idx header cut": ("mnist", TRAIN_IMAGES, IMAGES[:9], "truncated file: a header of 9 bytes"),
    "idx trailing bytes": ("mnist", TRAIN_IMAGES, IMAGES + b"\0", "trailing bytes"),
    "idx trailing bytes, packed": ("mnist", TRAIN_IMAGES, gzip.compress(IMAGES + b"\0"), "trailing bytes"),
    "idx wrong magic": ("mnist", TRAIN_IMAGES, b"\1" + IMAGES[1:], "first bytes 01 00 08 03, not 00 00 08 03"),
    "idx of floats": ("mnist", TRAIN_IMAGES, b"\0\0\x0d\3" + IMAGES[4:], "first bytes 00 00 0d 03"),
    "idx labels for images": ("mnist", TRAIN_IMAGES, LABELS, "first bytes 00 00 08 01"),
    "idx images for labels": ("mnist", TRAIN_LABELS, IMAGES, "first bytes 00 00 08 03"),
    "idx claims 2^31 images": ("mnist", TRAIN_IMAGES, struct.pack(">4I", 0x803, 2**31, 28, 28), "2,147,483,648"),
    "idx claims 2^31, packed": (
        "mnist",
        TRAIN_IMAGES,
        gzip.compress(struct.pack(">4I", 0x803, 2**31, 28, 28)),
        "2,147,483,648",
    ),
    "idx claims more than its bytes": (
        "mnist",
        TRAIN_IMAGES,
        gzip.compress(struct.pack(">4I", 0x803, 100, 28, 28) + bytes(784)),
        "truncated",
    ),
    "idx wrong size of image": ("mnist", TRAIN_IMAGES, idx_bytes(np.zeros((5, 32, 32), np.uint8)), "items of 32x32"),
    "idx of nothing": ("mnist", TRAIN_IMAGES, idx_bytes(np.zeros((0, 28, 28), np.uint8)), "0 items"),
    "idx labels too few": ("mnist", TRAIN_LABELS, idx_bytes(np.zeros(11, np.uint8)), "11 labels"),
    "idx label out of range": ("mnist", TRAIN_LABELS, idx_bytes(np.full(12, 10, np.uint8)), "label 10 at place 0"),
    "gzip torn": ("mnist", TRAIN_IMAGES, PACKED[:-20], "torn"),
    "gzip torn in its trailer": ("mnist", TRAIN_IMAGES, PACKED[:-3], "torn"),
    "gzip with a wrong CRC": ("mnist", TRAIN_IMAGES, damaged(PACKED, len(PACKED) - 6), "damaged"),
    "gzip damaged": ("mnist", TRAIN_IMAGES, damaged(PACKED, 10), "damaged"),
    "gzip header only": ("mnist", TRAIN_IMAGES, PACKED[:2], "torn"),
    "gzip and then something": ("mnist", TRAIN_IMAGES, PACKED + b"more", "damaged"),
    "web page": ("mnist", TRAIN_IMAGES, HTML, "looks like a web page"),
    "web page, packed": ("mnist", TRAIN_IMAGES, gzip.compress(HTML), "looks like a web page"),
    "web page for labels": ("fashion_mnist", TRAIN_LABELS, HTML, "looks like a web page"),
    "git-lfs pointer": ("mnist", TRAIN_IMAGES, LFS, "git-lfs pointer"),
    "empty file": ("mnist", TRAIN_IMAGES, b"", "empty file"),
    "one of four missing": ("mnist", TRAIN_LABELS, None, "no train-labels-idx1-ubyte"),
    "folder for a file": ("mnist", TRAIN_IMAGES, FOLDER, "a folder"),
    "unreadable": ("mnist", TRAIN_IMAGES, LOOP, "error when reading"),
    "pipe": ("mnist", TRAIN_IMAGES, PIPE, "no plain file"),
    "cifar not whole records": ("cifar10", "data_batch_2.bin", cifar_bytes()[:-1], "not a multiple of 3073"),
    "cifar label out of range": ("cifar10", "data_batch_2.bin", b"\x0a" + cifar_bytes()[1:], "label 10 at place 0"),
    "cifar web page": ("cifar10", "test_batch.bin", HTML, "looks like a web page"),
    "cifar empty": ("cifar10", "test_batch.bin", b"", "empty file"),
    "cifar one missing": ("cifar10", "test_batch.bin", None, "no test_batch.bin"),
    "cifar git-lfs pointer": ("cifar10", "data_batch_5.bin", LFS, "git-lfs pointer"),
    "tar without a member": ("cifar10", TAR, tar_bytes(*cifar_members(leave_out=["test_batch.bin"])), "without test_"),
    "tar of the python version": ("cifar10", TAR, tar_bytes(member("cifar-10-batches-py/data_batch_1")), "without"),
    "tar pointing outside": ("cifar10", TAR, tar_bytes(*cifar_members("../")), "points out of the archive"),
    "tar with an absolute path": ("cifar10", TAR, tar_bytes(*cifar_members("/")), "points out of the archive"),
    "tar with a link": (
        "cifar10",
        TAR,
        tar_bytes(member("data_batch_1.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "no plain file",
    ),
    "tar with a member twice": ("cifar10", TAR, tar_bytes(*cifar_members(), *cifar_members()), "two members"),
    "tar with part of a record": ("cifar10", TAR, tar_bytes(member("test_batch.bin", b"12")), "not a multiple"),
    "tar claims 2^60 bytes": (
        "cifar10",
        TAR,
        gzip.compress(member("other", size=2**60)[0].tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
        "claims 1,152,921,504,606,846,976 bytes",
    ),
    "tar torn": ("cifar10", TAR, tar_bytes(*cifar_members())[:-5000], "torn"),
    "tar with a wrong CRC": ("cifar10", TAR, damaged(t := tar_bytes(*cifar_members()), len(t) - 6), "damaged"),
    "gzip of no tar": ("cifar10", TAR, gzip.compress(b"no tar at all" * 100), "damaged"),
    "tar is a web page": ("cifar10", TAR, HTML, "looks like a web page"),
    "amat with a 2": ("binarized_mnist", AMAT, LINES[0] + b"\n" + b"2" + LINES[1][1:] + b"\n", "'2' on line 2"),
    "amat of floats": ("binarized_mnist", AMAT, LINES[0].replace(b"1", b"1.0") + b"\n", "'.' on line 1"),
    "amat short line": ("binarized_mnist", AMAT, LINES[0] + b"\n" + LINES[1][:-2] + b"\n", "783 numbers on line 2"),
    "amat cut in a line": ("binarized_mnist", AMAT, b"\n".join(LINES)[:-500], "numbers on line 3"),
    "amat with no spaces": ("binarized_mnist", AMAT, LINES[0].replace(b" ", b"") + b"\n", "no space between"),
    "amat with an empty line": ("binarized_mnist", AMAT, LINES[0] + b"\n\n" + LINES[1], "0 numbers on line 2"),
    "amat is MATLAB's": ("binarized_mnist", AMAT, b"MATLAB 5.0 MAT-file, Platform: GLNXA64", "a MATLAB file"),
    "amat empty": ("binarized_mnist", AMAT, b"", "empty file"),
    "amat web page": ("binarized_mnist", AMAT, HTML, "looks like a web page"),
    "npz missing key": ("binarized_mnist", BITS, npz_bytes(train=np.zeros((1, 98), np.uint8)), "no valid, test among"),
    "npz wrong dtype": ("binarized_mnist", BITS, with_bits(train=np.zeros((2, 784))), "dtype float64"),
    "npz wrong integers": ("binarized_mnist", BITS, with_bits(train=np.zeros((2, 784), np.int64)), "int64 (2, 784)"),
    "npz wrong shape": ("binarized_mnist", BITS, with_bits(train=np.zeros((2, 28, 28), np.uint8)), "(2, 28, 28)"),
    "npz of no images": ("binarized_mnist", BITS, with_bits(train=np.zeros((0, 98), np.uint8)), "(0, 98)"),
    "npz not of bits": ("binarized_mnist", BITS, with_bits(train=np.full((2, 784), 7, np.uint8)), "the value 7"),
    "npz objects": ("binarized_mnist", BITS, with_bits(train=np.array([{}], object)), "pickled objects"),
    "npz claims 2^40 rows": ("binarized_mnist", BITS, npz_with_header("(1099511627776, 98)"), "truncated array"),
    "npz claims fewer rows": ("binarized_mnist", BITS, npz_with_header("(0, 98)"), "trailing bytes"),
    "npz claims less than none": ("binarized_mnist", BITS, npz_with_header("(-1, 98)"), "trailing bytes"),
    "npz header is nonsense": ("binarized_mnist", BITS, npz_with_header("'a lot'"), "damaged"),
    "npz corrupt": ("binarized_mnist", BITS, damaged(with_bits(), 200), "damaged"),
    "npz torn": ("binarized_mnist", BITS, with_bits()[:-40], "damaged"),
    "npz is no zip": ("binarized_mnist", BITS, b"PK but no zip", "damaged"),
    "npz web page": ("binarized_mnist", BITS, HTML, "looks like a web page"),
    "subset missing key": ("cifar10", SUBSET, npz_bytes(x_train=np.zeros(3, np.uint8)), "no y_train"),
    "subset wrong shape": (
        "cifar10",
        SUBSET,
        npz_bytes(**subset_arrays(x_train=np.zeros((4, 32, 32, 3), np.uint8))),
        "(4, 32, 32, 3)",
    ),
    "subset of floats": ("cifar10", SUBSET, npz_bytes(**subset_arrays(x_train=np.zeros((4, 3, 32, 32)))), "float64"),
    "subset labels too few": ("cifar10", SUBSET, npz_bytes(**subset_arrays(y_train=np.arange(3))), "3 labels"),
    "subset label negative": ("cifar10", SUBSET, npz_bytes(**subset_arrays(y_train=np.arange(-1, 3))), "label -1"),
    "subset labels one-hot": ("cifar10", SUBSET, npz_bytes(**subset_arrays(y_train=np.eye(4, dtype=np.uint8))), "(4,"),
    "subset git-lfs pointer": ("cifar10", SUBSET, LFS, "git-lfs pointer"),
}


def spoil(folder: Path, file: str, content) -> None:
    """A folder with everything right but for one file."""
    if file.endswith("ubyte"):
        write_mnist(folder, "{}-{}")
    elif file.endswith(".bin"):
        write_cifar(folder)
    elif file.endswith(".amat"):
        write_amat(folder)
    folder.mkdir(exist_ok=True)
    path = folder / file
    path.unlink(missing_ok=True)
    if content is FOLDER:
        path.mkdir()
    elif content is LOOP:
        path.symlink_to(path)
    elif content is PIPE:
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_end_in_one_line(tmp_path, loose, case):
    name, file, content, words = MALFORMED[case]
    spoil(tmp_path / name, file, content)
    with pytest.raises(InputError) as caught:
        registry.load(name, tmp_path)
    message = str(caught.value)
    assert words in message
    assert file in message
    assert "\n" not in message
    assert str(tmp_path) in message
    assert message.endswith(".")


@pytest.mark.parametrize("place", [".", "mnist"])
def test_an_empty_folder_is_no_data_set(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    with pytest.raises(InputError, match=r"does not hold it.*lamina data get mnist --data .*--data embedded"):
        registry.load("mnist", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_no_permission(tmp_path, loose, what):
    write_mnist(tmp_path / "mnist")
    target = tmp_path / "mnist" / ("train-images-idx3-ubyte.gz" if what == "file" else ".")
    target.chmod(0)
    try:
        with pytest.raises(InputError, match="Permission denied"):
            registry.load("mnist", tmp_path)
    finally:
        target.chmod(0o700)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_idx_file_never_loads(tmp_path_factory, draw):
    """Random bytes, truncations and flipped bytes: an InputError, or the very content that was written."""
    path = tmp_path_factory.mktemp("idx") / "x"
    good = draw.draw(st.sampled_from([IMAGES, PACKED]))
    kind = draw.draw(st.sampled_from(["random", "cut", "longer", "flipped"]))
    if kind == "random":
        bad = draw.draw(st.binary(max_size=200))
    elif kind == "cut":
        bad = good[: draw.draw(st.integers(0, len(good) - 1))]
    elif kind == "longer":
        bad = good + draw.draw(st.binary(min_size=1, max_size=5))
    else:
        bad = damaged(good, draw.draw(st.integers(0, len(good) - 1)))
    path.write_bytes(bad)
    try:
        _, value = formats.read_idx(path, (28, 28))
    except InputError:
        return
    # A pixel of an unpacked file, or a byte of gzip's header that says nothing of the content: the hash decides.
    assert kind == "flipped" or (kind == "longer" and not bad[len(good) :].strip(b"\0"))
    packed = bad[:2] == b"\x1f\x8b"
    assert value == hashlib.sha256(IMAGES if packed else bad).hexdigest()
    assert packed or value != hashlib.sha256(IMAGES).hexdigest()


@given(st.binary(max_size=300), st.sampled_from(["", "PK\x03\x04", "\x1f\x8b\x08\0", "0 1 "]))
def test_random_bytes_raise_nothing_but_input_errors(tmp_path_factory, content, start):
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(start.encode("latin-1") + content)
    readers = (
        lambda: formats.read_amat(path),
        lambda: formats.read_npz(path, ["x"]),
        lambda: formats.read_cifar_tar({TAR: path}),
        lambda: formats.read_cifar_bins(dict.fromkeys(formats.CIFAR_FILES, path)),
    )
    for reader in readers:
        with pytest.raises(InputError):
            reader()


@pytest.mark.parametrize("packed", [False, True])
def test_a_header_cannot_make_the_reader_take_memory(tmp_path, packed):
    """A claim of 1.6 TB in a file of 1 MB, read under a limit of address space."""
    path = tmp_path / "big"
    content = struct.pack(">4I", 0x803, 2**31, 28, 28) + os.urandom(2**20)
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    code = (
        "import resource, sys, pathlib; from lamina.lab.data import formats\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "try: formats.read_idx(pathlib.Path(sys.argv[1]), (28, 28))\n"
        "except formats.InputError as error: print(error)"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment)
    assert "truncated" in done.stdout, done.stderr


# Pinned content


def test_content_that_was_not_published_is_refused(tmp_path):
    for name in ("mnist", "fashion_mnist"):
        write_mnist(tmp_path / name)
    with pytest.raises(InputError, match="60,000 images in train, got 12"):
        registry.load("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "binarized_mnist", "cifar10"])
def test_a_wrong_hash_is_refused(tmp_path, monkeypatch, name):
    source = registry.SOURCES[name]
    layouts = tuple(dataclasses.replace(layout, counts={}) for layout in source.layouts)
    monkeypatch.setitem(registry.SOURCES, name, dataclasses.replace(source, layouts=layouts))
    write = {"mnist": write_mnist, "binarized_mnist": write_amat, "cifar10": write_cifar}[name]
    write(tmp_path / name)
    with pytest.raises(InputError, match=r"not the published file\. Delete it and run `lamina data get") as caught:
        registry.load(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_one_set_in_place_of_another_is_named(tmp_path, monkeypatch, loose):
    write_mnist(tmp_path / "mnist")
    write_mnist(tmp_path / "fashion_mnist")
    hashes = registry.load("mnist", tmp_path).sha256
    for name, pins in (("mnist", hashes), ("fashion_mnist", dict.fromkeys(hashes, "0" * 64))):
        source = registry.SOURCES[name]
        layouts = tuple(dataclasses.replace(layout, sha256=pins) for layout in source.layouts)
        monkeypatch.setitem(registry.SOURCES, name, dataclasses.replace(source, layouts=layouts))
    assert registry.load("mnist", tmp_path).kind == "real"
    with pytest.raises(InputError, match=r"got that of mnist\. Pass the folder"):
        registry.load("fashion_mnist", tmp_path)


def test_every_file_of_every_set_is_pinned():
    for source in registry.SOURCES.values():
        assert all(len(layout.sha256) >= 3 and layout.counts for layout in source.layouts)
        assert {len(sha) for layout in source.layouts for sha in layout.sha256.values()} == {64}
        assert all(len(remote.sha256) == 64 and remote.size > 0 for remote in source.remotes)
        assert source.licence


@needs_real
@pytest.mark.parametrize(
    ("name", "label", "key"),
    [
        ("mnist", "MNIST (real: 60,000 + 10,000)", "train-images-idx3-ubyte"),
        ("fashion_mnist", "Fashion-MNIST (real: 60,000 + 10,000)", "train-images-idx3-ubyte"),
        ("binarized_mnist", "Binarised MNIST (real: 50,000 + 10,000 + 10,000)", "binarized_mnist_train.amat"),
        ("cifar10", "CIFAR-10", None),
    ],
)
def test_the_published_sets(name, label, key):
    if registry.find(registry.SOURCES[name], Path(REAL)) is None:
        pytest.skip(f"LAMINA_TEST_DATA has no {name}")
    got = registry.load(name, REAL)
    usable(got)
    assert got.label.startswith(label)
    assert got.kind == "real"
    assert key is None or got.sha256[key] == registry.SOURCES[name].layouts[0].sha256[key]
    mean = {"mnist": 33.318, "fashion_mnist": 72.940, "binarized_mnist": 0.130562}.get(name)
    assert mean is None or got.arrays["train_x"].mean() == pytest.approx(mean, rel=1e-4)


# Where a set is looked for, and the stand-in


def test_argument_then_environment_then_cache_then_embedded(tmp_path, monkeypatch, loose):
    assert registry.load("mnist").kind == "embedded"
    write_mnist(tmp_path / "cache/lamina/mnist")
    assert registry.load("mnist").kind == "real"
    assert registry.load("fashion_mnist").kind == "embedded"
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="elsewhere, which is not there"):
        registry.load("mnist")
    assert registry.load("mnist", tmp_path / "cache/lamina").kind == "real"
    assert registry.load("mnist", "embedded").kind == "embedded"
    monkeypatch.setenv("LAMINA_DATA", "embedded")
    assert registry.load("mnist").kind == "embedded"
    monkeypatch.setenv("LAMINA_DATA", "")
    assert registry.load("mnist").kind == "real"


def test_a_cache_with_half_a_set_is_an_error_not_a_stand_in(tmp_path):
    home = tmp_path / "cache/lamina/mnist"
    home.mkdir(parents=True)
    assert registry.load("mnist").kind == "embedded"
    (home / "train-images-idx3-ubyte.gz.part").write_bytes(b"some")
    with pytest.raises(InputError, match="lamina data get mnist"):
        registry.load("mnist")


def test_home_folder_and_relative_cache(tmp_path, monkeypatch, loose):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the convention: such a value is ignored
    assert registry.default_root() == tmp_path / ".cache/lamina"
    write_mnist(tmp_path / "sets/mnist")
    assert registry.load("mnist", "~/sets").kind == "real"


def test_unknown_names_and_a_file_for_a_folder(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'mnist'"):
        registry.load("mnits")
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with pytest.raises(InputError, match="which is a file"):
        registry.load("mnist", path)


def test_the_stand_in_is_fixed():
    got = registry.load("mnist", "embedded")
    usable(got)
    assert got.label == "scikit-learn digits 8x8 (embedded stand-in for mnist: 1,297 + 500)"
    assert got.describe()["sizes"] == {"train": 1297, "test": 500}
    assert got.arrays["train_x"].shape == (1297, 8, 8)
    assert (got.arrays["train_x"].min(), got.arrays["train_x"].max()) == (0, 255)
    assert got.sha256["train_x"] == hashlib.sha256(got.arrays["train_x"].tobytes()).hexdigest()
    # two machines must mean the same split
    first = [got.sha256[key][:8] for key in ("train_x", "train_y", "test_x", "test_y")]
    assert first == ["9beab5fc", "ca964eb7", "b20d5bc4", "5668284a"]
    assert (
        registry.load("cifar10", "embedded").sha256 == registry.load("fashion_mnist", "embedded").sha256 == got.sha256
    )


def test_the_stand_in_is_stratified_and_complete():
    from sklearn.datasets import load_digits

    got = registry.load("mnist", "embedded").arrays
    np.testing.assert_array_equal(np.bincount(got["test_y"]), np.full(10, 50))
    assert np.abs(np.bincount(got["train_y"][:300], minlength=10) - 30).max() <= 3
    everything = np.concatenate([got["train_x"], got["test_x"]]).reshape(1797, 64)
    original = np.rint(load_digits().data * 255 / 16)
    np.testing.assert_array_equal(everything[np.lexsort(everything.T)], original[np.lexsort(original.T)])


def test_the_binarised_stand_in():
    got = registry.load("binarized_mnist", "embedded")
    usable(got)
    assert got.describe()["sizes"] == {"train": 1000, "valid": 297, "test": 500}
    assert got.arrays.keys() == {"train_x", "valid_x", "test_x"}
    assert got.arrays["train_x"].shape == (1000, 64)
    grey_images = registry.load("mnist", "embedded").arrays
    np.testing.assert_array_equal(got.arrays["test_x"], grey_images["test_x"].reshape(500, 64) > 127)
    train = grey_images["train_x"].reshape(-1, 64) > 127
    np.testing.assert_array_equal(np.concatenate([got.arrays["train_x"], got.arrays["valid_x"]]), train)


def test_the_stand_in_says_when_scikit_learn_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install scikit-learn`.*lamina-nn\[lab\]"):
        registry.load("mnist", "embedded")


def test_no_torch_is_imported():
    code = (
        "import sys, lamina.lab.data.registry, lamina.lab.data.fetch; "
        "print('torch' in sys.modules, 'sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


# Downloads, from a server in this process


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; notes every request's Range and the bytes it sent; ``trouble`` says how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.trouble: set[str] = set()
        self.cut_after: int | None = None  # bytes of a body, before the connection closes
        self.cuts = 10**9  # how many times
        self.requests: list[dict[str, str | None]] = []
        self.sent = 0
        self.etag = '"v1"'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data/"

    def handle_error(self, *_) -> None:
        """Clients that hang up are part of the tests."""

    def ranges(self) -> list[str | None]:
        return [request["Range"] for request in self.requests]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        server, trouble = self.server, self.server.trouble
        server.requests.append({name: self.headers[name] for name in ("Range", "If-Range")})
        if "redirect" in trouble and self.path.startswith("/data/"):
            return self.answer(302, Location=self.path.replace("/data/", "/moved/"))
        if "silence" in trouble:
            return threading.Event().wait(1)
        name = self.path.rsplit("/", 1)[1]
        if "html" in trouble:
            return self.answer(200, HTML, Content_Type="text/html; charset=utf-8")
        if "busy" in trouble:
            trouble.discard("busy")
            return self.answer(503)
        if name not in server.files:
            return self.answer(404, b"<html>no such file</html>")
        return self.file(server.files[name])

    def file(self, content: bytes) -> None:
        asked, changed = self.headers["Range"], self.headers["If-Range"] not in (None, self.server.etag)
        if asked is None or changed or "no range" in self.server.trouble:
            return self.answer(200, content, ETag=self.server.etag)
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            return self.answer(416, Content_Range=f"bytes */{len(content)}")
        if "shifted" in self.server.trouble:
            start -= 10
        where = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.answer(206, content[start:], Content_Range=where, ETag=self.server.etag)

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        server = self.server
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "no length" not in server.trouble:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cut_after is not None and code in (200, 206) and len(body) > server.cut_after and server.cuts > 0:
            server.cuts -= 1
            body = body[: server.cut_after]
        server.sent += len(body)  # before the client can have it
        self.wfile.write(body)
        self.close_connection = True


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


FILES = {name: rng().integers(0, 256, 40_000, np.uint8).tobytes() for name in ("a.bin", "b.bin")}
PACKED_TEXT = gzip.compress(b"text " * 4000)


@pytest.fixture
def toy(monkeypatch, server):
    """A data set of two files and a packed one, on the server."""
    server.files = FILES | {"c.gz": PACKED_TEXT}
    nowhere = ("http://127.0.0.1:9/",)
    remotes = [registry.Remote(name, nowhere, len(c), hashlib.sha256(c).hexdigest()) for name, c in FILES.items()]
    remotes.append(registry.Remote("c.gz", nowhere, 0, hashlib.sha256(b"text " * 4000).hexdigest(), unpacked=True))

    def read(files):
        return formats.Contents(
            {"train_x": np.zeros(1)}, {n: formats.file_sha256(p, n == "c.gz") for n, p in files.items()}
        )

    pins = {remote.name: remote.sha256 for remote in remotes}
    layout = registry.Layout(("toy", "."), tuple(pins), read, {}, pins)
    source = registry.Source("toy", "Toy", "none", (layout,), tuple(remotes), registry.digits_images)
    monkeypatch.setitem(registry.SOURCES, "toy", source)
    return source


def fetch(tmp_path, server, **options) -> list[Path]:
    return download.get("toy", tmp_path, base_urls=[server.url], **options)


def check_whole(tmp_path) -> None:
    home = tmp_path / "toy"
    assert {p.name for p in home.iterdir()} == {"a.bin", "b.bin", "c.gz", ".lock"}
    assert all((home / name).read_bytes() == content for name, content in FILES.items())
    assert registry.load("toy", tmp_path).kind == "real"


def test_get_fetches_and_then_has_nothing_to_do(tmp_path, toy, server):
    seen = []
    paths = fetch(tmp_path, server, progress=lambda *state: seen.append(state))
    assert paths == [tmp_path / "toy" / name for name in ("a.bin", "b.bin", "c.gz")]
    check_whole(tmp_path)
    assert [state for state in seen if state[2] == "a.bin"][-1] == (40_000, 40_000, "a.bin")
    assert server.ranges() == [None] * 3
    assert fetch(tmp_path, server) == paths
    assert len(server.requests) == 3


def test_get_goes_on_where_an_earlier_one_stopped(tmp_path, toy, server):
    home = tmp_path / "toy"
    home.mkdir()
    (home / "a.bin").write_bytes(FILES["a.bin"])
    (home / "b.bin.part").write_bytes(FILES["b.bin"][:30_000])
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.ranges() == ["bytes=30000-", None]
    assert server.sent == 10_000 + len(PACKED_TEXT)  # not a byte twice


def test_a_cut_connection_is_resumed(tmp_path, toy, server):
    server.cut_after, server.cuts = 15_000, 2
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.ranges() == [None, "bytes=15000-", "bytes=30000-", None, None]
    assert server.requests[1]["If-Range"] == '"v1"'
    assert server.sent == 80_000 + len(PACKED_TEXT)


def test_the_command_fetches_resumes_and_says_how_it_went(tmp_path, toy, server, capsys):
    """``lamina data get``: 0 with the files there, 1 when cut off (the part is kept), 2 when the bytes are wrong."""
    cli = pytest.importorskip("lamina.lab.cli.commands", reason="needs the lab extra")
    command = ["data", "get", "toy", "--data", str(tmp_path), "--mirror", server.url]
    server.cut_after = 1000
    assert cli.main(command) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("lamina: ")
    assert (tmp_path / "toy/a.bin.part").exists()
    server.cut_after = None
    assert cli.main(command) == 0
    assert "3 file(s)" in capsys.readouterr().out
    check_whole(tmp_path)
    (tmp_path / "toy/a.bin").unlink()
    server.files["a.bin"] = bytes(40_000)
    assert cli.main(command) == 2
    assert "a.bin" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "toy/a.bin").exists()


def test_a_connection_that_stays_bad_keeps_the_part(tmp_path, toy, server):
    server.cut_after = 1000
    with pytest.raises(
        RunError, match=r"5,000 of 40,000 bytes.*5,000 bytes are kept, and the same command goes on"
    ) as e:
        fetch(tmp_path, server)
    assert "\n" not in str(e.value)
    assert (tmp_path / "toy/a.bin.part").read_bytes() == FILES["a.bin"][:5000]
    assert not (tmp_path / "toy/a.bin").exists()
    server.cut_after, server.sent = None, 0
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.sent == 75_000 + len(PACKED_TEXT)


@pytest.mark.parametrize(
    "trouble", [{"no range"}, {"no range", "no length"}, {"no length"}, {"redirect"}, {"busy"}, {"shifted"}]
)
def test_servers_with_habits(tmp_path, toy, server, trouble):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin.part").write_bytes(FILES["a.bin"][:30_000])
    server.trouble = trouble
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.ranges()[0] == "bytes=30000-"


def test_a_file_that_changed_on_the_server_comes_whole(tmp_path, toy, server):
    server.files["a.bin"], server.cut_after, server.cuts = bytes(40_000), 20_000, 5
    server.trouble = {"no range"}
    with pytest.raises(RunError):
        fetch(tmp_path, server)
    assert (tmp_path / "toy/a.bin.part").read_bytes() == bytes(20_000)
    server.files["a.bin"], server.etag, server.trouble = FILES["a.bin"], '"v2"', set()
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.requests[5]["If-Range"] == '"v1"'


@pytest.mark.parametrize("at_hand", [FILES["a.bin"], FILES["a.bin"] + b"more"])
def test_a_part_that_has_everything_or_too_much(tmp_path, toy, server, at_hand):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin.part").write_bytes(at_hand)
    fetch(tmp_path, server)
    check_whole(tmp_path)
    fetched = 80_000 if len(at_hand) > 40_000 else 40_000
    assert server.sent == fetched + len(PACKED_TEXT)


@pytest.mark.parametrize("size", [40_000, 39_000])
def test_wrong_content_is_not_kept(tmp_path, toy, server, size):
    server.files["a.bin"] = bytes(size)
    with pytest.raises(InputError, match="other content than the published file"):
        fetch(tmp_path, server)
    assert {p.name for p in (tmp_path / "toy").iterdir()} == {".lock"}


def test_wrong_content_on_the_disc_is_replaced(tmp_path, toy, server):
    (tmp_path / "toy").mkdir()
    for name in server.files:
        (tmp_path / "toy" / name).write_bytes(b"\x1f\x8bnot what it should be")
    fetch(tmp_path, server)
    check_whole(tmp_path)


def test_another_packing_of_the_same_content_will_do(tmp_path, toy, server):
    server.files["c.gz"] = gzip.compress(b"text " * 4000, 1, mtime=1)
    fetch(tmp_path, server)
    assert (tmp_path / "toy/c.gz").read_bytes() == server.files["c.gz"]


@pytest.mark.parametrize(
    ("trouble", "words"), [("html", "web page"), ("404", "HTTP 404"), ("down", "refused"), ("silence", "timed out")]
)
def test_no_server_has_it(tmp_path, toy, server, monkeypatch, trouble, words):
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin.part").write_bytes(FILES["a.bin"][:100])
    server.trouble = {trouble}
    server.files = {}
    base = "http://127.0.0.1:9/" if trouble == "down" else server.url
    kind = RunError if trouble == "silence" else InputError
    with pytest.raises(kind, match=words) as caught:
        download.get("toy", tmp_path, base_urls=[base])
    message = str(caught.value)
    assert "\n" not in message
    if kind is InputError:
        assert all(f"http://127.0.0.1:9/{name}" in message for name in ("a.bin", "b.bin", "c.gz"))
        assert f"into {tmp_path / 'toy'}" in message
        assert f"--data {tmp_path}" in message
    assert (tmp_path / "toy/a.bin.part").read_bytes() == FILES["a.bin"][:100]  # nothing at hand is given up


def test_the_next_mirror_goes_on_with_the_part(tmp_path, toy, server):
    second = Server()
    second.files, second.etag = server.files, '"its own"'
    thread = threading.Thread(target=second.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.cut_after = 1000
    download.get("toy", tmp_path, base_urls=["http://127.0.0.1:9/", server.url, second.url.rstrip("/")])
    second.shutdown()
    thread.join()
    second.server_close()
    check_whole(tmp_path)
    # the first server's mark means nothing to the second, which would send the whole file for it
    assert second.requests[0] == {"Range": "bytes=5000-", "If-Range": None}
    assert second.sent == 70_000


def test_a_server_that_hangs_up_costs_nothing_at_hand(tmp_path, toy, server):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin.part").write_bytes(FILES["a.bin"][:30_000])
    server.trouble, server.cut_after = {"no range"}, 0
    with pytest.raises(RunError, match=r"before the first byte.*30,000 bytes are kept"):
        fetch(tmp_path, server)


def test_two_at_once(tmp_path, toy, server):
    """Threads open the lock file each for itself, as processes do."""
    errors = []

    def one() -> None:
        try:
            fetch(tmp_path, server)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check_whole(tmp_path)
    assert len(server.requests) == 3


def test_a_full_disc(tmp_path, toy, server):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"no room.*No space left.*the same command goes on"):
        fetch(tmp_path, server)


def test_a_full_disc_keeps_what_has_arrived(tmp_path, toy, server):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match="no room"):
            fetch(tmp_path, server)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = (tmp_path / "toy/a.bin.part").read_bytes()
    assert len(kept) > 0
    assert kept == FILES["a.bin"][: len(kept)]
    server.sent = 0
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.sent == 80_000 - len(kept) + len(PACKED_TEXT)


def test_an_interrupt_keeps_what_has_arrived(tmp_path, toy, server):
    def stop(done, total, name):
        if done > 512:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, server, progress=stop)
    kept = (tmp_path / "toy/a.bin.part").read_bytes()
    assert len(kept) > 512
    fetch(tmp_path, server)
    check_whole(tmp_path)
    assert server.ranges()[1] == f"bytes={len(kept)}-"


def test_get_refuses_what_it_cannot_do(tmp_path, toy, server):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="can be written"):
        download.get("toy", tmp_path / "file", base_urls=[server.url])
    with pytest.raises(InputError, match="embedded"):
        download.get("toy", "embedded")
    with pytest.raises(InputError, match="http://"):
        download.get("toy", tmp_path, base_urls=["file:///etc/"])
    with pytest.raises(InputError, match="Did you mean"):
        download.get("toi", tmp_path)


def test_get_leaves_a_set_alone_that_lies_there_unpacked(tmp_path, monkeypatch, loose):
    write_mnist(tmp_path / "mnist", "{}.{}")
    assert len(download.get("mnist", tmp_path, base_urls=["http://127.0.0.1:9/"])) == 4


def test_get_does_not_take_a_subset_for_the_set(tmp_path, loose):
    (tmp_path / "cifar10_subset.npz").write_bytes(npz_bytes(**subset_arrays()))
    assert registry.load("cifar10", tmp_path).kind == "real"
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz must be fetched"):
        download.get("cifar10", tmp_path, base_urls=["http://127.0.0.1:9/"])


def test_status_says_what_is_where(tmp_path, loose):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "fashion_mnist").mkdir()
    (tmp_path / "fashion_mnist/train-images-idx3-ubyte.gz").write_bytes(b"12345")
    (tmp_path / "cifar10_subset").mkdir()
    (tmp_path / "cifar10_subset/cifar10_subset.npz").write_bytes(b"123")
    found = {one.name: one for one in download.status(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "mnist": "present",
        "fashion_mnist": "incomplete",
        "binarized_mnist": "absent",
        "cifar10": "present",
    }
    assert (found["mnist"].folder, found["mnist"].missing) == (tmp_path / "mnist", ())
    assert found["fashion_mnist"].size == 5
    assert len(found["fashion_mnist"].missing) == 3
    assert found["binarized_mnist"].folder == tmp_path / "binarized_mnist"
    assert found["cifar10"].title == "CIFAR-10 subset"
    assert all(one.licence for one in found.values())
