"""An advice in words: its tables, and sentences that say what they show."""

from __future__ import annotations

from superbatch.results.advice import Advice, Steps, number_text
from superbatch.results.memory import binary_text
from superbatch.results.noise import ASSUMED, ASSUMPTION
from superbatch.results.scaling import setting_text

from .table import Column, Table, range_text, seconds_text, shown, table_of

NOT_MEASURED = (
    "For Adam the noise scale hangs on what is assumed of its preconditioner (q = 0, 1, 2), which is "
    "measured on a recipe only; the factor of {:g} stands for it here."
)

COUPLED = (
    "BatchNorm and in-batch negatives see a micro-batch, not the batch, unless WholeBatch makes the updates."
)

NO_SETTINGS = (
    "Without accumulation beta2 becomes its K-th root, which keeps its half-life in samples; rate "
    "and weight decay are scaled by superbatch.tuning.scaling (give --lr for numbers)."
)


def steps_table(report: Advice) -> Table:
    """The table of an advice: one row per number of accumulation steps."""
    asked = report.asked
    return table_of(
        title_of(report),
        report.steps,
        ("K", "micro-batches of an update; the mark is at the one in question", lambda each: _k(each, asked)),
        ("batch", "samples of an update, on all ranks", lambda each: str(each.batch)),
        ("time", "to the same loss, relative to K = 1: W(K)/W(1)", lambda each: _three(each.time)),
        ("range", f"over {range_said(report)}", _range),
        ("samples", "needed for that, relative to K = 1: a lower bound", lambda each: _three(each.samples)),
    )


def alternative_table(report: Advice) -> Table:
    """The settings with accumulation, and those without; no rows where none are known."""
    found = report.alternative
    return table_of(
        "The alternative: no accumulation",
        [] if found is None else [(name, old, found.after[name]) for name, old in found.before.items()],
        ("setting", "" if found is None else f'by the rule "{found.rule}": {found.why}', lambda row: row[0]),
        (f"batch {report.of_asked.batch}", "with accumulation", lambda row: setting_text(row[1])),
        (f"batch {report.microbatch_size * report.ranks}", "without", lambda row: setting_text(row[2])),
    )


def memory_table(report: Advice) -> Table:
    """Memory of the sum of gradients, a micro-batch and the batch in one piece, as far as it is known."""
    columns = (Column("memory of", "beyond the model"), Column("takes", ""), Column("remark", ""))
    free = "a float32 .grad is this sum; an update fused into the backward needs none"
    limit, peak, whole = report.limit, report.peak, report.whole
    rows: list[tuple[str, str, str]] = []
    if report.accumulator_bytes is not None:
        rows.append(
            ("sum of gradients", f"{binary_text(report.accumulator_bytes)} (4 bytes a parameter)", free)
        )
    if limit is not None and peak is not None:
        remark = f"{'fits in' if peak <= limit.bytes else 'does not fit in'} {limit}"
        rows.append((f"a micro-batch of {report.microbatch_size}", binary_text(peak), remark))
    if limit is not None and whole is not None and whole <= limit.bytes:
        samples = f"{report.asked} x {report.microbatch_size} in one piece"
        remark = "fits: the same update without accumulation, mostly faster (superbatch fit)"
        rows.append((samples, binary_text(whole), remark))
    return Table("Memory", columns, tuple(rows))


def models_table(report: Advice) -> Table:
    """The noise scale under each assumption about Adam's preconditioner."""
    times = {each.power: time for each, time in zip(report.models, report.of_asked.by_model, strict=True)}
    return table_of(
        "By the assumption on Adam's preconditioner",
        report.models,
        ("q", "power of Adam's preconditioner; 0, the plain gradient, is used", lambda each: str(each.power)),
        ("assumes that", "of the curvature", lambda each: ASSUMED[each.power]),
        ("noise scale", "with its 95 % interval", lambda each: range_text(each.noise, each.low, each.high)),
        ("K*", "the best number of micro-batches", lambda each: _three(each.best)),
        (f"time at K = {report.asked}", "relative to K = 1", lambda each: _three(times[each.power])),
    )


def tables(report: Advice) -> list[Table]:
    """All tables of an advice; one without rows has nothing to say."""
    return [steps_table(report), models_table(report), alternative_table(report)]


def title_of(report: Advice) -> str:
    """An advice in one line: the micro-batch, the noise scale and the times."""
    ranks = f" on each of {report.ranks} ranks" if report.ranks > 1 else ""
    recipe = "" if report.recipe is None else f"{report.recipe}: "
    reduce = f", all-reduce {seconds_text(report.all_reduce_seconds)}" if report.all_reduce_seconds else ""
    each = f"{seconds_text(report.microbatch_seconds)} each"
    noise = range_text(report.noise, report.noise_low, report.noise_high)
    assumed = f", {ASSUMPTION}" if report.noise_from.startswith("measured") else ""
    return (
        f"{recipe}micro-batches of {report.microbatch_size}{ranks}, {each}; update "
        f"{seconds_text(report.update_seconds)}{reduce}; noise scale {noise}{assumed}"
    )


def range_said(report: Advice) -> str:
    """Return a description of the range."""
    adam = ", and Adam's models" if report.band is not None else ""
    return f"the noise scale's interval, a factor of {report.systematic:g} beyond it{adam}"


def answer(report: Advice) -> list[str]:
    """The verdict, the best number of micro-batches, how sure that is, and what no table has."""
    between = f"between {number_text(report.best_low)} and {number_text(report.best_high)}"
    if report.best is None:
        best = f"The best number of micro-batches is {between}."
    elif report.best <= 1:
        best = f"None pays at the estimate: K* = {report.best:.2g} ({between})."
    else:
        best = f"Least time at K* = {report.best:.3g} ({between})."
    settings = [] if report.alternative is not None else [NO_SETTINGS]
    return [verdict_text(report), best, *report.uncertainty[:1], *settings]


def caveats(report: Advice, most: int | None = 3) -> list[str]:
    """Limits of the verdict, all or the first: problems of this run first, general caveats last."""
    # Of the memory only what changes the answer: too much, or no need to accumulate.
    memory = [row for row in memory_table(report).rows if row[2].startswith(("does not fit", "fits:"))]
    said = [*report.notes, *(f"{what}: {takes}, {remark}." for what, takes, remark in memory)]
    if report.alternative is not None and report.alternative.optimizer != "sgd" and not report.models:
        said.append(NOT_MEASURED.format(report.systematic))
    if report.verdict != "helps":
        said.append(f"This does not apply where {'; or '.join(report.exceptions)}.")
    # How sure the verdict is stands beside it, in the answer.
    return [*said, COUPLED, *report.uncertainty[1:]][:most]


def verdict_text(report: Advice) -> str:
    """The verdict with its reason."""
    said = {"helps": "helps", "wasteful": "is wasteful"}.get(report.verdict)
    if said is None:
        return f"Whether accumulating {report.asked} micro-batches pays is undetermined. {report.reason}"
    return f"Accumulating {report.asked} micro-batches {said}. {report.reason}"


def _k(each: Steps, asked: int) -> str:
    return f"{each.accumulation_steps}{' <' if each.accumulation_steps == asked else ''}"


def _range(each: Steps) -> str:
    return "" if each.accumulation_steps == 1 else f"{each.low:.3g} to {each.high:.3g}"


def _three(value: float | None) -> str:
    return shown(value, "{:.3g}".format)
