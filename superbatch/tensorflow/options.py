# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Options of an accumulator, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import tensorflow as tf

from .. import normalize
from ..errors import InputError
from . import arithmetic

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
class Options:
    """The arguments of `Accumulator`; its docstring describes them.

    A dataclass, which `tf.Module` does not track: a checkpoint of the accumulator must not hold the model.

    Attributes:
        given: the variables as the user passed them.
        variables: the `tf.Variable` behind each of them.
    """

    given: tuple[Any, ...]
    variables: tuple[Any, ...]
    reduction: normalize.Reduction
    accumulator_dtype: arithmetic.DTypeChoice
    max_grad_norm: float | None
    max_grad_value: float | None
    nonfinite: NonFinite
    noise: bool

    def name_of(self, index: int) -> str:
        """Return the name of a variable: its path in a Keras model, else its name."""
        return str(getattr(self.given[index], "path", self.given[index].name))


def check(options: Options) -> Options:
    """Return the options if they are valid together.

    Raises:
        InputError: an option is not valid, or two exclude each other.
    """
    normalize.check_reduction(options.reduction, ("mean", "sum"))
    arithmetic.check_sum_dtype(options.accumulator_dtype)
    if options.nonfinite not in get_args(NonFinite):
        choices = ", ".join(repr(choice) for choice in get_args(NonFinite))
        raise InputError(f"nonfinite={options.nonfinite!r} is unknown. Pass one of {choices}.")
    for name, value in (("max_grad_norm", options.max_grad_norm), ("max_grad_value", options.max_grad_value)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and value > 0 and math.isfinite(value)):
            raise InputError(f"{name}={value!r} is not a positive number. Pass a positive float, or None.")
    if options.max_grad_value is not None and any(v.dtype.is_complex for v in options.variables):
        raise InputError(
            f"max_grad_value={options.max_grad_value} cannot clip complex variables, whose numbers have no "
            "order. Pass max_grad_norm."
        )
    return options


def as_variables(given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the variables as they were given, and the `tf.Variable` behind each of them.

    Raises:
        InputError: there are none, one is not a variable of TensorFlow or has no gradient, or one occurs
        twice.

    Examples:
        >>> len(as_variables([tf.Variable(1.0), tf.Variable(2.0)])[1])
        2
    """
    if isinstance(given, tf.Variable) or not isinstance(given, Iterable):
        raise InputError(
            f"variables is a {type(given).__name__}, not a list. Pass "
            "model.trainable_variables, or a list of variables."
        )
    listed = tuple(given)
    behind = tuple(_behind(variable, index) for index, variable in enumerate(listed))
    if not behind:
        raise InputError(
            "variables is empty. Pass model.trainable_variables of a model that is built (called once on "
            "data)."
        )
    # By the variable behind: a Keras variable and its `value` are one.
    if len({id(variable) for variable in behind}) < len(behind):
        raise InputError(
            "variables contains a variable twice, so its gradient would be applied twice. Pass each variable "
            "once."
        )
    return listed, behind


def _behind(variable: Any, index: int) -> Any:
    """Return the `tf.Variable` behind a variable: itself, or the `value` of a Keras variable."""
    behind = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(behind, tf.Variable):
        raise InputError(
            f"variables[{index}] is a {type(variable).__name__}, not a variable of TensorFlow. Pass "
            "tf.Variable, or variables of Keras with the backend tensorflow."
        )
    if not (behind.dtype.is_floating or behind.dtype.is_complex):
        raise InputError(
            f"variables[{index}] of dtype {behind.dtype.name} has no gradient. Pass the trainable variables "
            "only."
        )
    if not behind.shape.is_fully_defined():
        raise InputError(
            f"variables[{index}] has the shape {behind.shape}, but its gradient sum needs a known shape. "
            "Build the model first."
        )
    return behind
