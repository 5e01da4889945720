"""Tick labels of logarithmic axes, also for ranges of less than a decade."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axis import Axis, XAxis
from matplotlib.ticker import Locator, MaxNLocator, NullLocator

MOST = 8  # maximum number of powers on an axis

Text = Callable[[float], str]

# Multiples of each power of ten, the coarsest first.
_STEPS = ((1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 2.0, 3.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))


def ticks_between(low: float, high: float, *, base: int = 10) -> list[float]:
    """Round numbers in a range: powers of the base (2 or 10), simple multiples of them, or equal steps.

    Three to about eight; none if the range is empty or not positive.

    Examples:
        >>> ticks_between(1.1, 1.8)
        [1.2, 1.4, 1.6, 1.8]
        >>> ticks_between(0.3, 4), ticks_between(1e-6, 10)[::4]
        ([0.3, 0.5, 1.0, 2.0, 3.0], [1e-06, 0.01])
        >>> ticks_between(10, 100, base=2), ticks_between(1.2, 2.2, base=2)
        ([16.0, 32.0, 64.0], [1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    """
    if not 0 < low < high < math.inf:
        return []
    fine = (_multiples(low, high, steps) for steps in _STEPS if base == 10)
    candidates = (_powers(low, high, base), *fine)
    fewest = 4 if base == 10 else 3
    return next((each for each in candidates if len(each) >= fewest), _equal_steps(low, high, base))


def _powers(low: float, high: float, base: int) -> list[float]:
    """Powers of the base; of its square, cube, ... if those are too many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    stride = max(1, -(-(last - first + 1) // MOST))
    return [float(base) ** power for power in range(first, last + 1) if power % stride == 0]


def _multiples(low: float, high: float, steps: Sequence[float]) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = (float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps)
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def _equal_steps(low: float, high: float, base: int) -> list[float]:
    # Bytes are in steps of a KiB, MiB, ...
    unit = 1024.0 ** max(0, math.floor(math.log(high, 1024))) if base == 2 else 1.0
    found = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / unit, high / unit)
    values = (float(f"{value * unit:.10g}") for value in found)
    return [value for value in values if low <= value <= high]


def readable(axis: Axis, text: Text | None = None, *, base: int = 10) -> None:
    """Label a logarithmic axis with round numbers over any range.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().add_subplot()
        >>> axes.set_yscale("log")
        >>> _ = axes.set_ylim(1.1, 1.9)
        >>> readable(axes.yaxis)
        >>> [label.get_text() for label in axes.get_yticklabels()]
        ['1.2', '1.4', '1.6', '1.8']
    """
    say = text or tick_text
    axis.set_major_locator(_RoundNumbers(base, say))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: say(value))


def logarithmic(axis: Axis, text: Text | None = None, *, base: int = 10) -> None:
    """Make an axis logarithmic, with readable labels."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)  # pyright: ignore[reportAttributeAccessIssue]
    readable(axis, text, base=base)


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


def _width(label: str) -> float:
    """Of a label with the space beside it, in sizes of a letter; marks of a formula are not drawn."""
    power = label.partition("^{")[2].partition("}")[0]
    drawn = label.replace("\\times", "x").replace(f"^{{{power}}}", "").replace("$", "")
    return 0.65 * len(drawn) + 0.45 * len(power) + 0.8


class _RoundNumbers(Locator):
    def __init__(self, base: int, say: Text) -> None:
        self.base, self.say = base, say

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        found = self.tick_values(*sorted(self.axis.get_view_interval()))
        if not isinstance(self.axis, XAxis):
            return found
        # Labels of an x axis stand side by side: only as many as its length has room for.
        room = 3 * self.axis.get_tick_space()  # matplotlib counts on three times the size of a letter
        return found[:: max(1, math.ceil(sum(_width(self.say(each)) for each in found) / room))]

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        return ticks_between(vmin, vmax, base=self.base)
