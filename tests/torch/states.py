"""All state that a window may change, as one flat dictionary that can be compared bitwise."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def fingerprint(*objects: Any, generators: bool = True) -> dict[str, Any]:
    """Return the state of modules, other objects and the random generators, by name.

    Args:
        objects: modules, and objects with `state_dict()`.
        generators: include torch's, Python's and NumPy's global generators.
    """
    found: dict[str, Any] = {}
    for number, item in enumerate(objects):
        name = f"{type(item).__name__} {number}"
        parts = _of_module(item) if isinstance(item, nn.Module) else item.state_dict()
        found.update(_flat(parts, name))
    if generators:
        found["torch generator"] = torch.get_rng_state()
        found["python generator"] = random.getstate()
        kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        found["numpy generator"] = (kind, keys.tolist(), *rest)
    found["modes"] = [type(mode).__name__ for mode in _modes()]
    return found


def assert_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Fail with a list of all differences; NaN equals NaN."""
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    changed = [name for name in before if name in after and not _same(before[name], after[name])]
    differing = {"gone": gone, "new": new, "changed": changed}
    assert not (gone or new or changed), {what: names[:12] for what, names in differing.items()}


def _of_module(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = value.detach()
        found[f"{name} identity"] = id(value)
        found[f"{name} gradient"] = None if value.grad is None else value.grad.detach()
        found[f"{name} hooks"] = [
            len(getattr(value, which) or ()) for which in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
        }
        found[f"module {name}"] = {
            "attributes": sorted(vars(module)),
            "buffers": sorted(key for key, value in module._buffers.items() if value is not None),
            "hooks": hooks,
            "plain": plain,
        }
    return found


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple) and len(value) < 100:  # keep the state of a generator as one value
        for key, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{key}")
    else:
        yield name, value.clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(torch.isnan(one), torch.isnan(other))
            and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
            and torch.equal(torch.signbit(one.real), torch.signbit(other.real))
            if one.is_floating_point()
            else torch.equal(one, other)
        )
    if isinstance(one, float) and one != one:
        return other != other
    return bool(one == other)


def _modes() -> Iterable[Any]:
    return [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


def draw_everywhere() -> None:
    """Advance every global generator, as data augmentation in a forward does."""
    torch.rand(3)
    random.random()
    np.random.rand(2)
