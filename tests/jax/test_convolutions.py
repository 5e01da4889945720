# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Convolutions in micro-batches: gradient of the large batch, in the layout that is fast on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch.jax import convolutions, value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same  # noqa: E402

pytestmark = pytest.mark.jax

FORMS = {
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "mixed": ("HWCN", "IOHW", "CHWN"),
}


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def network(p: Any, batch: Any) -> Any:
    """Two convolutions, the second grouped, strided and dilated, in a `jit`, a checkpoint and a `cond`."""

    def first(x: Any) -> Any:
        return lax.conv_general_dilated(x, p["one"], (1, 1), "SAME", dimension_numbers=FORMS["NHWC"])

    def second(x: Any) -> Any:
        x = jnp.transpose(x, (0, 3, 1, 2))
        options: Any = {"rhs_dilation": (2, 1), "feature_group_count": 2, "dimension_numbers": FORMS["NCHW"]}
        return lax.conv_general_dilated(x, p["two"], (2, 1), "VALID", **options)

    hidden = jnp.tanh(jax.checkpoint(jax.jit(first))(batch["x"]))
    hidden = lax.cond(p["two"].sum() > -1e9, second, lambda x: 0 * second(x), hidden)
    return jnp.mean((jnp.tanh(hidden).sum((2, 3)) @ p["out"] - batch["y"]) ** 2)


def parts() -> tuple[Any, Any]:
    p = {"one": draw(3, 3, 2, 4), "two": draw(6, 2, 3, 3), "out": draw(6) / 6}
    return p, {"x": draw(10, 8, 9, 2), "y": draw(10)}


def convolutions_in_loops(jaxpr: Any, *, inside: bool = False) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        loop = inside or equation.primitive.name == "scan"
        if equation.primitive.name == "conv_general_dilated" and inside:
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from convolutions_in_loops(getattr(inner, "jaxpr", inner), inside=loop)


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_the_gradient_is_that_of_the_large_batch(layout: Any) -> None:
    p, batch = parts()
    call = value_and_grad(network, microbatch_size=4, layout=layout)
    assert_same(jax.jit(call)(p, batch), jax.jit(jax.value_and_grad(network))(p, batch))


def test_every_convolution_in_the_loop_has_the_fast_layout() -> None:
    p, batch = parts()
    own = jax.make_jaxpr(jax.grad(network))(p, batch).jaxpr
    assert convolutions.has_slow_convolutions(own), "the premise: a gradient has other layouts"
    call = value_and_grad(network, microbatch_size=2, check=False)
    found = list(convolutions_in_loops(jax.make_jaxpr(call)(p, batch).jaxpr))
    assert len(found) >= 6, "the premise: the loop has the convolutions of forward and backward"
    for equation in found:
        assert equation.params["dimension_numbers"] == convolutions.fast_form(4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_any_layout_gives_the_same_result(form: str, spatial: int) -> None:
    kept = "DHW"[3 - spatial :]
    lhs, rhs, out = (spec.replace("HW", "#") for spec in FORMS[form])
    specs = tuple(spec.replace("#", kept) for spec in (lhs, rhs, out))
    sizes = dict(zip("NCDHW", (3, 2, 5, 6, 7), strict=True))
    kernel = dict(zip("IODHW", (2, 4, 3, 2, 3), strict=True))
    x, k = draw(*(sizes[axis] for axis in specs[0])), draw(*(kernel[axis] for axis in specs[1]))

    def convolve(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, (2,) * spatial, "SAME", dimension_numbers=specs)

    closed = jax.make_jaxpr(convolve)(x, k)
    again = ClosedJaxpr(convolutions.rewritten(closed.jaxpr), closed.consts)
    assert not convolutions.has_slow_convolutions(again.jaxpr)
    assert_same(jaxpr_as_fun(again)(x, k)[0], convolve(x, k))


def test_a_wrong_order_of_axes_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_order", lambda given, wanted: [*range(len(given))])
    with pytest.raises((AssertionError, TypeError, ValueError)):
        test_any_layout_gives_the_same_result("mixed", 1)


def test_a_loop_without_convolutions_is_unchanged() -> None:
    body = lambda carry, x: (carry + x, None)  # noqa: E731  (compared by identity)
    assert convolutions.for_loop(body, 1.0, 2.0) is body
    gradient = jax.grad(network)
    assert convolutions.for_loop(gradient, *parts()) is not gradient, "the premise: other loops change"


@pytest.mark.parametrize("checked", [True, False])
def test_in_a_shard_map(checked: bool) -> None:
    """Types in a sharded program contain the mesh axes, and the added transposes must keep them."""
    p, batch = parts()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    call = value_and_grad(network, microbatch_size=4, axis_name="data", check=False)
    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": checked}
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, **specs))
    assert_same(sharded(p, batch), jax.jit(jax.value_and_grad(network))(p, batch))
    found = list(convolutions_in_loops(jax.make_jaxpr(sharded)(p, batch).jaxpr))
    assert found and all(e.params["dimension_numbers"] == convolutions.fast_form(4) for e in found)
