"""Cloze questions: two layouts, ids, relabelling, control rows, the cache, and bad input that is skipped or refused."""

from __future__ import annotations

import json
import lzma
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.errors import InputError
from lamina.lab.data import array_cache, question_files, questions, registry
from lamina.lab.data.formats import lines_in
from lamina.lab.data.question_files import LONGEST, four_sentences, sentences_of
from lamina.lab.data.questions import NUMBER, UNKNOWN, load_questions

SHARED = Path(__file__).parents[2].parent / "shared/data"
REAL = os.environ.get("LAMINA_TEST_DATA") or (str(SHARED) if SHARED.is_dir() else None)
FOLDERS = {"train": "training", "valid": "validation", "test": "test"}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """No folder or cache of the machine."""
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lamina/questions"


def article(name, *sentences, **question):
    asked = {"query": "@placeholder won in 2011", "answer": "@entity1", "passage": [*range(len(sentences))]} | question
    return {"id": name, "sentences": list(sentences), "questions": [asked]}


def sound():
    """Two articles a split; train has @entity1, @entity2 and @entity30."""
    return {
        "train": [
            article("a", "@entity1 met @entity2 in May .", "@entity1 won 1,000 games ."),
            article(
                "b", "@entity2 met @entity30 .", "nobody won", answer="@entity30", query="@entity2 met @placeholder"
            ),
        ],
        "valid": [
            article("c", "@entity2 saw @entity1 .", "@entity2 met @entity2 ."),
            article("d", "@entity2 won ."),
        ],
        "test": [article("e", "@entity1 won ."), article("f", "@entity1 met @entity2 .")],
    }


def write(root, data=None, packed=False):
    folder = root / "cnn_qa"
    folder.mkdir(parents=True, exist_ok=True)
    for split, articles in (data or sound()).items():
        lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in articles]
        content = b"".join(line + b"\n" for line in lines)
        path = folder / f"{split}.jsonl{'.xz' * packed}"
        path.write_bytes(lzma.compress(content) if packed else content)
    return str(root)


def question_file(passage, query="@placeholder won in 2011", answer="@entity1"):
    return f"http://url\n\n{passage}\n\n{query}\n\n{answer}\n\n@entity1:Somebody\n@entity2:Somebody Else\n"


def write_folders(root, data=None):
    """The articles as a folder of rc-data."""
    for split, articles in (data or sound()).items():
        folder = root / "cnn_qa/questions" / FOLDERS[split]
        folder.mkdir(parents=True, exist_ok=True)
        for one in articles:
            (asked,) = one["questions"]
            text = question_file(" ".join(one["sentences"]), asked["query"], asked["answer"])
            (folder / f"{one['id']}.question").write_text(text)
    return str(root)


def words(text):
    return text.split()


def told(data, split):
    """Return passages, queries and answers of a split as words."""
    part, words = data.splits[split], data.vocabulary.words
    number = torch.arange(len(part))
    texts = []
    for ragged in (part.passages, part.queries):
        ids, lengths = ragged.padded(number)
        texts.append([" ".join(words[i] for i in row[:n]) for row, n in zip(ids.tolist(), lengths.tolist())])
    return [*zip(*texts, [words[i] for i in part.answers.tolist()])]


def everything(data):
    return {split: told(data, split) for split in data.splits}


@pytest.mark.parametrize(
    "writer", [write, lambda root: write(root, packed=True), write_folders], ids=["plain", "packed", "folders"]
)
def test_every_layout_gives_the_same_questions(tmp_path, writer):
    data = load_questions("cnn_qa", writer(tmp_path))
    assert everything(data) == {
        "train": [
            (
                "@entity1 met @entity2 in <unknown> . @entity1 won <number> <unknown> .",
                "@placeholder won in <number>",
                "@entity1",
            ),
            ("@entity2 met @entity30 . <unknown> won", "@entity2 met @placeholder", "@entity30"),
        ],
        "valid": [
            ("@entity2 <unknown> @entity1 . @entity2 met @entity2 .", "@placeholder won in <number>", "@entity1"),
            ("@entity2 won .", "@placeholder won in <number>", "@entity1"),
        ],
        "test": [
            ("@entity1 won .", "@placeholder won in <number>", "@entity1"),
            ("@entity1 met @entity2 .", "@placeholder won in <number>", "@entity1"),
        ],
    }
    words = ("<end>", "<unknown>", "<number>", "@entity2", ".", "@entity1", "met", "won", "@placeholder", "in")
    assert data.vocabulary.words[:3] == words[:3]
    assert set(data.vocabulary.words) == {*words, "@entity30"}  # met once, but every entity of training has an id
    assert [data.vocabulary.words[i] for i in data.entities] == ["@entity1", "@entity2", "@entity30"]
    assert data.describe()["sizes"] == {"train": 2, "valid": 2, "test": 2}
    assert (data.kind, data.label, data.notes) == ("real", "CNN questions (real: 2 + 2 + 2)", ())
    assert all(len(one) == 64 for one in data.sha256.values())
    assert len(data.sha256) == 3
    json.dumps(data.describe())


