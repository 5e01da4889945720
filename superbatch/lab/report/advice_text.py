"""Tables and sentences of an advice."""

from __future__ import annotations

from superbatch.results.advice import Advice, number_text
from superbatch.results.memory import binary_text
from superbatch.results.noise import ASSUMED, ASSUMPTION
from superbatch.results.scaling import setting_text

from .table import Column, Table, or_dash, range_text, seconds_text, table_of

NOT_MEASURED = (
    "For Adam the noise scale depends on an assumption about its preconditioner (q = 0, 1, 2). This effect "
    "is measured on a recipe only; here it is covered by the factor of {:g} in the range."
)

COUPLED = (
    "BatchNorm and in-batch negatives see a micro-batch, not the batch, unless WholeBatch makes the updates."
)

NO_SETTINGS = (
    "To train without accumulation, replace beta2 by its K-th root (the same half-life in samples), and "
    "scale rate and weight decay with superbatch.tuning.scaling. Give --lr to get the numbers."
)


def steps_table(report: Advice) -> Table:
    """Return the main table of an advice: one row per number of accumulation steps."""

    def marked(k: int) -> str:
        return f"{k} <" if k == report.asked else str(k)

    return table_of(
        title_of(report),
        report.steps,
        ("K", "micro-batches per update; < marks those to judge", lambda row: marked(row.accumulation_steps)),
        ("batch", "samples of an update, on all ranks", lambda row: str(row.batch)),
        ("time", "to the same loss, relative to K = 1: W(K)/W(1)", lambda row: _three(row.time)),
        (
            "range",
            f"over {noise_range_text(report)}",
            lambda row: "" if row.accumulation_steps == 1 else f"{row.low:.3g} to {row.high:.3g}",
        ),
        ("samples", "to the same loss, relative to K = 1: a lower bound", lambda row: _three(row.samples)),
    )


def alternative_table(report: Advice) -> Table:
    """Return the settings with and without accumulation; no rows if no settings are known."""
    found = report.alternative
    return table_of(
        "The alternative: no accumulation",
        [] if found is None else [(name, old, found.after[name]) for name, old in found.before.items()],
        ("setting", "" if found is None else f'by the rule "{found.rule}": {found.why}', lambda row: row[0]),
        (f"batch {report.of_asked.batch}", "with accumulation", lambda row: setting_text(row[1])),
        (f"batch {report.microbatch_size * report.ranks}", "without", lambda row: setting_text(row[2])),
    )


def memory_table(report: Advice) -> Table:
    """Return the known memory of the sum of gradients, of a micro-batch and of the unsplit batch."""
    limit, peak, whole = report.limit, report.peak, report.whole
    rows: list[tuple[str, str, str]] = []
    if report.accumulator_bytes is not None:
        takes = f"{binary_text(report.accumulator_bytes)} (4 bytes a parameter)"
        free = "a float32 .grad is this sum; an update fused into the backward needs none"
        rows.append(("sum of gradients", takes, free))
    if limit is not None and peak is not None:
        remark = f"{'fits in' if peak <= limit.bytes else 'does not fit in'} {limit}"
        rows.append((f"a micro-batch of {report.microbatch_size}", binary_text(peak), remark))
    if limit is not None and whole is not None and whole <= limit.bytes:
        samples = f"{report.asked} x {report.microbatch_size} in one piece"
        remark = "fits: the same update without accumulation, mostly faster (superbatch fit)"
        rows.append((samples, binary_text(whole), remark))
    columns = Column("memory of", "beyond the model"), Column("takes", ""), Column("remark", "")
    return Table("Memory", columns, tuple(rows))


def models_table(report: Advice) -> Table:
    """Return the noise scale under each assumption about Adam's preconditioner."""
    times = {each.power: time for each, time in zip(report.models, report.of_asked.by_model, strict=True)}
    return table_of(
        "By the assumption on Adam's preconditioner",
        report.models,
        ("q", "power of Adam's preconditioner; 0, the plain gradient, is used", lambda row: str(row.power)),
        ("assumes that", "of the curvature", lambda row: ASSUMED[row.power]),
        ("noise scale", "with its 95 % interval", lambda row: range_text(row.noise, row.low, row.high)),
        ("K*", "the best number of micro-batches", lambda row: _three(row.best)),
        (f"time at K = {report.asked}", "relative to K = 1", lambda row: _three(times[row.power])),
    )


def tables(report: Advice) -> list[Table]:
    """Return all tables of an advice; those that do not apply have no rows."""
    return [steps_table(report), models_table(report), alternative_table(report)]


def title_of(report: Advice) -> str:
    """Return the micro-batch, the times and the noise scale of an advice in one line."""
    ranks = f" on each of {report.ranks} ranks" if report.ranks > 1 else ""
    recipe = "" if report.recipe is None else f"{report.recipe}: "
    reduce = f", all-reduce {seconds_text(report.all_reduce_seconds)}" if report.all_reduce_seconds else ""
    noise = range_text(report.noise, report.noise_low, report.noise_high)
    assumed = f", {ASSUMPTION}" if report.noise_from.startswith("measured") else ""
    each = f"{seconds_text(report.microbatch_seconds)} each"
    return (
        f"{recipe}micro-batches of {report.microbatch_size}{ranks}, {each}; "
        f"update {seconds_text(report.update_seconds)}{reduce}; noise scale {noise}{assumed}"
    )


def noise_range_text(report: Advice) -> str:
    """Return a description of the range of noise scales for which the verdict holds."""
    adam = ", and Adam's models" if report.band is not None else ""
    return f"the noise scale's interval, widened by a factor of {report.systematic:g}{adam}"


def answer(report: Advice) -> list[str]:
    """Return the verdict, the best number of micro-batches, and how often such a verdict was right."""
    between = f"between {number_text(report.best_low)} and {number_text(report.best_high)}"
    if report.best is None:
        best = f"The best number of micro-batches is {between}."
    elif report.best <= 1:
        best = f"Accumulation does not pay at the estimate: K* = {report.best:.2g} ({between})."
    else:
        best = f"Least time at K* = {report.best:.3g} ({between})."
    settings = [] if report.alternative is not None else [NO_SETTINGS]
    return [verdict_text(report), best, *report.uncertainty[:1], *settings]


def caveats(report: Advice) -> list[str]:
    """Return the limits of the verdict: problems of this run first, general caveats last."""
    # Of the memory only what changes the answer: too much, or no need to accumulate.
    memory = [row for row in memory_table(report).rows if row[2].startswith(("does not fit", "fits:"))]
    found = [*report.notes, *(f"{what}: {takes}, {remark}." for what, takes, remark in memory)]
    if report.alternative is not None and report.alternative.optimizer != "sgd" and not report.models:
        found.append(NOT_MEASURED.format(report.systematic))
    if report.verdict != "helps":
        found.append(f"The verdict does not apply in these cases: {'; '.join(report.exceptions)}.")
    # The first uncertainty is in the answer, beside the verdict.
    return [*found, COUPLED, *report.uncertainty[1:]]


def verdict_text(report: Advice) -> str:
    """Return the verdict and its reason."""
    if report.verdict == "undetermined":
        return f"Whether accumulating {report.asked} micro-batches pays is undetermined. {report.reason}"
    verb = "is wasteful" if report.verdict == "wasteful" else "helps"
    return f"Accumulating {report.asked} micro-batches {verb}. {report.reason}"


def _three(value: float | None) -> str:
    return or_dash(value, "{:.3g}".format)
