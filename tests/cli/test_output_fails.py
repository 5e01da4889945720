"""Exit codes for a full disk, a closed pipe, a planted link and SIGTERM."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superbatch.lab.cli import entry, printing
from tests.cli.commands import PLANE, ROOT, run

ADVISE = (
    *("advise", "--microbatch-size", "4", "--accumulation-steps", "12", "--noise", "100"),
    *("--micro-seconds", "1", "--update-seconds", "0.1"),
)


def test_a_full_disk_gives_exit_code_74(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "superbatch", *ADVISE, "--out", str(tmp_path / "out")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert (done.returncode, done.stderr) == (
        74,
        "superbatch: the output could not be written: No space left on device\n",
    )


def test_a_closed_pipe_gives_exit_code_141(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "superbatch", *ADVISE, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    old = tmp_path / "report.json"
    old.write_text("old", encoding="utf-8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            printing.write_file(old, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(old)
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text(encoding="utf-8") == "old"


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    (tmp_path / ".report.json.unfinished").symlink_to(precious)
    printing.write_file(tmp_path / "report.json", "new")
    assert precious.read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["precious", "report.json"]


def test_sigterm_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("superbatch.lab.plot.advice", terminate)
    out = tmp_path / "out"
    assert entry.main([*ADVISE, "--out", str(out)]) == 130
    assert "the report is kept in" in capsys.readouterr().err
    assert (out / "report.json").is_file()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are listed by Linux's /proc")
def test_sigterm_with_workers_leaves_no_semaphore(tmp_path: Path) -> None:
    """SIGTERM during the start of workers does not interrupt that start, so no semaphore leaks."""
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "superbatch", "compare", PLANE, "--runs", "4", "--workers", "2"),
            *("--updates", "20000", "--out", str(tmp_path / "out")),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    end = time.monotonic() + 60
    while len(children.read_text().split()) < 3 and time.monotonic() < end:  # two workers and the tracker
        time.sleep(0.05)
    assert len(children.read_text().split()) == 3, "the premise"
    os.kill(started.pid, signal.SIGTERM)
    said, _ = started.communicate(timeout=60)  # until the tracker has ended too
    assert started.returncode == 130, said
    assert "superbatch: interrupted" in said
    assert "leaked" not in said, said


@pytest.mark.parametrize("command", ["fit", "advise"])
def test_a_missing_cuda_device_gives_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is available, so the error cannot occur")
    assert run(command, PLANE, "--device", "cuda") == 2
    text = "superbatch: --device='cuda', but torch finds no CUDA device. Use cpu.\n"
    assert capsys.readouterr().err.endswith(text)
