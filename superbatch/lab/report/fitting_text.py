"""A fit in words: its tables, and sentences that say what they show."""

from __future__ import annotations

from superbatch.results.advice import number_text
from superbatch.results.memory import binary_text

from .fitting import DRAWN_ON, Fitting, Size
from .table import Column, Table, seconds_text, shown

_KEPT_WHOLE = (
    "Keep the batch whole: its samples influence each other, so superbatch does not split it "
    "(`superbatch verify` names what does it)."
)


def sizes_table(report: Fitting) -> Table:
    """The table of a fit: one row per size of micro-batch."""
    columns = (
        Column("micro-batch", "samples; the marks name the choice"),
        Column(f"batch of {report.batch_size}", f"micro-batches that make the batch of {report.batch_size}"),
        Column("predicted", "peak memory beyond the model and the batch on the host"),
        Column("measured", "the same of real micro-batches"),
        Column("per sample", "forward and backward"),
        Column("per update", f"of the batch of {report.batch_size}"),
    )
    return Table(title_of(report), columns, tuple(_row(size, report) for size in report.sizes))


def title_of(report: Fitting) -> str:
    """A fit in one line: the recipe, the batch, the optimizer, the dtype and the device."""
    many = "s" if report.threads > 1 else ""
    threads = f", {report.threads} thread{many}" if report.device == "cpu" else ""
    return (
        f"{report.recipe}: a batch of {report.batch_size} samples, {report.optimizer}, {report.dtype}, "
        f"{report.device}{threads}"
    )


def reach_table(report: Fitting) -> Table:
    """Effective batches within reach: what they take in micro-batches and in one piece."""
    columns = (
        Column("effective batch", "samples of one update"),
        Column("micro-batches", "samples of one micro-batch"),
        Column("peak memory", "with these micro-batches"),
        Column("in one piece", "what the batch would need without accumulation, by the curve"),
        Column("per update", "time"),
    )
    peak = None if report.fastest is None else report.of(report.fastest).peak

    def whole(need: int) -> str:
        return binary_text(need) + ("" if need <= report.usable else " > limit")

    rows = tuple(
        (
            str(each.batch),
            f"{each.microbatches} x {each.samples}",
            shown(peak, binary_text),
            shown(each.whole, whole),
            shown(each.seconds, seconds_text),
        )
        for each in report.reach
    )
    return Table("Effective batches within reach", columns, rows)


def savings_table(report: Fitting) -> Table:
    """Return the means that lower the peak, largest first."""
    columns = (Column("saves about", "each by itself"), Column("what", "the means"), Column("how", "in code"))
    rows = tuple((binary_text(each.bytes), each.name, each.how) for each in report.savings)
    samples = report.fastest or max((size.samples for size in report.sizes if size.fits), default=0)
    return Table(f"What would lower the peak of micro-batches of {samples}", columns, rows)


def findings(report: Fitting) -> list[str]:
    """Return the findings of a fit in words: the choice first."""
    sentences = [_choice(report), _largest(report)] if report.largest else [_largest(report)]
    if phases := sorted({size.probe.phase for size in report.sizes if size.probe is not None}):
        sentences.append(f"Most memory is in use in the {' or '.join(phases)}.")
    if errors := [abs(size.error) for size in report.sizes if size.error is not None]:
        sentences.append(
            f"Predicted from {report.how}, without computing: within {100 * max(errors):.1f} % of what was "
            "measured."
        )
    return [*sentences, *report.notes]


def _choice(report: Fitting) -> str:
    if report.refused is not None:
        return _KEPT_WHOLE
    timed = {size.samples: size.seconds for size in report.sizes if size.seconds is not None}
    if report.fastest is None or len(timed) < 2:
        return "Which size is fastest is not known: fewer than two were timed."
    fastest, top = report.fastest, max(timed)
    if any(size.fits and size.samples > top for size in report.sizes):
        # No advice: a larger micro-batch is often the faster one.
        return (
            f"Micro-batches of {fastest} are the fastest of those timed, but larger ones fit that were not "
            "timed: give more --seconds."
        )
    gain = "" if fastest == top else f", {timed[top] / timed[fastest]:.2f}x as fast as {top}"
    return f"Use micro-batches of {fastest}: the fastest of those timed{gain}."


def _largest(report: Fitting) -> str:
    if not report.largest:
        return f"Not even one sample fits in {report.limit}."
    if report.largest < report.batch_size:
        return f"At most {report.largest} samples fit in {report.limit}."
    if report.beyond is None:
        return f"The whole batch fits in {report.limit}."
    more = " or more" if report.beyond >= DRAWN_ON * report.batch_size else ""
    beyond = f"about {number_text(report.beyond)} samples{more}"
    return f"The whole batch fits in {report.limit}; so would {beyond}."


def _row(size: Size, report: Fitting) -> tuple[str, ...]:
    return (
        f"{size.samples}{_mark(size, report)}",
        f"{size.microbatches} x {size.samples}",
        shown(size.predicted, binary_text),
        shown(size.measured, binary_text),
        shown(size.seconds, seconds_text),
        shown(size.update_seconds, seconds_text),
    )


def _mark(size: Size, report: Fitting) -> str:
    if not size.fits:
        return " too large"
    if size.samples == report.fastest and report.refused is None:
        return " fastest"
    largest = max(each.samples for each in report.sizes if each.fits)
    return " largest" if size.samples == largest else ""
