"""Run the blocks of one page in this process: `python -m tests.docs.run_page PAGE FOLDER`, in that folder.

Stops at the first block that fails or whose output differs from the page, with an error that names the line.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import types
from pathlib import Path

from superbatch.lab.cli import main as command_line
from tests.docs import snippets


def run_python(block: snippets.Block, page: Path, namespace: dict[str, object]) -> str:
    """Execute the block with its line numbers in the page, so that a traceback shows them."""
    if block.title:
        Path(block.title).write_text(block.text + "\n", encoding="utf-8")
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def run_console(block: snippets.Block, page: Path) -> str:
    """Run the superbatch commands of the block in this process: a child process would load torch again."""
    printed, errors = io.StringIO(), io.StringIO()
    for command in snippets.commands(block):
        name, *arguments = shlex.split(command)
        assert name == "superbatch", f"{page}:{block.line}: only superbatch is run, not {command!r}"
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = command_line(arguments)
        assert code == 0, f"{page}:{block.line}: $ {command}\n{printed.getvalue()}{errors.getvalue()}"
    return printed.getvalue()


def main() -> None:
    page = Path(sys.argv[1]).resolve()
    os.chdir(sys.argv[2])
    sys.path.insert(0, "")  # a page may import the files that it writes
    module = types.ModuleType("__main__")  # so that classes of the page can be pickled
    sys.modules["__main__"] = module
    printed = ""
    for block in snippets.read_blocks(page.read_text(encoding="utf-8"), page.name):
        if block.is_output:
            assert snippets.same_output(block.text, printed), (
                f"{page}:{block.line}: the page says\n{block.text}\nand the block before printed\n{printed}"
            )
        elif block.is_run and block.language == "python":
            printed = run_python(block, page, vars(module))
        elif block.is_run:
            printed = run_console(block, page)


if __name__ == "__main__":
    main()
