"""Logarithmic axes of any range have round numbers as labels."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from superbatch.lab.plot.ticks import logarithmic, tick_text, ticks_between


def ranges(count: int) -> list[tuple[float, float]]:
    """Generate ranges of 5 % to 20 decades."""
    chance = random.Random(0)
    lows = [10 ** chance.uniform(-12, 6) for _ in range(count)]
    return [(low, low * 10 ** chance.choice([0.02, 0.1, 0.3, 0.7, 1, 1.5, 3, 8, 20])) for low in lows]


@pytest.mark.parametrize("base", [2, 10])
def test_every_range_has_a_few_ticks(base: int) -> None:
    for low, high in ranges(500):
        found = ticks_between(low, high, base=base)
        assert 3 <= len(found) <= 11, (low, high, found)
        assert found == sorted(found)
        assert low * (1 - 1e-6) <= found[0] < found[-1] <= high * (1 + 1e-6)
        labels = [tick_text(value) for value in found]
        assert len(set(labels)) == len(labels), labels


def test_an_invalid_range_has_no_ticks() -> None:
    for low, high in ((0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, math.inf)):
        assert ticks_between(low, high) == []


def drawn(low: float, high: float, *, own: bool) -> tuple[list[str], list[float]]:
    """Return the labels of a drawn axis, and their distances in pixels."""
    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    if own:
        logarithmic(axes.yaxis)
    else:
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.minorticks_off()
    axes.set_ylim(low, high)
    figure.canvas.draw()
    said = [label for label in axes.get_yticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in said]
    inside = [
        (label.get_text(), box)
        for label, box in zip(said, boxes, strict=True)
        if axes.bbox.y0 - 2 <= (box.y0 + box.y1) / 2 <= axes.bbox.y1 + 2
    ]
    gaps = [upper.y0 - lower.y1 for (_, lower), (_, upper) in pairwise(inside)]
    return [text for text, _ in inside], gaps


@pytest.mark.parametrize("span", [(1.1, 1.9), (0.5, 1.8), (3, 40), (0.02, 300), (1e-9, 1e3)])
def test_labels_are_drawn_and_do_not_overlap(span: tuple[float, float]) -> None:
    labels, gaps = drawn(*span, own=True)
    assert len(labels) >= 3
    assert min(gaps) > 0


def test_less_than_two_powers_of_ten_are_not_enough_labels() -> None:
    assert drawn(1.1, 1.9, own=False)[0] == []


@pytest.mark.parametrize("span", [(3.35e-8, 3.9e-8), (1e-9, 1e-3), (1.1, 1.9), (2e-7, 3e-5)])
@pytest.mark.parametrize("width", [3.0, 6.0])
def test_labels_of_a_short_x_axis_do_not_overlap(span: tuple[float, float], width: float) -> None:
    figure = Figure(figsize=(width, 2))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    logarithmic(axes.xaxis)
    axes.set_xlim(*span)
    figure.canvas.draw()
    said = [label for label in axes.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in said]
    assert len(boxes) >= 2
    assert min(right.x0 - left.x1 for left, right in pairwise(boxes)) > 0


def test_long_enough_axes_are_labelled_with_powers() -> None:
    """A short axis labels every second one of 3e-7, 1e-6, 3e-6, ..."""
    figure = Figure(figsize=(7.5, 4))
    axes = figure.add_subplot(1, 2, 2)
    logarithmic(axes.xaxis)
    axes.set_xlim(1.4e-7, 1.3e-4)
    assert len(ticks_between(1.4e-7, 1.3e-4)) == 6, "the premise: more than the labels"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$10^{-6}$", "$10^{-5}$", "$10^{-4}$"]
