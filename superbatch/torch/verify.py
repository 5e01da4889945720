"""`verify`: comparison of the accumulated gradient with that of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..batch.split import TokenBudget, sizes
from ..batch.tree import count_samples
from ..errors import InputError
from ..normalize import Reduction
from ..results.verification import Verification
from .checks.probing.options import check_model, check_options
from .checks.probing.problem import LossFn, Problem, WeightOption, by_term
from .checks.probing.report import Against, Dtype, Request, verified
from .loss.declared import Declared, declare
from .options import NOT_DECLARED, FrozenBatchNorm, PerSampleRandom, Split
from .window.options import check_lists, check_split
from .window.validation import as_models, check_choice

# The rounding error of a float64 sum of a few thousand terms is smaller.
TOLERANCE = 1e-12


def verify(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: LossFn,
    batch: Any,
    *,
    microbatch_size: int | TokenBudget,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight: WeightOption | Mapping[str, WeightOption] = None,
    participants: Sequence[Any] = (),
    split: Split = NOT_DECLARED,
    against: Against = "auto",
    dtype: Dtype = "both",
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare the accumulated gradient with that of the whole batch, and find the causes of a difference.

    The difference of a parameter's gradient is ``|accumulated - reference| / max(|reference|, 1e-3 |all|)``,
    where `all` is the reference gradient of all parameters. In float64 it may be up to `tolerance`. In the
    model's own dtype it may be as large as the rounding error of the whole batch's gradient, measured against
    float64. If the gradients differ, each possible cause is removed in turn: a loss that is not repeatable,
    random numbers, state that a forward changes, wrong weights, samples that influence each other. The
    declared `reduction` and `weight` are also checked as on the Accumulator's first window, because gradients
    may agree by chance for one split.

    Model, gradients, random state and the state reachable from `loss_fn` are restored bit for bit.

    Args:
        model: the model, or several, in the mode (train or eval) of the training.
        loss_fn: ``loss_fn(microbatch) -> loss``, a closure over the model.
        batch: a batch of the training, on the host; two samples or more.
        microbatch_size: samples of a micro-batch, fewer than the batch has; or a `TokenBudget`.
        reduction: how `loss_fn` reduces, as in `Accumulator`.
        weight: weight of a micro-batch, as in `Accumulator`. Each term of a loss with several terms is
            verified by itself, so that a large term does not hide an error in another.
        participants: as in `Accumulator`. `PerSampleRandom` and `FrozenBatchNorm` apply to the whole batch
            and to its micro-batches. Other participants have no effect.
        split: as in `Accumulator`, for parts that are not tensors with the samples in dimension 0.
        against: the reference: ``"batch"``, the whole batch; ``"splits"``, another split, for a batch that
            does not fit in memory; ``"auto"``, the whole batch unless it runs out of memory.
        dtype: `"own"` (the model's), `"float64"`, or `"both"`.
        tolerance: largest relative difference in float64 that counts as exact.

    Returns:
        The report. `print` shows the verdict, the causes with their remedies, and a row for each parameter.

    Raises:
        InputError: an argument has the wrong type or value, the batch is not larger than a micro-batch, or
            the model has no parameters that need a gradient.
        SplitError: the batch cannot be split.
        NonFiniteError: the loss or a gradient is not finite.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> loss_fn = lambda batch: nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
        >>> batch = {"x": torch.randn(8, 2), "y": torch.randn(8)}
        >>> report = verify(model, loss_fn, batch, microbatch_size=3)
        >>> report.exact, report.causes[0].kind, report.causes[0].module
        (False, 'batchnorm', '1')
        >>> verify(model.eval(), loss_fn, batch, microbatch_size=3).exact
        True
    """
    request = _request(
        model,
        loss_fn,
        batch,
        declare(reduction, weight),
        participants,
        split,
        microbatch_size=microbatch_size,
        against=against,
        dtype=dtype,
        tolerance=tolerance,
    )
    return verified(request)


def verify_sizes(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: LossFn,
    batch: Any,
    sizes: Sequence[int],
    *,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight: WeightOption | Mapping[str, WeightOption] = None,
    participants: Sequence[Any] = (),
    split: Split = NOT_DECLARED,
) -> Iterator[Verification]:
    """Yield the report of `verify` for several sizes of micro-batches.

    Only the first size includes the check of the declared loss: the check cuts micro-batches further, so
    pass the largest size first. All other options are those of `verify`.
    """
    declared = declare(reduction, weight)
    for index, size in enumerate(sizes):
        request = _request(model, loss_fn, batch, declared, participants, split, microbatch_size=size)
        yield verified(replace(request, probes=index == 0))


def _request(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: LossFn,
    batch: Any,
    declared: Declared,
    participants: Sequence[Any],
    split: Split,
    *,
    microbatch_size: int | TokenBudget,
    against: Against = "auto",
    dtype: Dtype = "both",
    tolerance: float = TOLERANCE,
) -> Request:
    """Check the options of `verify` and return them."""
    check_split(split)
    check_lists(participants=participants)
    models = as_models(model)
    problem = Problem(
        # One module for the comparison; a ModuleList gives each model a prefix of its own.
        models[0] if len(models) == 1 else nn.ModuleList(models),
        loss_fn,
        declared.reduction,
        # None: the comparison itself counts the samples.
        None if declared.weigh == "samples" else declared.weigh,
        tuple(split.unsplit),
        tuple(split.per_sample),
        terms=declared.terms,
    )
    # With a random stream per sample, dropout draws the same numbers in both passes.
    sample_rng = any(isinstance(each, PerSampleRandom) for each in participants)
    frozen = any(isinstance(each, FrozenBatchNorm) for each in participants)
    check_model(problem.model)
    # Each term is verified by itself, so that a large one does not hide an error in another.
    for one in (problem, *by_term(problem).values()):
        check_options(one, tolerance)
    check_choice(against, "against", Against)
    check_choice(dtype, "dtype", Dtype)
    samples, batchnorm = count_samples(batch, **split.paths), "frozen" if frozen else "per_microbatch"
    request = Request(
        problem, batch, samples, microbatch_size, sample_rng, batchnorm, against, dtype, tolerance
    )
    _check_split(request)
    return request


def _check_split(request: Request) -> None:
    # Counted in the split itself, because a TokenBudget splits by lengths.
    parts = sizes(request.batch, request.samples, request.microbatch_size)
    if len(parts) < 2:
        raise InputError(
            f"With microbatch_size={request.microbatch_size!r} and {request.samples} samples the batch is "
            "one micro-batch, so there is nothing to compare. Pass a larger batch, or a smaller "
            "microbatch_size."
        )