def test_the_vocabulary_is_of_training_alone_and_ranked_by_counts(tmp_path):
    data = sound()
    data["valid"] += [article("v", "zebra zebra zebra @entity1 ."), article("w", "zebra @entity1 .")]
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    assert "zebra" not in loaded.vocabulary.ids
    small = load_questions("cnn_qa", write(tmp_path, data), vocabulary=3 + 4 + 1)
    assert set(small.vocabulary.words[3:]) == {"@entity1", "@entity2", "@entity30", "@placeholder", "."}
    assert small.vocabulary.encode(["met", "1,000", "@placeholder", "<number>"])[:2] == [UNKNOWN, NUMBER]
    with pytest.raises(InputError, match="room for marks, entities and the placeholder, got vocabulary=6"):
        load_questions("cnn_qa", str(tmp_path), vocabulary=6)


def test_a_word_spelled_like_a_mark_is_unknown(tmp_path):
    data = sound()
    data["train"].append(article("m", "<end> <end> <number> <number> @entity1 ."))
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    assert loaded.vocabulary.words.count("<end>") == 1
    assert told(loaded, "train")[2][0] == "<unknown> <unknown> <unknown> <unknown> @entity1 ."


def test_only_the_first_training_questions_are_read(tmp_path):
    data = load_questions("cnn_qa", write(tmp_path), limit=1)
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [1, 2, 2]
    assert "@entity30" not in data.vocabulary.ids


# Entities


def test_entities_that_training_never_saw_take_a_free_label(tmp_path):
    data = sound()
    data["valid"] = [
        article("u", "@entity77 met @entity2 and @entity77 .", answer="@entity77", query="@placeholder met @entity2"),
        article("v", "@entity5 @entity6 @entity7 @entity8", answer="@entity5"),
        article("w", "@entity1 won", answer="@entity99"),
    ]
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    (passage, query, answer), (other, _, absent) = told(loaded, "valid")
    assert (passage, query) == (f"{answer} met @entity2 <unknown> {answer} .", "@placeholder met @entity2")
    assert answer in ("@entity1", "@entity30")  # not the one that the question has already
    assert other == "@entity1 won"
    assert absent in ("@entity2", "@entity30")
    assert "valid questions skipped for more entities than training has: 1" in loaded.notes
    assert any("never saw" in note and note.endswith(": 2") for note in loaded.notes)


def test_relabelling_names_entities_by_first_appearance(tmp_path):
    data = sound()
    data["train"].append(
        article("x", "@entity9 met @entity8 , @entity9 .", query="@entity7 @placeholder", answer="@entity6")
    )
    data["test"].append(article("y", *[f"@entity{n} won ." for n in range(40, 45)], answer="@entity40"))
    loaded = load_questions("cnn_qa", write(tmp_path, data), relabel=4)
    assert told(loaded, "train")[1:] == [
        ("@entity0 met @entity1 . <unknown> won", "@entity0 met @placeholder", "@entity1"),
        ("@entity0 met @entity1 <unknown> @entity0 .", "@entity2 @placeholder", "@entity3"),
    ]
    assert told(loaded, "valid")[0][0] == "@entity0 <unknown> @entity1 . @entity0 met @entity0 ."
    assert len(loaded.splits["test"]) == 2
    assert "test questions skipped for more than 4 entities: 1" in loaded.notes
    assert [loaded.vocabulary.words[i] for i in loaded.entities] == [f"@entity{n}" for n in range(4)]
    with pytest.raises(InputError, match="relabel must leave questions in each split"):
        load_questions("cnn_qa", str(tmp_path), relabel=1)


