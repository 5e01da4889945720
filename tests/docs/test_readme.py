"""README.md is short and begins with the text that a newcomer needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
MOST_WORDS = 600


def prose(text: str) -> str:
    """Return the text without code blocks, comments, tables and link targets; texts of pictures stay."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(text: str) -> int:
    return len(prose(text).split())


def rows_of_first_table(text: str) -> list[str]:
    found = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return found[0].splitlines()[2:] if found else []


def test_the_prose_of_the_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert 200 < words(text) < MOST_WORDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one *two* [three](https://a.b/four)", 3),
        ("one\n```python\nfour five\n```\ntwo", 2),
        ("| a | b |\n| --- | --- |\none ![two three](p.png)", 3),
        ("one <!-- two\nthree --> two", 2),
        ("word " * 700, 700),
    ],
)
def test_words_are_counted(text: str, expected: int):
    assert words(text) == expected


def test_the_first_screen_says_what_why_and_how():
    text = README.read_text(encoding="utf-8")
    parts = (
        "Exact gradient accumulation",
        "A hand-written accumulation loop is wrong when",
        'pip install "superbatch[torch]"',
        "```diff",
        "<!-- table: scorecard -->",
        "```python",
        "$ ./run compare",
        "$ ./run test",
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert len(rows_of_first_table(text)) == 8


def test_checkpoints_take_one_line():
    lines = [line for line in README.read_text(encoding="utf-8").splitlines() if "checkpoint" in line.lower()]
    assert len(lines) == 1
    assert "docs/guides/checkpoints.md" in lines[0]
