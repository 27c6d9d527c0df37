"""Search by hand: what is found, what is said about it, the page, and mistakes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lamina.errors import InputError
from lamina.lab.cli.commands import main
from lamina.lab.data import registry, scenes, thumbnails
from lamina.lab.data.captions import CaptionedImages, vocabulary_of
from lamina.lab.data.formats import File
from lamina.lab.experiments.order_embeddings.search import Library
from tests.lab.test_captions import write_tokens

WORDS = ("red", "blue", "ring", "box", "big")
SPLIT = CaptionedImages(
    ("a.jpg", "b.jpg", "c.jpg"),
    np.array([[1, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.float32),
    (
        *(("red", "ring"), ("red",), ("ring",), ("a", "red", "ring"), ("ring", "red")),
        *(("blue", "ring"), ("blue",), ("ring",), ("a", "blue", "ring"), ("ring", "blue")),
        *(("big", "blue", "box"), ("big",), ("box",), ("a", "blue", "box"), ("box", "blue")),
    ),
)


class Exact(nn.Module):
    """Images are their features, and a sentence is the set of its words: its penalty counts the missing ones."""

    def __init__(self, score: str, vocabulary) -> None:
        super().__init__()
        self.score = score
        self.table = nn.Parameter(torch.zeros(len(vocabulary), len(WORDS)))
        with torch.no_grad():
            for place, word in enumerate(WORDS):
                self.table[vocabulary.ids[word], place] = 1

    def images(self, features):
        return self._placed(features)

    def sentences(self, words, lengths):
        real = (torch.arange(words.shape[1]) < lengths[:, None]).unsqueeze(2)
        return self._placed((self.table[words] * real).amax(1))

    def _placed(self, x):
        return x if self.score == "order" else nn.functional.normalize(x, dim=1)


@pytest.fixture(params=["order", "cosine"])
def library(request):
    vocabulary = vocabulary_of(SPLIT)
    return Library(Exact(request.param, vocabulary), SPLIT, vocabulary)


def test_a_text_finds_the_images_that_hold_its_words(library):
    found = library.by_text("A BLUE box, a blu box!", top=2)
    assert found.words == ("a", "blue", "box", "a", "blu", "box")
    assert found.unknown == {"blu": ("blue",)}
    assert [hit.image for hit in found.images] == ["c.jpg", "b.jpg"]
    assert [hit.caption for hit in found.images] == ["big blue box", "blue ring"]
    values = {"order": [0, 1], "cosine": [2 / 6**0.5, 0.5]}[library.model.score]
    assert [hit.value for hit in found.images] == pytest.approx(values)
    assert len(library.by_text("blue", top=99).images) == 3


def test_an_image_finds_captions_and_other_images(library):
    found = library.by_image("b.jpg", top=4)
    assert found.image == "b.jpg"
    assert found.written[0] == "blue ring"
    assert [hit.image for hit in found.images] == ["a.jpg", "c.jpg"] or library.model.score == "cosine"
    assert found.images[0].value == pytest.approx(0.5)
    values = library.by_image("b.jpg", top=15).captions
    assert len(values) == 15
    assert [hit.own for hit in values] == [hit.image == "b.jpg" for hit in values]
    shown = [hit.value for hit in values]
    assert shown == sorted(shown, reverse=library.model.score == "cosine")
    first = {hit.caption for hit in found.captions}
    assert first <= {"blue ring", "blue", "ring", "a blue ring", "ring blue"}


@pytest.mark.parametrize(
    ("ask", "part"),
    [
        (lambda it: it.by_image("d.jpg"), "got 'd.jpg', which is none of its 3 names. Try "),
        (lambda it: it.by_text(" ?! "), "a text must have words"),
        (lambda it: it.by_text("bluw boks"), "got 'bluw boks'. Try blue"),
        (lambda it: it.by_text("zzz"), "Try other words"),
    ],
)
def test_the_library_refuses_what_it_cannot_look_up(library, ask, part):
    with pytest.raises(InputError, match=re.escape(part)):
        ask(library)


def test_thumbnails_of_scenes_are_their_pictures():
    (kind, file), *_ = thumbnails.thumbnails("flickr8k", "embedded", None, ["scene-2201"]).values()
    assert kind == "image/png"
    pixels = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    np.testing.assert_array_equal(pixels, scenes.picture("scene-2201"))


def test_thumbnails_come_from_the_published_archive_if_it_is_there(tmp_path, monkeypatch):
    write_tokens(tmp_path / "flickr8k")
    assert thumbnails.thumbnails("flickr8k", "real", str(tmp_path), ["test0.jpg"]) == {}
    path = tmp_path / "flickr8k/images_64.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("test0.jpg", b"picture")
    with pytest.raises(InputError, match=r"the published images_64.zip"):
        thumbnails.thumbnails("flickr8k", "real", str(tmp_path), ["test0.jpg"])
    content = path.read_bytes()
    file = File("images_64.zip", len(content), hashlib.sha256(content).hexdigest())
    row = dataclasses.replace(registry.SOURCES["flickr8k"], extras=(file,))
    monkeypatch.setitem(registry.SOURCES, "flickr8k", row)
    found = thumbnails.thumbnails("flickr8k", "real", str(tmp_path), ["test0.jpg", "test1.jpg"])
    assert found == {"test0.jpg": ("image/jpeg", b"picture")}


# The command, on a small run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    words = "run order_embeddings --dataset flickr8k --data embedded --units 16 --word-size 8 --updates 20"
    words += " --eval-updates 20 --batch-size 32 --device cpu --jobs 1 --quiet --runs"
    assert main([*words.split(), str(runs)]) == 0
    (header,) = runs.rglob("config.json")
    return header.parent


def said(capsys, *words, code=0):
    capsys.readouterr()
    got = main(["search", *map(str, words)])
    out, err = capsys.readouterr()
    assert got == code, err
    return out, err


class Page(HTMLParser):
    """Tags that are open, pictures, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.sources, self.text = list[str](), list[str](), ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def pictures(page: Page) -> list[np.ndarray]:
    packed = [source.partition("base64,")[2] for source in page.sources if source.startswith("data:image/png")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB")) for one in packed]


def test_a_text_is_answered_in_the_terminal_and_on_a_page(capsys, run):
    out, err = said(capsys, run, "--text", "a zzq red ring <b>", "--top", 3)
    assert err == ""
    assert "'zzq' is not in the vocabulary" in out
    assert "EMBEDDED STAND-IN" in out
    names = re.findall(r"│ \d+ +│ (scene-\d+) ", out)
    assert len(names) == 3
    assert f"page: {run / 'search.html'}" in out
    page = Page((run / "search.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert all(source.startswith("data:") for source in page.sources)  # nothing is fetched
    assert "a zzq red ring <b>" in page.text  # as text, not as a tag
    for name, shown in zip(names, pictures(page), strict=True):
        assert name in page.text
        np.testing.assert_array_equal(shown, scenes.picture(name))


def test_an_image_is_answered_in_the_terminal_and_on_a_page(capsys, run, tmp_path):
    out, _ = said(capsys, run, "--image", "scene-2207", "--top", 2, "--page", tmp_path / "new" / "page.html")
    assert "Captions nearest to scene-2207" in out
    assert "Images nearest to scene-2207" in out
    page = Page((tmp_path / "new" / "page.html").read_text(encoding="utf-8"))
    assert page.open == []
    first, *others = pictures(page)
    np.testing.assert_array_equal(first, scenes.picture("scene-2207"))
    assert len(others) == 2
    said(capsys, run, "--image", "scene-0007", "--split", "train", "--page", tmp_path / "page.html")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("RUN", "got neither"),
        ("RUN --text red --image scene-2207", "got both"),
        ("RUN --text=", "--text must not be empty"),
        ("RUN --image=", "--image must not be empty"),
        ("RUN --image scene-22o7", "Try scene-22"),
        ("RUN --image scene-0007", "another --split"),
        ("RUN --text red --split dev", "'valid'"),
        ("RUN --text red --top 0", "'0'"),
        ("RUN --text red --page EMPTY", "--page must be a file"),
        ("RUN --text red --device tpu", "'tpu'"),
        ("RUN --text red --data EMPTY", "does not hold it"),
        ("EMPTY --text red", "EMPTY, none"),
        ("MISSING --text red", "a folder"),
        ("UNFINISHED --text red", "needs a checkpoint"),
        ("OTHER --text red", "OTHER, a run of mnist"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, run, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    header = json.loads((run / "config.json").read_text())
    for name, content in (("UNFINISHED", header), ("OTHER", {**header, "experiment": "mnist"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "RUN").symlink_to(run)
    before = sorted(path.name for path in run.rglob("*"))
    _, err = said(capsys, *words.split(" "), code=2)
    assert err.startswith("lamina: ")
    assert err.count("\n") == 1
    assert part in err
    assert sorted(path.name for path in run.rglob("*")) == before
    assert not list(Path("EMPTY").iterdir())


def test_help_waits_for_no_torch():
    code = "import sys; from lamina.lab.cli.commands import main; main(['search', '--help']); "
    code += "sys.exit(' '.join(m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--image" in done.stdout
