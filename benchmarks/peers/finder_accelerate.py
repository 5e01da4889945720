"""Accelerate's `find_executable_batch_size`, as in its example examples/by_feature/memory.py.

https://huggingface.co/docs/accelerate/usage_guides/memory
"""

from itertools import islice

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from memory_work import samples_of
from torch.utils.data import DataLoader

from .finders import UPDATES, Found, Stopwatch, Watch, endless
from .work import Work


def find(work: Work, watch: Watch, variant: str | None) -> Found:
    """Begin with the batch that the user wants; each failure restarts the training with 0.9 of the size."""
    accelerator = Accelerator(cpu=True)
    data, clock = samples_of(work), Stopwatch()
    lost = 0.0

    @find_executable_batch_size(starting_batch_size=work.samples)
    def train(batch_size: int) -> int:
        nonlocal lost
        accelerator.free_memory()
        lost = clock.seconds()  # all work before this trial is lost
        model, optimizer = work.build()
        watch.see(model)
        loader = DataLoader(data, batch_size=batch_size, drop_last=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        for batch in islice(endless(loader), UPDATES):
            outputs = model(batch["inputs"])
            loss = watch.loss(outputs, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    chosen = train()
    return Found(chosen=chosen, trains=True, kept=UPDATES * chosen, seconds=lost)
