# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""A second model object on the layers, weights, optimizer and metrics of a first one.

The twin is of a subclass of the user's class, so that all of it is there: `get_layer`, `summary`, `inputs`,
own methods, overridden `compute_metrics`. Only attributes that are set anew (`train_function`,
`stop_training`, what a new `compile` makes) are its own. The user's object is not changed.
"""

from __future__ import annotations

from typing import Any

import keras

# What Layer.__new__ makes for each object: closures over that very object.
OWN = ("build", "quantize")
FUNCTIONS = ("train_function", "test_function", "predict_function")


def on_same_layers(kind: type, model: Any) -> Any:
    """Return an object of another class with the state of a model.

    Args:
        kind: the class; a subclass of the model's, or the class that the model's was made from.
        model: the model.
    """
    other = keras.Model.__new__(kind)  # what `accumulate` makes of a class returns models of that class
    own = {name: vars(other)[name] for name in OWN}
    vars(other).clear()
    vars(other).update(vars(model))
    vars(other).update(own)
    vars(other).update(dict.fromkeys(FUNCTIONS))  # they are bound to the first object
    return other


def subclass(cls: type, methods: dict[str, Any]) -> type:
    """Return a subclass that calls itself as the class does, so that what it saves is loaded as the class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names | methods)
