"""Tables and sentences of a fit."""

from __future__ import annotations

from superbatch.results.advice import number_text
from superbatch.results.memory import binary_text

from .fitting import EXTRAPOLATED_TO, Fitting, Size
from .table import Table, or_dash, seconds_text, table_of

_KEPT_WHOLE = (
    "Do not split the batch: its samples are coupled, so micro-batches would not give its gradient "
    "(`superbatch verify` names the causes)."
)


def tables(report: Fitting) -> list[Table]:
    """Return the tables of a fit; those that do not apply have no rows."""
    return [sizes_table(report), reach_table(report), savings_table(report)]


def sizes_table(report: Fitting) -> Table:
    """Return the main table of a fit: one row per size of micro-batch."""
    batch = f"batch of {report.batch_size}"
    return table_of(
        title_of(report),
        report.sizes,
        (
            "micro-batch",
            "samples; the largest that fits and the fastest are marked",
            lambda size: _marked(size, report),
        ),
        (batch, f"micro-batches that make the {batch}", lambda size: f"{size.microbatches} x {size.samples}"),
        (
            "predicted",
            "peak memory beyond the model and the batch",
            lambda size: or_dash(size.predicted, binary_text),
        ),
        ("measured", "peak memory of real micro-batches", lambda size: or_dash(size.measured, binary_text)),
        ("per sample", "forward and backward", lambda size: seconds_text(size.seconds)),
        ("per update", f"of the {batch}", lambda size: seconds_text(size.update_seconds)),
    )


def title_of(report: Fitting) -> str:
    """Return the recipe, the batch, the optimizer, the dtype and the device of a fit in one line."""
    many = "s" if report.threads > 1 else ""
    threads = f", {report.threads} thread{many}" if report.device == "cpu" else ""
    return (
        f"{report.recipe}: a batch of {report.batch_size} samples, {report.optimizer}, {report.dtype}, "
        f"{report.device}{threads}"
    )


def reach_table(report: Fitting) -> Table:
    """Return effective batches with their memory, in micro-batches and in one piece, and their time."""
    peak = None if report.fastest is None else report.of(report.fastest).peak

    def whole(need: int) -> str:
        return binary_text(need) + ("" if need <= report.usable else " > limit")

    return table_of(
        "Effective batches within reach",
        report.reach,
        ("effective batch", "samples of one update", lambda each: str(each.batch)),
        ("micro-batches", "and the samples of one", lambda each: f"{each.microbatches} x {each.samples}"),
        ("peak memory", "with these micro-batches", lambda _: or_dash(peak, binary_text)),
        ("in one piece", "peak of the unsplit batch, by the curve", lambda each: or_dash(each.whole, whole)),
        ("per update", "time", lambda each: seconds_text(each.seconds)),
    )


def savings_table(report: Fitting) -> Table:
    """Return the ways to lower the peak, the largest saving first."""
    samples = report.fastest or max((size.samples for size in report.sizes if size.fits), default=0)
    return table_of(
        f"Ways to lower the peak of micro-batches of {samples}",
        report.savings,
        ("saves about", "each by itself", lambda each: binary_text(each.bytes)),
        ("what", "way to lower the peak", lambda each: each.name),
        ("how", "in code", lambda each: each.how),
    )


def findings(report: Fitting) -> list[str]:
    """Return the findings of a fit as sentences: the recommended size first."""
    sentences = [*([_recommended(report)] if report.largest else []), _largest(report)]
    if phases := sorted({size.probe.phase for size in report.sizes if size.probe is not None}):
        sentences.append(f"The peak occurs in the {' or '.join(phases)}.")
    if errors := [abs(size.error) for size in report.sizes if size.error is not None]:
        sentences.append(
            f"Peaks predicted from {report.how}, without computing, are within {100 * max(errors):.1f} % of "
            "the measured ones."
        )
    return [*sentences, *report.notes]


def _recommended(report: Fitting) -> str:
    if report.refused is not None:
        return _KEPT_WHOLE
    timed = {size.samples: size.seconds for size in report.sizes if size.seconds is not None}
    if report.fastest is None or len(timed) < 2:
        return "The fastest size is not known: fewer than two were timed."
    fastest, top = report.fastest, max(timed)
    if any(size.fits and size.samples > top for size in report.sizes):
        # No recommendation: a larger micro-batch is often faster.
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
    more = " or more" if report.beyond >= EXTRAPOLATED_TO * report.batch_size else ""
    beyond = f"about {number_text(report.beyond)} samples{more}"
    return f"The whole batch fits in {report.limit}; so would {beyond}."


def _marked(size: Size, report: Fitting) -> str:
    largest = max((each.samples for each in report.sizes if each.fits), default=None)
    if not size.fits:
        return f"{size.samples} too large"
    if size.samples == report.fastest and report.refused is None:
        return f"{size.samples} fastest"
    return f"{size.samples} largest" if size.samples == largest else str(size.samples)
