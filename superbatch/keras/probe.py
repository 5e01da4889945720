# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Weights and random draws for a comparison of rows at once and in parts.

A separable loss is separable at any weights and for any random draws. So the probe takes draws that are the
same for every row, and weights a little off the present ones: a branch whose gate starts at 0 shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops
from keras.src import backend

from . import refusals

Mapping = list[tuple[Any, Any]]
STEP = 0.05  # about the size of an initial weight
MOST = 2**25  # elements that are copied to be shifted: 128 MiB in float32


@contextmanager
def constant_draws() -> Iterator[None]:
    """Replace the draws of `keras.random` by constants, and dropout by nothing, while the context lasts.

    Draws depend on the shape, so that a row would get other numbers in a part than in the batch.
    """
    source, kept = backend.random, {}
    try:
        for name, constant in _CONSTANTS.items():
            kept[name] = getattr(source, name)
            setattr(source, name, constant)
        yield
    finally:
        for name, original in kept.items():
            setattr(source, name, original)


def _full(shape: Any, value: Any, dtype: Any) -> Any:
    dtype = dtype or keras.config.floatx()
    return ops.broadcast_to(ops.cast(value, dtype), tuple(shape))


# None of these is 0 or 1: noise that multiplies a branch must not switch it off.
_CONSTANTS: dict[str, Callable[..., Any]] = {
    "dropout": lambda inputs, rate, noise_shape=None, seed=None: inputs,
    "normal": lambda shape, mean=0.0, stddev=1.0, dtype=None, seed=None: _full(
        shape, mean + 0.5 * stddev, dtype
    ),
    "truncated_normal": lambda shape, mean=0.0, stddev=1.0, dtype=None, seed=None: _full(
        shape, mean + 0.5 * stddev, dtype
    ),
    "uniform": lambda shape, minval=0.0, maxval=1.0, dtype=None, seed=None: _full(
        shape, minval + 0.4 * (maxval - minval), dtype
    ),
    "randint": lambda shape, minval, maxval, dtype="int32", seed=None: _full(
        shape, (minval + maxval) // 2, dtype
    ),
    "gamma": lambda shape, alpha, dtype=None, seed=None: _full(shape, alpha, dtype),
    "beta": lambda shape, alpha, beta, dtype=None, seed=None: _full(shape, alpha / (alpha + beta), dtype),
    "binomial": lambda shape, counts, probabilities, dtype=None, seed=None: _full(
        shape, counts * probabilities, dtype
    ),
    "categorical": lambda logits, num_samples, dtype="int32", seed=None: ops.repeat(
        ops.cast(ops.argmax(logits, axis=-1), dtype)[:, None], num_samples, axis=1
    ),
    # Rows that are mixed with one another are coupled, and shall be found.
    "shuffle": lambda x, axis=0, seed=None: ops.roll(x, 1, axis=axis),
}


@contextmanager
def accepted_batchnorms(model: Any) -> Iterator[None]:
    """Let BatchNormalization use its moving statistics: what it does to micro-batches was accepted."""

    def with_moving_statistics(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: call(*arguments, **(options | {"training": False}))

    with _calls(refusals.batchnorms(model), with_moving_statistics):
        yield


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, list[Any]]]]:
    """Collect each layer and its outputs, in the order in which the layers end."""
    found: list[tuple[Any, list[Any]]] = []

    def noting(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            outputs = call(*arguments, **options)
            found.append((layer, keras.tree.flatten(outputs)))
            return outputs

        return noted

    with _calls([layer for layer in model._flatten_layers() if layer is not model], noting):
        yield found


@contextmanager
def _calls(layers: list[Any], wrap: Callable[[Any, Callable[..., Any]], Any]) -> Iterator[None]:
    """Wrap `call` of these objects, and not of their class, while the context lasts."""
    with ExitStack() as restored:
        for layer in layers:
            own = vars(layer).get("call")
            vars(layer)["call"] = wrap(layer, layer.call)
            if own is None:
                restored.callback(vars(layer).pop, "call")
            else:  # a layer may have had one already
                restored.callback(vars(layer).__setitem__, "call", own)
        yield


def shifted(mapping: Mapping) -> Mapping:
    """Return the values of variables, with trainable ones a little off, the smallest first up to `MOST`."""
    found, elements = list(mapping), 0
    by_size = sorted(range(len(mapping)), key=lambda number: _elements(mapping[number][0]))
    for number in by_size:
        variable, value = mapping[number]
        if not (variable.trainable and backend.is_float_dtype(variable.dtype)):
            continue
        elements += _elements(variable)
        if elements > MOST:
            break
        waves = ops.sin(ops.arange(_elements(variable), dtype="float32") * 1.7 + number)
        step = ops.reshape(STEP * waves, tuple(variable.shape))
        found[number] = variable, value + ops.cast(step, variable.dtype)
    return found


def reseeded(model: Any, mapping: Mapping) -> Mapping:
    """Return the values of variables, with other states of the random generators."""
    states = {id(variable) for variable in model.non_trainable_variables if "seed" in variable.path}
    given = {id(variable): value for variable, value in mapping}
    rest = [(variable, value) for variable, value in mapping if id(variable) not in states]
    for variable in model.non_trainable_variables:
        if id(variable) in states:
            # JAX takes the value out of the variable for the time of training: only `given` has it then.
            value = given[id(variable)] if id(variable) in given else variable.value  # noqa: SIM401
            rest.append((variable, value + ops.cast(1, variable.dtype)))
    return rest


def _elements(variable: Any) -> int:
    count = 1
    for size in variable.shape:
        count *= int(size)
    return count
