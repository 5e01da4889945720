"""Every case, by subject and by name."""

from __future__ import annotations

from tests.torch.coupled.case import Case
from tests.torch.coupled.zoo import architectures, batch_statistics, contrastive

GROUPS: dict[str, list[Case]] = {
    "architectures": architectures.CASES,
    "batch statistics": batch_statistics.CASES,
    "contrastive": contrastive.CASES,
}

ALL = [case for group in GROUPS.values() for case in group]
CASES: dict[str, Case] = {case.name: case for case in ALL}
assert len(CASES) == len(ALL), "two cases have one name"
