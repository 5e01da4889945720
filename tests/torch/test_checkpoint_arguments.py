"""Wrong arguments of `save_checkpoint` and `load_checkpoint` raise InputError and write no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.errors import InputError
from superbatch.torch import Accumulator

checkpoint = pytest.importorskip(
    "superbatch.torch.checkpoint", reason="safetensors is not installed (extra: checkpoint)"
)


def accumulator() -> Accumulator:
    model = nn.Linear(2, 1)
    return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 2.5}, "samples=2.5 is not a number of samples. Pass"),
        ({"samples": True}, "samples=True is not a number of samples. Pass"),
        (
            {"extra": object()},
            "extra is a object. Pass a dict of numbers, strings and tensors",
        ),
        ({"extra": [3]}, "extra is a list. Pass a dict"),
        ({"keep": 0}, "keep=0 is not a number of checkpoints. Pass how many"),
        ({"generators": [1]}, "generators=[1] does not map names to random generators. Pass a dict"),
        ({"generators": {"data": 7}}, "generators={'data': 7} does not map names to random generators."),
    ],
)
def test_wrong_arguments_of_saving(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        checkpoint.save_checkpoint(tmp_path, accumulator(), **arguments)
    assert str(caught.value).startswith(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("load", [False, True])
def test_wrong_arguments_of_both(load: bool, tmp_path: Path) -> None:
    function = checkpoint.load_checkpoint if load else checkpoint.save_checkpoint
    with pytest.raises(InputError, match=r"^The folder is a int\. Pass a path, such as 'checkpoints'\.$"):
        function(3, accumulator())
    with pytest.raises(InputError, match=r"^accumulate is a Linear\. Pass the Accumulator or the WholeBatch"):
        function(tmp_path, nn.Linear(2, 1))
    with pytest.raises(InputError, match=r"^generators=3 does not map names to random generators"):
        function(tmp_path, accumulator(), generators=3)
    assert list(tmp_path.iterdir()) == []
