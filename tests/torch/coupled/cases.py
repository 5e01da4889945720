"""All cases, by group and by name."""

from __future__ import annotations

from tests.torch.coupled.case import Case
from tests.torch.coupled.zoo import (
    architectures,
    autograd,
    batch_statistics,
    buffers,
    contrastive,
    data_movement,
    everyday,
    exotic,
    gradients_in_loss,
    in_place,
    layers,
    loss_functions,
    regularised,
)

GROUPS: dict[str, list[Case]] = {
    "architectures": architectures.CASES,
    "batch statistics": batch_statistics.CASES,
    "contrastive": contrastive.CASES,
    "regularised": regularised.CASES,
    "data movement": data_movement.CASES,
    "in place": in_place.CASES,
    "autograd": autograd.CASES,
    "gradients in the loss": gradients_in_loss.CASES,
    "buffers": buffers.CASES,
    "everyday": everyday.CASES,
    "exotic": exotic.CASES,
    "loss functions": loss_functions.CASES,
    "layers": layers.CASES,
}

ALL = [case for group in GROUPS.values() for case in group]
CASES: dict[str, Case] = {case.name: case for case in ALL}
assert len(CASES) == len(ALL), "two cases have the same name"
