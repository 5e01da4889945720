"""superbatch with ``microbatch_size="largest"`` or ``"auto"``: the search is part of real training."""

from typing import Literal, cast

from torch import Tensor

from superbatch.torch import Accumulator

from .finders import Found, Stopwatch, Watch
from .task import Batch
from .work import Work

WINDOWS = {"largest": 4, "auto": 8}
"""The last of them shows what the search settled on."""


def find(work: Work, watch: Watch, variant: str | None) -> Found:
    """Train, which includes the search; then run a window of two micro-batches of the largest size found."""
    model, optimizer = work.build()
    watch.see(model)

    def loss_fn(microbatch: Batch) -> Tensor:
        return watch.loss(model(microbatch["inputs"]), microbatch)

    size = cast("Literal['auto', 'largest']", variant)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=size)
    kept, seconds = 0, []
    for _ in range(WINDOWS[size]):
        clock = Stopwatch()
        update = accumulate(work.batch)
        seconds.append(clock.seconds())
        kept += update.samples or 0
        watch.window()
    report = accumulate.memory
    assert report is not None
    chosen = report.largest if variant == "largest" else report.chosen
    exact = {name: leaf[: 2 * chosen] for name, leaf in work.batch.items()}
    kept += accumulate(exact).samples or 0
    watch.window()
    sizes, note = watch.windows[-1], ""
    if sizes != [chosen, chosen]:  # the size in use counts, not the reported one
        note = f"reports {chosen}, but a batch of {2 * chosen} went in micro-batches of {sizes}"
        chosen = max(watch.windows[-2])
    lost = max(0.0, seconds[0] - min(seconds))
    return Found(chosen, trains=True, kept=kept, seconds=lost, rate=seconds[-1] / work.samples, note=note)
