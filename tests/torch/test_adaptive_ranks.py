"""Windows that follow the noise have one length on all ranks: two real gloo processes."""

from __future__ import annotations

import statistics

import pytest

from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[int]]]:
    """What each rank found."""
    return found_by_both("tests.torch.adaptive_ranks", tmp_path_factory.mktemp("ranks"))


def test_rank_0_decides_where_ranks_know_different_things(found: list[dict[str, list[int]]]) -> None:
    # Micro-batches of 2 x 5 samples: rank 0 wants 40, 40, 40 and then 9; alone, rank 1 would want others.
    assert found[0]["disagreeing"] == [8, 16, 32, 40, 20]
    assert found[1]["disagreeing"] == found[0]["disagreeing"]


def test_lengths_follow_the_noise_of_both_ranks_together(found: list[dict[str, list[int]]]) -> None:
    lengths = found[0]["measured"]
    assert lengths == found[1]["measured"]
    assert lengths[0] == 2
    # 160 samples are 10 micro-batches of 8 on two ranks; counted for one rank alone they would be 20.
    assert 7 <= statistics.median(lengths[len(lengths) // 3 :]) <= 14
