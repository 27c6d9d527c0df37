"""The sentence suite: its files, the batched solver, both protocols, SICK's head, control rows, and going on."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, StratifiedKFold

from lamina.errors import InputError
from lamina.lab.data import registry, sentence_files
from lamina.lab.sentences import controls, encodings, evaluate, relatedness, tasks
from lamina.lab.sentences.classification import PROTOCOLS, cross_validated, nested
from lamina.lab.sentences.evaluation import FILE
from lamina.lab.sentences.logistic import LogisticRegressions
from lamina.lab.sentences.tasks import Classification, Pairs, Relatedness, load

SHARED = Path(__file__).parents[2].parent / "shared/data"
REAL = os.environ.get("LAMINA_TEST_DATA") or (str(SHARED) if SHARED.is_dir() else None)
needs_real = pytest.mark.skipif(
    not REAL or not (Path(REAL) / "sentence_eval").is_dir(),
    reason="needs the sentence files: set LAMINA_TEST_DATA to their folder",
)
HEADER = b"pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
ENOUGH = 25  # sentences of each label for nested folds


@pytest.fixture(autouse=True)
def _no_data_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Files


def files(**changed):
    """Contents by name, as the published files have them; ``changed`` by the name's first part."""
    held = {name: b"fine words\nmore words\n" for names in sentence_files.CLASSES.values() for name in names}
    row = b"1\ta dog runs\ta cat runs\t3.5\tNEUTRAL\n"
    held |= {f"SICK/{name}": HEADER + row + row for name in sentence_files.PAIRS.values()}
    return {name: changed.get(Path(name).name.replace(".", "_").replace("-", "_"), held[name]) for name in held}


def read(**changed):
    arrays = sentence_files.read(files(**changed))
    return arrays, registry.Dataset("", "", "", arrays, {}).notes


def lines(array):
    return array.tobytes().decode().split("\n")


def test_label_1_comes_first_and_objective_is_1():
    arrays, notes = read(subj_objective=b"it rains\n")
    assert lines(arrays["SUBJ_sentences"]) == ["it rains", "fine words", "more words"]
    assert arrays["SUBJ_labels"].tolist() == [1, 0, 0]
    assert notes == ()


def test_empty_lines_are_skipped_and_counted():
    arrays, notes = read(custrev_neg=b"one\n\n \t\ntwo\n\n")
    assert lines(arrays["CR_sentences"])[2:] == ["one", "two"]
    assert arrays["CR_labels"].tolist() == [1, 1, 0, 0]
    assert notes == ("empty lines, skipped: 3, the first is line 2 of custrev.neg",)


def test_quotes_and_dots_of_cp1252_are_read_and_end_no_line():
    arrays, notes = read(rt_polarity_pos=b"it\x92s a clich\xe9 \x85 yes\n")
    assert lines(arrays["MR_sentences"])[0] == "it\u2019s a cliché … yes"
    assert notes == ()


def test_each_line_of_mixed_encodings_is_read_as_its_own():
    arrays, notes = read(mpqa_pos=b"clich\xe9\nplain\n" + "cliché über".encode() + b"\n")
    assert lines(arrays["MPQA_sentences"])[:3] == ["cliché", "plain", "cliché über"]
    assert len(notes) == 1
    assert "both UTF-8 and cp1252" in notes[0]
    assert "line 3 of mpqa.pos" in notes[0]


def test_bytes_of_no_encoding_are_replaced_and_counted():
    arrays, notes = read(mpqa_pos=b"a\x81b\n")
    assert lines(arrays["MPQA_sentences"])[0] == "a\ufffdb"
    assert notes == (
        "lines with bytes that neither UTF-8 nor cp1252 has, replaced: 1, the first is line 1 of mpqa.pos",
    )


