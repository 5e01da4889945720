"""Context parallel: ranks with slices of the same sequences are weighted by their own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch import sharded_tasks as tasks
from tests.torch.context_ranks import TASK
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both(
        "tests.torch.context_ranks", tmp_path_factory.mktemp("r"), warnings="default", count=4
    )


@pytest.mark.parametrize("way", ["once", "each"])
def test_two_data_ranks_by_two_sequence_slices(way: str, found: list[dict[str, Any]]) -> None:
    reference, seen = tasks.reference(TASK, 2)
    start = TASK.make()
    for each in found:
        assert each[way]["sharded"], "premise"
        assert max(tasks.errors(each[way]["parameters"], reference, start).values()) <= 1e-12
        assert each[way]["losses"] == pytest.approx(seen.losses, rel=1e-12)
    wrong = found[0]["mutant: samples"]["parameters"]
    assert max(tasks.errors(wrong, reference, start).values()) > 1e-3, "the test can fail"
