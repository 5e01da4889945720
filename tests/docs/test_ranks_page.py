"""The program of the page on ranks, run under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import snippets

ROOT = Path(__file__).parents[2]


def test_the_example_is_the_program_of_the_page() -> None:
    blocks = snippets.read_blocks((ROOT / "docs" / "ranks.md").read_text(encoding="utf-8"), "ranks.md")
    program = next(block for block in blocks if block.title == "train.py")
    example = (ROOT / "examples" / "train_ranks.py").read_text(encoding="utf-8")
    _, _, code = example.partition('"""\n\n')
    assert code.strip() == program.text.strip()


@pytest.mark.slow
def test_the_program_prints_the_output_of_the_page(tmp_path: Path) -> None:
    blocks = snippets.read_blocks((ROOT / "docs" / "ranks.md").read_text(encoding="utf-8"), "ranks.md")
    program = next(block for block in blocks if block.title == "train.py")
    (tmp_path / "train.py").write_text(program.text, encoding="utf-8")
    shown = next(block for block in blocks if block.language == "text")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert snippets.same_output(shown.text, done.stdout), done.stdout
