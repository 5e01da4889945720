"""A fit in words: its tables, and sentences that say what they show."""

from __future__ import annotations

from itertools import groupby

from superbatch.results.memory import binary_text

from .fitting import DRAWN_ON, Fitting, Reach, Size
from .table import DASH, Column, Table, seconds_text, shown

_KEPT_WHOLE = (
    "Keep the batch whole: its samples influence each other, so superbatch does not split it "
    "(`superbatch verify` names what does it)."
)
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update"}


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
    rows = tuple(
        (
            str(each.batch),
            f"{each.microbatches} x {each.samples}",
            shown(peak, binary_text),
            _whole(each, report),
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
    choice = _choice(report) if report.refused is None else _KEPT_WHOLE
    sentences = [choice, _largest(report), *_phases(report)]
    if errors := [abs(size.error) for size in report.sizes if size.error is not None]:
        sentences.append(
            f"Predicted from {report.how}, without computing: within {100 * max(errors):.1f} % of what was "
            "measured."
        )
    return [sentence for sentence in (*sentences, *report.notes) if sentence]


def _choice(report: Fitting) -> str:
    timed = [size for size in report.sizes if size.seconds is not None]
    if report.fastest is None or len(timed) < 2:
        return "Which size is fastest is not known: fewer than two were timed." if report.largest else ""
    fastest, top = report.of(report.fastest), timed[-1]
    assert fastest.seconds is not None and top.seconds is not None
    untimed = any(size.fits and size.seconds is None for size in report.sizes)
    if any(size.fits and size.samples > top.samples for size in report.sizes):
        # No advice: a larger micro-batch is often the faster one.
        return (
            f"Micro-batches of {report.fastest} are the fastest of those timed, but larger ones fit that "
            "were not timed: give more --seconds."
        )
    which, top_is = ("of those timed", "largest timed") if untimed else ("that fit", "largest")
    said = f"Use micro-batches of {report.fastest}: the fastest {which}"
    if fastest is top:
        return f"{said}, and the {top_is}."
    return f"{said}, {top.seconds / fastest.seconds:.2f}x as fast as {top.samples}, the {top_is}."


def _largest(report: Fitting) -> str:
    limit = f"{binary_text(report.limit.bytes)} ({report.limit.by})"
    if not report.largest:
        return f"Not even one sample fits in {limit}."
    if report.largest < report.batch_size:
        return f"At most {report.largest} samples fit in {limit}."
    said = f"The whole batch fits in {limit}"
    if report.beyond is None:
        return f"{said}."
    if report.beyond >= DRAWN_ON * report.batch_size:
        return f"{said}; so would one {DRAWN_ON} times as large, and more."
    return f"{said}; so would a batch of about {_round(report.beyond)} samples."


def _phases(report: Fitting) -> list[str]:
    """Return the phases of the predicted peak: one for all sizes, or one for each range of sizes."""
    probed = [(_PHASES[size.probe.phase], size.samples) for size in report.sizes if size.probe is not None]
    ranges = [(phase, [n for _, n in sizes]) for phase, sizes in groupby(probed, key=lambda each: each[0])]
    if len(ranges) < 2:
        return [f"Most memory is in use in the {phase}." for phase, _ in ranges]
    ends = [(phase, f"{n[0]} to {n[-1]}" if n[1:] else f"{n[0]}") for phase, n in ranges]
    return [f"Most memory is in use {', '.join(f'in the {phase} with {n} samples' for phase, n in ends)}."]


def _round(count: int) -> str:
    """A count that is extrapolated: two digits, and the thousands apart."""
    power = 10 ** max(0, len(str(count)) - 2)
    return f"{count // power * power:,}".replace(",", " ")


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


def _whole(each: Reach, report: Fitting) -> str:
    if each.whole is None:
        return DASH
    return binary_text(each.whole) + ("" if each.whole <= report.usable else " > limit")
