"""Vocabulary expansion: files of word vectors, the least-squares map, and bad rows."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from lamina.errors import InputError
from lamina.lab.data.text import Vocabulary
from lamina.lab.experiments.skip_thoughts.expansion import WordVectors, expanded, read_vectors

ROWS = "cat 1 2.5 -3e-1\nnew_york 1 1 1\ndog 0 0 1\ncat 9 9 9\n\n\u00c9t\u00e9 1 0 0\n"


def write(path, content: str | bytes):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


CHANGES = (str, lambda text: text.replace(" ", "\t"), lambda text: text.replace("\n", " \r\n"))


@pytest.mark.parametrize("header", ["", "5 3\n"])
@pytest.mark.parametrize("change", CHANGES, ids=["plain", "tabs", "windows"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_as_word2vec_and_glove_write_it_is_read(tmp_path, header, change, packed):
    """Phrases are left out, blank lines skipped, and of two rows of a word the first counts."""
    content = change(header + ROWS).encode()
    found = read_vectors(write(tmp_path / "v.txt", gzip.compress(content) if packed else content))
    assert found.words == ("cat", "dog", "\u00c9t\u00e9")
    assert found.rows.dtype == np.float32
    np.testing.assert_allclose(found.rows, [[1, 2.5, -0.3], [0, 0, 1], [1, 0, 0]])


def test_only_the_first_rows_may_be_read(tmp_path):
    path = write(tmp_path / "v.txt", ROWS + "ragged 1\n")
    assert read_vectors(path, 2).words == ("cat", "dog")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROWS + "ragged 1 2\n", r"v.txt must have 3 numbers, got 2 on line 7, after 'ragged 1 2'"),
        (ROWS + "two words 1 2 3\n", "must have 3 numbers, got 4 on line 7"),
        ("5 4\n" + ROWS, "must have 4 numbers, got 3 on line 2"),
        ("alone\n", "must have some numbers, got 0 on line 1"),
        (ROWS + "bad 1 x 3\n", "must have finite numbers, got '1 x 3' on line 7"),
        (ROWS + "bad 1 nan 3\n", "must have finite numbers, got '1 nan 3' on line 7"),
        (ROWS + "bad 1 inf 3\n", "must have finite numbers"),
        ("", "must have word vectors as text, got no row"),
        (b"3 2\ncat \x00\x81\xff\x3f\n", "must be text in UTF-8, got other bytes. Convert a binary file of word2vec"),
        (gzip.compress(ROWS.encode())[:-9], "must be a readable file"),
    ],
)
def test_a_bad_file_is_refused_by_its_line(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_vectors(write(tmp_path / "v.txt", content))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="must be a readable file"):
        read_vectors(tmp_path / "v.txt")


def made_up(noise: float = 0.0):
    """Embeddings that are a linear map of word vectors with an intercept, of 30 words of which 20 are known."""
    draw = np.random.default_rng(0)
    rows, weights = draw.standard_normal((30, 4)), draw.standard_normal((5, 6))
    wanted = np.concatenate([rows, np.ones((30, 1))], 1) @ weights + noise * draw.standard_normal((30, 6))
    words = tuple(f"w{number:02d}" for number in range(30))
    vocabulary = Vocabulary(dict.fromkeys(("own", *words[:20]), 1))
    embedding = draw.standard_normal((len(vocabulary), 6)).astype(np.float32)
    embedding[[vocabulary.ids[word] for word in words[:20]]] = wanted[:20]
    return vocabulary, embedding, WordVectors(words, rows.astype(np.float32)), wanted


def test_new_words_are_mapped_and_own_words_keep_their_embeddings():
    vocabulary, embedding, vectors, wanted = made_up()
    ids, table = expanded(vocabulary, embedding, vectors)
    assert table.dtype == embedding.dtype
    np.testing.assert_array_equal(table[: len(vocabulary)], embedding)
    assert len(table) == len(vocabulary) + 10
    np.testing.assert_allclose(table[[ids[word] for word in vectors.words[20:]]], wanted[20:], atol=1e-5)
    assert ids["own"] == vocabulary.ids["own"]
    assert sorted(ids.values()) == list(range(2, len(table)))


def test_the_map_is_the_least_squares_fit():
    """Its residuals on the shared words are orthogonal to the vectors and to the intercept."""
    vocabulary, embedding, vectors, _ = made_up(noise=0.5)
    again = tuple(f"again{word}" for word in vectors.words[:20])
    both = WordVectors((*vectors.words, *again), np.concatenate([vectors.rows, vectors.rows[:20]]))
    ids, table = expanded(vocabulary, embedding, both)
    fitted = table[[ids[word] for word in again]]
    residuals = fitted - embedding[[vocabulary.ids[word] for word in vectors.words[:20]]]
    assert np.abs(residuals).max() > 0.1
    np.testing.assert_allclose(vectors.rows[:20].T @ residuals, 0, atol=1e-4)
    np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-4)


def test_too_few_shared_words_are_refused():
    vocabulary, embedding, vectors, _ = made_up()
    few = WordVectors(vectors.words[16:], vectors.rows[16:])
    with pytest.raises(InputError, match=r"share enough words .* got 4 words in both for 5 numbers a word"):
        expanded(vocabulary, embedding, few)
