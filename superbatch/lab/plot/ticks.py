"""Tick labels of logarithmic axes, also for ranges of less than a decade."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from matplotlib.axis import Axis, XAxis
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

MOST = 8  # largest number of powers on an axis

Text = Callable[[float], str]

# Multiples of each power, the coarsest first.
_STEPS = {
    2: ((1.0,),),
    10: ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 2.0, 3.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)),
}


def ticks_between(low: float, high: float, *, base: int = 10) -> list[float]:
    """Return round numbers in a range: powers of the base (2 or 10), multiples of them, or equal steps.

    There are three to eleven, or none if the range is empty or not positive.

    Examples:
        >>> ticks_between(1.1, 1.5)
        [1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5]
        >>> ticks_between(0.3, 4), ticks_between(1e-6, 10)[::4]
        ([0.3, 0.5, 1.0, 2.0, 3.0], [1e-06, 0.01])
        >>> ticks_between(10, 100, base=2), ticks_between(1.2, 2.2, base=2)
        ([16.0, 32.0, 64.0], [1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    """
    if not 0 < low < high < math.inf:
        return []
    # matplotlib's own ticks are powers only, or multiples whose labels overlap.
    powers = (LogLocator(base, steps, numticks=MOST).tick_values(low, high) for steps in _STEPS[base])
    # Bytes have equal steps in KiB, MiB, ...
    unit = 1024.0 ** max(0, math.floor(math.log(high, 1024))) if base == 2 else 1.0
    equal = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / unit, high / unit)
    candidates = [_inside(found, low, high) for found in (*powers, [unit * each for each in equal])]
    fewest = 4 if base == 10 else 3
    return next((each for each in candidates if len(each) >= fewest), candidates[-1])


def _inside(values: Iterable[float], low: float, high: float) -> list[float]:
    rounded = (float(f"{value:.12g}") for value in values)
    return [value for value in rounded if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def logarithmic(axis: Axis, text: Text | None = None, *, base: int = 10) -> None:
    """Make an axis logarithmic, with round numbers as labels over any range.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().add_subplot()
        >>> logarithmic(axes.yaxis)
        >>> _ = axes.set_ylim(0.3, 4)
        >>> [label.get_text() for label in axes.get_yticklabels()]
        ['0.3', '0.5', '1', '2', '3']
    """
    say = text or tick_text
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)  # pyright: ignore[reportAttributeAccessIssue]
    axis.set_major_locator(_RoundNumbers(base))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: say(value))


def tick_text(value: float) -> str:
    r"""Format a number on an axis, as briefly as possible.

    Examples:
        >>> tick_text(0.02), tick_text(1500.0), tick_text(1e-6), tick_text(2e-6)
        ('0.02', '1500', '$10^{-6}$', '$2\\times10^{-6}$')
    """
    if value <= 0 or 1e-3 <= value < 1e5:
        return f"{value:.10g}"
    power = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10.0**power:.3g}"
    return f"$10^{{{power}}}$" if factor == "1" else f"${factor}\\times10^{{{power}}}$"


class _RoundNumbers(Locator):
    def __init__(self, base: int) -> None:
        self.base = base

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        found = self.tick_values(*sorted(self.axis.get_view_interval()))
        if not isinstance(self.axis, XAxis):
            return found
        # Labels of an x axis stand side by side. matplotlib reserves three letters for each; a factor with a
        # power of ten needs twice that.
        step = max(1, math.ceil(2 * len(found) / self.axis.get_tick_space()))
        # Of 3e-6, 1e-5, 3e-5, 1e-4 label 1e-5 and 1e-4, not the others.
        return max((found[first::step] for first in range(step)), key=self._powers, default=found)

    def _powers(self, values: Sequence[float]) -> int:
        exponents = [math.log(value, self.base) for value in values]
        return sum(abs(each - round(each)) < 1e-9 for each in exponents)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        return ticks_between(vmin, vmax, base=self.base)
