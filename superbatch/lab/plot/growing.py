"""Plot of a growing batch: its size, the remaining factor of the learning rate, and the saved updates."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superbatch.tuning.growing import GrowingBatch

from .style import BLUE, DASHED, GREEN, VERMILION, Theme, headline, legend, panels
from .ticks import logarithmic


def growing(schedule: GrowingBatch, *, samples: int, dark: bool = False) -> Figure:
    """Draw a schedule over the samples of a run.

    Args:
        schedule: from `superbatch.tuning.growing.grow_batch`.
        samples: number of samples in the run.
        dark: draw light on dark.

    Examples:
        >>> from superbatch.tuning.growing import grow_batch
        >>> schedule = grow_batch(lambda seen: 0.5 ** (seen // 640), batch=64, microbatch=32)
        >>> figure = growing(schedule, samples=2000)
        >>> figure.axes[1].get_xlabel()
        'samples seen'
    """
    figure, (sizes, rates), theme = panels(6.4, "a;b", dark=dark, sharex=True)
    updates = range(schedule.updates(samples))
    seen = [schedule.samples(update) for update in updates]
    _sizes(sizes, schedule, seen)
    _rates(rates, schedule, seen, theme)
    before = samples / schedule.batch
    share = 100 * len(updates) / before
    headline(figure, f"{len(updates)} updates instead of {before:.0f} ({share:.0f} %), the same noise", theme)
    return figure


def _sizes(axes: Axes, schedule: GrowingBatch, seen: list[int]) -> None:
    batches = [schedule.batch_of(update) for update in range(len(seen))]
    axes.step(seen, batches, where="post", color=BLUE, linewidth=2)
    logarithmic(axes.yaxis, base=2)
    if schedule.cap.samples < 2 * max(batches):  # a cap far above would flatten the steps
        top = schedule.cap.samples
        axes.axhline(top, color=VERMILION, linewidth=1.2, linestyle=DASHED)
        axes.text(seen[0], top, f"cap: {schedule.cap.by}", color=VERMILION, va="bottom", fontsize=9)
    axes.set_ylabel("samples of an update")


def _rates(axes: Axes, schedule: GrowingBatch, seen: list[int], theme: Theme) -> None:
    updates = range(len(seen))
    requested = [schedule.temperature(update) for update in updates]
    left = [schedule.rate(update) for update in updates]
    axes.plot(seen, requested, color=theme.ink, linewidth=1.6, linestyle=DASHED, label="requested rate")
    label = "remaining rate, with the batch above"
    axes.step(seen, left, where="post", color=GREEN, linewidth=2, label=label)
    axes.set_ylim(bottom=0)
    axes.set(ylabel="factor of the rate", xlabel="samples seen")
    legend(axes, theme, loc="lower left")
