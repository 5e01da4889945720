"""A study as tables of text: the arms, and the tests between them."""

from __future__ import annotations

import math

from .study import Quantity, Study, StudyArm, StudyTest
from .table import DASH, ROUNDING, Column, Table, equivalence_text


def study_table(report: Study) -> Table:
    """The table of a study: one row per arm, one column per quantity."""
    columns = (Column("arm", "what was compared"), *(Column(q.name, q.meaning) for q in report.quantities))
    rows = tuple((arm.name, *(_cell(arm, each) for each in report.quantities)) for arm in report.arms)
    return Table(title_of(report), columns, rows)


def equivalence_table(report: Study) -> Table:
    """The tests of a study: differences or ratios, their intervals, margins and verdicts."""
    columns = (
        Column("equivalence (TOST)", "the two arms; paired where their runs share seeds"),
        Column("of", "the quantity that is compared"),
        Column("difference", "of the means, or the ratio of the geometric means (x)"),
        Column("90 % interval", "equivalent means: it lies inside the margin"),
        Column("margin", "the largest difference that does not matter"),
        Column("equivalent", "two one-sided tests; p below 0.05 says yes"),
    )
    return Table("Tests", columns, tuple(map(_test, report.tests)))


def title_of(report: Study) -> str:
    """A study in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {len(report.seeds)} seeds" if report.partial else f"{runs} seeds"
    return f"{report.name}: {report.recipe}, {count}" + "".join(
        f", {name} {value}" for name, value in report.setting.items()
    )


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


def signed(difference: float) -> str:
    """A difference with its sign, to two digits; zero where it is rounding.

    Examples:
        >>> signed(0.0432), signed(-1.0), signed(7e-15)
        ('+0.043', '-1', '0')
    """
    return "0" if abs(difference) < 1e-9 else f"{difference:+.2g}"


def with_sign(difference: float) -> str:
    """A difference with its sign, to three digits; zero, or what rounding makes of ties, has none.

    Examples:
        >>> with_sign(0.25), with_sign(-7e-15), with_sign(float("nan"))
        ('+0.25', '0', 'not a number')
    """
    return "0" if abs(difference) < ROUNDING else number(difference, "+.3g")


def _cell(arm: StudyArm, quantity: Quantity) -> str:
    mean, sd = arm.mean(quantity.name), arm.sd(quantity.name)
    if mean is None:
        return DASH
    text = number(mean, quantity.form)
    return text if not sd or not math.isfinite(sd) else f"{text} ± {number(sd, quantity.form)}"


def _test(test: StudyTest) -> tuple[str, ...]:
    low, middle, high = (
        "x " + number(value, ".3g") if test.ratio else with_sign(value)
        for value in (test.low, test.difference, test.high)
    )
    margin = f"x {1 / test.margin:.3g} … x {test.margin:.3g}" if test.ratio else f"±{test.margin:g}"
    return (
        f"{test.first} – {test.second}" if not test.ratio else f"{test.first} / {test.second}",
        test.quantity,
        middle,
        f"{low} … {high}",
        margin,
        equivalence_text(test.result),
    )
