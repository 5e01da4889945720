# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Decorator that keeps AutoGraph from rewriting a method and its errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import tensorflow as tf

from ..errors import SuperbatchError

Method = TypeVar("Method", bound=Callable[..., Any])


def as_written(method: Method) -> Method:
    """Keep AutoGraph from rewriting a method, and pass its errors to the caller with their own type.

    AutoGraph replaces an error of an unknown type by a StagingError, unless it has the attribute
    ``ag_pass_through``, like the errors of TensorFlow's own functions.

    Examples:
        >>> @as_written
        ... def refuse() -> None:
        ...     raise SuperbatchError("no")
        >>> tf.function(lambda: refuse())()
        Traceback (most recent call last):
        superbatch.errors.SuperbatchError: no
    """

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except SuperbatchError as error:
            error.ag_pass_through = True  # pyright: ignore[reportAttributeAccessIssue]  (read by AutoGraph alone)
            raise

    return tf.autograph.experimental.do_not_convert(called)
