# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Print errors and collectives of programs on four local devices as JSON: `python -m tests.jax.sharded`."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from superbatch.jax import per_sample_value_and_grad, value_and_grad
from tests.jax.helpers import mse, params, rows

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text: str) -> dict[str, int]:
    """Count each collective in the program, and the all-reduces outside of its entry computation."""
    entry = text[text.index("\nENTRY ") :]
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    inside = found["all-reduce"] - len(re.findall(r" all-reduce(?:-start)?\(", entry))
    return found | {"all-reduces in a loop": inside}


def error(got: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def clipped_on_devices(p: Any, batch: Any, mesh: Any, *, check_vma: bool) -> float:
    """Return the error of the sum of clipped gradients, against one device."""
    each = per_sample_value_and_grad(mse, microbatch_size=3, max_grad_norm=1.0)
    call = lambda p, batch: jax.lax.psum(each(p, batch)[1], "data")  # noqa: E731
    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    return error(jax.jit(jax.shard_map(call, mesh=mesh, **specs))(p, batch), each(p, batch)[1])


def on_an_explicit_mesh(p: Any, batch: Any) -> list[float]:
    """Return the errors of the gradient and of the sum of clipped gradients, against one device."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    spread = jax.device_put(batch, NamedSharding(mesh, P("data")))
    everywhere = jax.device_put(p, NamedSharding(mesh, P()))
    calls = (
        value_and_grad(mse, microbatch_size=16),
        per_sample_value_and_grad(mse, microbatch_size=16, max_grad_norm=1.0),
    )
    return [error(jax.jit(call)(everywhere, spread)[1], call(p, batch)[1]) for call in calls]


def unchanged(tree: Any, axis_name: Any) -> Any:
    """Return the tree: the mutant of `varying`."""
    return tree


def main() -> None:
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003  (the API takes it by position)
    if sys.argv[1:] == ["mutant"]:  # JAX treats the parameters as replicated
        sys.modules["superbatch.jax.gradient"].varying = unchanged  # pyright: ignore[reportAttributeAccessIssue]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    p, batch = params(), rows(64)
    expected = jax.jit(jax.value_and_grad(mse))(p, batch)
    on_devices = jax.device_put(batch, NamedSharding(mesh, P("data")))
    everywhere = jax.device_put(p, NamedSharding(mesh, P()))
    found: dict[str, Any] = {"devices": jax.device_count()}
    for layout in ("strided", "contiguous"):
        call = jax.jit(value_and_grad(mse, microbatch_size=16, layout=layout))
        program: Any = call.lower(everywhere, on_devices).compile()
        found[layout] = collectives(program.as_text()) | {
            "flops": program.cost_analysis()["flops"],
            "error": error(call(everywhere, on_devices), expected),
        }
    for check_vma in (True, False):
        mapped = jax.shard_map(
            value_and_grad(mse, microbatch_size=3, axis_name="data", noise=True),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
        call = jax.jit(mapped)
        program = call.lower(everywhere, on_devices).compile()
        *got, stats = call(everywhere, on_devices)
        found[f"shard_map, check_vma={check_vma}"] = collectives(program.as_text()) | {
            "error": error(tuple(got), expected),
            "microbatches": int(stats.microbatches),
            "weight": int(stats.weight),
        }
        if sys.argv[1:] == ["mutant"]:
            break  # without check_vma JAX does not track replication
    own = value_and_grad(
        lambda p, batch: jax.lax.pmean(mse(p, batch), "data"),
        microbatch_size=3, axis_name="data", check=False,
    )  # fmt: skip
    mapped = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found["the loss averages over devices, unchecked"] = error(
        jax.jit(mapped)(everywhere, on_devices), expected
    )
    found["clipped"] = [clipped_on_devices(p, batch, mesh, check_vma=check) for check in (True, False)]
    found["explicit mesh"] = on_an_explicit_mesh(p, batch)
    sys.modules["superbatch.jax.per_sample"].varying = lambda tree, axis_name: tree  # pyright: ignore[reportAttributeAccessIssue]
    found["devices are added before the clip"] = clipped_on_devices(p, batch, mesh, check_vma=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
