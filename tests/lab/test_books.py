"""Books: layouts, words, held-out parts, ids, the cache, the embedded stand-in, and bad input."""

from __future__ import annotations

import gzip
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lamina.errors import InputError
from lamina.lab.data import array_cache, book_files, books, registry, topics
from lamina.lab.data.book_files import LONGEST, words_of
from lamina.lab.data.books import load_books
from lamina.lab.data.text import END, UNKNOWN

SHARED = Path(__file__).parents[2].parent / "shared/data"
REAL = os.environ.get("LAMINA_TEST_DATA") or (str(SHARED) if SHARED.is_dir() else None)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """No folder or cache of the machine."""
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lamina/numbered-books"


def novel(name: str, sentences: int = 40) -> str:
    return "".join(f"{name} saw thing{number % 7} .\n" for number in range(sentences))


def write(root, contents: dict[str, str | bytes], index: str | None = None) -> str:
    folder = root / "books"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        packed = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(gzip.compress(packed) if name.endswith(".gz") else packed)
    if index is not None:
        (folder / "INDEX.tsv").write_text(index)
    return str(root)


def text_of(data, split: str) -> list[str]:
    sentences = data.splits[split]
    ends = sentences.offsets.tolist()
    rows = [sentences.values[a:b].tolist() for a, b in pairwise(ends)]
    assert all(row[-1] == END and END not in row[:-1] for row in rows)
    return [" ".join(data.vocabulary.decode(row)) for row in rows]


# Layouts and held-out parts


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("itself", [False, True])
def test_every_layout_gives_the_same_sentences(tmp_path, suffix, itself):
    contents = {f"{name}{suffix}": novel(name) for name in ("ann", "bob")}
    root = write(tmp_path, contents, "book\tsentences\nann\t40\nbob\t40\n" if itself else None)
    data = load_books("books", f"{root}/books" if itself else root)
    whole = {name: [f"{name} saw thing{number % 7} ." for number in range(40)] for name in ("ann", "bob")}
    assert text_of(data, "train") == whole["ann"][:36] + whole["bob"][:36]
    assert text_of(data, "valid") == whole["ann"][36:38] + whole["bob"][36:38]
    assert text_of(data, "test") == whole["ann"][38:] + whole["bob"][38:]
    assert data.describe() == {
        "name": "books",
        "kind": "real",
        "label": "Books (real: 72 + 4 + 4 sentences)",
        "sizes": {"train": 72, "valid": 4, "test": 4},
        "sha256": data.sha256,
        "vocabulary": 13,
        "notes": [],
    }


def test_of_many_books_whole_ones_are_held_out(tmp_path):
    names = [f"b{number:02d}" for number in range(51)]
    data = load_books("books", write(tmp_path, {f"{name}.txt": novel(name, 5) for name in names}))
    found = {split: [line.split()[0] for line in text_of(data, split)[::5]] for split in data.splits}
    assert {split: len(books) for split, books in found.items()} == {"train": 47, "valid": 2, "test": 2}
    assert sorted(name for books in found.values() for name in books if name != "<unknown>") == sorted(found["train"])
    assert found["train"] == sorted(found["train"])
    assert "<unknown>" in found["valid"]  # its name is a word that training does not have


def test_the_same_books_have_the_same_hash_in_every_record(tmp_path):
    root = write(tmp_path, {"ann.txt": novel("ann", 60)}, "book\nann\n")
    first, second = (load_books("books", place) for place in (root, f"{root}/books"))
    assert first.sha256 == second.sha256
    write(tmp_path, {"ann.txt": novel("ann", 61)})
    assert load_books("books", root).sha256 != first.sha256


def test_books_under_copyright_are_left_out_and_told(tmp_path):
    name = min(book_files.LEFT_OUT)
    data = load_books("books", write(tmp_path, {"ann.txt": novel("ann", 60), f"{name}.txt": novel("secret")}))
    assert "secret" not in data.vocabulary.ids
    assert data.notes == (f"books left out for their copyright: 1, the first is {name}",)


# Words and ids


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("I don't know.", "i do n't know ."),
        ('"Can\u2019t you?" he said', '" ca n\'t you ? " he said'),
        ("She's well-taught; they'll go -- no...", "she 's well-taught ; they 'll go -- no ..."),
        ("O'Neill paid \u00a310 \u00e9t\u00e9", "o ' neill paid \u00a3 10 \u00e9t\u00e9"),
        ("do n't is split already", "do n't is split already"),
        ("  \t ", ""),
    ],
)
def test_sentences_are_split_as_the_treebank_does(sentence, words):
    assert " ".join(words_of(sentence)) == words


