# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Reading a traced program: the equations that its outputs depend on, and the programs within an equation.

JAX has the first in a private module only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal


def needed(jaxpr: Any) -> tuple[list[Any], set[Any]]:
    """Return the equations and the variables that the outputs depend on.

    An equation with a program in it counts as one: with any of its outputs, all of its inputs are needed.

    Examples:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda x, y: (x + y, x * 2)[1])(1.0, 2.0).jaxpr
        >>> [equation.primitive.name for equation in needed(program)[0]]
        ['mul']
    """
    wanted = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        found.append(equation)
        wanted.update(variable for variable in equation.invars if not isinstance(variable, Literal))
    return found, wanted


def within(equation: Any) -> Iterator[Any]:
    """Yield the programs in the parameters of an equation: of a loop, a branch, a jitted function.

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
