"""Data sets: where they lie, what they must contain to the byte, and a small embedded stand-in for each.

A set is looked for in the folder that was asked for (argument or ``LAMINA_DATA``), else in the cache folder; where the
cache has none, scikit-learn's digits stand in and every label says so. A folder that was asked for and lacks the set
is an error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError, fail, not_installed, one_of
from . import formats
from .formats import CIFAR_FILES, CIFAR_FOLDER, SPLITS, Array, BadFile, Contents, Reader, digest

EMBEDDED = "embedded"
TEST_PER_CLASS, BINARIZED_TRAIN = 50, 1000  # of the stand-in
ROOT_VARIABLE = "LAMINA_DATA"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Arrays and what they are.

    arrays: "train_x", "train_y", "test_x", "test_y", and "valid_x" where the set has a validation part. Grey images
    are uint8 [N, H, W], colour ones [N, 3, H, W], binarised ones 0 or 1 [N, pixels] with no labels.
    """

    name: str
    kind: str  # "real" or "embedded"
    label: str
    arrays: dict[str, Array]
    sha256: dict[str, str]

    def describe(self) -> dict[str, Any]:
        """What run folders and records keep about the data."""
        sizes = _sizes(self.arrays)
        return {"name": self.name, "kind": self.kind, "label": self.label, "sizes": sizes, "sha256": self.sha256}


@dataclass(frozen=True)
class Remote:
    """One file to fetch. The sha256 is of the unpacked content where ``unpacked``: mirrors differ in gzip headers."""

    name: str
    bases: tuple[str, ...]
    size: int
    sha256: str
    unpacked: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(base + self.name for base in self.bases)


@dataclass(frozen=True)
class Layout:
    """One way a set may lie on the disc: folders below the root ("." is the root itself), files, and their reader."""

    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Reader
    counts: Mapping[str, int]
    sha256: Mapping[str, str]
    spellings: Callable[[str], tuple[str, ...]] = lambda name: (name,)
    subset_title: str | None = None  # the layout holds part of the set, and this is its name


@dataclass(frozen=True)
class Source:
    """All there is to know of a data set; a new one is a new row of ``SOURCES``."""

    name: str
    title: str
    licence: str
    layouts: tuple[Layout, ...]
    remotes: tuple[Remote, ...]
    stand_in: Callable[[], Contents]
    stand_in_title: str = "scikit-learn digits 8x8"


@dataclass(frozen=True)
class Found:
    """The files of a layout that are there, by published name, and the names of those that are not."""

    layout: Layout
    folder: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """The data set ``name``.

    Args:
        name: "mnist", "fashion_mnist", "binarized_mnist" or "cifar10".
        root: folder that holds the set's folder, or that folder itself; "embedded" for the stand-in. By default
            what ``LAMINA_DATA`` says, else the cache folder where it has the set, else the stand-in.
    """
    source = lookup(name)
    asked = asked_root(root)
    if asked == EMBEDDED:
        return _embedded(source)
    folder = default_root() if asked is None else Path(asked)
    found = find(source, folder)
    if found is None and asked is None:
        return _embedded(source)
    if found is None:
        raise fail(f"--data must be a folder with {name} in it", _absence(folder), _remedy(name, folder))
    if found.missing:
        rule = f"{found.folder} must hold {', '.join(found.layout.files)}"
        raise fail(rule, f"no {', '.join(found.missing)}", _remedy(name, folder))
    return _real(source, found, folder)


def lookup(name: str) -> Source:
    """The row of a data set, or an error that suggests the nearest name."""
    one_of("a data set", name, SOURCES)
    return SOURCES[name]


def asked_root(root: str | os.PathLike[str] | None = None) -> str | None:
    """The folder that was asked for, by argument or environment; "embedded" for the stand-in; None when neither."""
    asked = os.environ.get(ROOT_VARIABLE) if root is None else os.fspath(root)
    return os.path.expanduser(asked) if asked else None


