# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""A second model object that shares layers, weights, optimizer and metrics with the user's model.

Its class is a subclass of the user's class, so every method works: `get_layer`, `summary`, own methods, an
overridden `compute_metrics`. Attributes that are assigned later (`train_function`, `stop_training`, the
results of a new `compile`) belong to one of the two objects only. The user's object is not changed.
"""

from __future__ import annotations

from typing import Any

import keras

# Attributes that Layer.__new__ makes for each object: closures over this object, so they cannot be shared.
OWN = ("build", "quantize")
FUNCTIONS = ("train_function", "test_function", "predict_function")


def on_same_layers(kind: type, model: Any) -> Any:
    """Return an object of another class that shares the attributes of a model.

    Args:
        kind: a subclass of the model's class, or the user's class that the model's was derived from.
        model: the model.
    """
    # Not `kind.__new__`: that of an accumulating class makes an object of the user's class.
    other = keras.Model.__new__(kind)
    own = {name: vars(other)[name] for name in OWN}
    vars(other).clear()
    vars(other).update(vars(model))
    vars(other).update(own)
    vars(other).update(dict.fromkeys(FUNCTIONS))  # compiled for the user's object; made again on demand
    return other


def subclass(cls: type, methods: dict[str, Any]) -> type:
    """Return a subclass under the name of the class, so that saved files name the user's class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names | methods)
