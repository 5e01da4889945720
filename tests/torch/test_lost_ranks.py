"""If a rank is killed or hangs, the other raises within the timeout of the process group."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import ROOT, Forked
from tests.torch.lost_ranks import TIMEOUT

# The wrapper, and the place where the rank hangs, or "killed" in its loss.
CASES = [
    *(("DDP", fault) for fault in ("killed", "hangs", "handler", "forward hook", "step hook", "iterator")),
    ("DDP", "until all end"),
    *(("FSDP2", fault) for fault in ("killed", "hangs", "forward hook")),
]


@pytest.mark.parametrize(("how", "fault"), CASES)
def test_a_lost_rank_raises_on_the_other_within_the_timeout(how: str, fault: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                Forked(
                    ["-m", "tests.torch.lost_ranks", rank, tmp_path, how, fault],
                    environment=environment,
                    merged=True,
                )
            )
            for rank in (0, 1)
        ]
        assert programs[0].wait(60.0) == 0, programs[0].output()[0]
        if fault == "killed":
            assert programs[1].wait(60.0) == -9, "premise"
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["seconds"] < TIMEOUT + 3.0
    for kind, text in found["errors"]:
        assert kind == "RankError"
        assert text.startswith(
            "Another rank has ended, or has not answered within the process group's timeout ("
        )
    assert len(found["errors"]) == 2, "no later window starts"