def test_a_byte_order_mark_and_windows_line_ends_are_no_text():
    arrays, notes = read(
        mpqa_pos=b"\xef\xbb\xbfone\r\ntwo\r\n",
        SICK_train_txt=HEADER.replace(b"\n", b"\r\n") + b"1\ta\tb\t5\tNEUTRAL\r\n",
    )
    assert lines(arrays["MPQA_sentences"])[:2] == ["one", "two"]
    assert arrays["train_x"].tolist() == [5]
    assert notes == ()


@pytest.mark.parametrize("content", ["a\n".encode("utf-16"), b"\n\n", b""])
def test_files_without_text_are_refused(content):
    with pytest.raises(InputError, match=r"mpqa\.pos must"):
        read(mpqa_pos=content)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (b"1\ta\tb\t3\tMAYBE\n", "one of NEUTRAL, ENTAILMENT, CONTRADICTION, got 'MAYBE'"),
        (b"1\ta\tb\t5.1\tNEUTRAL\n", "from 1 to 5, got '5.1'"),
        (b"1\ta\tb\tnan\tNEUTRAL\n", "from 1 to 5, got 'nan'"),
        (b"1\ta\tb\thigh\tNEUTRAL\n", "from 1 to 5, got 'high'"),
        (b"1\ta\tb\t3\n", "5 columns, got 4"),
    ],
)
def test_a_wrong_pair_is_named(row, told):
    with pytest.raises(InputError, match=rf"line 3 of SICK_trial\.txt must .*{told}"):
        read(SICK_trial_txt=HEADER + b"1\ta\tb\t3\tNEUTRAL\n" + row)


@pytest.mark.parametrize("content", [b"", b"1\ta\tb\t3\tNEUTRAL\n", HEADER])
def test_pairs_need_their_header_and_rows(content):
    with pytest.raises(InputError, match="SICK_train"):
        read(SICK_train_txt=content)


def test_a_pair_with_an_empty_sentence_is_skipped():
    arrays, notes = read(SICK_train_txt=HEADER + b"1\t\tb\t3\tNEUTRAL\n2\ta\tb\t4\tNEUTRAL\n")
    assert arrays["train_x"].tolist() == [4]
    assert notes == ("pairs with an empty sentence, skipped: 1, the first is line 2 of SICK_train.txt",)


def test_the_folders_of_senteval_are_read(tmp_path):
    folders = {name: task for task, names in sentence_files.CLASSES.items() for name in names}
    for name, content in files().items():
        path = tmp_path / "downstream" / folders.get(name, ".") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    data = load(tmp_path)
    assert data.kind == "real"
    assert data.tasks["MR"].sentences == ("fine words", "more words") * 2
    assert data.tasks["SICK"].splits["test"].first == ("a dog runs",) * 2


def test_a_changed_file_in_the_published_place_is_refused(tmp_path):
    for name, content in files().items():
        (tmp_path / "sentence_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sentence_eval" / name).write_bytes(content)
    with pytest.raises(InputError, match="must be the published"):
        load(tmp_path)


def test_the_stand_in_says_what_it_is_and_stays_the_same():
    data = load("embedded")
    assert data.kind == "embedded"
    assert "stand-in" in data.label
    assert list(data.tasks) == ["SICK", "MR", "CR", "SUBJ", "MPQA"]
    texts = "\n".join(text for task in data.tasks.values() for text in task.texts())
    assert zlib.crc32(texts.encode()) == 2175148950


# Tasks


@pytest.mark.parametrize(
    ("sentences", "labels", "told"),
    [
        (("a", "b"), [0, 2], "must be 0 and 1"),
        (("a", "b"), [0, -1], "must be 0 and 1"),
        (("a", "b"), [1, 1], "both of them"),
        (("a", "b"), [0.5, 1], "must be 0 and 1"),
        (("a", "b"), [0, 1, 1], "a label for each"),
        (("a", " "), [0, 1], "not blank"),
        (("a", None), [0, 1], "must be a string"),
    ],
)
def test_tasks_refuse_what_they_cannot_judge(sentences, labels, told):
    with pytest.raises(InputError, match=told):
        Classification("own", sentences, labels)


