"""Captioned images on the disk, in four layouts: every line and every feature is checked before training begins.

A mistake that would silently spoil an experiment is refused by name: counts that do not match, features that are
missing, zero or not finite, an image in two splits. One bad line is repaired, and the repair is counted and told in
"notes". Text is held in arrays too: see ``lines_array``.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import fail
from .formats import Array, lines_array

PER_IMAGE = 5
SPLITS = ("train", "valid", "test")
SPLIT_OF = {"train": "train", "restval": "train", "val": "valid", "dev": "valid", "test": "test"}
PUNCTUATION = re.compile(r"[^\w\s]|_")
TOKEN_LINE = re.compile(r"(.+)#(\d+)\t(.*)", re.DOTALL)
ALLOWED_BROKEN = 10  # lines that are not UTF-8 in a file of any length; in a long one a tenth of its lines
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
CHUNK = 4096  # rows of features in memory at once
ROUNDING = 1e-4  # rows whose length is this close to 1 are taken as they are, and stay on the disk

Captions = dict[str, list[str]]  # of each image


def words_of(caption: str) -> list[str]:
    """Return the words of a caption as the paper's data have them: lower case, no punctuation."""
    return PUNCTUATION.sub("", caption.lower()).split()


def _tokenised(caption: str) -> str:
    return " ".join(words_of(caption))


class Repairs:
    """Repairs counted by kind, each kind with the first case."""

    def __init__(self) -> None:
        self._cases: dict[str, list[str]] = {}

    def add(self, kind: str, case: str) -> None:
        self._cases.setdefault(kind, []).append(case)

    def told(self) -> list[str]:
        """Return one line for each kind."""
        return [f"{kind}: {len(cases):,}, the first is {cases[0]}" for kind, cases in self._cases.items()]


# The four layouts


def read_compact(files: Mapping[str, bytes]) -> dict[str, Array]:
    """Read the published captions.tsv.gz and features; images of other splits than the three are left out."""
    text, features = files.values()
    repairs, splits = Repairs(), dict[str, Captions]()
    for line in lines_of(gzip.decompress(text), "captions.tsv.gz", repairs)[1:]:
        image, split, _, caption = line.split("\t")
        splits.setdefault(split, {}).setdefault(image, []).append(_tokenised(caption))
    rows = _named_features(Path("features_efficientnet_lite0.npz"), io.BytesIO(features))
    known = {SPLIT_OF[split]: captions for split, captions in splits.items() if split in SPLIT_OF}
    return _joined(known, rows, Path("captions.tsv.gz"), repairs)


def read_token_file(paths: Mapping[str, Path]) -> dict[str, Array]:
    """Read Flickr8k.token.txt, the three lists of images, and features with their names."""
    tokens, *lists, features = paths.values()
    repairs = Repairs()
    captions = _token_captions(tokens, repairs)
    splits = {split: _listed(path, captions, repairs) for split, path in zip(SPLITS, lists)}
    return _joined(splits, _named_features(features), tokens, repairs)


def read_karpathy(paths: Mapping[str, Path]) -> dict[str, Array]:
    """Read Karpathy's JSON, and features with names or in the order of its images."""
    path, features = paths.values()
    repairs = Repairs()
    images = _json_images(path, repairs)
    splits: dict[str, Captions] = {split: {} for split in SPLITS}
    for number, image in enumerate(images):
        name, split, captions = _json_image(path, number, image)
        if name in splits[split]:
            raise fail(f"{path} must have each image once", f"{name!r} twice", "Delete one of them.")
        splits[split][name] = captions
    if features.suffix == ".npz":
        return _joined(splits, _named_features(features), path, repairs)
    names = [image["filename"] for image in images]
    return _joined(splits, _Features(features, names, _mapped(features)), path, repairs)


def read_original(paths: Mapping[str, Path]) -> dict[str, Array]:
    """Read the layout of the authors: five tokenised lines for each row of a split's features."""
    repairs, arrays, files = Repairs(), dict[str, Array](), list(paths.values())
    for split, text, features in zip(SPLITS, files[:3], files[3:]):
        rows = _matrix(features, _mapped(features))
        lines = lines_of(text.read_bytes(), str(text), repairs)
        captions = [" ".join(line.split()) for line in _without_blank_end(lines, PER_IMAGE * len(rows))]
        if len(captions) != PER_IMAGE * len(rows):
            received = f"{len(captions):,} lines for {len(rows):,} images in {features}"
            raise fail(f"{text} must have {PER_IMAGE} lines for each image", received, "Bring a pair that fits.")
        names = [f"{split}-{row:06d}" for row in range(len(rows))]
        groups = [captions[at : at + PER_IMAGE] for at in range(0, len(captions), PER_IMAGE)]
        starts = [f"{name} (line {PER_IMAGE * row + 1})" for row, name in enumerate(names)]
        five = [_five(start, group, text, repairs) for start, group in zip(starts, groups)]
        arrays |= _arrays(split, names, five, _unit_rows(rows, names.__getitem__, features))
    return _finished(arrays, repairs)