def test_the_most_frequent_words_of_training_have_ids(tmp_path):
    lines = ["a a a b b c .\n"] * 38 + ["d d d d d d d d d .\n"] * 2
    root = write(tmp_path, {"x.txt": "".join(lines) + "e .\n" * 12})
    data = load_books("books", root, 5)
    assert data.vocabulary.words == ("<end>", "<unknown>", "a", "b", ".")
    assert data.counts.tolist() == [46, 38 + 18 + 6, 114, 76, 46]
    assert int(data.counts.sum()) == len(data.splits["train"].values)
    assert "e" in load_books("books", root).vocabulary.ids
    for size in (1, 0, -3):
        with pytest.raises(InputError, match="room for its two marks"):
            load_books("books", root, size)


# Cache


def test_books_are_read_once_for_each_vocabulary(tmp_path, cache, monkeypatch):
    root = write(tmp_path, {"ann.txt": novel("ann", 60)})
    first = load_books("books", root, 5)
    monkeypatch.setattr(book_files, "lines_of", lambda *given: pytest.fail("read again"))
    again = load_books("books", root, 5)
    assert text_of(first, "train") == text_of(again, "train")
    assert again.notes == first.notes
    assert again.vocabulary.words == first.vocabulary.words
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    load_books("books", root, 6)
    assert len([*cache.iterdir()]) == 2


def test_a_damaged_cache_is_made_anew_and_a_full_disk_does_without(tmp_path, cache, monkeypatch):
    root = write(tmp_path, {"ann.txt": novel("ann", 60)})
    wanted = text_of(load_books("books", root), "train")
    (path,) = cache.glob("*/train_ids.npy")
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    assert text_of(load_books("books", root), "train") == wanted
    monkeypatch.setattr(array_cache, "read", lambda folder: None)
    monkeypatch.setattr(array_cache, "write", lambda *given: False)
    assert text_of(load_books("books", root), "train") == wanted


# Bad input


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"x.txt": "no end " * 20_000}, "x.txt must hold one sentence a line, got 1 lines, .* more than 1,000 words"),
        ({"x.txt": ("a paragraph " * 60 + "\n") * 50}, "one sentence a line, got 50 lines, .* more than 120 words"),
        ({"x.txt": "\n\n \n"}, "x.txt must hold sentences, one a line, got none"),
        ({"x.txt": ""}, "x.txt must hold sentences"),
        ({"x.txt": "\u00e9t\u00e9 .\n".encode("latin-1") * 50}, "UTF-8, got 50 broken lines of 50"),
        ({"x.txt": novel("ann").encode("utf-16")}, "UTF-8, got zero bytes"),
        ({"x.txt.gz": novel("ann"), "x.txt": novel("ann")}, "each book once, got x packed and unpacked"),
        ({"x.pdf": b"%PDF"}, r"must hold books: \*.txt or \*.txt.gz, one sentence a line, got none"),
        ({"x.txt": "one .\ntwo .\n"}, "must hold 3 sentences or more in each split, got 0 sentences for train"),
        ({"x.txt": novel("ann", 30)}, "must hold 3 sentences or more in each split, got 2 sentences for valid"),
    ],
)
def test_a_bad_book_is_refused_by_name(tmp_path, contents, message):
    with pytest.raises(InputError, match=message):
        load_books("books", write(tmp_path, contents))


def test_a_torn_or_damaged_gzip_file_is_refused_by_name(tmp_path):
    packed = gzip.compress(novel("ann", 500).encode(), mtime=0)
    for content in (packed[:-20], packed[:30] + b"xxxx" + packed[34:], packed[:2]):
        write(tmp_path, {})
        (tmp_path / "books/x.txt.gz").write_bytes(content)
        with pytest.raises(InputError, match=r"x.txt.gz must be a whole gzip file, got a damaged one"):
            load_books("books", str(tmp_path))


def test_a_book_that_a_browser_unpacked_but_kept_the_name_of_is_read(tmp_path):
    write(tmp_path, {})
    (tmp_path / "books/x.txt.gz").write_text(novel("ann", 60))
    assert len(load_books("books", str(tmp_path)).splits["train"]) == 54


