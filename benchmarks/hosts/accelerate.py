"""Accelerate's loop with a small transformer, for next tokens or classes of sequences."""

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peers.work import Window

from superbatch.integrations.accelerate import make_gradient
from superbatch.torch import Window as Batches
from superbatch.torch import count_tokens

from . import STEPS, network


def window(training: str, exact: bool) -> Window:
    """Return an update of the loop, with `accumulate` or with superbatch."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    bare = network.Network(training)
    prepared: Any = accelerator.prepare(bare, network.optimizer_of(bare))
    model, optimizer = prepared
    batches = network.microbatches(training)

    def loss_fn(batch: network.Batch) -> Any:
        return network.loss_of(model, batch)

    def own() -> None:
        accelerator.gradient_accumulation_steps = STEPS  # all Accelerators of a process share this value
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    if not exact:
        return Window(own)
    if training == "coupled":
        gradient_of = make_gradient(accelerator, model, loss_fn, coupled=True)
    else:
        gradient_of = make_gradient(accelerator, model, loss_fn, weight=count_tokens("labels"))

    def ours() -> None:
        accelerator.gradient_accumulation_steps = 1
        gradient_of(Batches(batches))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Window(ours)