def test_relabelling_is_a_bijection_of_each_question(tmp_path):
    plain, new = (everything(load_questions("facts", relabel=n)) for n in (0, 8))
    for before, after in zip(plain["train"], new["train"], strict=True):
        pairs = set(zip(" ".join(before).split(), " ".join(after).split(), strict=True))
        assert len({one for one, _ in pairs}) == len(pairs) == len({other for _, other in pairs})


# Control rows


def test_control_rows_count_by_hand(tmp_path):
    data = sound()
    query = "@entity2 met @placeholder"
    data["valid"] = [
        article("p", "@entity2 @entity2 @entity1", query=query),  # not in the query: right
        article("q", "@entity1 @entity1 @entity2", query=query),  # both right
        article("r", "@entity1 @entity30", answer="@entity30"),  # of equally frequent ones the first: wrong
        article("s", "@entity2 @entity2", query=query),  # none is left, and the answer is not there
    ]
    controls = load_questions("cnn_qa", write(tmp_path, data)).controls["valid"]
    assert controls == {"most_frequent": 0.75, "most_frequent_not_in_query": 0.5, "answer_present": 0.75}


# The four-sentence reduction


def test_a_passage_is_cut_to_the_sentences_that_share_most_with_the_query():
    sentences = [
        "first one about nothing .",
        "@entity1 won the prize !",  # 3 of the query
        "the of and in .",  # stop words and points do not count
        "@entity2 spoke ?",  # 1
        "prize prize prize prize .",  # one token, however often
        "won and lost @entity2 .",  # 2
        "no point at the end",
    ]
    query = words("@entity1 won the prize of @entity2 with @placeholder .")
    kept = four_sentences(" ".join(sentences).split(), query)
    assert kept == " ".join(sentences[n] for n in (1, 3, 4, 5)).split()
    assert [" ".join(one) for one in sentences_of(" ".join(sentences).split())] == sentences
    assert four_sentences(words("a b . c d"), query) == words("a b . c d")
    assert four_sentences(words("a . b . c . d . e ."), query) == words("a . b . c . d .")  # ties: the earlier
    assert four_sentences([], query) == []


# Bad input


BAD = {
    "an empty passage": article("z", ""),
    "an empty query": article("z", "@entity1 .", query=" "),
    "a query without @placeholder": article("z", "@entity1 .", query="who won"),
    "an answer that is no entity": article("z", "@entity1 .", answer="entity1"),
    "more than 2,000 tokens in passage or query": article("z", "@entity1 " * 100_000),
    "missing or wrong parts": article("z", "@entity1 .", passage=[-1]),
    "an article whose id came before": article("a", "@entity1 ."),
    "a broken line or file": b'{"id": "z", "sentences": ["na\xefve"], "questions": []}',
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_bad_question_is_skipped_and_counted(tmp_path, kind, split):
    data = sound()
    clean = everything(load_questions("cnn_qa", write(tmp_path, data)))
    data[split].insert(1, BAD[kind])
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    (note,) = loaded.notes
    assert note.startswith(f"questions skipped for {kind}: 1, the first is ")
    assert str(tmp_path) not in note
    if kind != "an article whose id came before":
        assert everything(loaded) == clean


@pytest.mark.parametrize(
    "line",
    [b"no json", b"[1, 2]", b'{"id": "z"}', b'{"id": "z", "sentences": [1], "questions": []}', b"[" * 100_000],
)
def test_a_malformed_line_is_skipped(tmp_path, line):
    data = sound()
    data["train"].append(line)
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    assert loaded.notes == (
        "questions skipped for a broken line or file: 1, the first is line 3 of train.jsonl (no article)",
    )


@pytest.mark.parametrize("passage", [None, "all", [0, 5], [True], [0.0], {"a": 1}])
def test_sentence_numbers_must_be_numbers_of_sentences(tmp_path, passage):
    data = sound()
    data["train"].append(article("z", "@entity1 .", "@entity2 .", passage=passage))
    assert (
        "wrong parts: 1, the first is question 1 in line 3 of train.jsonl"
        in load_questions("cnn_qa", write(tmp_path, data)).notes[0]
    )


def test_half_a_surrogate_pair_is_one_odd_word(tmp_path):
    data = sound()
    data["train"].append(article("z", "\ud800 \ud800 ? ? @entity1 ."))
    loaded = load_questions("cnn_qa", write(tmp_path, data))
    assert len(set(loaded.vocabulary.words)) == len(loaded.vocabulary.words)


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("train.jsonl", b"", "must have sound questions for each split, got none for train"),
        ("valid.jsonl", b"\xff\xfe\n" * 99, "valid.jsonl must have sound articles or questions"),
        (
            "valid.jsonl",
            b"\xff\xfe",
            "none for valid; questions skipped for a broken line or file: 1, the first is line 1 of",
        ),
        ("test.jsonl", b"oh\n" * 500, "500 broken of 501"),
        ("train.jsonl", b"\xfd7zXZ\x00torn", "train.jsonl must be a sound xz file"),
        ("train.jsonl", lzma.compress(b"{}\n" * 999)[:-9], "train.jsonl must be a sound xz file"),
    ],
)
def test_a_file_that_is_damaged_as_a_whole_is_refused_by_name(tmp_path, file, content, part):
    root = write(tmp_path)
    (tmp_path / "cnn_qa" / file).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(part)):
        load_questions("cnn_qa", root)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"http://url\n\n", "a broken line or file"),
        (question_file("@entity1 won .").replace("\n\n", "\n").encode(), "a broken line or file"),
        (question_file("@entity1 won .").encode("utf-16"), "a broken line or file"),
        (b"x" * (question_files.LARGEST + 1), "a broken line or file"),
        (question_file("").encode(), "an empty passage"),
        (question_file("@entity1 won", query="").encode(), "an empty query"),
        (question_file("@entity1 won", answer="").encode(), "an answer that is no entity"),
        (question_file("@entity1 won", answer="@entity1 @entity2").encode(), "an answer that is no entity"),
        (question_file("@entity1 " * 100_000).encode(), "more than 2,000 tokens"),
    ],
)
def test_a_bad_question_file_is_skipped_and_counted(tmp_path, content, kind):
    root = write_folders(tmp_path)
    clean = everything(load_questions("cnn_qa", root))
    (tmp_path / "cnn_qa/questions/training/zzz.question").write_bytes(content)
    loaded = load_questions("cnn_qa", root)
    assert everything(loaded) == clean
    (note,) = loaded.notes
    assert kind in note
    assert "the first is training/zzz.question" in note