def test_a_book_of_the_index_that_is_missing_is_named(tmp_path):
    root = write(tmp_path, {"ann.txt": novel("ann", 60)}, "book\nann\nbob\ncid\ndan\neve\n")
    with pytest.raises(InputError, match=r"every book of its INDEX.tsv, got no bob, cid, dan and 1 more"):
        load_books("books", root)


def test_a_folder_without_books_and_a_file_in_their_place_are_refused(tmp_path):
    with pytest.raises(InputError, match="--data must be a folder with books in it"):
        load_books("books", str(tmp_path))
    (tmp_path / "books").write_text("a\n")
    with pytest.raises(InputError, match=r"must hold books"):
        load_books("books", str(tmp_path))
    with pytest.raises(InputError, match="Did you mean 'books'"):
        load_books("book")


def test_single_bad_lines_are_repaired_and_told(tmp_path):
    """Blank lines are skipped, bytes of another encoding left out, and a line of 10,000 words cut."""
    lines = [*novel("ann", 60).encode().splitlines(), b"", b"   ", b"x\xe9 .", b"so " * 10_000]
    data = load_books("books", write(tmp_path, {"x.txt": b"\n".join(lines)}))
    assert data.describe()["sizes"] == {"train": 54, "valid": 4, "test": 4}
    assert text_of(data, "test")[-2] == "<unknown> ."
    assert int(data.splits["test"].offsets.diff()[-1]) == LONGEST + 1
    assert data.notes == (
        "lines with bytes that are not UTF-8, which were left out: 1, the first is line 63 of x.txt",
        "sentences of more than 1,000 words, cut there; no triple of sentences holds them: 1, the first is line 64 of "
        "x.txt",
    )


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf", b""])
def test_byte_order_marks_and_line_ends_of_windows_change_nothing(tmp_path, content):
    plain = load_books("books", write(tmp_path / "a", {"x.txt": novel("ann", 60)}))
    other = load_books(
        "books", write(tmp_path / "b", {"x.txt": content + novel("ann", 60).replace("\n", "\r\n").encode()})
    )
    assert text_of(plain, "train") == text_of(other, "train")


# The stand-in


def test_the_stand_in_is_of_this_python_and_its_held_out_text_is_not_in_training():
    data = load_books("topics", vocabulary=1000)
    assert (data.name, data.kind, data.label) == ("topics", "embedded", topics.TITLE)
    assert len(data.vocabulary) == 1000
    everything = load_books("topics")
    told = {split: text_of(everything, split) for split in everything.splits}
    assert len(told["train"]) > 1000
    assert all(len(told[split]) > 100 for split in ("valid", "test"))
    long = {line for line in told["train"] if len(line.split()) > 12}
    assert sum(line in long for split in ("valid", "test") for line in told[split]) < 5
    assert data.sha256 == load_books("topics").sha256 == registry.load("books", "embedded").sha256


def test_sentences_of_a_topic_leave_out_what_is_no_prose():
    shared = 'It is used\nfor choices. See "else" too.\n\n'
    first = f'The "if" statement\n*******\n\n{shared}   if_stmt ::= "if" x\n\n* One item:'
    second = f"{shared}>>> a\n\nlower case start.\n\nNo end\n\nA last one!"
    found = dict(topics.sentences_by_topic({"b": second, "a": first, "c": ">>> 1"}))
    assert found == {"a": ["It is used for choices.", 'See "else" too.', "One item:"], "b": ["A last one!"]}


def test_a_python_without_help_texts_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(InputError, match=r"got a Python without pydoc_data. Pass a folder of books with --data"):
        load_books("topics")


# The real books


@pytest.mark.slow
@pytest.mark.skipif(REAL is None or not (Path(REAL) / "books").is_dir(), reason="needs the 100 novels")
def test_97_of_the_100_novels_are_numbered():
    data = load_books("books", REAL, 8000)
    assert data.describe()["sizes"] == {"train": 681_190, "valid": 24_208, "test": 22_343}
    assert data.notes == ("books left out for their copyright: 3, the first is Bennet_Imperial_1930",)
    assert data.vocabulary.words[2:8] == (",", "the", ".", "and", '"', "to")
    unknown = {split: float((part.values == UNKNOWN).float().mean()) for split, part in data.splits.items()}
    assert 0.03 < unknown["train"] < unknown["valid"] < 0.08
    assert re.fullmatch("[0-9a-f]{64}", data.sha256["books"])
    assert books.CACHE != "books"  # the cache lies in the folder that data sets are looked for in
