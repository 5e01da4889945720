# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Rewriting of convolutions in the body of a loop to the layout of XLA's fast kernel on the CPU.

The kernel needs the layout (batch, space, features). Convolutions of a gradient have another layout.
Outside of loops XLA transposes their operands. Inside a loop XLA computes them element by element, 10 times
slower. So the transposes are inserted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from .programs import with_changed


def for_loop(body: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a body for `jax.lax.scan` that computes the same with fast convolutions.

    Args:
        body: the function to run in the loop.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`.

    Returns:
        `body` itself if it has no slow convolution, or if the backend is not the CPU.

    Examples:
        >>> body = lambda carry, x: (carry + x, None)
        >>> for_loop(body, jnp.zeros(()), jnp.zeros(())) is body
        True
    """
    if jax.default_backend() != "cpu":
        return body  # only XLA on the CPU has this limit
    # Here, before `scan` traces the body: its program cannot be changed afterwards.
    closed, shape = jax.make_jaxpr(body, return_shape=True)(*args)
    if not has_slow_convolutions(closed.jaxpr):
        return body
    computed = jaxpr_as_fun(ClosedJaxpr(rewritten(closed.jaxpr), closed.consts))
    structure = jax.tree.structure(shape)

    def same(*again: Any) -> Any:
        return structure.unflatten(computed(*jax.tree.leaves(again)))

    return same


def fast_form(dimensions: int) -> lax.ConvDimensionNumbers:
    """Return the fast layout: (batch, space, features) of operand and result, (space, in, out) of the kernel.

    Examples:
        >>> fast_form(4).lhs_spec, fast_form(4).rhs_spec
        ((0, 3, 1, 2), (3, 2, 0, 1))
    """
    rows = (0, dimensions - 1, *range(1, dimensions - 1))
    return lax.ConvDimensionNumbers(rows, (dimensions - 1, dimensions - 2, *range(dimensions - 2)), rows)


def has_slow_convolutions(jaxpr: Jaxpr) -> bool:
    """Return True if a program, or one within it, has a convolution in another layout."""
    return any(
        _is_slow(equation) or any(map(has_slow_convolutions, _inner(equation.params)))
        for equation in jaxpr.eqns
    )


def _is_slow(equation: Any) -> bool:
    if equation.primitive.name != "conv_general_dilated":
        return False
    return equation.params["dimension_numbers"] != fast_form(equation.invars[0].aval.ndim)


def _inner(params: dict[str, Any]) -> list[Jaxpr]:
    listed = [one for value in params.values() for one in (value if isinstance(value, tuple) else (value,))]
    return [one.jaxpr if isinstance(one, ClosedJaxpr) else one for one in listed if _is_program(one)]


def _is_program(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def rewritten(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program with each slow convolution replaced by a fast one between transposes."""
    return jaxpr.replace(eqns=[new for old in jaxpr.eqns for new in _equations(old)])


def _equations(equation: Any) -> list[Any]:
    if _is_slow(equation):
        return _transposed(equation)
    # Also in programs within the equation: the user's `jit`, checkpoint, branch or loop.
    if any(map(has_slow_convolutions, _inner(equation.params))):
        params = {name: with_changed(value, rewritten) for name, value in equation.params.items()}
        return [equation.replace(params=params)]
    return [equation]


def _transposed(equation: Any) -> list[Any]:
    """Return the equations for one convolution: two transposes, the fast convolution, one transpose."""
    given = equation.params["dimension_numbers"]
    wanted = fast_form(equation.invars[0].aval.ndim)

    def convolution(lhs: Any, rhs: Any) -> Any:
        lhs = jnp.transpose(lhs, _order(given.lhs_spec, wanted.lhs_spec))
        rhs = jnp.transpose(rhs, _order(given.rhs_spec, wanted.rhs_spec))
        result = equation.primitive.bind(lhs, rhs, **equation.params | {"dimension_numbers": wanted})
        return jnp.transpose(result, _order(wanted.out_spec, given.out_spec))

    inner = jax.make_jaxpr(convolution)(*(variable.aval for variable in equation.invars)).jaxpr
    # The equations are spliced into the outer program, so they must use its variables.
    outer = dict(zip((*inner.invars, *inner.outvars), (*equation.invars, *equation.outvars), strict=True))

    def named(variable: Any) -> Any:
        return variable if isinstance(variable, Literal) else outer.get(variable, variable)

    return [
        one.replace(invars=[*map(named, one.invars)], outvars=[*map(named, one.outvars)])
        for one in inner.eqns
    ]


def _order(given: tuple[int, ...], wanted: tuple[int, ...]) -> list[int]:
    """Return the axes for `jnp.transpose` from one specification to another.

    A specification lists the axis of each role: batch, features, then space.
    """
    return [axis for _, axis in sorted(zip(wanted, given, strict=True))]
