"""A pytest plugin that makes the device in SUPERBATCH_DEVICE torch's default."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}


class _DrawnOnTheCpu(TorchFunctionMode):
    """Draw the numbers of a CPU generator on the CPU, as the tests expect, and move them to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        generator = options.get("generator")
        if func in _DRAWING and generator is not None and generator.device.type == "cpu":
            return func(*args, **options, device="cpu").to(torch.get_default_device())
        return func(*args, **options)


def pytest_configure() -> None:
    torch.set_default_device(os.environ["SUPERBATCH_DEVICE"])
    _DrawnOnTheCpu().__enter__()
