"""superbatch with ``microbatch_size="largest"`` or ``"auto"``: the search is part of real training."""

from torch import Tensor

from superbatch.torch import Accumulator

from .finders import Found, Stopwatch, Watch
from .task import Batch
from .work import Work, loss_of

WINDOWS = 6
"""The search is over long before; the last windows show what it settled on."""


def find(work: Work, watch: Watch, variant: str | None) -> Found:
    """Train; what is searched, is searched meanwhile."""
    model, optimizer = work.build()
    watch.see(model)

    def loss_fn(microbatch: Batch) -> Tensor:
        return loss_of(model(microbatch["inputs"]), microbatch)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=variant)
    kept, seconds = 0, []
    for _ in range(WINDOWS):
        clock = Stopwatch()
        update = accumulate(work.batch)
        seconds.append(clock.seconds())
        kept += update.samples or 0
        watch.window()
    chosen = max(watch.windows[-1])
    lost = max(0.0, seconds[0] - min(seconds))
    return Found(chosen=chosen, trains=True, kept=kept, seconds=lost)
