"""Timing of the gradient all-reduce in a command on two ranks with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from superbatch.errors import InputError
from superbatch.lab.studies.exchange import ROUNDS, check_ranks, rank_and_count
from superbatch.results.advice import Advice
from tests.forked import Forked
from tests.report_json import from_json
from tests.studies import exchange_ranks

ROOT = Path(__file__).parents[2]


def on_two_ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exchange")
    done = on_two_ranks("-m", "tests.studies.exchange_ranks", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_get_the_time_of_the_slower_one(measured: list[dict[str, Any]]) -> None:
    assert [(each["rank"], each["count"]) for each in measured] == [(0, 2), (1, 2)]
    for name in ("small", "large", "late"):
        assert measured[0][name] == measured[1][name] > 0
    assert measured[0]["late"] >= exchange_ranks.SLEEP


def test_only_gradients_of_trained_parameters_are_timed(measured: list[dict[str, Any]]) -> None:
    """Frozen parameters have no gradient. The test counts elements, because times depend on the load."""
    for of_rank in measured:
        assert of_rank["numbers"] == {
            "small": [4] * ROUNDS,
            "large": [4_002_000] * ROUNDS,
            "frozen": [4] * ROUNDS,
        }


def test_the_advice_contains_the_measured_time_and_is_printed_once(tmp_path: Path) -> None:
    asked = ("digits", "--threads", "1", "--noise", "80", "--accumulation-steps", "4", "--out", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:  # as torchrun starts them
        ranks = [
            stack.enter_context(
                Forked(["-m", "superbatch", "advise", *asked], environment={**shared, "RANK": str(rank)})
            )
            for rank in range(2)
        ]
        said = [rank.finish() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    printed = "".join(output for output, _ in said)
    assert printed.count("Accumulating") + printed.count("Whether accumulating") == 1
    assert "on each of 2 ranks" in printed
    assert ", all-reduce " in printed
    report = from_json(Advice, (tmp_path / "report.json").read_text())
    assert report.ranks == 2
    assert 0 < report.all_reduce_seconds < 10
    assert "all_reduce_seconds" not in report.command, "it was not given"
    assert any("timed over 2 ranks" in note for note in report.notes)


def test_ranks_must_equal_the_ranks_of_the_command() -> None:
    with pytest.raises(InputError, match="ranks=8, but this command runs on 2 ranks"):
        check_ranks(8, 2)
    assert check_ranks(8, 1) == 8


@pytest.mark.parametrize(
    ("rank", "count"), [("one", "2"), ("2", "2"), ("0", "many")], ids=["rank", "too large", "count"]
)
def test_an_invalid_environment_is_refused(rank: str, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(InputError, match="are not a rank and a number of ranks"):
        rank_and_count()


def test_rank_variables_without_a_master_address_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_and_count() == (0, 1)
