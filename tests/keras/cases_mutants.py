# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Wrong accumulation: a case of the other files must reject each mutant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.keras import arithmetic, batchnorm, forward, terms, window
from tests.keras import cases_exact, cases_numbers, helpers


def rejects(owner: Any, name: str, wrong: Any, case: Callable[[], None]) -> None:
    """Assert that the case fails with the wrong function in place of the right one."""
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    try:
        case()
    except (
        AssertionError,
        CoupledSamplesError,
        LossSpecError,
    ):  # the check of the first batch may reject it too
        return
    finally:
        setattr(owner, name, right)
    raise ValueError(f"the mutant {name} survives {case.__name__}")


def case_mutant_a_mean_of_means() -> None:
    mean = lambda weight, total: ops.ones_like(total) / 5  # noqa: E731  (5 micro-batches of 5 and 4 rows)
    rejects(arithmetic, "scale", mean, cases_exact.case_clipvalue)


def case_mutant_divided_by_the_number_of_microbatches() -> None:
    rejects(window, "division", lambda sums, rows, plan: 7.0, cases_exact.case_masked_tokens)


def case_mutant_every_row_counts() -> None:
    by_rows = lambda sums, rows, plan: sums[-1]  # noqa: E731
    rejects(window, "division", by_rows, cases_exact.case_masked_tokens)


def case_mutant_zero_times_nan() -> None:
    always = lambda sums, plan: ops.any(sums == sums)  # noqa: E731
    y = helpers.Y.copy()
    y[helpers.SECOND] = -1

    def eagerly() -> None:
        """Run eagerly: compiled by XLA, 0 x NaN is 0 here."""
        model = lambda: helpers.dense(loss=cases_exact.Halving(), compiled={"run_eagerly": True})  # noqa: E731
        helpers.compare(model, y=y, epochs=1, options={"loss_weight": cases_exact.count_known})

    eagerly()
    rejects(window, "counts", always, eagerly)


def case_mutant_regularizers_of_every_microbatch() -> None:
    everything = lambda model: model.losses  # noqa: E731
    rejects(forward, "data_losses", everything, cases_exact.case_masked_tokens_beside_a_regularizer)


def case_mutant_sums_in_bfloat16() -> None:
    rejects(
        arithmetic, "wide", keras.backend.standardize_dtype, cases_numbers.case_sums_of_bfloat16_are_float32
    )


def case_mutant_batches_of_weight_zero_update() -> None:
    always = lambda sums, plan: ops.any(sums == sums)  # noqa: E731
    rejects(window, "counts", always, cases_numbers.case_a_batch_of_weight_zero)


def case_mutant_moving_statistics_of_the_last_microbatch() -> None:
    last = lambda sums, weight: arithmetic.per_weight(sums, weight) * 0  # noqa: E731
    rejects(
        batchnorm,
        "_own",
        lambda after, before, momentum: after + last(before, before),
        cases_numbers.case_batchnorm,
    )


def case_mutant_the_sample_weights_divisor_is_rows() -> None:
    right = terms._reduced

    def wrong(*arguments: Any) -> Any:
        term = right(*arguments)
        return term._replace(weight=ops.ones_like(term.weight)) if term.kind == "counted" else term

    rejects(terms, "_reduced", wrong, cases_exact.case_a_mean_over_sample_weights)
