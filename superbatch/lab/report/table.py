"""Reports as tables of text: one place says what the columns are, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from superbatch.results.advice import number_text
from superbatch.results.memory import binary_text

from .comparison import Arm, Comparison, Equivalence

ROUNDING = 1e-12
"""Differences of means below this are those of ties: sums in another order."""

T = TypeVar("T")

DASH = "–"  # what is not known, or was not measured


@dataclass(frozen=True)
class Column:
    """A column: its heading, and what its numbers mean."""

    heading: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column names the row.

    Examples:
        >>> table = Table("Primes", (Column("prime", "a number"),), (("2",), ("3",)))
        >>> len(table.rows)
        2
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(title: str, items: Iterable[T], *columns: tuple[str, str, Callable[[T], str]]) -> Table:
    """A table with one row per item; a column is its heading, its meaning, and the text of its cell.

    Examples:
        >>> table_of("Primes", [2, 3], ("prime", "a number", str)).rows
        (('2',), ('3',))
    """
    rows = tuple(tuple(cell(item) for _, _, cell in columns) for item in items)
    return Table(title, tuple(Column(heading, meaning) for heading, meaning, _ in columns), rows)


def comparison_table(report: Comparison) -> Table:
    """The table of a comparison: one row per arm."""
    within = f"inside {margin_text(report)}: two one-sided tests (TOST) on pairs of runs; p below 0.05: yes"
    metric = f"{report.metric}, {report.unit}" if report.unit else report.metric
    form = ".2f" if report.unit == "%" else ".4f"
    apart = "|w - w_real| / |w_real| at the end, same seed: median (max) of runs"
    return table_of(
        title_of(report),
        report.arms,
        ("split", "micro-batches x samples; first the real batch", lambda arm: named(arm.name, arm.claim)),
        (metric, "mean ± sd over the runs, held-out data", lambda arm: mean_text(arm.mean, arm.sd, form)),
        ("updates", "of the optimizer in each run", lambda arm: str(arm.updates)),
        ("time, s", "of a run's updates alone, the mean", lambda arm: shown(arm.seconds, "{:.2f}".format)),
        ("peak memory", "of an update, beside weights and batch", lambda arm: bytes_text(arm.peak_bytes)),
        ("weights differ by", apart, _apart),
        (f"equivalent within ±{report.margin:g}", within, lambda arm: equivalence_text(arm.paired)),
    )


def title_of(report: Comparison) -> str:
    """A comparison in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {len(report.seeds)} runs" if report.partial else f"{runs} runs"
    return (
        f"{report.trained}: {count} of {report.updates} updates with {report.batch_size} samples, "
        f"{report.optimizer} lr {report.learning_rate:g}, {report.dtype}"
    )


def plain(table: Table) -> str:
    """A table as aligned plain text, whatever its width: for files, pipes and logs.

    Examples:
        >>> print(plain(Table("Primes", (Column("n", ""), Column("prime", "")), (("1", "2"), ("10", "29")))))
        Primes
        n   prime
        --  -----
        1   2
        10  29
    """
    headings = tuple(column.heading for column in table.columns)
    widths = [max(map(len, cells)) for cells in zip(headings, *table.rows, strict=True)]
    lines = [headings, tuple("-" * width for width in widths), *table.rows]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([table.title, *(text.rstrip() for text in texts)])


def shown(value: T | None, text: Callable[[T], str]) -> str:
    """A value as text; a dash for None."""
    return DASH if value is None else text(value)


def named(arm: str, claim: str) -> str:
    """The name of an arm, with what it says of itself where a reader must know."""
    return arm + {"real": " (real batch)", "inexact": " (not exact)"}.get(claim, "")


def bytes_text(count: int | None) -> str:
    """A number of bytes in KiB, MiB, ...; a dash for None."""
    return shown(count, binary_text)


