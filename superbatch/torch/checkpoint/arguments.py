"""Checks of the arguments of `save_checkpoint` and `load_checkpoint`, before the first collective."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import torch

from superbatch.errors import InputError

from ..window.engine import Engine


def check_common(accumulate: object, folder: object, generators: object) -> None:
    """Raise InputError if an argument that both functions take has the wrong type."""
    if not isinstance(getattr(accumulate, "engine", None), Engine):
        raise InputError(
            f"accumulate is a {type(accumulate).__name__}. Pass the Accumulator or the WholeBatch."
        )
    if not isinstance(folder, (str, PathLike)):
        raise InputError(f"The folder is a {type(folder).__name__}. Pass a path, such as 'checkpoints'.")
    if generators is not None and not (
        isinstance(generators, Mapping)
        and all(isinstance(each, torch.Generator) for each in generators.values())
    ):
        raise InputError(
            f"generators={generators!r} does not map names to random generators. Pass a dict, such as "
            '{"data": torch.Generator()}.'
        )


def check_saving(samples: object, extra: object, keep: object) -> None:
    """Raise InputError if another argument of `save_checkpoint` has the wrong type or value."""
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
        raise InputError(
            f"samples={samples!r} is not a number of samples. Pass the number of samples used so far, an int."
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(
            f"extra is a {type(extra).__name__}. Pass a dict of numbers, strings and tensors, such as "
            '{"epoch": 3}.'
        )
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise InputError(
            f"keep={keep!r} is not a number of checkpoints. Pass how many checkpoints to keep, 1 or more."
        )
