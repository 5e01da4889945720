"""A pytest plugin that makes the device in SUPERBATCH_DEVICE torch's default."""

from __future__ import annotations

import os

import torch


def pytest_configure() -> None:
    torch.set_default_device(os.environ["SUPERBATCH_DEVICE"])
