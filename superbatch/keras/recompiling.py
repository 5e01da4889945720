# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Detection of a `compile` of the original model after `accumulate`.

The original and the accumulating model share layers and weights, but each has the loss and the optimizer of
its own `compile`. After a new `compile` of the original, the accumulating model would still train with the
former loss.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from ..errors import InputError

SOURCE = "_superbatch_source"


class Source(NamedTuple):
    """The original model, with the loss and optimizer that the accumulating model accepts for it.

    Attributes:
        model: a weak reference to the original model.
        compiled: its loss and optimizer when the accumulating model was made or last compiled.
    """

    model: Any
    compiled: tuple[Any, Any]


def source_of(model: Any) -> Source:
    """Return the model as a source, with its present loss and optimizer; the model is not kept alive."""
    return Source(weakref.ref(model), _compiled(model))


def accept_current(accumulating: Any) -> None:
    """Accept the present loss and optimizer of the original: the accumulating model was compiled after it."""
    source = vars(accumulating).get(SOURCE)
    model = None if source is None else source.model()
    if model is not None:
        vars(accumulating)[SOURCE] = source_of(model)


def check(accumulating: Any) -> None:
    """Raise if the original model was compiled after the accumulating one.

    Raises:
        InputError: the original model was compiled again.
    """
    source = vars(accumulating)[SOURCE]
    model = source.model()
    if model is not None and any(
        now is not before for now, before in zip(_compiled(model), source.compiled, strict=True)
    ):
        raise InputError(
            f"The model {accumulating.name!r} was compiled again after accumulate, but the accumulating "
            "model still has the former loss and optimizer. Call compile() of the model that accumulate "
            "returned, or call accumulate again."
        )


def _compiled(model: Any) -> tuple[Any, Any]:
    return model._compile_loss, model.optimizer
