"""Decisions are short pages by subject, all of them in the index."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")


def test_there_are_at_most_50_pages() -> None:
    assert 0 < len(PAGES) <= 50


def test_the_index_has_each_page_with_its_title() -> None:
    lines = re.findall(r"(?m)^- \[.+?\]\((.+?)\): (.+)$", (FOLDER / "README.md").read_text())
    titles = [(page.name, page.read_text().splitlines()[0].removeprefix("# ")) for page in PAGES]
    assert sorted(lines) == titles


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_at_most_500_words_and_says_what_and_why(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 500
    assert "**Decision.**" in text
    assert "**Why.**" in text