def test_pairs_refuse_what_they_cannot_judge():
    fine = Pairs(("a", "b"), ("c", "d"), np.array([1, 5]))
    for wrong, told in (
        (Pairs(("a",), ("c", "d"), np.array([1, 5])), "a score for each pair"),
        (Pairs(("a", "b"), ("c", "d"), np.array([0, 5])), "from 1 to 5"),
        (Pairs(("a", "b"), ("c", "d"), np.array([np.nan, 5])), "from 1 to 5"),
    ):
        with pytest.raises(InputError, match=told):
            Relatedness("own", {"train": fine, "valid": fine, "test": wrong})
    with pytest.raises(InputError, match="must have train, valid, test"):
        Relatedness("own", {"train": fine})


# The solver


def drawn(seed, cases, size, spread=1.0, shift=0.0):
    """Features of falling variance, and labels that a logistic model drew."""
    random = np.random.RandomState(seed)
    x = random.randn(cases, size) * np.arange(1, size + 1) ** -0.5
    log_odds = x @ random.randn(size)
    y = (2 * log_odds / (log_odds.std() + 1e-9) + random.logistic(size=cases) > 0).astype(np.int64)
    y[:4] = 0, 1, 0, 1
    return (spread * (x + shift)).astype(np.float32), y


def folds_of(cases, count):
    parts = np.ones((count, cases), np.bool_)
    for part, fold in zip(parts, np.array_split(np.arange(4, cases), count)):
        part[fold] = False  # the first four stay: both labels are in every part
    return parts


def solved(x, y, parts, costs):
    regressions = LogisticRegressions(torch.from_numpy(x), torch.from_numpy(y))
    return regressions.solve(torch.from_numpy(parts), torch.as_tensor(costs))


def by_sklearn(x, y, parts, costs):
    """Scikit-learn's solution to many digits."""
    x, found = x.astype(np.float64), []
    for part, cost in zip(parts, costs):
        model = LogisticRegression(C=cost, tol=1e-9, max_iter=10_000, solver="newton-cg").fit(x[part], y[part])
        found.append(model.decision_function(x))
    return np.array(found)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    cases=st.integers(20, 120),
    size=st.integers(1, 40),
    spread=st.sampled_from([0.05, 1.0, 20.0]),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_all_parts_and_costs_at_once_are_scikit_learns(seed, cases, size, spread, shift):
    x, y = drawn(seed, cases, size, spread, shift)
    parts, costs = np.repeat(folds_of(cases, 3), 3, 0), np.tile([0.25, 4.0, 64.0], 3)
    if spread == 20:  # C counts with the square of the features' scale
        costs = costs / 400
    ours, theirs = solved(x, y, parts, costs), by_sklearn(x, y, parts, costs)
    assert ours.unsolved == 0
    apart = np.sqrt(((ours.scores.numpy() - theirs) ** 2).mean(1)) / (1 + np.sqrt((theirs**2).mean(1)))
    assert apart.max() < 2e-2


def test_accuracies_are_scikit_learns_to_a_tenth_of_a_point():
    x, y = drawn(0, 2000, 60, shift=0.5)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    parts, costs = np.repeat(folds_of(2000, 4), 3, 0), np.tile([1.0, 16.0, 256.0], 4)
    ours = solved(x, y, parts, costs).scores.numpy()
    for score, exact, part in zip(ours, by_sklearn(x, y, parts, costs), parts):
        right = [((values > 0) == y)[~part].mean() for values in (score, exact)]
        assert abs(right[0] - right[1]) <= 1e-3


