"""Plot of a Caffe solver file: the learning rate over the updates."""

from __future__ import annotations

from matplotlib.figure import Figure

from superbatch.results.caffe import CaffeExplained

from ..report.caffe_text import title_of
from .style import BLUE, headline, panels
from .ticks import logarithmic


def caffe_rate(report: CaffeExplained, *, dark: bool = False) -> Figure:
    """Draw the learning rate of a solver file, on a logarithmic axis if it spans more than a factor of 30.

    Examples:
        >>> from superbatch.caffe import explain_solver, parse_solver
        >>> text = 'base_lr: 1 lr_policy: "step" gamma: 0.1 stepsize: 10 max_iter: 100'
        >>> caffe_rate(explain_solver(parse_solver(text))).axes[0].get_yscale()
        'log'
    """
    figure, (axes,), theme = panels(4.2, dark=dark)
    steps = report.policy in ("fixed", "step", "multistep")
    drawstyle = "steps-post" if steps else "default"
    axes.plot(report.at, report.rates, color=BLUE, linewidth=2, drawstyle=drawstyle)
    positive = [rate for rate in report.rates if rate > 0]
    if positive and max(positive) > 30 * min(positive):  # a linear axis would show the smallest as zero
        logarithmic(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="update", ylabel="learning rate, for lr_mult 1")
    if report.effective_batch is not None and report.updates > 1:
        batch = report.effective_batch
        convert = (lambda updates: updates * batch), (lambda samples: samples / batch)
        above = axes.secondary_xaxis("top", functions=convert)
        above.set_xlabel("samples, repeated ones included", color=theme.ink)
        above.tick_params(colors=theme.ink, labelcolor=theme.ink)
        above.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        above.spines["top"].set_color(theme.faint)
    headline(figure, title_of(report), theme)
    return figure
