"""Plot of the scaling rules: the factor of the learning rate against the factor of the batch."""

from __future__ import annotations

from matplotlib.figure import Figure

from superbatch.tuning.scaling import Family, Rule, rate_factor

from .style import BLUE, DASHED, GREEN, ORANGE, legend, panels
from .ticks import logarithmic

KAPPAS = [2 ** (i / 4) for i in range(41)]


def scaling_rules(*, ratios: tuple[float, ...] = (1.0, 16.0, 256.0), dark: bool = False) -> Figure:
    """Draw the factor of the learning rate for kappa times the batch, with and without a known noise scale.

    Args:
        ratios: noise over signal at the old batch, ``B_noise / B``, three at most.
        dark: draw light on dark.

    Examples:
        >>> [axes.get_title() for axes in scaling_rules().axes]
        ['SGD', 'Adam, AdamW']
    """
    figure, both, theme = panels(4.6, "ab", dark=dark, sharey=True)
    families: tuple[tuple[Family, Rule], ...] = (("sgd", "linear"), ("adam", "sqrt"))
    for axes, (family, rule), title in zip(both, families, ("SGD", "Adam, AdamW"), strict=True):
        axes.set_xscale("log", base=2)
        logarithmic(axes.yaxis, base=2)
        plain = [rate_factor(family, rule, kappa, None) for kappa in KAPPAS]
        axes.plot(KAPPAS, plain, color=theme.ink, linewidth=1.6, linestyle=DASHED, label=f'"{rule}"')
        for ratio, colour in zip(ratios, (BLUE, GREEN, ORANGE), strict=False):
            factors = [rate_factor(family, "gain", kappa, ratio) for kappa in KAPPAS]
            label = f'"gain", noise scale {ratio:g} x the old batch'
            axes.plot(KAPPAS, factors, color=colour, linewidth=2.2, label=label)
        axes.set_title(title, fontsize=11, color=theme.ink)
        axes.set_xlabel("kappa: new batch / old batch")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()  # powers of two alone are labelled
    both[0].set_ylabel("new rate / old rate")
    legend(both[0], theme)
    return figure
