"""Tables of a study: the arms, and the tests between them."""

from __future__ import annotations

from collections.abc import Iterable

from .study import Quantity, Study, StudyArm, StudyTest
from .table import Column, Table, equivalence_text, float_text, mean_text, signed_text


def study_table(report: Study) -> Table:
    """Return the main table of a study: one row per arm, one column per quantity."""
    columns = (Column("arm", "the compared method"), *(Column(q.name, q.meaning) for q in report.quantities))
    rows = tuple((arm.name, *(_cell(arm, each) for each in report.quantities)) for arm in report.arms)
    return Table(title_of(report), columns, rows)


def equivalence_table(tests: Iterable[StudyTest]) -> Table:
    """Return the table of the tests of equivalence: one row per test."""
    columns = (
        Column("equivalence (TOST)", "the two arms; paired if their runs share seeds"),
        Column("of", "the compared quantity"),
        Column("difference", "of the means, or the ratio of the geometric means (x)"),
        Column("90 % interval", "the arms are equivalent if it lies inside the margin"),
        Column("margin", "the largest difference that does not matter"),
        Column("equivalent", "two one-sided tests; yes for p below 0.05"),
    )
    return Table("Tests", columns, tuple(map(_test, tests)))


def title_of(report: Study) -> str:
    """Return the study, the recipe, the seeds and the setting in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {len(report.seeds)} seeds" if report.partial else f"{runs} seeds"
    return f"{report.name}: {report.recipe}, {count}" + "".join(
        f", {name} {value}" for name, value in report.setting.items()
    )


def _cell(arm: StudyArm, quantity: Quantity) -> str:
    return mean_text(arm.mean(quantity.name), arm.sd(quantity.name), quantity.form)


def _test(test: StudyTest) -> tuple[str, ...]:
    low, middle, high = (
        "x " + float_text(value, ".3g") if test.ratio else signed_text(value, 3)
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
