# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Weights and random draws for a comparison of rows at once and in parts.

A loss that separates into rows does so at any weights and for any random draws. So the comparison uses the
same constant draws for every row. It also uses weights shifted a little from the present ones: only then a
branch whose gate is initialised to 0 has an effect.
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
STEP = 0.05  # size of a shift: about that of an initial weight
MOST = 2**25  # most elements to copy and shift: 128 MiB in float32


@contextmanager
def constant_draws() -> Iterator[None]:
    """Replace the draws of `keras.random` by constants, and switch dropout off, within the context.

    Draws depend on the shape of the array: a row would get other numbers in a part than in the whole.
    """
    source, originals = backend.random, {}
    try:
        for name, constant in _CONSTANTS.items():
            originals[name] = getattr(source, name)
            setattr(source, name, constant)
        yield
    finally:
        for name, original in originals.items():
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
    # It still permutes rows: a layer that shuffles rows couples them, and the comparison must show it.
    "shuffle": lambda x, axis=0, seed=None: ops.roll(x, 1, axis=axis),
}


@contextmanager
def accepted_batchnorms(model: Any) -> Iterator[None]:
    """Let BatchNormalization use its moving statistics within the context.

    With ``batchnorm="per_microbatch"`` the user has accepted that it couples rows.
    """

    def with_moving_statistics(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: call(*arguments, **(options | {"training": False}))

    with _wrapped_calls(refusals.batchnorms(model), with_moving_statistics):
        yield


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, list[Any]]]]:
    """Record each layer and its outputs, in the order in which the calls of the layers return."""
    records: list[tuple[Any, list[Any]]] = []

    def recording(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_record(*arguments: Any, **options: Any) -> Any:
            outputs = call(*arguments, **options)
            records.append((layer, keras.tree.flatten(outputs)))
            return outputs

        return call_and_record

    with _wrapped_calls([layer for layer in model._flatten_layers() if layer is not model], recording):
        yield records


@contextmanager
def _wrapped_calls(layers: list[Any], wrap: Callable[[Any, Callable[..., Any]], Any]) -> Iterator[None]:
    """Wrap the `call` of each layer within the context, as an attribute of the object, not of its class."""
    with ExitStack() as restoring:
        for layer in layers:
            own = vars(layer).get("call")
            vars(layer)["call"] = wrap(layer, layer.call)
            if own is None:
                restoring.callback(vars(layer).pop, "call")
            else:  # the user has set `call` on this object
                restoring.callback(vars(layer).__setitem__, "call", own)
        yield


def shifted(mapping: Mapping) -> Mapping:
    """Return the mapping with small shifts of trainable values, smallest variables first, up to `MOST`."""
    shifted_mapping, elements = list(mapping), 0
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
        shifted_mapping[number] = variable, value + ops.cast(step, variable.dtype)
    return shifted_mapping


def reseeded(model: Any, mapping: Mapping) -> Mapping:
    """Return the mapping with other states of the random generators."""
    states = {id(variable) for variable in model.non_trainable_variables if "seed" in variable.path}
    given = {id(variable): value for variable, value in mapping}
    rest = [(variable, value) for variable, value in mapping if id(variable) not in states]
    for variable in model.non_trainable_variables:
        if id(variable) in states:
            # On JAX a variable has no value during training: `fit` moves the values into its own state.
            value = given[id(variable)] if id(variable) in given else variable.value  # noqa: SIM401
            rest.append((variable, value + ops.cast(1, variable.dtype)))
    return rest


def _elements(variable: Any) -> int:
    count = 1
    for size in variable.shape:
        count *= int(size)
    return count
