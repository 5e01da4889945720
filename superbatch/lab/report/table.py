"""Tables of text for the terminal and the page, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from superbatch.results.advice import number_text
from superbatch.results.memory import aligned, binary_text

from .comparison import Arm, Comparison, Equivalence

T = TypeVar("T")

DASH = "–"  # for a value that is not known or was not measured
ROUNDING = 1e-12  # a smaller difference of two means comes from the order of summation


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading and the meaning of its cells."""

    heading: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """A table of text; the first cell of a row is its name.

    Examples:
        >>> table = Table("Primes", (Column("prime", "a number"),), (("2",), ("3",)))
        >>> len(table.rows)
        2
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(title: str, items: Iterable[T], *columns: tuple[str, str, Callable[[T], str]]) -> Table:
    """Return a table with one row per item; a column is (heading, meaning, function from item to cell).

    Examples:
        >>> table_of("Primes", [2, 3], ("prime", "a number", str)).rows
        (('2',), ('3',))
    """
    rows = tuple(tuple(cell(item) for _, _, cell in columns) for item in items)
    return Table(title, tuple(Column(heading, meaning) for heading, meaning, _ in columns), rows)


def comparison_table(report: Comparison) -> Table:
    """Return the table of a comparison: one row per arm."""
    within = f"inside {margin_text(report)}: two one-sided tests (TOST) on pairs of runs; p below 0.05: yes"
    metric = f"{report.metric}, {report.unit}" if report.unit else report.metric
    form = ".2f" if report.unit == "%" else ".4f"
    apart = "|w - w_real| / |w_real| at the end, same seed: median (max) of runs"
    return table_of(
        title_of(report),
        report.arms,
        (
            "split",
            "micro-batches x samples; first the real batch",
            lambda arm: marked_name(arm.name, arm.claim),
        ),
        (metric, "mean ± sd over the runs, held-out data", lambda arm: mean_text(arm.mean, arm.sd, form)),
        ("updates", "of the optimizer in each run", lambda arm: str(arm.updates)),
        ("time, s", "mean of the runs, updates only", lambda arm: or_dash(arm.seconds, "{:.2f}".format)),
        (
            "peak memory",
            "of an update, not counting weights and batch",
            lambda arm: or_dash(arm.peak_bytes, binary_text),
        ),
        ("weights differ by", apart, _difference),
        (f"equivalent within ±{report.margin:g}", within, lambda arm: equivalence_text(arm.paired)),
    )


def title_of(report: Comparison) -> str:
    """Return the recipe, the runs and the setting of a comparison in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {len(report.seeds)} runs" if report.partial else f"{runs} runs"
    return (
        f"{report.trained}: {count} of {report.updates} updates with {report.batch_size} samples, "
        f"{report.optimizer} lr {report.learning_rate:g}, {report.dtype}"
    )


def plain(table: Table) -> str:
    """Return a table as aligned plain text of any width, for files, pipes and logs.

    Examples:
        >>> print(plain(Table("Primes", (Column("n", ""), Column("prime", "")), (("1", "2"), ("10", "29")))))
        Primes
        n   prime
        --  -----
        1   2
        10  29
    """
    headings = tuple(column.heading for column in table.columns)
    return "\n".join([table.title, *aligned([headings, *table.rows], underlined=True)])


def or_dash(value: T | None, text: Callable[[T], str]) -> str:
    """Return a value as text; a dash for None."""
    return DASH if value is None else text(value)


def marked_name(arm: str, claim: str) -> str:
    """Return the name of an arm, marked if it is the real batch or known not to be exact."""
    return arm + {"real": " (real batch)", "inexact": " (not exact)"}.get(claim, "")


def margin_text(report: Comparison) -> str:
    """Return the margin of the equivalence tests with its unit: percentage points for percentages."""
    unit = "percentage points" if report.unit == "%" else report.unit
    return f"±{report.margin:g} {unit}".rstrip()


def seconds_text(seconds: float | None) -> str:
    """Return a time with three digits; a dash for None.

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
    """Return an interval of batch sizes; without an upper end it is "LOW or more".

    Examples:
        >>> interval_text(10.0, 40.0), interval_text(10.0, math.inf), interval_text(0.0, math.inf)
        ('10 to 40', '10 or more', '–')
    """
    if math.isinf(high):
        return f"{number_text(low)} or more" if low > 0 else DASH
    return f"{number_text(low)} to {number_text(high)}"


def range_text(value: float | None, low: float, high: float) -> str:
    """Return a noise scale and its interval; without a value, its lower bound.

    Examples:
        >>> range_text(100.0, 80.0, 130.0), range_text(None, 40.0, math.inf), range_text(9.0, 9.0, 9.0)
        ('100 (80 to 130)', 'not determined, at least 40', '9')
    """
    if value is None:
        return f"not determined, at least {number_text(low)}" if low else "not determined"
    return number_text(value) if low == high else f"{number_text(value)} ({interval_text(low, high)})"


def mean_text(mean: float | None, sd: float | None, form: str) -> str:
    """Return a mean and its standard deviation, unless that is None, zero or not finite.

    Examples:
        >>> mean_text(95.38, 0.358, ".2f"), mean_text(2.5, None, ".4f"), mean_text(None, None, ".2f")
        ('95.38 ± 0.36', '2.5000', '–')
    """
    if mean is None:
        return DASH
    text = float_text(mean, form)
    return text if not sd or not math.isfinite(sd) else f"{text} ± {float_text(sd, form)}"


def difference_text(difference: float | None) -> str:
    """Return a relative difference with two digits; a dash for None.

    Examples:
        >>> difference_text(2.08e-07), difference_text(0.0), difference_text(0.055), difference_text(None)
        ('2.1e-07', '0', '5.5 %', '–')
    """
    if difference is None:
        return DASH
    if difference == 0:
        return "0"
    return f"{100 * difference:.2g} %" if 0.001 <= difference < 10 else f"{difference:.1e}"


def float_text(value: float, form: str = ".4g") -> str:
    """Return a number as text, with words for NaN and infinity.

    Examples:
        >>> float_text(2500.0, ",.0f"), float_text(math.nan), float_text(math.inf), float_text(-0.001, ".2f")
        ('2,500', 'not a number', 'infinite', '0.00')
    """
    if math.isfinite(value):
        text = format(value, form)
        # "-0.00" would look like a loss.
        return text if any(digit in text for digit in "123456789") else text.lstrip("-")
    return "not a number" if math.isnan(value) else "infinite"


def signed_text(difference: float, digits: int = 2) -> str:
    """Return a difference with its sign; a difference that only rounding makes is "0".

    Examples:
        >>> signed_text(0.0432), signed_text(-1.0), signed_text(-7e-15), signed_text(math.nan)
        ('+0.043', '-1', '0', 'not a number')
    """
    return "0" if abs(difference) < ROUNDING else float_text(difference, f"+.{digits}g")


def equivalence_text(test: Equivalence | None) -> str:
    """Return the verdict of an equivalence test and its p-value; a dash for None."""
    if test is None:
        return DASH
    if test.identical:
        return f"{test.verdict}, identical"
    return f"{test.verdict}, {p_text(test.p_value)}"


def p_text(value: float) -> str:
    """Return a p-value with three decimals."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _difference(arm: Arm) -> str:
    largest = difference_text(arm.weight_difference)
    median = difference_text(arm.median_difference)
    return largest if median == largest else f"{median} (max {largest})"