def margin_text(report: Comparison) -> str:
    """The margin of the equivalence tests with its unit: differences of percentages are percentage points."""
    unit = "percentage points" if report.unit == "%" else report.unit
    return f"±{report.margin:g} {unit}".rstrip()


def seconds_text(seconds: float | None) -> str:
    """A time, to three digits; a dash for None.

    Examples:
        >>> seconds_text(1.234e-5), seconds_text(0.0456), seconds_text(7.8), seconds_text(4000)
        ('12.3 µs', '45.6 ms', '7.80 s', '67 min')
    """
    if seconds is None:
        return DASH
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    value = seconds * scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def interval_text(low: float, high: float) -> str:
    """An interval of batch sizes, that may have no upper end.

    Examples:
        >>> interval_text(10.0, 40.0), interval_text(10.0, math.inf), interval_text(0.0, math.inf)
        ('10 to 40', '10 or more', '–')
    """
    if math.isinf(high):
        return f"{number_text(low)} or more" if low > 0 else DASH
    return f"{number_text(low)} to {number_text(high)}"


def range_text(value: float | None, low: float, high: float) -> str:
    """A noise scale with its interval, where there is one.

    Examples:
        >>> range_text(100.0, 80.0, 130.0), range_text(None, 40.0, math.inf), range_text(9.0, 9.0, 9.0)
        ('100 (80 to 130)', 'not determined, at least 40', '9')
    """
    if value is None:
        return f"not determined, at least {number_text(low)}" if low else "not determined"
    return number_text(value) if low == high else f"{number_text(value)} ({interval_text(low, high)})"


def mean_text(mean: float | None, sd: float | None, form: str) -> str:
    """A mean, and its standard deviation where there is one.

    Examples:
        >>> mean_text(95.38, 0.358, ".2f"), mean_text(2.5, None, ".4f"), mean_text(None, None, ".2f")
        ('95.38 ± 0.36', '2.5000', '–')
    """
    if mean is None:
        return DASH
    text = number(mean, form)
    return text if not sd or not math.isfinite(sd) else f"{text} ± {number(sd, form)}"


def difference_text(difference: float | None) -> str:
    """A relative difference, to two digits.

    Examples:
        >>> difference_text(2.08e-07), difference_text(0.0), difference_text(0.055), difference_text(None)
        ('2.1e-07', '0', '5.5 %', '–')
    """
    if difference is None:
        return DASH
    if difference == 0:
        return "0"
    return f"{100 * difference:.2g} %" if 0.001 <= difference < 10 else f"{difference:.1e}"


def number(value: float, form: str = ".4g") -> str:
    """A number as people read it.

    Examples:
        >>> number(2500.0, ",.0f"), number(float("nan")), number(float("inf")), number(-0.001, ".2f")
        ('2,500', 'not a number', 'infinite', '0.00')
    """
    if math.isfinite(value):
        text = format(value, form)
        # What rounds to zero has no sign: "-0.00" reads as a loss.
        return text if any(digit in text for digit in "123456789") else text.lstrip("-")
    return "not a number" if math.isnan(value) else "infinite"


def signed(difference: float, digits: int = 2) -> str:
    """A difference with its sign; zero, or what rounding makes of ties, has none.

    Examples:
        >>> signed(0.0432), signed(-1.0), signed(-7e-15), signed(float("nan"))
        ('+0.043', '-1', '0', 'not a number')
    """
    return "0" if abs(difference) < ROUNDING else number(difference, f"+.{digits}g")


def equivalence_text(test: Equivalence | None) -> str:
    """The verdict of an equivalence test and its p-value."""
    if test is None:
        return DASH
    if test.identical:
        return f"{test.verdict}, identical"
    return f"{test.verdict}, {p_text(test.p_value)}"


def p_text(value: float) -> str:
    """A p-value, to three decimals."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _apart(arm: Arm) -> str:
    largest = difference_text(arm.weight_difference)
    median = difference_text(arm.median_difference)
    return largest if median == largest else f"{median} (max {largest})"