def test_odd_things_in_question_folders(tmp_path):
    root = write_folders(tmp_path)
    clean = everything(load_questions("cnn_qa", root))
    folder = tmp_path / "cnn_qa/questions/validation"
    (folder / "README.txt").write_text("no question")
    (folder / "folder.question").mkdir()
    os.mkfifo(folder / "pipe.question")
    (folder / "a.question").write_text(question_file("@entity1 won ."))  # the name of a training question
    loaded = load_questions("cnn_qa", root)
    assert everything(loaded) == clean
    assert [note.partition(",")[0] for note in loaded.notes] == [
        "questions skipped for a file whose name came before: 1",
        "questions skipped for a broken line or file: 2",
    ]


def test_a_long_passage_of_many_sentences_is_cut_and_read(tmp_path):
    root = write_folders(tmp_path)
    path = tmp_path / "cnn_qa/questions/training/long.question"
    path.write_text(question_file("nothing here . " * 30_000 + "@entity1 won ."))
    loaded = load_questions("cnn_qa", root)
    assert told(loaded, "train")[2][0].endswith("@entity1 won .")
    assert int(loaded.splits["train"].passages.offsets.diff().max()) < LONGEST


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"shards": 5}, "shards must be a whole number, from 1 to 4, got 5"),
        ({"shards": 0}, "shards must be"),
        ({"limit": 0}, "limit must be a whole number, at least 1"),
        ({"vocabulary": 2.5}, "vocabulary must be a whole number"),
        ({"relabel": -1}, "relabel must be a whole number, at least 0"),
        ({"limit": True}, "limit must be a whole number"),
    ],
)
def test_wrong_options_are_refused(options, part):
    with pytest.raises(InputError, match=re.escape(part)):
        load_questions("facts", **options)


def test_other_data_sets_and_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'cnn_qa'"):
        load_questions("cnn")
    with pytest.raises(InputError, match="does not hold it"):
        load_questions("cnn_qa", str(tmp_path))
    write(tmp_path)
    (tmp_path / "cnn_qa/test.jsonl").unlink()
    with pytest.raises(InputError, match=r"got no test\.jsonl"):
        load_questions("cnn_qa", str(tmp_path))
    assert load_questions("cnn_qa", None).kind == "embedded"


def test_a_published_file_that_differs_is_refused(tmp_path):
    folder = tmp_path / "cnn_qa"
    folder.mkdir()
    for file in registry.SOURCES["cnn_qa"].layouts[0].files:
        (folder / file.name).write_bytes(b"torn")
    with pytest.raises(InputError, match=r"train-00\.jsonl\.xz must be the published .*bring the published one"):
        load_questions("cnn_qa", str(tmp_path))


