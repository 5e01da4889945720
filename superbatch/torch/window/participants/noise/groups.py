"""Numbers and names of the parameter groups whose noise is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer


def group_names(optimizers: Iterable[Optimizer]) -> tuple[dict[tuple[int, int], int], list[str]]:
    """Number and name the parameter groups of optimizers.

    Returns:
        A mapping (id of the optimizer, number of the group in it) -> number among all groups; and the names.
        A name is the group's own entry ``"name"`` if that is unique, else ``"group 0"``, or with several
        optimizers ``"optimizer 0, group 0"``.

    Examples:
        >>> import torch
        >>> one, two = (torch.zeros(1, requires_grad=True) for _ in range(2))
        >>> optimizer = torch.optim.SGD([{"params": [one], "name": "head"}, {"params": [two]}])
        >>> group_names([optimizer])[1]
        ['head', 'group 1']
    """
    optimizers = list(optimizers)
    several = len(optimizers) > 1
    numbers: dict[tuple[int, int], int] = {}
    own: list[Any] = []
    plain: list[str] = []
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            numbers[id(optimizer), number] = len(numbers)
            own.append(group.get("name"))
            plain.append(f"optimizer {index}, group {number}" if several else f"group {number}")
    # A name is used only if it is unique and cannot be mistaken for the generated one of another group.
    names = [
        name if isinstance(name, str) and own.count(name) == 1 and name not in plain else other
        for name, other in zip(own, plain, strict=True)
    ]
    return numbers, names
