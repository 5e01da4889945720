"""Windows that follow the gradient noise have the same length on both gloo ranks."""

from __future__ import annotations

import statistics

import pytest

from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[int]]]:
    """Results of each rank."""
    return found_by_both("tests.torch.adaptive_ranks", tmp_path_factory.mktemp("ranks"))


def test_rank_0_decides_if_the_noise_differs_between_ranks(found: list[dict[str, list[int]]]) -> None:
    # Micro-batches of 2 x 5 samples: rank 0 asks for 40, 40, 40 and then 9, rank 1 for other lengths.
    assert found[0]["disagreeing"] == [8, 16, 32, 40, 20]
    assert found[1]["disagreeing"] == found[0]["disagreeing"]


def test_lengths_follow_the_noise_over_both_ranks(found: list[dict[str, list[int]]]) -> None:
    lengths = found[0]["measured"]
    assert lengths == found[1]["measured"]
    assert lengths[0] == 2
    # 160 samples are 10 micro-batches of 8 on each of two ranks, or 20 on a single rank.
    assert 7 <= statistics.median(lengths[len(lengths) // 3 :]) <= 14
