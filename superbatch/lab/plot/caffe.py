"""The picture of a Caffe solver: its learning rate over the updates."""

# matplotlib leaves the types of its keyword arguments open:
# pyright: standard

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from superbatch.results.caffe import CaffeExplained

from ..report.caffe_text import title_of
from .style import BLUE, DARK, LIGHT, plain_axes
from .ticks import readable


def caffe_rate(report: CaffeExplained, *, dark: bool = False) -> Figure:
    """Draw the learning-rate curve of a solver file.

    Args:
        report: of `superbatch caffe`.
        dark: light on dark instead of dark on light.

    Returns:
        A figure, 10 inches wide; logarithmic where the rate spans more than a factor of 30.

    Examples:
        >>> from superbatch.caffe import explain_solver, parse_solver
        >>> text = 'base_lr: 1 lr_policy: "step" gamma: 0.1 stepsize: 10 max_iter: 100'
        >>> caffe_rate(explain_solver(parse_solver(text))).axes[0].get_yscale()
        'log'
    """
    theme = DARK if dark else LIGHT
    figure = Figure(figsize=(10, 4.2), facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot()
    plain_axes(axes, theme)
    steps = report.policy in ("fixed", "step", "multistep")
    axes.plot(
        report.at,
        report.rates,
        color=BLUE,
        linewidth=2,
        drawstyle="steps-post" if steps else "default",
    )
    positive = [rate for rate in report.rates if rate > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
        readable(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("update")
    axes.set_ylabel("learning rate, for lr_mult 1")
    if report.effective_batch is not None and report.updates > 1:
        above = axes.secondary_xaxis("top", functions=_samples(report.effective_batch))
        above.set_xlabel("samples, repeated ones included", color=theme.ink)
        above.tick_params(colors=theme.ink, labelcolor=theme.ink)
        above.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        above.spines["top"].set_color(theme.faint)
    figure.suptitle(title_of(report), color=theme.ink, fontsize=12)
    return figure


def _samples(batch: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Updates to samples, and back."""
    return (lambda updates: updates * batch, lambda samples: samples / batch)