def default_root() -> Path:
    """The cache folder: ``$XDG_CACHE_HOME/lamina`` or ``~/.cache/lamina``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "lamina"


def find(source: Source, root: Path) -> Found | None:
    """The first complete layout below ``root``, else the first begun one, else None.

    A subset serves only where nothing of the whole set is there: a download cut short must not pass for it.
    """
    for subset in (False, True):
        layouts = [layout for layout in source.layouts if (layout.subset_title is not None) is subset]
        looks = [_look(layout, root / folder) for layout in layouts for folder in layout.folders]
        begun = [found for found in looks if found is not None]
        if begun:
            return next((found for found in begun if not found.missing), begun[0])
    return None


def _look(layout: Layout, folder: Path) -> Found | None:
    held = _names(folder)
    files = {}
    for name in layout.files:
        there = [folder / spelling for spelling in layout.spellings(name) if spelling in held]
        if there:  # a folder of that name serves only where no file has it; then the reader says so
            files[name] = min(there, key=os.path.isdir)
    missing = tuple(name for name in layout.files if name not in files)
    parts = any(f"{spelling}.part" in held for name in missing for spelling in layout.spellings(name))
    return Found(layout, folder, files, missing) if files or parts else None


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (OSError, ValueError) as error:
        remedy = "See that you may read the folder, or pass another with --data."
        raise fail(f"{folder} must be a readable folder", str(error), remedy) from None


def _absence(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}, which is not there"
    return f"{folder}, which " + ("does not hold it" if folder.is_dir() else "is a file")


def fetch_command(name: str, root: Path) -> str:
    """The command that puts the set into ``root``."""
    return f"lamina data get {name} --data {shlex.quote(str(root))}"


def _remedy(name: str, root: Path) -> str:
    return f"Run `{fetch_command(name, root)}`, or pass `--data {EMBEDDED}` for the small stand-in."


def _real(source: Source, found: Found, root: Path) -> Dataset:
    again = f"run `{fetch_command(source.name, root)}`"
    try:
        contents = read(found)
    except BadFile as error:
        raise fail(error.rule, error.found, error.remedy or f"Delete it and {again}.") from None
    label = f"{found.layout.subset_title or source.title} (real: {_counted(contents.arrays)})"
    return Dataset(source.name, "real", label, contents.arrays, contents.sha256)


def read(found: Found) -> Contents:
    """The arrays of a layout, as published to the byte or not at all."""
    contents = found.layout.read(found.files)
    sizes = _sizes(contents.arrays)
    for split, count in found.layout.counts.items():
        if sizes[split] != count:
            raise BadFile(found.folder, f"a folder with {count:,} images in {split}", f"{sizes[split]:,}")
    for name, value in contents.sha256.items():
        if found.layout.sha256.get(name, value) != value:
            raise _unpublished(found, name, value)
    return contents


def _unpublished(found: Found, name: str, value: str) -> BadFile:
    path = found.files.get(name, next(iter(found.files.values())))
    holder = "" if name in found.files else "a file with "
    expected = f"{holder}the published {name} (sha256 {found.layout.sha256[name]})"
    owners = [source.name for source in SOURCES.values() if any(value in o.sha256.values() for o in source.layouts)]
    if owners:
        return BadFile(path, expected, f"that of {owners[0]}", "Pass the folder that holds the set itself.")
    return BadFile(path, expected, f"other content (sha256 {value}): not the published file")


def _sizes(arrays: Mapping[str, Array]) -> dict[str, int]:
    return {split: len(arrays[f"{split}_x"]) for split in SPLITS if f"{split}_x" in arrays}


def _counted(arrays: Mapping[str, Array]) -> str:
    return " + ".join(f"{count:,}" for count in _sizes(arrays).values())


# The embedded stand-in


def _embedded(source: Source) -> Dataset:
    contents = source.stand_in()
    label = f"{source.stand_in_title} (embedded stand-in for {source.name}: {_counted(contents.arrays)})"
    return Dataset(source.name, EMBEDDED, label, contents.arrays, contents.sha256)


def _split_digits() -> tuple[Array, Array]:
    """scikit-learn's digits (0 to 16, [1797, 8, 8]) and labels: 50 of each class first, then the others, in an order
    in which every stretch has the classes in proportion."""
    try:
        digits = import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise InputError(f"The embedded data are scikit-learn's digits. {not_installed('sklearn')}") from None
    labels = digits.target
    ranks, sizes = np.empty(len(labels)), np.bincount(labels)[labels]
    shuffled = np.random.RandomState(0).permutation(len(labels))  # a legacy generator: its numbers are frozen
    for label in range(10):
        members = shuffled[labels[shuffled] == label]
        ranks[members] = np.arange(len(members))
    order = np.lexsort((labels, ranks / sizes, ranks >= TEST_PER_CLASS))
    return digits.images[order], labels[order].astype(np.uint8)


def digits_images() -> Contents:
    """1,297 + 500 grey images, 0 to 255."""
    images, labels = _split_digits()
    pixels, test = np.rint(images * (255 / 16)).astype(np.uint8), 10 * TEST_PER_CLASS
    arrays = {"train_x": pixels[test:], "train_y": labels[test:], "test_x": pixels[:test], "test_y": labels[:test]}
    return _hashed(arrays)


def digits_bits() -> Contents:
    """1,000 + 297 + 500 images of 64 bits: whether a pixel is at least half full."""
    images, _ = _split_digits()
    bits, test = (images >= 8).reshape(len(images), -1).astype(np.uint8), 10 * TEST_PER_CLASS
    first_valid = test + BINARIZED_TRAIN
    return _hashed({"train_x": bits[test:first_valid], "valid_x": bits[first_valid:], "test_x": bits[:test]})


def _hashed(arrays: dict[str, Array]) -> Contents:
    return Contents(arrays, {name: digest(array) for name, array in arrays.items()})


# The table of data sets


def _idx_source(
    name: str, title: str, licence: str, folder: str, bases: tuple[str, ...], files: Mapping[str, tuple[int, str]]
) -> Source:
    layout = Layout(
        folders=(name, folder, "."),
        files=tuple(files),
        read=formats.read_mnist,
        counts={"train": 60_000, "test": 10_000},
        sha256={stem: sha for stem, (_, sha) in files.items()},
        spellings=formats.idx_names,
    )
    remotes = tuple(Remote(f"{stem}.gz", bases, size, sha, unpacked=True) for stem, (size, sha) in files.items())
    return Source(name, title, licence, (layout,), remotes, digits_images)


# The sha256 of uncompressed IDX files whose packed forms have the published md5; sizes are of the packed files.
_MNIST = _idx_source(
    "mnist",
    "MNIST",
    "LeCun, Cortes and Burges; CC BY-SA 3.0 is what is usually quoted",
    "MNIST/raw",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    {
        "train-images-idx3-ubyte": (9912422, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        "train-labels-idx1-ubyte": (28881, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        "t10k-images-idx3-ubyte": (1648877, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        "t10k-labels-idx1-ubyte": (4542, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    },
)
_FASHION = _idx_source(
    "fashion_mnist",
    "Fashion-MNIST",
    "Zalando SE; MIT",
    "FashionMNIST/raw",
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    {
        "train-images-idx3-ubyte": (26421880, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        "train-labels-idx1-ubyte": (29515, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        "t10k-images-idx3-ubyte": (4422102, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        "t10k-labels-idx1-ubyte": (5148, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    },
)

_AMAT = {
    "binarized_mnist_train.amat": (78400000, "ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d"),
    "binarized_mnist_valid.amat": (15680000, "1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2"),
    "binarized_mnist_test.amat": (15680000, "e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c"),
}
_binarized_layout = partial(
    Layout,
    folders=("binarized_mnist", "."),
    counts={"train": 50_000, "valid": 10_000, "test": 10_000},
    sha256={name: sha for name, (_, sha) in _AMAT.items()},
)
_AMAT_BASES = ("http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",)
_BINARIZED = Source(
    "binarized_mnist",
    "Binarised MNIST",
    "Larochelle and Murray 2011, drawn from MNIST; no licence stated",
    (
        _binarized_layout(files=tuple(map(formats.amat_name, SPLITS)), read=formats.read_binarized_amat),
        _binarized_layout(files=("binarized_mnist.npz",), read=formats.read_binarized_npz),
    ),
    tuple(Remote(name, _AMAT_BASES, size, sha) for name, (size, sha) in _AMAT.items()),
    digits_bits,
    "scikit-learn digits 8x8, binarised",
)

_CIFAR_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
# The whole first batch and the first 2,000 of the test batch.
_CIFAR_SUBSET_SHA256 = {
    "cifar10_subset.npz/x_train": "a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21",
    "cifar10_subset.npz/y_train": "d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9",
    "cifar10_subset.npz/x_test": "cd1be53d00d8393c04cb219102c1cb4fc739297cb262316bec1712589e93e1c7",
    "cifar10_subset.npz/y_test": "3902c3af7fa7672eec1fabac87b4a7d8e9846a916952a3f6b723ec75787df0f9",
}
_CIFAR_TAR = Remote(
    "cifar-10-binary.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/",),
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
_cifar_layout = partial(Layout, counts={"train": 50_000, "test": 10_000}, sha256=_CIFAR_SHA256)
_CIFAR = Source(
    "cifar10",
    "CIFAR-10",
    "Krizhevsky 2009; no licence stated, used for research everywhere",
    (
        _cifar_layout(
            folders=("cifar10", CIFAR_FOLDER, f"cifar10/{CIFAR_FOLDER}", "."),
            files=CIFAR_FILES,
            read=formats.read_cifar_bins,
        ),
        _cifar_layout(folders=("cifar10", "."), files=(_CIFAR_TAR.name,), read=formats.read_cifar_tar),
        Layout(
            folders=("cifar10_subset", "cifar10", "."),
            files=("cifar10_subset.npz",),
            read=formats.read_cifar_subset,
            counts={"train": 10_000, "test": 2_000},
            sha256=_CIFAR_SUBSET_SHA256,
            subset_title="CIFAR-10 subset",
        ),
    ),
    (_CIFAR_TAR,),
    digits_images,
)

SOURCES: dict[str, Source] = {source.name: source for source in (_MNIST, _FASHION, _BINARIZED, _CIFAR)}
