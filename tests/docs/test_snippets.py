"""Run every snippet of README.md and docs/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet  # the type of pytest.param() is not public

from tests import forked
from tests.docs import snippets

ROOT = Path(__file__).resolve().parents[2]
RUNNER = "tests.docs.run_page"
LIMIT = 180  # seconds for a page
HOSTS = {"transformers", "trl", "lightning", "accelerate", "sentence_transformers"}
# Warnings that must not fail a page: a newer release of a host library than tested, and
# Keras 3.15, which converts variables to arrays in a way that NumPy 2 deprecates.
NEW_HOST = "ignore:superbatch.integrations was tested with:UserWarning"
KERAS_VARIABLES = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page in `folder` in a child process, with warnings as errors."""
    arguments = ["-W", "error", "-W", KERAS_VARIABLES, "-W", NEW_HOST, "-m", RUNNER, page, folder]
    backends = {"jax", "tensorflow", "keras"}.intersection(snippets.needed_packages(page.read_text("utf-8")))
    if backends:  # they start threads
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT,
        )  # fmt: skip
    return forked.run(arguments, seconds=LIMIT)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def marked(page: Path) -> ParameterSet:
    """Mark the test of a page with its backend or with the integrations."""
    needed = snippets.needed_packages(page.read_text(encoding="utf-8"))
    marks = [getattr(pytest.mark, name) for name in ("jax", "tensorflow", "keras") if name in needed]
    if HOSTS.intersection(needed):
        marks.append(pytest.mark.integrations)
    return pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.parametrize("page", [marked(page) for page in snippets.pages(ROOT)])
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = snippets.read_blocks(text, name_of(page))
    missing = snippets.missing_packages(text)
    if missing:
        pytest.skip(f"{name_of(page)} needs {' and '.join(missing)}: not installed")
    if any(block.is_run for block in blocks):
        done = run(page, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_that_are_not_run_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for page in snippets.pages(ROOT):
        for block in snippets.read_blocks(page.read_text(encoding="utf-8"), name_of(page)):
            if block.mark == "not run":
                with capsys.disabled():  # shown even if all tests pass
                    print(f"\n{name_of(page)}:{block.line} is not run: {block.reason}", end="")


def test_the_pages_are_found() -> None:
    found = {name_of(page) for page in snippets.pages(ROOT)}
    assert {"README.md", "docs/index.md", "docs/how-to-choose.md"} <= found
    readme = snippets.read_blocks((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
    assert sum(block.language == "python" and block.is_run for block in readme) >= 1


# Errors that the harness must find.

GOOD = """
# A page

```python
values = [1, 2]
```

Between them, text.

```python
print(sum(values), "in all")
```
<!-- output -->
```text
3 ...
```
"""


def run_text(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return run(page, folder)


def test_blocks_share_a_namespace_and_the_output_is_compared(tmp_path: Path) -> None:
    done = run_text(GOOD, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sum(values)", "sum(valeus)", "NameError: name 'valeus' is not defined"),
        ("sum(values)", "sum(values) +", "SyntaxError"),
        ("3 ...", "4 ...", "the page says"),
        ("values = [1, 2]", "import warnings; warnings.warn('old')", "UserWarning: old"),
        ("values = [1, 2]", "values = [1, 2]\nassert not values", "AssertionError"),
    ],
)
def test_a_broken_snippet_fails(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    done = run_text(GOOD.replace(old, new), tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "page.md" in done.stderr, "the error names the page"


def test_a_traceback_shows_the_line_of_the_page(tmp_path: Path) -> None:
    done = run_text(GOOD.replace("sum(values)", "sum(valeus)"), tmp_path)
    line = 1 + GOOD.splitlines().index('print(sum(values), "in all")')
    assert f'page.md", line {line}' in done.stderr


def test_a_console_block_that_fails_is_found(tmp_path: Path) -> None:
    done = run_text("<!-- run -->\n```console\n$ superbatch no-such-command\n```\n", tmp_path)
    assert done.returncode != 0
    assert "$ superbatch no-such-command" in done.stderr


def test_a_titled_block_is_a_file_for_those_after_it(tmp_path: Path) -> None:
    text = '```python title="task.py"\nx = 1\n```\n\n```python\nimport task\nassert task.x == 1\n```\n'
    done = run_text(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "task.py").read_text(encoding="utf-8") == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\nls\n```\n", "language 'bash'"),
        ("```\nls\n```\n", "language ''"),
        ("```console\n$ ls\n```\n", "mark the console block"),
        ("<!-- run -->\ntext between\n\n```console\n$ ls\n```\n", "mark the console block"),
        ("<!-- not run -->\n```python\nx\n```\n", "say why"),
        ("<!-- run -->\n```text\nx\n```\n", "means nothing"),
        ("```python\nx\n", "never closed"),
    ],
)
def test_a_block_without_a_known_mark_is_an_error(text: str, message: str) -> None:
    with pytest.raises(snippets.MarkError, match=message):
        snippets.read_blocks(text, "page.md")


def test_a_block_with_a_reason_is_not_run() -> None:
    (block,) = snippets.read_blocks("<!-- not run: needs a GPU -->\n\n```python\nx\n```\n", "page.md")
    assert not block.is_run
    assert block.reason == "needs a GPU"


def test_an_indented_block_is_read_without_its_indent() -> None:
    (block,) = snippets.read_blocks("* item\n\n  ```python\n  if x:\n      y\n  ```\n", "page.md")
    assert block.text == "if x:\n    y"


def test_commands_continue_after_a_backslash() -> None:
    (block,) = snippets.read_blocks(
        "<!-- run -->\n```console\n$ superbatch a \\\n    --b\noutput\n$ superbatch c\n```\n", "page.md"
    )
    assert [line.split() for line in snippets.commands(block)] == [
        ["superbatch", "a", "--b"],
        ["superbatch", "c"],
    ]


def test_a_page_lists_the_packages_it_needs() -> None:
    assert snippets.missing_packages("# No needs\n") == []
    assert snippets.missing_packages("<!-- needs: json -->\n# A page\n") == []
    assert snippets.missing_packages("<!-- needs: json, not_there -->\n# A page\n") == ["not_there"]
    page = ROOT / "docs" / "jax.md"
    assert snippets.NEEDS.search(page.read_text(encoding="utf-8")), "the premise: one page needs a package"