@pytest.mark.parametrize(("cases", "size"), [(60, 10), (30, 80)])
def test_constant_and_repeated_features_do_no_harm(cases, size):
    x, y = drawn(1, cases, size)
    x = np.concatenate([x, x[:, :3], np.full((cases, 2), 7, np.float32)], 1)
    parts, costs = folds_of(cases, 2), np.array([1.0, 8.0])
    np.testing.assert_allclose(solved(x, y, parts, costs).scores, by_sklearn(x, y, parts, costs), atol=0.02)


def test_features_that_tell_nothing_give_the_log_odds_of_the_labels():
    y = np.array([1, 1, 1, 0] * 5)
    scores = solved(np.zeros((20, 3), np.float32), y, np.ones((1, 20), np.bool_), [4.0]).scores
    np.testing.assert_allclose(scores, np.log(3), atol=1e-3)


def test_problems_beyond_the_limit_are_counted():
    x, y = drawn(2, 50, 5)
    regressions = LogisticRegressions(torch.from_numpy(x), torch.from_numpy(y))
    solution = regressions.solve(torch.ones(2, 50, dtype=torch.bool), torch.tensor([1e-6, 1e4]), limit=3)
    assert (solution.steps, solution.unsolved) == (3, 1)


def test_the_solver_refuses_wrong_problems():
    x, y = map(torch.from_numpy, drawn(3, 20, 4))
    every = torch.ones(1, 20, dtype=torch.bool)
    regressions, one = LogisticRegressions(x, y), torch.ones(1)
    for parts, costs, told in (
        (every & y.bool(), one, "both labels"),
        (every, -one, "C must be > 0"),
        (every[:, :9], one, "parts must be bool"),
        (every.float(), one, "parts must be bool"),
    ):
        with pytest.raises(InputError, match=told):
            regressions.solve(parts, costs)
    with pytest.raises(InputError, match="labels must be 0 or 1"):
        LogisticRegressions(x, y + 1)
    with pytest.raises(InputError, match="features must be"):
        LogisticRegressions(x, y[:5])


# Protocols


