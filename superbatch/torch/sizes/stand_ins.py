"""Copies of optimizers for a dry run on fake tensors, which does not change the real ones."""

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
    """Yield copies of optimizers that may step on fake tensors without changing the real ones.

    Args:
        optimizers: any optimizers; of wrappers the inner ones are copied (`leaves_of`).

    Yields:
        List of copies for each optimizer. Call ``type(copy).step(copy)``, because on the instance schedulers
        replace the method by one of the real optimizer.

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
    before = list(_contents([vars(leaf) for each in leaves for leaf in each]))
    try:
        yield [[copy_of(leaf) for leaf in each] for each in leaves]
    finally:
        # Objects inside a state are not copied, so the dry run may have put fake tensors into them.
        for holder, contents in before:
            _restore(holder, contents)


def copy_of(optimizer: Optimizer) -> Optimizer:
    """Copy an optimizer, so that a step of the copy does not change the state and groups of the original.

    Args:
        optimizer: an optimizer that wraps no other.

    Returns:
        Optimizer of the same class with the same parameters, options and state, without hooks.

    Raises:
        PredictionError: the state or the groups belong to another object.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
        >>> copy_of(sgd).param_groups[0]["params"][0] is sgd.param_groups[0]["params"][0]
        True
    """
    # A wrapper returns the state of its inner optimizer, which a copy would then change.
    own = vars(optimizer)
    missing = [name for name in ("state", "param_groups") if name not in own]
    if missing:
        raise PredictionError(
            f"The optimizer {type(optimizer).__name__} has no {missing[0]!r} of its own, so it cannot be "
            "copied to predict its memory. Pass the optimizer that it wraps, or an int as microbatch_size."
        )
    copied: dict[int, Any] = {}
    # Without __init__, whose arguments are unknown.
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update({name: _copied(value, copied) for name, value in own.items()})
    # Without hooks: a prediction must not run user code.
    copy.__dict__["_optimizer_step_pre_hooks"] = {}
    copy.__dict__["_optimizer_step_post_hooks"] = {}
    return copy


def _copied(value: Any, copied: dict[int, Any]) -> Any:
    """Return copies of nested containers, each copied once; everything else is shared."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if id(value) in copied:
        return copied[id(value)]
    if kind is tuple or kind is set:
        found = copied[id(value)] = kind(_copied(each, copied) for each in value)
        return found
    made: Any = defaultdict(value.default_factory) if kind is defaultdict else kind()
    # Registered before its content, which may refer to the container.
    copied[id(value)] = made
    if isinstance(value, dict):
        for key, each in value.items():
            made[key] = _copied(each, copied)
    else:
        made = deque(maxlen=value.maxlen) if kind is deque else made
        copied[id(value)] = made
        made.extend(_copied(each, copied) for each in value)
    return made


def _contents(roots: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the containers that can be reached, attributes of objects included, each with its content."""
    seen: set[int] = set()
    left: list[Any] = list(roots)
    while left:
        value = left.pop()
        # `faked` restores modules; real tensors are replaced by fakes and never written.
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
        # By identity: == on tensors compares elements.
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