# Text


def lines_of(content: bytes, file: str, repairs: Repairs) -> list[str]:
    """Return the lines of a text file without bytes that are not UTF-8. Only line feeds end a line."""
    if b"\0" in content:
        raise fail(
            f"{file} must be text in UTF-8", "zero bytes, as of UTF-16 or a packed file", "Convert or unpack it."
        )
    packed = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = [line.decode(errors="ignore").rstrip("\r") for line in packed[: len(packed) - (not packed[-1])]]
    broken = [number for number, line in enumerate(packed, 1) if not _is_utf8(line)]
    if len(broken) > max(ALLOWED_BROKEN, len(lines) // 10):
        received = f"{len(broken):,} broken lines of {len(lines):,}, the first is line {broken[0]}"
        raise fail(f"{file} must be text in UTF-8", received, "Convert it to UTF-8.")
    for number in broken:
        repairs.add("lines with bytes that are not UTF-8, which were left out", f"line {number} of {Path(file).name}")
    return lines


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _without_blank_end(lines: list[str], expected: int) -> list[str]:
    """Return the lines without blank ones beyond the expected number."""
    while len(lines) > expected and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def _token_captions(path: Path, repairs: Repairs) -> Captions:
    captions: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines_of(path.read_bytes(), str(path), repairs), 1):
        if not line.strip():
            continue
        parts = TOKEN_LINE.fullmatch(line)
        if parts is None:
            rule = f"a line of {path} must be an image's name, #, a number, a tab and a caption"
            raise fail(rule, f"line {number}: {line[:80]!r}", "Correct the line.")
        captions.setdefault(parts[1], []).append((int(parts[2]), _tokenised(parts[3])))
    return {image: [caption for _, caption in sorted(those)] for image, those in captions.items()}


def _listed(path: Path, captions: Captions, repairs: Repairs) -> Captions:
    """Return the captions of the images that a list names."""
    names = [name for line in lines_of(path.read_bytes(), str(path), repairs) if (name := line.strip())]
    found = {name: captions.get(name, []) for name in names}
    if len(found) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise fail(f"{path} must name each image once", f"{twice!r} twice", "Delete one of the lines.")
    return found


