"""Options of `accumulate`, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import InputError
from ..integers import positive_int

LossWeight = Callable[[Any, Any, Any], Any]
BatchNorm = Literal["error", "per_microbatch"]
NonFinite = Literal["propagate", "skip_microbatch"]


@dataclass(frozen=True)
class Options:
    """The arguments of `accumulate`; its docstring describes them."""

    microbatch_size: int
    loss_weight: LossWeight | None = None
    batchnorm: BatchNorm = "error"
    nonfinite: NonFinite = "propagate"
    check: bool = True


def check(options: Options) -> Options:
    """Return the options if each is valid.

    Raises:
        InputError: one is not valid.

    Examples:
        >>> check(Options(microbatch_size=8)).batchnorm
        'error'
    """
    positive_int("microbatch_size", options.microbatch_size)
    if options.loss_weight is not None and not callable(options.loss_weight):
        raise InputError(
            f"loss_weight={options.loss_weight!r} is not a function. Pass a function (x, y, sample_weight) "
            "-> scalar, or None."
        )
    for name, allowed in (("batchnorm", get_args(BatchNorm)), ("nonfinite", get_args(NonFinite))):
        value = getattr(options, name)
        if value not in allowed:
            raise InputError(f"{name}={value!r} is unknown. Pass one of {allowed}.")
    if not isinstance(options.check, bool):
        raise InputError(f"check={options.check!r} is not a bool. Pass True, or False to skip the check.")
    return options
