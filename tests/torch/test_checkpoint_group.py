"""A rank that fails while a checkpoint is written is named on the other ranks."""

from __future__ import annotations

from typing import Any

import pytest

from superbatch.errors import CheckpointError
from superbatch.torch.checkpoint.group import Group


@pytest.mark.parametrize("error", ["OSError: no space left", "InputError: keep=0 is not positive."])
def test_the_error_of_another_rank_is_quoted_with_one_full_stop(error: str) -> None:
    def gather(message: Any) -> list[Any]:
        return [message, error]

    with pytest.raises(CheckpointError) as raised:
        Group(0, 2, gather).on_all_ranks(lambda: None)
    assert str(raised.value) == f"Rank 1 failed: {error.rstrip('.')}. Correct the error on that rank."
