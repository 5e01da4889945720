# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Cost of the check: number of compiled programs, and no prints or callbacks of the user's function."""

from __future__ import annotations

import logging
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import CoupledSamplesError, LossSpecError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same, count_tokens, mse, params, texts, token_mean  # noqa: E402

pytestmark = pytest.mark.jax


def with_labels() -> Any:
    """Return two micro-batches with labels; the check generates a further set of values for labels."""
    batch = texts([4, 1, 3, 2, 3, 1, 1, 4, 2, 1, 3, 2, 4, 1, 2, 3])
    return batch | {"labels": jnp.where(batch["mask"] > 0, 1, 0)}


def one_hot(p: Any, batch: Any) -> Any:
    """Loss that is NaN for labels below 0, as Optax's cross entropy, and has constant arrays."""
    valid = jnp.where(jnp.any(batch["labels"] < 0), jnp.nan, jnp.ones(()))
    return token_mean(p, batch) * valid + 0 * jnp.zeros((5,)).sum()


def ready(fun: Any, *, jitted: bool, **options: Any) -> Any:
    """Return a call with its arguments."""
    function = value_and_grad(fun, microbatch_size=8, **options)
    function, given = jax.jit(function) if jitted else function, (params(), with_labels())
    return lambda: function(*given)


def compiled(caplog: Any, run: Any) -> int:
    """Count the programs that XLA compiles in a call."""
    caplog.clear()
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        run()
    messages = [record.getMessage() for record in caplog.records]
    return sum(message.startswith("Finished XLA compilation of ") for message in messages)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_right_declaration_costs_two_programs(caplog: Any, jitted: bool) -> None:
    """One program is for the whole batch, one for a micro-batch."""
    without, with_check = (
        compiled(caplog, ready(one_hot, jitted=jitted, weight=count_tokens, check=check))
        for check in (False, True)
    )
    assert without >= 1, "the premise: compilations are counted"
    assert with_check - without == 2


@pytest.mark.parametrize(
    ("fun", "error", "most"),
    [
        pytest.param(one_hot, LossSpecError, 4, id="a weight is missing"),
        # The check tries each array as a table; one of them works and costs two more programs.
        pytest.param(
            lambda p, b: mse(p, b) + (p["v"][0] * b["x"].mean()) ** 2, CoupledSamplesError, 6, id="coupled"
        ),
    ],
)
def test_an_error_costs_a_few_more_programs(caplog: Any, fun: Any, error: Any, most: int) -> None:
    call = ready(fun, jitted=True)

    def run() -> None:
        with pytest.raises(error):
            call()

    assert 2 <= compiled(caplog, run) <= most


def test_the_check_runs_no_prints_and_no_callbacks() -> None:
    """A loss that logs by `jax.debug.callback` would otherwise log values of generated rows."""
    seen: list[float] = []

    def logged(p: Any, batch: Any) -> Any:
        loss = jax.jit(token_mean)(p, batch)
        jax.debug.callback(lambda value: seen.append(float(value)), loss)

        def each(total: Any, row: Any) -> Any:
            jax.debug.print("{}", row, ordered=True)
            jax.debug.callback(lambda value: seen.append(float(value)), row)
            return total, None

        return jax.lax.scan(each, loss, jnp.arange(2.0))[0]

    got = ready(logged, jitted=True, weight=count_tokens)()
    jax.effects_barrier()
    assert len(seen) == 2 * 3, f"two micro-batches of three calls each: {seen}"
    assert_same(got, jax.value_and_grad(token_mean)(params(), with_labels()))
