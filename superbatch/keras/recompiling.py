# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Compilation of the first model after `accumulate`: the accumulating model would not see it.

The two objects share layers and weights, but each has the loss and the optimizer of its own `compile`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from ..errors import InputError

SOURCE = "_superbatch_source"


class Source(NamedTuple):
    """The first model, and what it was compiled to when the accumulating model was compiled or made."""

    model: Any
    compiled: tuple[Any, Any]


def source_of(model: Any) -> Source:
    """Return the present compilation of a model; nobody keeps the model alive for it."""
    return Source(weakref.ref(model), _compiled(model))


def note(twin: Any) -> None:
    """Accept the present compilation of the first model: the accumulating model has a newer one."""
    source = vars(twin).get(SOURCE)
    model = None if source is None else source.model()
    if model is not None:
        vars(twin)[SOURCE] = source_of(model)


def check(twin: Any) -> None:
    """Refuse to train with the loss that the first model had before.

    Raises:
        InputError: the first model was compiled again.
    """
    source = vars(twin)[SOURCE]
    model = source.model()
    if model is not None and any(
        now is not before for now, before in zip(_compiled(model), source.compiled, strict=True)
    ):
        raise InputError(
            f"The model {twin.name!r} was compiled again after accumulate, and the accumulating model "
            "still has the loss and optimizer of before. Call compile() of the model that accumulate "
            "returned, or call accumulate again."
        )


def _compiled(model: Any) -> tuple[Any, Any]:
    return model._compile_loss, model.optimizer
