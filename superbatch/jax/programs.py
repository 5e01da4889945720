# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Analysis of traced programs (jaxprs): dependencies of outputs, programs within equations.

JAX has this only in private modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

DEBUGGING = ("debug_callback", "debug_print")


def needed(jaxpr: Any) -> tuple[list[Any], set[Any]]:
    """Return the equations and the variables on which the outputs depend.

    An equation with an inner program, such as a loop, counts as one: any of its outputs needs all its inputs.

    Examples:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x, y: (x + y, x * 2)[1])(1.0, 2.0).jaxpr
        >>> [equation.primitive.name for equation in needed(program)[0]]
        ['mul']
    """
    wanted = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        equations.append(equation)
        wanted.update(variable for variable in equation.invars if not isinstance(variable, Literal))
    return equations, wanted


def within(equation: Any) -> Iterator[Any]:
    """Yield the programs within an equation: those of a loop, a branch, a jitted function.

    Examples:
        >>> import jax
        >>> outer = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).jaxpr
        >>> [len(program.eqns) for program in within(outer.eqns[0])]
        [1]
    """
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            program = getattr(inner, "jaxpr", inner)
            if hasattr(program, "eqns"):
                yield program


def with_changed(value: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Return a parameter of an equation with a change applied to every program in it.

    Examples:
        >>> with_changed(3, lambda program: program)
        3
    """
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(change(value.jaxpr), value.consts)
    if isinstance(value, Jaxpr):
        return change(value)
    if isinstance(value, tuple) and any(isinstance(one, Jaxpr | ClosedJaxpr) for one in value):
        return tuple(with_changed(one, change) for one in value)  # the branches of a `cond`
    return value


def without_debugging(jaxpr: Jaxpr) -> Jaxpr:
    """Return the program without its calls of `jax.debug.print` and `jax.debug.callback`.

    Examples:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x: (jax.debug.print("{}", x), x + 1)[1])(1.0).jaxpr
        >>> [equation.primitive.name for equation in without_debugging(program).eqns]
        ['add']
    """
    equations = [
        equation.replace(
            params={name: with_changed(value, without_debugging) for name, value in equation.params.items()},
            effects=_not_of_debugging(equation.effects),
        )
        for equation in jaxpr.eqns
        if equation.primitive.name not in DEBUGGING
    ]
    return jaxpr.replace(eqns=equations, effects=_not_of_debugging(jaxpr.effects))


def _not_of_debugging(effects: Any) -> Any:
    # JAX has the types in a private module: `DebugEffect` and `OrderedDebugEffect`.
    return {effect for effect in effects if "Debug" not in type(effect).__name__}