# The cache


@pytest.fixture
def numbered(monkeypatch):
    """How often questions were numbered."""
    calls, prepared = [], questions.prepared
    monkeypatch.setattr(questions, "prepared", lambda *a, **k: calls.append(k) or prepared(*a, **k))
    return calls


@pytest.mark.parametrize("writer", [write, write_folders], ids=["lines", "folders"])
def test_the_second_load_maps_what_the_first_kept(tmp_path, cache, numbered, writer):
    root = writer(tmp_path)
    first, second = load_questions("cnn_qa", root), load_questions("cnn_qa", root)
    assert len(numbered) == 1
    assert everything(first) == everything(second)
    assert first.describe() == second.describe()
    assert len(list(cache.iterdir())) == 1
    load_questions("cnn_qa", root, vocabulary=9)
    load_questions("cnn_qa", root, relabel=5)
    load_questions("cnn_qa", root, limit=1)
    assert len(numbered) == 4


@pytest.mark.parametrize("writer", [write, write_folders], ids=["lines", "folders"])
def test_changed_files_are_read_anew(tmp_path, numbered, writer):
    root, data = writer(tmp_path), sound()
    load_questions("cnn_qa", root)
    data["train"].append(article("n", "@entity2 won ."))
    writer(tmp_path, data)
    assert len(load_questions("cnn_qa", root).splits["train"]) == 3
    assert len(numbered) == 2


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda home: _flip(home / "train_passages.npy"),
        lambda home: (home / "train_passages.npy").write_bytes(b"\x93NUMPY"),
        lambda home: (home / "entities.npy").unlink(),
        lambda home: (home / "facts.json").write_text("[]"),
        lambda home: (home / "facts.json").write_text('{"checksums": 1}'),
        lambda home: (home / "words.npy").write_bytes(b""),
    ],
)
def test_a_damaged_cache_is_built_anew(tmp_path, cache, numbered, damage):
    root = write(tmp_path)
    first = everything(load_questions("cnn_qa", root))
    (home,) = cache.iterdir()
    damage(home)
    assert everything(load_questions("cnn_qa", root)) == first
    assert len(numbered) == 2
    load_questions("cnn_qa", root)
    assert len(numbered) == 2
    assert [path.name for path in cache.iterdir()] == [home.name]


def test_without_a_folder_for_the_cache_everything_works(tmp_path, cache, numbered):
    root = write(tmp_path)
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    first, second = load_questions("cnn_qa", root), load_questions("cnn_qa", root)
    assert everything(first) == everything(second)
    assert len(numbered) == 2


def test_a_write_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "save", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        array_cache.write(tmp_path / "kept/key", {"x": np.arange(3)}, {})
    assert list((tmp_path / "kept").iterdir()) == []
    assert array_cache.read(tmp_path / "kept/key") is None


def test_what_is_mapped_may_be_changed_in_memory_only(tmp_path):
    assert array_cache.write(tmp_path / "key", {"x": np.arange(3)}, {"a": 1})
    arrays, facts = array_cache.read(tmp_path / "key")
    arrays["x"][0] = 7
    assert facts == {"a": 1}
    assert array_cache.read(tmp_path / "key")[0]["x"].tolist() == [0, 1, 2]


# The published files


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "cnn_qa").is_dir(), reason="needs the CNN files: set LAMINA_TEST_DATA to their folder"
)
@pytest.mark.slow
def test_the_published_questions_load():
    data = load_questions("cnn_qa", REAL, shards=1, vocabulary=20_000, relabel=32)
    assert data.label == "CNN questions, 1 of 4 training files (real: 79,194 + 3,312 + 2,702)"
    assert "train-00.jsonl.xz" in data.sha256
    assert "train-01.jsonl.xz" not in data.sha256
    assert len(data.vocabulary) == 20_000
    valid = data.controls["valid"]
    assert valid["answer_present"] == 1
    assert (round(valid["most_frequent"], 3), round(valid["most_frequent_not_in_query"], 3)) == (0.703, 0.542)
    assert bool(torch.isin(data.splits["valid"].answers, data.entities).all())


def test_the_words_of_a_data_set_are_text():
    assert lines_in(registry.load("cnn_qa", "embedded").arrays["words"])[0].startswith("@entity")