def a_task(name="own", count=ENOUGH, shift=1.2):
    """A small task, and vectors that tell some of its labels."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    labels = np.repeat([1, 0], count)
    sentences = tuple(f"{name} {'word ' * (n % 7)}number {n}" for n in range(2 * count))
    return Classification(name, sentences, labels), (random.randn(2 * count, 4) + shift * labels[:, None]).astype("f4")


def score(cost, x, y, train, test):
    model = LogisticRegression(C=cost, tol=1e-8, max_iter=1000).fit(x[train], y[train])
    return 100 * model.score(x[test], y[test])


def nested_loops(x, y, outer, inner, costs, decimals):
    """Accuracies and costs of the published loops."""
    folds, chosen = [], []
    for train, test in outer.split(x, y):
        means = []
        for cost in costs:
            within = [(train[a], train[b]) for a, b in inner.split(x[train], y[train])]
            means.append(round(float(np.mean([score(cost, x, y, *pair) for pair in within])), decimals))
        chosen.append(costs[int(np.argmax(means))])
        folds.append(score(chosen[-1], x, y, train, test))
    return folds, chosen


def test_the_protocol_of_kiros_is_two_contiguous_loops_over_shuffled_sentences():
    task, x = a_task()
    order = np.arange(len(x))
    np.random.RandomState(1234).shuffle(order)
    costs = PROTOCOLS["kiros"].costs
    assert costs == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    folds, chosen = nested_loops(x[order], task.labels[order], KFold(10), KFold(10), costs, decimals=9)
    found = cross_validated(task, x, PROTOCOLS["kiros"])
    assert found["costs"] == chosen
    assert found["folds"] == pytest.approx(folds)
    assert found["accuracy"] == pytest.approx(np.mean(folds))
    assert found["std"] == pytest.approx(np.std(folds))
    assert found["unsolved"] == 0


def test_the_protocol_of_senteval_is_stratified_by_length():
    task, x = a_task(count=30)
    order = [n for _, _, n in sorted((len(s.split()), task.labels[n], n) for n, s in enumerate(task.sentences))]
    split = StratifiedKFold(10, shuffle=True, random_state=1111)
    costs = PROTOCOLS["senteval"].costs
    assert costs == (0.25, 0.5, 1, 2, 4, 8)
    folds, chosen = nested_loops(x[order], task.labels[order], split, split, costs, decimals=2)
    found = cross_validated(task, x, PROTOCOLS["senteval"])
    assert found["costs"] == chosen
    assert found["folds"] == pytest.approx(folds)


def test_each_sentence_is_held_out_once_and_never_fitted_then():
    task, _ = a_task(count=31)
    seen = []

    def fit(parts, costs):
        seen.append((parts.copy(), costs))
        return np.zeros(parts.shape), 0

    nested(task, fit, PROTOCOLS["kiros"])
    (inner, inner_costs), (outer, outer_costs) = seen
    assert (inner.shape, outer.shape) == ((900, 62), (10, 62))
    assert ((~outer).sum(0) == 1).all()
    assert (inner.reshape(10, 90, 62) <= outer[:, None]).all()  # what is held out outside stays so within
    assert (~inner & np.repeat(outer, 90, 0)).reshape(10, 10, 9, 62)[:, :, 0].sum(1).max() == 1
    assert set(inner_costs) == set(PROTOCOLS["kiros"].costs)
    assert set(outer_costs) == {1}  # the first of equals


def test_a_task_too_small_for_nested_folds_is_refused():
    task, x = a_task(count=12)
    with pytest.raises(InputError, match="20 sentences of each label"):
        cross_validated(task, x, PROTOCOLS["kiros"])


# SICK


def test_two_neighbours_share_the_probability_of_a_score():
    expected = [[1, 0, 0, 0, 0], [0, 0, 0.4, 0.6, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_allclose(relatedness.targets(np.array([1, 3.6, 5])), expected, atol=1e-7)


@given(st.lists(st.floats(1, 5), min_size=1, max_size=9))
def test_the_mean_of_the_targets_is_the_score(scores):
    shares = relatedness.targets(np.array(scores))
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(shares @ np.arange(1, 6), scores, atol=1e-5)


def test_measures_are_scipys():
    random = np.random.RandomState(0)
    scores = np.round(1 + 4 * random.rand(200), 1)  # with ties
    guesses = scores + random.randn(200)
    found = relatedness.measured(guesses, scores)
    assert found["pearson"] == pytest.approx(stats.pearsonr(guesses, scores)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(guesses, scores)[0])
    assert found["mse"] == pytest.approx(np.mean((guesses - scores) ** 2))


def test_a_correlation_with_a_constant_is_not_a_number():
    found = relatedness.measured(np.full(3, 3.3), np.array([1.0, 3, 5]))
    assert np.isnan(found["pearson"])
    assert np.isnan(found["spearman"])


def test_features_of_a_pair():
    found = relatedness.pair_features(np.array([[1.0, -2.0]]), np.array([[3.0, 4.0]]))
    assert found.tolist() == [[2, 6, 3, -8]]


def some_pairs(count, seed):
    random = np.random.RandomState(seed)
    first, second = ([f"s{number}" for number in random.randint(0, 40, count)] for _ in range(2))
    scores = 5 - 4 * np.abs(vectors_of(first)[:, 0] - vectors_of(second)[:, 0])
    return Pairs(tuple(first), tuple(second), scores)


def vectors_of(sentences):
    return np.array([[int(s[1:]) / 40, 1, int(s[1:]) % 3] for s in sentences], np.float32)


def pairs_task():
    return Relatedness("SICK", {split: some_pairs(70, n) for n, split in enumerate(("train", "valid", "test"))})


def test_the_head_learns_a_distance():
    task = pairs_task()

    def features(split):
        return relatedness.pair_features(
            *(vectors_of(part) for part in (task.splits[split].first, task.splits[split].second))
        )

    found = relatedness.regressed(task, features)
    assert found["pearson"] > 0.95
    assert found == relatedness.regressed(task, features)  # from one seed, whatever was drawn before


def test_training_stops_at_the_first_block_that_does_not_help_and_keeps_the_best(monkeypatch):
    task, told, biases = pairs_task(), iter([0.1, 0.3, 0.3, 0.9]), iter([1.0, 2.0, 3.0])

    def train(model, *rest):
        torch.nn.init.constant_(model.bias, 0)
        with torch.no_grad():
            model.bias[0] = next(biases)
            model.weight.zero_()

    monkeypatch.setattr(relatedness, "_train_block", train)
    monkeypatch.setattr(relatedness, "pearson", lambda a, b: next(told, 0.0))
    monkeypatch.setattr(relatedness, "measured", lambda guesses, scores: {"guess": float(guesses[0])})
    found = relatedness.regressed(task, lambda split: np.zeros((70, 2), np.float32))
    best = np.exp(2) / (np.exp(2) + 4)
    assert found["blocks"] == 3
    assert found["guess"] == pytest.approx(best + (2 + 3 + 4 + 5) * (1 - best) / 4, rel=1e-5)


def test_one_vector_for_every_sentence_ends_the_training(monkeypatch):
    monkeypatch.setattr(relatedness, "EPOCHS", 2)
    found = relatedness.regressed(pairs_task(), lambda split: np.ones((70, 2), np.float32))
    assert np.isnan(found["pearson"])
    assert found["blocks"] == 2


# Control rows


def test_the_majority_is_the_share_of_the_most_frequent_label():
    task = Classification("own", tuple(f"s {n}" for n in range(100)), [1] * 70 + [0] * 30)
    assert controls.majority(task, PROTOCOLS["kiros"])["accuracy"] == pytest.approx(70)
    balanced, _ = a_task()
    assert controls.majority(balanced, PROTOCOLS["kiros"])["accuracy"] == pytest.approx(50)


def test_the_majority_of_pairs_is_the_mean_score():
    task = pairs_task()
    found = controls.majority(task, PROTOCOLS["kiros"])
    guess = task.splits["train"].scores.mean()
    assert found["mse"] == pytest.approx(((task.splits["test"].scores - guess) ** 2).mean())


def test_word_vectors_are_averaged_and_unknown_words_left_out():
    encode = controls.mean_of({"a": np.array([1.0, 2.0]), "b": np.array([3.0, 6.0])})
    np.testing.assert_array_equal(encode(["a b", "A x", "x y"]), [[2, 4], [1, 2], [0, 0]])
    with pytest.raises(InputError, match="must hold words"):
        controls.mean_of({})


def test_tfidf_is_the_protocol_on_scikit_learns_features():
    task = load("embedded").tasks["CR"]
    x = TfidfVectorizer(token_pattern=r"\S+").fit_transform(task.sentences).toarray().astype(np.float32)
    found = controls.tfidf(task, PROTOCOLS["senteval"])
    assert found["accuracy"] == pytest.approx(cross_validated(task, x, PROTOCOLS["senteval"])["accuracy"], abs=3)
    assert found["accuracy"] > 70


# The whole


class Encoder:
    """Vectors from a hash of the words; counts the sentences that it was asked for."""

    def __init__(self, seed=0, size=6, fails_at=None):
        self.seed, self.size, self.fails_at, self.asked = seed, size, fails_at, 0

    def __call__(self, sentences):
        if self.fails_at and any(self.fails_at in sentence for sentence in sentences):
            raise KeyboardInterrupt
        self.asked += len(sentences)
        return np.stack([np.mean([self.vector(word) for word in one.split()], 0) for one in sentences])

    def vector(self, word):
        return np.random.RandomState(zlib.crc32(f"{self.seed} {word}".encode())).randn(self.size)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(relatedness, "EPOCHS", 2)
    return [pairs_task(), a_task("first")[0], a_task("second")[0]]


def keys(found):
    return [(line["task"], line["row"]) for line in found]


def test_every_task_has_the_model_and_the_control_rows(own):
    words = {f"s{number}": np.ones(3) * number for number in range(40)}
    found = evaluate(Encoder(), own, vectors=words)
    rows = ("model", "majority", "tfidf", "vectors")
    assert keys(found) == [(task.name, row) for task in own for row in rows]
    for line in found:
        assert (line["data"], line["protocol"]) == ("own", "kiros")
        assert set(line) >= ({"pearson", "spearman", "mse"} if line["task"] == "SICK" else {"accuracy", "std"})
    json.dumps(found, allow_nan=False)


def test_a_killed_evaluation_goes_on(own, tmp_path):
    stopped = Encoder(fails_at="second")
    with pytest.raises(KeyboardInterrupt):
        evaluate(stopped, own, results=tmp_path / "kept", controls=("majority",))
    path = tmp_path / "kept" / FILE
    before = path.read_bytes()
    assert keys(map(json.loads, before.splitlines())) == [
        (task, row) for task in ("SICK", "first") for row in ("model", "majority")
    ]
    path.write_bytes(before + b'{"task": "second", "row": "mo')  # what a kill may leave
    again = Encoder()
    found = evaluate(again, own, results=tmp_path / "kept", controls=("majority",))
    assert found == evaluate(Encoder(), own, controls=("majority",))
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes().splitlines()) == 6
    assert again.asked == 3 * encodings.PROBED + 50  # probes, and the sentences of the last task


def test_results_of_another_encoder_or_of_other_data_are_not_taken(own, tmp_path):
    place = tmp_path / "results.jsonl"
    evaluate(Encoder(), own[1:2], results=place, controls=())
    with pytest.raises(InputError, match="must be of this encoder"):
        evaluate(Encoder(seed=1), own[1:2], results=place, controls=())
    other = Classification("first", own[1].sentences, 1 - own[1].labels)
    evaluate(Encoder(), [other], results=place, controls=())
    evaluate(Encoder(), own[1:2], protocol="senteval", results=place, controls=())
    assert len(place.read_bytes().splitlines()) == 3


def test_vectors_are_kept_and_a_damaged_file_is_encoded_again(own, tmp_path):
    first, told = Encoder(), []
    found = evaluate(first, own[1:], cache=tmp_path / "c", controls=(), say=told.append)
    assert first.asked == 2 * (50 + encodings.PROBED)
    assert "first: 50 of 50 sentences encoded" in told
    again = Encoder()
    assert evaluate(again, own[1:], cache=tmp_path / "c", controls=()) == found
    assert again.asked == 2 * encodings.PROBED
    file = tmp_path / "c/model/first/vectors.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    repaired = Encoder()
    assert evaluate(repaired, own[1:], cache=tmp_path / "c", controls=()) == found
    assert repaired.asked == 50 + 2 * encodings.PROBED
    other = Encoder(seed=1)
    evaluate(other, own[1:], cache=tmp_path / "c", controls=())
    assert other.asked == 2 * (50 + encodings.PROBED)


def test_sentences_that_recur_are_encoded_once():
    task = Classification("own", ("same", *(f"s {n}" for n in range(49)), "same"), [1] * 25 + [0] * 26)
    encoder = Encoder()
    evaluate(encoder, [task], controls=())
    assert encoder.asked == 50 + encodings.PROBED


def test_long_lists_are_encoded_in_blocks(own, monkeypatch):
    monkeypatch.setattr(encodings, "BLOCK", 20)
    asked, encoder = [], Encoder()
    evaluate(lambda sentences: asked.append(len(sentences)) or encoder(sentences), own[1:2], controls=())
    assert asked == [4, 20, 20, 10]


def test_tensors_of_any_precision_are_taken(own):
    encoder = Encoder()
    wide = evaluate(lambda sentences: torch.from_numpy(encoder(sentences)).requires_grad_(), own[1:2], controls=())
    assert wide[0]["accuracy"] == evaluate(encoder, own[1:2], controls=())[0]["accuracy"]
    evaluate(lambda sentences: torch.from_numpy(encoder(sentences)).bfloat16(), own[1:2], controls=())


@pytest.mark.parametrize(
    ("encode", "told"),
    [
        (lambda s: np.zeros((len(s) + 1, 3)), r"numbers \[4, D\] for 4 sentences, got shape \[5, 3\]"),
        (lambda s: np.zeros(len(s)), r"numbers \[4, D\]"),
        (lambda s: np.zeros((len(s), 0)), r"numbers \[4, D\]"),
        (lambda s: [[1.0] * (n + 1) for n in range(len(s))], r"numbers \[4, D\]"),
        (lambda s: np.full((len(s), 3), "x"), r"numbers \[4, D\]"),
        (lambda s: None, r"numbers \[4, D\]"),
        (lambda s: np.full((len(s), 3), np.nan), "finite numbers, got NaN.* for 'first number 0'"),
        (lambda s: np.full((len(s), 3), 1e39), "finite numbers"),
        (lambda s: np.zeros((len(s), len(s))), "one size D, got 50 after 4"),
    ],
)
def test_what_encode_returns_is_checked(own, encode, told):
    with pytest.raises(InputError, match=told):
        evaluate(encode, own[1:2], controls=())


def test_unknown_names_are_refused(own):
    for wrong, told in (
        ({"tasks": ["MR", "CRR"]}, "a task must be one of 'SICK', 'MR'"),
        ({"protocol": "sent"}, "Did you mean 'senteval'"),
        ({"controls": ["tf"]}, "a control row must be one of"),
        ({"data": "nowhere"}, "must be a folder with sentence_eval"),
        ({"data": [own[1], own[1]]}, "different names, got first, first"),
    ):
        with pytest.raises(InputError, match=told):
            evaluate(Encoder(), **{"data": "embedded"} | wrong)


def test_some_tasks_of_the_stand_in():
    found = evaluate(Encoder(size=30), "embedded", tasks=("CR",), controls=("majority",))
    assert keys(found) == [("CR", "model"), ("CR", "majority")]
    assert found[0]["data"] == "embedded"
    assert found[0]["accuracy"] > found[1]["accuracy"] == pytest.approx(62.5)


# The published files


@needs_real
def test_the_published_sentences_load():
    data = load(REAL)
    assert data.kind == "real"
    assert data.notes == ("empty lines, skipped: 7, the first is line 2323 of custrev.pos",)
    sizes = {"MR": (5331, 5331), "CR": (2405, 1366), "SUBJ": (5000, 5000), "MPQA": (3311, 7292)}
    counts = {name: tuple(np.bincount(data.tasks[name].labels)[::-1].tolist()) for name in sizes}
    assert counts == sizes
    assert [len(data.tasks["SICK"].splits[split].scores) for split in ("train", "valid", "test")] == [4500, 500, 4927]
    assert tasks.fingerprint(data.tasks["MR"]) != tasks.fingerprint(data.tasks["CR"])


@needs_real
@pytest.mark.slow
@pytest.mark.parametrize(("name", "published"), [("MR", 76.2), ("CR", 79.0), ("SUBJ", 90.8), ("MPQA", 86.1)])
def test_tfidf_is_close_to_the_published_figures(name, published):
    """Linear SVM on single words: Wang and Manning, "Baselines and Bigrams", ACL 2012, table 2."""
    found = controls.tfidf(load(REAL).tasks[name], PROTOCOLS["kiros"])
    assert abs(found["accuracy"] - published) <= 1.5
