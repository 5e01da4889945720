"""Copies of optimizers for a dry run on fake tensors; the real ones stay as they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..window.wrapped import leaves_of
from .fake import PredictionError

_CONTAINERS = (dict, defaultdict, OrderedDict, list, tuple, set, deque)


@contextmanager
def stand_ins(optimizers: Sequence[Optimizer]) -> Iterator[list[list[Optimizer]]]:
    """Lend copies of optimizers that may step on fake tensors; the real ones stay as they are.

    Args:
        optimizers: any; of those that wrap others, the ones inside are copied (`leaves_of`).

    Yields:
        The copies for each optimizer. Call ``type(copy).step(copy)``: schedulers wrap the method of the
        instance, around the real optimizer.

    Raises:
        PredictionError: an optimizer keeps its state where it cannot be copied.

    Examples:
        >>> import torch
        >>> adam = torch.optim.Adam([torch.ones(1, requires_grad=True)])
        >>> with stand_ins([adam]) as copies:
        ...     copies[0][0].param_groups[0]["params"][0] is adam.param_groups[0]["params"][0]
        True
    """
    leaves = [leaves_of(optimizer) for optimizer in optimizers]
    kept = list(_contents([vars(leaf) for each in leaves for leaf in each]))
    try:
        yield [[copy_of(leaf) for leaf in each] for each in leaves]
    finally:
        # An object in a state is not copied, and may have been given fake tensors.
        for holder, contents in kept:
            _restore(holder, contents)


def copy_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same parameters, whose step leaves the state and groups of the given one alone.

    Args:
        optimizer: one that wraps no other.

    Returns:
        One of the same class, with the same options and state; hooks are left out.

    Raises:
        PredictionError: its state or its groups are not its own.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
        >>> copy_of(sgd).param_groups[0]["params"][0] is sgd.param_groups[0]["params"][0]
        True
    """
    # A wrapper answers with the state of the optimizer inside, which a copy would then change.
    own = vars(optimizer)
    missing = [name for name in ("state", "param_groups") if name not in own]
    if missing:
        raise PredictionError(
            f"The optimizer {type(optimizer).__name__} has no {missing[0]!r} of its own, so it cannot be "
            "copied to predict its memory. Pass the optimizer that it wraps, or state a microbatch_size."
        )
    copied: dict[int, Any] = {}
    # Not by __init__, whose arguments are not known.
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update({name: _apart(value, copied) for name, value in own.items()})
    # Hooks are user code, which must not run for a prediction.
    copy.__dict__["_optimizer_step_pre_hooks"] = {}
    copy.__dict__["_optimizer_step_post_hooks"] = {}
    return copy


def _apart(value: Any, copied: dict[int, Any]) -> Any:
    """Copy containers inside each other, each once; everything else is shared."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if id(value) in copied:
        return copied[id(value)]
    if kind is tuple or kind is set:
        found = copied[id(value)] = kind(_apart(each, copied) for each in value)
        return found
    made: Any = defaultdict(value.default_factory) if kind is defaultdict else kind()
    # Before its contents, which may refer to it.
    copied[id(value)] = made
    if isinstance(value, dict):
        for key, each in value.items():
            made[key] = _apart(each, copied)
    else:
        made = deque(maxlen=value.maxlen) if kind is deque else made
        copied[id(value)] = made
        made.extend(_apart(each, copied) for each in value)
    return made


def _contents(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """List the containers and objects in reach, each with its content."""
    seen: set[int] = set()
    left: list[Any] = list(roots)
    while left:
        value = left.pop()
        # `faked` restores modules; a tensor is exchanged for its fake, and never written to.
        if id(value) in seen or isinstance(value, Tensor | nn.Module | type | str) or callable(value):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += value.values()
            yield value, dict(value)
        elif isinstance(value, list | deque):
            left += value
            yield value, list(value)
        elif isinstance(value, set):
            yield value, set(value)
        elif isinstance(value, tuple):
            left += value
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            left.append(attributes)


def _restore(holder: Any, contents: Any) -> None:
    if isinstance(holder, dict):
        # By identity: == on tensors compares their entries.
        same = holder.keys() == contents.keys() and all(holder[key] is each for key, each in contents.items())
    elif isinstance(holder, set):
        same = holder == contents
    else:
        same = len(holder) == len(contents) and all(a is b for a, b in zip(holder, contents, strict=True))
    if same:
        return
    holder.clear()
    add: Callable[[Any], None] = holder.extend if isinstance(holder, list | deque) else holder.update
    add(contents)
