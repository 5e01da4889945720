"""An advice in words: its tables, and sentences that say what they show."""

from __future__ import annotations

# pyright: strict
from superbatch.results.advice import Advice, Steps, number_text
from superbatch.results.memory import binary_text
from superbatch.results.noise import ASSUMED, ASSUMPTION
from superbatch.results.scaling import setting_text

from .fitting_text import seconds_text
from .table import Column, Table

NOT_KNOWN = "–"
NOT_MEASURED = (
    "For Adam the noise scale hangs on what is assumed of its preconditioner (q = 0, 1, 2), which is "
    "measured on a recipe only; the factor of {:g} stands for it here."
)

COUPLED = (
    "BatchNorm and in-batch negatives see a micro-batch, not the batch, unless WholeBatch makes the updates."
)


def steps_table(report: Advice) -> Table:
    """The table of an advice: one row per number of accumulation steps.

    Args:
        report: of an advice.

    Returns:
        Text; a dash stands for what is not known.
    """
    columns = (
        Column("K", "micro-batches of an update; the mark is at the one in question"),
        Column("batch", "samples of an update, on all ranks"),
        Column("time", "to the same loss, relative to K = 1: W(K)/W(1)"),
        Column("range", f"over {range_said(report)}"),
        Column("samples", "needed for the same loss, relative to K = 1: a lower bound"),
    )
    return Table(title_of(report), columns, tuple(_row(each, report) for each in report.steps))


def alternative_table(report: Advice) -> Table:
    """The settings with accumulation, and those without.

    Args:
        report: of an advice.

    Returns:
        One row per setting; none where no settings were given.
    """
    found = report.alternative
    batch = report.microbatch_size * report.ranks
    columns = (
        Column("setting", "of the optimizer"),
        Column(f"batch {report.of_asked.batch}", "with accumulation"),
        Column(f"batch {batch}", "without"),
    )
    rows = (
        ()
        if found is None
        else tuple(
            (name, setting_text(old), setting_text(found.after[name])) for name, old in found.before.items()
        )
    )
    return Table("The alternative: no accumulation", columns, rows)


def models_table(report: Advice) -> Table:
    """The noise scale under each assumption about Adam's preconditioner.

    Args:
        report: of an advice.

    Returns:
        One row per model; none where they were not measured.
    """
    columns = (
        Column("q", "power of Adam's preconditioner; the first is the plain gradient, which is used"),
        Column("assumes that", "what the power takes for granted of the curvature"),
        Column("noise scale", "samples of a batch with as much noise as signal, with its 95 % interval"),
        Column("K*", "the best number of micro-batches"),
        Column(f"time at K = {report.asked}", "to the same loss, relative to K = 1"),
    )
    rows = tuple(
        (
            str(each.power),
            ASSUMED[each.power],
            range_text(each.noise, each.low, each.high),
            NOT_KNOWN if each.best is None else f"{each.best:.3g}",
            NOT_KNOWN if time is None else f"{time:.3g}",
        )
        for each, time in zip(report.models, report.of_asked.by_model, strict=True)
    )
    return Table("By what is assumed of Adam's preconditioner", columns, rows)


def title_of(report: Advice) -> str:
    """An advice in one line: the micro-batch, the noise scale and the times."""
    ranks = f" on each of {report.ranks} ranks" if report.ranks > 1 else ""
    recipe = "" if report.recipe is None else f"{report.recipe}: "
    reduce = f", all-reduce {seconds_text(report.all_reduce_seconds)}" if report.all_reduce_seconds else ""
    each = f"{seconds_text(report.microbatch_seconds)} each"
    return (
        f"{recipe}micro-batches of {report.microbatch_size}{ranks}, {each}; update "
        f"{seconds_text(report.update_seconds)}{reduce}; noise scale {noise_text(report)}{_assumed(report)}"
    )


def _assumed(report: Advice) -> str:
    """The condition of a noise scale that was measured."""
    return f", {ASSUMPTION}" if report.noise_from.startswith("measured") else ""


def range_said(report: Advice) -> str:
    """Return a description of the range."""
    adam = ", and Adam's models" if report.band is not None else ""
    return f"the noise scale's interval, a factor of {report.systematic:g} beyond it{adam}"


def noise_text(report: Advice) -> str:
    """The noise scale with its interval.

    Args:
        report: of an advice.

    Returns:
        Text, in samples.
    """
    return range_text(report.noise, report.noise_low, report.noise_high)


def range_text(value: float | None, low: float, high: float) -> str:
    """A noise scale with its interval, where there is one.

    Examples:
        >>> range_text(100.0, 80.0, 130.0), range_text(None, 40.0, float("inf")), range_text(9.0, 9.0, 9.0)
        ('100 (80 to 130)', 'not determined, at least 40', '9')
    """
    least, most = number_text(low), number_text(high)
    if value is None:
        return f"not determined, at least {least}" if low else "not determined"
    return number_text(value) if least == most else f"{number_text(value)} ({least} to {most})"


