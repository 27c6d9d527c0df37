"""Captioned images: four layouts give the same data, and bad input is refused by name or repaired and counted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.errors import InputError
from lamina.lab.cli import running
from lamina.lab.cli.commands import main
from lamina.lab.data import caption_files, captions, registry
from lamina.lab.data.captions import load_captions, vocabulary_of, words_of
from lamina.lab.data.text import END, UNKNOWN

SHARED = Path(__file__).parents[2].parent / "shared/data"
REAL = os.environ.get("LAMINA_TEST_DATA") or (str(SHARED) if SHARED.is_dir() else None)
COUNTS = {"train": 4, "valid": 2, "test": 3}
KARPATHY = {"train": "restval", "valid": "val", "test": "test"}
LISTS = {"train": "train", "valid": "dev", "test": "test"}
IMAGES = [(f"{split}{number}.jpg", split) for split, count in COUNTS.items() for number in range(count)]
FEATURES = np.random.default_rng(0).uniform(0, 2, (len(IMAGES), 6)).astype(np.float32)
UNIT = (FEATURES / np.linalg.norm(FEATURES.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    """No folder or cache of the machine."""
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def raw(image: str, number: int) -> str:
    return f'A dog, number {number} of "{image.split(".")[0]}" runs .'


def wanted(image: str, number: int) -> tuple[str, ...]:
    return tuple(f"a dog number {number} of {image.split('.')[0]} runs".split())


# The layouts. Each function writes one; tests change a file of it afterwards.


def write_tokens(folder: Path) -> str:
    folder.mkdir(parents=True)
    lines = [f"{image}#{n}\t{raw(image, n)}\n" for image, _ in IMAGES for n in range(5)]
    (folder / "Flickr8k.token.txt").write_text("".join(lines) + "nowhere.jpg.1#0\tIn no list .\n")
    for split, name in LISTS.items():
        listed = "".join(f"{image}\n" for image, own in IMAGES if own == split)
        (folder / f"Flickr_8k.{name}Images.txt").write_text(listed)
    write_npz(folder / "features.npz")
    return "flickr8k"


def write_npz(path: Path, names=None, features=FEATURES) -> None:
    names = [image for image, _ in IMAGES] if names is None else names
    order = np.random.default_rng(1).permutation(len(names))  # by name, in any order
    np.savez(path, names=np.array(names)[order], features=np.asarray(features)[order % len(features)])


def karpathy_images() -> list[dict]:
    """Images in an order of their own, each with a sixth sentence."""
    return [
        {
            "filename": image,
            "split": KARPATHY[split],
            "sentences": [{"tokens": list(wanted(image, n)), "raw": raw(image, n)} for n in range(6)],
        }
        for image, split in IMAGES
    ]


def write_karpathy(folder: Path, images=None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    images = karpathy_images() if images is None else images
    (folder / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    np.save(folder / "features.npy", FEATURES)
    return "coco"


def write_original(folder: Path) -> str:
    (folder / "images" / "10crop").mkdir(parents=True)
    for split, name in LISTS.items():
        rows = [row for row, (_, own) in enumerate(IMAGES) if own == split]
        lines = [" ".join(wanted(IMAGES[row][0], n)) + "\n" for row in rows for n in range(5)]
        (folder / f"{name}.txt").write_text("".join(lines))
        np.save(folder / f"images/10crop/{name}.npy", UNIT[rows])
    return "coco"


LAYOUTS = {"tokens": write_tokens, "karpathy": write_karpathy, "original": write_original}


@pytest.mark.parametrize("place", ["set", "."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_data(tmp_path, layout, place):
    name = {"tokens": "flickr8k"}.get(layout, "coco")
    LAYOUTS[layout](tmp_path / "data" / name)
    data = load_captions(name, str(tmp_path / "data" / (name if place == "." else "")))
    assert (data.name, data.kind) == (name, "real")
    assert data.describe()["sizes"] == COUNTS
    assert data.label.endswith("(real: 4 + 2 + 3)")
    assert all(len(value) == 64 for value in data.sha256.values())
    for split, found in data.splits.items():
        rows = [row for row, (_, own) in enumerate(IMAGES) if own == split]
        images = [IMAGES[row][0] for row in rows]
        assert found.names == tuple(images) or layout == "original"
        assert found.captions == tuple(wanted(image, n) for image in images for n in range(5))
        assert found.features.dtype == np.float32
        np.testing.assert_allclose(found.features, UNIT[rows], atol=1e-6)
        torch.from_numpy(found.features)  # warns where it may not be written
    assert len(data.notes) == (layout == "karpathy")  # more than five captions


def test_karpathys_features_may_have_names_and_captions_no_tokens(tmp_path):
    images = karpathy_images()
    for image in images:
        for sentence in image["sentences"]:
            del sentence["tokens"]
    write_karpathy(tmp_path / "coco", images[::-1])
    (tmp_path / "coco/features.npy").unlink()
    write_npz(tmp_path / "coco/features.npz")
    found = load_captions("coco", str(tmp_path)).splits["train"]
    assert found.names == ("train3.jpg", "train2.jpg", "train1.jpg", "train0.jpg")
    assert found.captions[0] == wanted("train3.jpg", 0)
    np.testing.assert_allclose(found.features, UNIT[3::-1], atol=1e-6)


def test_large_features_stay_on_the_disk_and_files_are_never_written(tmp_path):
    write_original(tmp_path / "coco")
    (tmp_path / "coco/dev.txt").rename(tmp_path / "coco/val.txt")
    (tmp_path / "coco/images/10crop/dev.npy").rename(tmp_path / "coco/images/10crop/val.npy")
    before = (tmp_path / "coco/images/10crop/train.npy").read_bytes()
    features = load_captions("coco", str(tmp_path)).splits["train"].features
    assert isinstance(features, np.memmap)
    features[:] = 0
    assert (tmp_path / "coco/images/10crop/train.npy").read_bytes() == before


def test_captions_lose_case_and_punctuation():
    text = "A man's T-shirt , ``red'' & \"blue\" ; naïve_café 3 dogs!  \t…"
    assert words_of(text) == ["a", "mans", "tshirt", "red", "blue", "naïvecafé", "3", "dogs"]
    assert words_of(" . !") == []


def test_the_vocabulary_is_of_training_captions_and_other_words_are_unknown(tmp_path):
    write_tokens(tmp_path / "flickr8k")
    data = load_captions("flickr8k", str(tmp_path))
    vocabulary = vocabulary_of(data.splits["train"])
    assert "train0" in vocabulary.ids
    assert "test0" not in vocabulary.ids
    ids = vocabulary.encode(data.splits["test"].captions[0])
    assert ids.count(UNKNOWN) == 1
    assert ids[-1] == END
    assert len(vocabulary_of(data.splits["train"], 5)) == 5


# Repairs: one bad line does not stop an experiment


def edited(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("layout", "file", "old", "new", "note", "caption"),
    [
        ("tokens", "Flickr8k.token.txt", b'A dog, number 2 of "train1"', b"", "", "runs"),
        ("tokens", "Flickr8k.token.txt", b'A dog, number 2 of "train1" runs .', b" . ", "empty captions", "="),
        ("tokens", "Flickr8k.token.txt", b'A dog, number 2 of "train1"', b"A d\xffog 2", "UTF-8", "a dog 2 runs"),
        ("tokens", "Flickr8k.token.txt", b"train1.jpg#2", b"\n \ntrain1.jpg#2", "", "a dog number 2 of train1 runs"),
        ("original", "train.txt", b"a dog number 2 of train1 runs", b"   ", "empty captions", "="),
        ("original", "train.txt", b"a dog number 2 of train1", b"r\xe9d 2", "UTF-8", "rd 2 runs"),
        ("original", "train.txt", b"2 of train1 runs\n", b"2 \xe2\x80\xa8runs\r\n", "", "a dog number 2 runs"),
        ("karpathy", "dataset_coco.json", b'"tokens": ["a", "dog", "number", "2", "of", "train1", "runs"]',
         b'"tokens": [" "]', "empty captions", "="),
        ("karpathy", "dataset_coco.json", b'"tokens": ["a", "dog", "number", "2", "of", "train1"',
         b'"tokens": ["d\xffog", "2"', "UTF-8", "dog 2 runs"),
        ("karpathy", "dataset_coco.json", b'"tokens": ["a", "dog", "number", "2", "of", "train1"',
         b'"tokens": ["\\ud800", 2', "", "? 2 runs"),
    ],
)  # fmt: skip
def test_one_bad_line_is_repaired_and_counted(tmp_path, layout, file, old, new, note, caption):
    name = LAYOUTS[layout](tmp_path / layout)
    before = load_captions(name, str(tmp_path / layout))
    edited(tmp_path / layout / file, old, new)
    data = load_captions(name, str(tmp_path / layout))
    expected = list(before.splits["train"].captions)
    expected[7] = expected[5] if caption == "=" else tuple(caption.split())
    assert data.splits["train"].captions == tuple(expected)
    assert data.splits["test"].captions == before.splits["test"].captions
    added = [told for told in data.notes if told not in before.notes]
    assert len(added) == bool(note)
    assert all(note in told and ": 1, the first is " in told for told in added)
    assert data.describe()["notes"] == list(data.notes)


def test_blank_lines_at_the_end_are_no_captions(tmp_path):
    write_original(tmp_path / "coco")
    with open(tmp_path / "coco/train.txt", "a") as file:
        file.write("\n\n")
    assert load_captions("coco", str(tmp_path)).describe()["sizes"] == COUNTS
    edited(tmp_path / "coco/train.txt", b"a dog number 4 of train3 runs\n\n\n", b"\n")  # the last caption is empty
    data = load_captions("coco", str(tmp_path))
    assert data.splits["train"].captions[-1] == wanted("train3.jpg", 0)


# Refusals: what would spoil the experiment


def rewritten(change):
    """Change the features of a folder."""

    def spoil(folder: Path) -> None:
        path = next(path for path in (folder / "features.npz", folder / "features.npy",
                                      folder / "images/10crop/train.npy") if path.exists())  # fmt: skip
        if path.suffix == ".npy":
            rows = np.load(path)
            np.save(path, change(rows))
        else:
            write_npz(path, features=change(FEATURES.copy()))

    return spoil


def with_value(value, row=1):
    def change(rows):
        rows[row] = value
        return rows

    return rewritten(change)


def with_text(file, old, new):
    return lambda folder: edited(folder / file, old.encode(), new.encode())


def with_json(change):
    def spoil(folder):
        images = karpathy_images()
        change(images)
        write_karpathy(folder, images)

    return spoil


def with_file(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def with_names(names, features=FEATURES):
    return lambda folder: write_npz(folder / "features.npz", names, features)


TOKENS, TRAIN, JSON = "Flickr8k.token.txt", "train.txt", "dataset_coco.json"
NAMES = [image for image, _ in IMAGES]
REFUSED = {
    "NaN": ("tokens", with_value(np.nan), "features.npz must be finite and not all zero, got NaN for 'train1.jpg'"),
    "infinite": ("original", with_value(np.inf), "infinite values for 'train-000001'; 1 of 4 rows are bad"),
    "one NaN": ("original", rewritten(lambda x: np.where(x == x[2, 3], np.nan, x)), "NaN for 'train-000002'"),
    "zero": ("karpathy", with_value(0), "only zeros for 'train1.jpg'"),
    "missing row": ("karpathy", rewritten(lambda x: x[:-1]), "a row of features for each image, got 8 rows for 9"),
    "missing image": ("tokens", with_names(NAMES[2:]), "of every image, got none of 'train0.jpg' and 1 others"),
    "image twice": ("tokens", with_names([*NAMES, NAMES[3]]), "each image once, got 'train3.jpg' twice"),
    "names as numbers": ("tokens", with_names(range(9)), "a list of names"),
    "vector": ("original", rewritten(lambda x: x[:, 0]), "a matrix of numbers"),
    "no numbers": ("original", rewritten(lambda x: x.astype(str)), "a matrix of numbers"),
    "other size": ("original", rewritten(lambda x: np.ones((4, 5), np.float32)), "5 in train, 6 in valid"),
    "objects": ("original", rewritten(lambda x: x.astype(object)), "readable npy file"),
    "torn features": ("tokens", with_file("features.npz", b"PK\3\4 torn"), "an npz file with the arrays"),
    "no features": ("tokens", lambda f: np.savez(f / "features.npz", x=FEATURES), "the arrays names and features"),
    "npy for npz": ("tokens", lambda f: (np.save(f / "x", FEATURES), (f / "x.npy").rename(f / "features.npz")),
                    "the arrays names and features"),
    "mapped": ("karpathy", with_file("features.npy", b"x"), "readable npy file"),
    "empty features": ("original", rewritten(lambda x: x[:0]), "a matrix of numbers"),
    "line too few": ("original", with_text(TRAIN, "a dog number 2 of train1 runs\n", ""),
                     "train.txt must have 5 lines for each image, got 19 lines for 4 images"),
    "line too many": ("original", with_text(TRAIN, "a dog", "one more\na dog"), "got 21 lines for 4 images"),
    "image too few": ("original", rewritten(lambda x: x[:-1]), "got 20 lines for 3 images"),
    "four captions": ("tokens", with_text(TOKENS, 'train1.jpg#2\tA dog, number 2 of "train1" runs .\n', ""),
                      "an image must have 5 captions, got 4 for train1.jpg in "),
    "four sentences": ("karpathy", with_json(lambda images: images[5].update(sentences=[{"raw": "a"}] * 4)),
                       "got 4 for valid1.jpg in "),
    "no captions": ("tokens", with_text("Flickr_8k.testImages.txt", "test1.jpg", "test9.jpg"), "got 0 for test9.jpg"),
    "only empty": ("karpathy", with_json(lambda images: images[5].update(sentences=[{"raw": "!"}] * 5)),
                   "a caption with words, got 5 empty ones for valid1.jpg"),
    "no tab": ("tokens", with_text(TOKENS, "train1.jpg#2\t", "train1.jpg#2 "), "got line 8: 'train1.jpg#2 A dog"),
    "UTF-16": ("original", lambda f: (f / TRAIN).write_text((f / TRAIN).read_text(), "utf-16"), "zero bytes"),
    "Latin-1": ("original", with_file(TRAIN, b"r\xe9d\n" * 20), "20 broken lines of 20, the first is line 1"),
    "listed twice": ("tokens", with_text("Flickr_8k.testImages.txt", "test1", "test0"), "'test0.jpg' twice"),
    "two splits": ("tokens", with_text("Flickr_8k.testImages.txt", "test1", "train1"),
                   "one split, got 'train1.jpg' in train and test"),
    "empty split": ("tokens", with_file("Flickr_8k.devImages.txt", b"\n"), "images of every split, got none of valid"),
    "JSON torn": ("karpathy", with_file(JSON, b'{"images": [{'), "dataset_coco.json must be Karpathy's JSON"),
    "JSON list": ("karpathy", with_file(JSON, b"[]"), "Karpathy's JSON"),
    "JSON images": ("karpathy", with_file(JSON, b'{"images": 3}'), "a list of images, got int"),
    "JSON split": ("karpathy", with_json(lambda images: images[5].update(split="extra")), "image 5 with KeyError"),
    "JSON name": ("karpathy", with_json(lambda images: images[5].pop("filename")), "image 5 with KeyError"),
    "JSON sentence": ("karpathy", with_json(lambda images: images[5].update(sentences=["a"])), "5 with TypeError"),
    "JSON twice": ("karpathy", with_json(lambda images: images[1].update(filename="train0.jpg")), "'train0.jpg' twice"),
    "missing file": ("tokens", lambda f: (f / "Flickr_8k.devImages.txt").unlink(), "got no Flickr_8k.devImages.txt"),
    "missing deep": ("original", lambda f: (f / "images/10crop/test.npy").unlink(), "got no images/10crop/test.npy"),
    "folder": ("tokens", lambda f: ((f / TOKENS).unlink(), (f / TOKENS).mkdir()), "readable files, got "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_with_a_remedy(tmp_path, case):
    layout, spoil, words = REFUSED[case]
    name = LAYOUTS[layout](tmp_path / layout)
    spoil(tmp_path / layout)
    with pytest.raises(InputError) as refused:
        load_captions(name, str(tmp_path / layout))
    assert words in str(refused.value)
    assert str(tmp_path) in str(refused.value) or case == "other size"  # the file
    assert len(str(refused.value).split(". ")[-1].split()) >= 3  # the remedy


def test_unknown_sets_and_absent_ones(tmp_path):
    with pytest.raises(InputError, match="'flickr8k'"):
        load_captions("flickr", str(tmp_path))
    with pytest.raises(InputError, match=r"Bring its files.*--data embedded"):
        load_captions("coco", str(tmp_path))
    for name, root in (("flickr8k", None), ("coco", "embedded"), ("scenes", str(tmp_path))):
        data = load_captions(name, root)
        assert (data.kind, data.name) == ("embedded", name)
        assert "embedded" in data.label


def test_the_commands_know_the_sets(tmp_path, capsys):
    write_original(tmp_path / "coco")
    (tmp_path / "flickr8k").mkdir()
    (tmp_path / "flickr8k/captions.tsv.gz").write_bytes(b"x")
    assert main(["data", "--data", str(tmp_path)]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert "incomplete" in lines["flickr8k"]
    assert "present" in lines["coco"]
    edited(tmp_path / "coco/train.txt", b"a dog number 2 of train1 runs", b"")
    assert main(["data", "check", "coco", "--data", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "REAL data: MSCOCO captions (real: 4 + 2 + 3)" in out
    assert "note: empty captions" in err
    assert main(["data", "get", "flickr8k", "--data", str(tmp_path)]) == 2
    assert "captions.tsv.gz" in capsys.readouterr().err
    assert main(["data", "check", "flickr8k", "--data", str(tmp_path)]) == 2


def test_a_run_says_what_was_repaired(tmp_path, capsys, monkeypatch):
    write_original(tmp_path / "coco")
    edited(tmp_path / "coco/train.txt", b"a dog number 2 of train1 runs", b"")
    monkeypatch.setattr(running.workers, "carry_out", lambda *_: 0)  # no training
    monkeypatch.setattr(running, "_show_results", lambda *_: None)
    words = ["run", "order_embeddings", "--device", "cpu", "--data", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    kind = "empty captions, for which another of the same image is read"
    assert f"note: {kind}: 1, the first is train-000001 (line 6) in train.txt\n" in capsys.readouterr().err


def test_a_changed_published_file_is_refused(tmp_path, capsys):
    (tmp_path / "flickr8k").mkdir()
    for file in registry.SOURCES["flickr8k"].layouts[0].files:
        (tmp_path / "flickr8k" / file.name).write_bytes(b"x")
    with pytest.raises(InputError, match=r"the published captions.tsv.gz.*bring the published one"):
        load_captions("flickr8k", str(tmp_path))


def test_the_compact_form_is_read_like_the_others():
    """The rows that a verified captions.tsv.gz would have, here with an image of a split that nobody uses."""
    import gzip
    import io

    lines = ["image\tsplit\tcaption_no\tcaption"]
    lines += [f"{image}\t{LISTS[split]}\t{n}\t{raw(image, n)}" for image, split in [*IMAGES, ("x", "extra")][:-1]
              for n in range(5)]  # fmt: skip
    lines += [f"x\textra\t{n}\tunused" for n in range(5)]
    features = io.BytesIO()
    np.savez(features, names=np.array(NAMES), features=FEATURES.astype(np.float16))
    packed = {"captions.tsv.gz": gzip.compress("\n".join(lines).encode()), "features": features.getvalue()}
    arrays = caption_files.read_compact(packed)
    found = captions._split(arrays, "valid")
    assert found.names == ("valid0.jpg", "valid1.jpg")
    assert found.captions[6] == wanted("valid1.jpg", 1)
    np.testing.assert_allclose(found.features, UNIT[4:6], atol=1e-3)


@pytest.mark.skipif(not REAL, reason="needs the published files: set LAMINA_TEST_DATA to their folder")
def test_the_published_set_loads():
    if registry.find(registry.SOURCES["flickr8k"], Path(REAL)) is None:
        pytest.skip(f"{REAL} has no flickr8k")
    data = load_captions("flickr8k", REAL)
    assert data.label == "Flickr8k (real: 6,000 + 1,000 + 1,000)"
    assert data.notes == ()
    assert data.splits["test"].features.shape == (1000, 1280)
    assert len(vocabulary_of(data.splits["train"])) == 7632
    assert min(len(caption) for split in data.splits.values() for caption in split.captions) >= 1
    assert main(["data", "check", "flickr8k", "--data", REAL]) == 0  # the pictures too
