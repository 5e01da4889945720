"""Every case, by subject and by name."""

from __future__ import annotations

from tests.torch.coupled.case import Case
from tests.torch.coupled.zoo import (
    architectures,
    batch_statistics,
    contrastive,
    data_movement,
    layers,
    loss_functions,
    regularised,
)

GROUPS: dict[str, list[Case]] = {
    "architectures": architectures.CASES,
    "batch statistics": batch_statistics.CASES,
    "contrastive": contrastive.CASES,
    "data movement": data_movement.CASES,
    "layers": layers.CASES,
    "loss functions": loss_functions.CASES,
    "regularised": regularised.CASES,
}

ALL = [case for group in GROUPS.values() for case in group]
CASES: dict[str, Case] = {case.name: case for case in ALL}
assert len(CASES) == len(ALL), "two cases have one name"
