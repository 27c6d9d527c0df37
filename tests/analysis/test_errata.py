"""docs/errata.md names, for every erratum, tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ERRATA = dict(re.findall(r"^### (.+)\n\n((?:- .+\n)+)", (ROOT / "docs" / "errata.md").read_text(), re.MULTILINE))


def test_every_section_is_an_erratum_in_three_parts():
    text = (ROOT / "docs" / "errata.md").read_text()
    assert len(ERRATA) == text.count("\n### ") >= 20
    for title, entry in ERRATA.items():
        assert re.findall(r"^- \*\*(\w+):\*\*", entry, re.MULTILINE) == ["Paper", "Correct", "Tests"], title


@pytest.mark.parametrize("title", ERRATA)
def test_every_erratum_names_tests_that_exist(title):
    *_, named = ERRATA[title].splitlines()
    paths = re.findall(r"`([^`]*)`", named)
    assert paths
    for path in paths:
        file, name = re.fullmatch(r"(tests/\w+/test_\w+\.py)::(test_\w+)", path).groups()
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), path
