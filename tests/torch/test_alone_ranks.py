"""A loss that couples only the samples of its own rank raises an error or warns."""

from __future__ import annotations

import pytest

from tests.torch import alone_ranks as ranks
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Results of each rank."""
    return found_by_both("tests.torch.alone_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", ranks.COUPLED)
def test_a_coupled_loss_raises_or_warns(name: str, size: int, found: list[dict[str, str]]) -> None:
    for each in found:
        said = each[f"{name}, {size}"]
        assert said == "raises" or "so it cannot be checked whether the loss couples the samples" in said


@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", ranks.SEPARATE)
def test_a_separable_loss_is_accepted(name: str, size: int, found: list[dict[str, str]]) -> None:
    assert [each[f"{name}, {size}"] for each in found] == ["", ""]


def test_the_warning_names_the_operator_and_the_remedy(found: list[dict[str, str]]) -> None:
    assert found[0]["of a bag, 5"] == (
        "There is no rule for aten._embedding_bag.default in 'words', so it cannot be checked whether the "
        "loss couples the samples of this rank without those of the other ranks. If it does, gather "
        "embeddings in loss_fn by all_gather, or sum statistics by all_reduce, both of "
        "torch.distributed.nn.functional."
    )