def findings(report: Advice) -> list[str]:
    """Return the findings of an advice in words: the verdict first.

    Args:
        report: of an advice, whole or partial.

    Returns:
        Sentences.
    """
    sentences = [
        verdict_text(report),
        _best(report),
        *report.uncertainty[:1],
        *_models(report),
        _alternative(report),
        *_sum_of_gradients(report),
        *_peak(report),
        *_one_piece(report),
        *_exceptions(report),
        COUPLED,
    ]
    return [*sentences, *report.uncertainty[1:], *report.notes]


def answer(report: Advice) -> list[str]:
    """The verdict with its reason, the best number of micro-batches, how sure that is, and what no table has.

    Args:
        report: of an advice, whole or partial.

    Returns:
        Sentences.
    """
    todo = [] if report.alternative is not None else [_alternative(report)]
    return [verdict_text(report), _best(report), *report.uncertainty[:1], *todo]


def caveats(report: Advice, most: int = 3) -> list[str]:
    """Limits of the verdict: problems of this run first, general caveats last.

    Args:
        report: of an advice, whole or partial.
        most: maximum number; `findings` returns all.

    Returns:
        Sentences.
    """
    fits = report.peak is None or report.limit is None or report.peak <= report.limit.bytes
    said = [
        *report.notes,
        *([] if fits else _peak(report)),
        *_one_piece(report),
        *_models(report),
        *_exceptions(report),
        COUPLED,
        *report.uncertainty[1:],  # how sure it is stands with the verdict
    ]
    return said[:most]


def _exceptions(report: Advice) -> list[str]:
    if report.verdict == "helps":
        return []
    return [f"This does not apply where {'; or '.join(report.exceptions)}."]


def verdict_text(report: Advice) -> str:
    """The verdict with its reason.

    Args:
        report: of an advice.

    Returns:
        A few sentences.
    """
    said = {
        "helps": f"Accumulating {report.asked} micro-batches helps.",
        "wasteful": f"Accumulating {report.asked} micro-batches is wasteful.",
        "undetermined": f"Whether accumulating {report.asked} micro-batches pays is undetermined.",
    }
    return f"{said[report.verdict]} {report.reason}"


def _models(report: Advice) -> list[str]:
    if not report.models:
        adam = report.alternative is not None and report.alternative.optimizer != "sgd"
        return [NOT_MEASURED.format(report.systematic)] if adam else []
    unknown = [f"q = {each.power}" for each in report.models if each.noise is None]
    left = f" ({' and '.join(unknown)}: not determined)" if unknown else ""
    said = f"no model of Adam is better than a factor of about {report.systematic:g}"
    band, times = report.band, report.of_asked.band
    if band is None or times is None:
        return [f"How much hangs on what is assumed of Adam's preconditioner is not known{left}; {said}."]
    return [
        f"By what is assumed of Adam's preconditioner the noise scale is {number_text(band[0])} to "
        f"{number_text(band[1])}, and the time {times[0]:.2f} to {times[1]:.2f}{left}; q = 0 is used, and "
        f"{said}."
    ]


def _best(report: Advice) -> str:
    between = f"between {number_text(report.best_low)} and {number_text(report.best_high)}"
    if report.best is None:
        return f"The best number of micro-batches is {between}."
    if report.best <= 1:
        return f"None pays at the estimate: K* = {report.best:.2g} ({between})."
    return f"Least time at K* = {report.best:.3g} ({between})."


def _alternative(report: Advice) -> str:
    if report.alternative is None:
        return (
            "Without accumulation beta2 becomes its K-th root, which keeps its half-life in samples; rate "
            "and weight decay are scaled by superbatch.tuning.scaling (give --lr for numbers)."
        )
    return f'Settings without accumulation, by the rule "{report.alternative.rule}": {report.alternative.why}'


def _sum_of_gradients(report: Advice) -> list[str]:
    count = report.accumulator_bytes
    if count is None:
        return []
    return [
        f"Accumulation keeps a sum of gradients, {binary_text(count)} (4 bytes a parameter), that an "
        "update fused into the backward would not need; a loop that keeps .grad in float32 has it anyway."
    ]


def _peak(report: Advice) -> list[str]:
    if report.peak is None or report.limit is None:
        return []
    fits = "fits in" if report.peak <= report.limit.bytes else "does not fit in"
    return [
        f"A micro-batch of {report.microbatch_size} takes {binary_text(report.peak)} and {fits} the "
        f"{binary_text(report.limit.bytes)} that there are ({report.limit.by})."
    ]


def _one_piece(report: Advice) -> list[str]:
    if report.whole is None or report.limit is None or report.whole > report.limit.bytes:
        return []
    return [
        f"{report.asked} x {report.microbatch_size} samples would fit in one piece "
        f"({binary_text(report.whole)}): the same update without accumulation, and mostly faster "
        "(`superbatch fit` measures it)."
    ]


def _row(each: Steps, report: Advice) -> tuple[str, ...]:
    alone = each.accumulation_steps == 1
    mark = " <" if each.accumulation_steps == report.asked else ""
    return (
        f"{each.accumulation_steps}{mark}",
        str(each.batch),
        NOT_KNOWN if each.time is None else f"{each.time:.3g}",
        "" if alone else f"{each.low:.3g} to {each.high:.3g}",
        NOT_KNOWN if each.samples is None else f"{each.samples:.3g}",
    )
