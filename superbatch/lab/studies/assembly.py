"""Put the runs of an arm together: means, differences, tests, and what a reader must know beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..recipes import Recipe
from ..report.comparison import Arm, Run
from .backends import Backend
from .setting import ArmPlan, Setting
from .statistics import limits_of, smallest_gap, summarise, tost_paired, tost_welch

PAIRED = (
    "Equivalence is tested on pairs: all arms of a seed share initial weights and sample order. The Welch "
    "test treats the arms as independent groups."
)
COUPLED = (
    "This model has BatchNorm, which normalises by the samples of a micro-batch, not of the batch: these "
    "arms do not claim to give the real batch's weights."
)
BESIDE = (
    "Samples of a batch are coupled here. The splits that stand alone compute the loss of the whole batch "
    "(WholeBatch); plain accumulation, with the BatchNorm of each micro-batch, is another objective and does "
    "not claim to give the real batch's weights."
)
BATCHNORM = {"frozen": "FrozenBatchNorm()", "per_microbatch": "GhostBatchNorm()"}
ROUNDING = (
    "Differences of about 1e-7 are rounding in float32, and 1e-5 where a unit falls on the other side of a "
    "ReLU's kink; --dtype float64 tells rounding from error."
)


def arm_report(
    arm: ArmPlan,
    recipe: Recipe,
    setting: Setting,
    backend: Backend,
    runs: Sequence[Run],
    real: Sequence[Run],
    peak_bytes: int | None,
    margin: float,
) -> Arm:
    """Summarise the finished runs of an arm; None stands for what needs more runs."""
    runs = sorted(runs, key=lambda run: run.seed)
    metrics = [run.metric for run in runs]
    of_seed = {run.seed: run.metric for run in real}
    pairs = [run.metric - of_seed[run.seed] for run in runs if run.seed in of_seed]
    compared, step = arm.claim != "real", recipe.metric_step
    how = backend.how[arm.way]
    if arm.way == "accumulator" and recipe.coupled == "exact":
        how = "superbatch.torch.WholeBatch"
    elif arm.claim == "inexact" and recipe.batchnorm != "error":
        how += f", participants=[{BATCHNORM[recipe.batchnorm]}]"
    apart = [run.weight_difference for run in runs if run.weight_difference is not None]
    return Arm(
        name=arm.name,
        sizes=arm.split.sizes,
        claim=arm.claim,
        how=how,
        runs=tuple(runs),
        mean=statistics.fmean(metrics) if metrics else None,
        sd=summarise(metrics).sd if len(metrics) > 1 else None,
        updates=setting.updates,
        seconds=statistics.fmean(run.seconds for run in runs) if runs else None,
        peak_bytes=peak_bytes,
        weight_difference=max(apart, default=None),
        median_difference=statistics.median(apart) if apart else None,
        worst_difference=max((d for run in runs if (d := run.worst_difference) is not None), default=None),
        paired=tost_paired(pairs, margin=margin, step=step) if compared and len(pairs) > 1 else None,
        welch=tost_welch(
            summarise(metrics),
            summarise(list(of_seed.values())),
            margin=margin,
            step=smallest_gap([*metrics, *of_seed.values()]) if step is None else step,
        )
        if compared and len(metrics) > 1 and len(of_seed) > 1
        else None,
    )


def notes_on(arms: Sequence[Arm], setting: Setting, backend: Backend, workers: int) -> tuple[str, ...]:
    """Return the facts that a reader needs to read the numbers right."""
    notes = [PAIRED, *limits_of(arm.paired for arm in arms if arm.paired is not None)]
    if setting.dtype == "float32":
        notes.append(ROUNDING)
    claims = {arm.claim for arm in arms}
    if "inexact" in claims:
        notes.append(BESIDE if "exact" in claims else COUPLED)
    if setting.tail is not None:
        notes.append(
            f"Now and then the data ends with a tail of {setting.tail} instead of {setting.batch_size} "
            "samples, in every arm: that is where a fixed divisor goes wrong."
        )
    needed = max((arm.welch.runs_needed or 0 for arm in arms if arm.welch is not None), default=0)
    if needed > max((len(arm.runs) for arm in arms), default=0):
        notes.append(
            f"To show equivalence of independent arms with 80 % power, {needed} runs per arm are needed at "
            "this variation between seeds."
        )
    notes.extend(backend.notes)
    if workers > 1:
        notes.append(f"Times were taken with up to {workers} processes side by side on the same machine.")
    return tuple(notes)