def _json_images(path: Path, repairs: Repairs) -> list[Any]:
    """Return the list of images in a JSON file."""
    text = "\n".join(lines_of(path.read_bytes(), str(path), repairs))
    try:
        images = json.loads(text)["images"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        received = f"{type(error).__name__}: {error}"
        raise fail(f"{path} must be Karpathy's JSON, with a list of images", received, "Download it again.") from None
    if not isinstance(images, list):
        raise fail(f"{path} must hold a list of images", type(images).__name__, "Download it again.")
    return images


def _json_image(path: Path, number: int, image: Any) -> tuple[str, str, list[str]]:
    """Return name, split and captions of one image."""
    try:
        split = SPLIT_OF[image["split"]]
        captions = [_json_caption(sentence) for sentence in image["sentences"]]
        return str(image["filename"]), split, captions
    except (KeyError, TypeError, AttributeError) as error:
        rule = f"an image in {path} must have filename, sentences, and a split of {', '.join(SPLIT_OF)}"
        received = f"image {number} with {type(error).__name__}: {error}"
        raise fail(rule, received, "Correct the file.") from None


def _json_caption(sentence: Mapping[str, Any]) -> str:
    """Return the tokens, which are lower case without punctuation already, or else those of the raw text."""
    if "tokens" not in sentence:
        return _tokenised(sentence["raw"])
    return " ".join(word for token in sentence["tokens"] for word in str(token).split())


def _five(image: str, captions: Sequence[str], source: Path, repairs: Repairs) -> list[str]:
    """Return five captions of an image; one without words gives way to another of the same image."""
    case, told = f"{image} in {source}", f"{image} in {source.name}"  # records hold no paths of a machine
    if len(captions) < PER_IMAGE:
        rule, remedy = f"an image must have {PER_IMAGE} captions", "Add the missing ones, or leave out the image."
        raise fail(rule, f"{len(captions)} for {case}", remedy)
    if len(captions) > PER_IMAGE:
        repairs.add(f"images with more than {PER_IMAGE} captions, of which the first {PER_IMAGE} are read", told)
    chosen = captions[:PER_IMAGE]
    spare = next(filter(None, chosen), None)
    if spare is None:
        raise fail("an image must have a caption with words", f"{PER_IMAGE} empty ones for {case}", "Add a caption.")
    for _ in range(sum(not caption for caption in chosen)):
        repairs.add("empty captions, for which another of the same image is read", told)
    return [caption or spare for caption in chosen]


# Features


class _Features:
    """Rows of features by image."""

    def __init__(self, path: Path, names: Sequence[str], rows: Array) -> None:
        self.path, self.rows = path, _matrix(path, rows)
        if len(names) != len(rows):
            received = f"{len(rows):,} rows for {len(names):,} names"
            raise fail(f"{path} must have a row of features for each image", received, "Compute the features again.")
        self.numbers = {name: number for number, name in enumerate(names)}
        if len(self.numbers) < len(names):
            twice = next(name for number, name in enumerate(names) if self.numbers[name] != number)
            raise fail(f"{path} must have each image once", f"{twice!r} twice", "Leave out one of them.")

    def of(self, images: Sequence[str]) -> Array:
        """Return rows of length 1, in the order of these images."""
        missing = [image for image in images if image not in self.numbers]
        if missing:
            received = f"none of {missing[0]!r}" + (f" and {len(missing) - 1:,} others" if missing[1:] else "")
            raise fail(f"{self.path} must have features of every image", received, "Compute the missing ones.")
        return _unit_rows(self.rows[[self.numbers[image] for image in images]], images.__getitem__, self.path)


def _named_features(path: Path, file: io.BytesIO | None = None) -> _Features:
    """Read an npz file with the names of images and their features."""
    try:
        with file or open(path, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            names, rows = arrays["names"], arrays["features"]
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        rule = f"{path} must be an npz file with the arrays names and features"
        raise fail(rule, f"{type(error).__name__}: {error}", "Write the file again.") from None
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise fail(f"{path} must have a list of names", f"{names.dtype} {names.shape}", "Write the file again.")
    return _Features(
        path, (np.char.decode(names, errors="replace") if names.dtype.kind == "S" else names).tolist(), rows
    )


def _mapped(path: Path) -> Array:
    """Open an npy file; it stays on the disk, and writing into the array leaves it alone."""
    try:
        return np.lib.format.open_memmap(path, mode="c")
    except UNREADABLE as error:
        raise fail(f"{path} must be a readable npy file", str(error), "Download or write it again.") from None


def _matrix(path: Path, rows: Array) -> Array:
    """Return the rows, or raise if they are no matrix of numbers."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiu" or 0 in rows.shape:
        rule = f"{path} must hold a matrix of numbers, a row for each image"
        raise fail(rule, f"{rows.dtype} {rows.shape}", "Write the file again.")
    return rows


def _unit_rows(rows: Array, name: Callable[[int], str], path: Path) -> Array:
    """Return the rows as float32 of Euclidean length 1; raise where one has none."""
    lengths = np.concatenate([_lengths(rows[at : at + CHUNK]) for at in range(0, len(rows), CHUNK)])
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        first = rows[bad[0]]
        fault = "only zeros" if not lengths[bad[0]] else "NaN" if np.isnan(first).any() else "infinite values"
        received = f"{fault} for {name(int(bad[0]))!r}; {len(bad):,} of {len(rows):,} rows are bad"
        raise fail(f"the features in {path} must be finite and not all zero", received, "Compute them again.")
    if rows.dtype == np.float32 and abs(lengths - 1).max() < ROUNDING:
        return rows
    unit = np.empty(rows.shape, np.float32)
    for at in range(0, len(rows), CHUNK):
        unit[at : at + CHUNK] = rows[at : at + CHUNK] / lengths[at : at + CHUNK, None]
    return unit


def _lengths(rows: Array) -> Array:
    lengths: Array = np.linalg.norm(rows.astype(np.float64), axis=1)
    return lengths


# Arrays


def _joined(splits: Mapping[str, Captions], rows: _Features, source: Path, repairs: Repairs) -> dict[str, Array]:
    """Return the arrays of three splits that share a file of features."""
    arrays: dict[str, Array] = {}
    _check_disjoint(splits, source)
    for split in SPLITS:
        images = list(splits.get(split, ()))
        if not images:
            raise fail(f"{source} must have images of every split", f"none of {split}", "Bring the whole set.")
        five = [_five(image, splits[split][image], source, repairs) for image in images]
        arrays |= _arrays(split, images, five, rows.of(images))
    return _finished(arrays, repairs)


def _check_disjoint(splits: Mapping[str, Captions], source: Path) -> None:
    owners: dict[str, str] = {}
    for split, captions in splits.items():
        for image in captions:
            if owners.setdefault(image, split) != split:
                rule, received = "an image must be in one split", f"{image!r} in {owners[image]} and {split}, {source}"
                raise fail(rule, received, "Leave it in one of them: a test image must not be trained on.")


def _arrays(split: str, names: Iterable[str], captions: Iterable[Iterable[str]], rows: Array) -> dict[str, Array]:
    lines = lines_array(caption for five in captions for caption in five)
    return {f"{split}_x": rows, f"{split}_names": lines_array(names), f"{split}_captions": lines}


def _finished(arrays: dict[str, Array], repairs: Repairs) -> dict[str, Array]:
    """Add the notes; raise if the splits' features have different sizes."""
    sizes = {split: arrays[f"{split}_x"].shape[1] for split in SPLITS}
    if len(set(sizes.values())) > 1:
        received = ", ".join(f"{size:,} in {split}" for split, size in sizes.items())
        raise fail("features must have the same size in every split", received, "Compute them with one network.")
    return arrays | {"notes": lines_array(repairs.told())}
