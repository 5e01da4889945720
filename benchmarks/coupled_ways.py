"""Methods to compute the gradient of a batch with coupled samples, each as one function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from coupled_work import Blocks, Data, Work
from torch import Tensor, nn

from superbatch.results.coupling import CouplingReport
from superbatch.torch import virtual_batch
from superbatch.torch.gradcache.cached import cached_gradients

Run = Callable[[Work, nn.Module, Data, int], "CouplingReport | None"]


@dataclass(frozen=True)
class Way:
    """Method to compute the gradient of a batch.

    Attributes:
        name: name in the JSON file.
        title: name in tables and plots.
        run: function that adds the gradient of a batch to `.grad`; its last argument is the micro-batch size.
        split: True if the method splits the batch into micro-batches.
        applies: function that returns True if the method can run a training.
        exact: function that returns True if the method promises the gradient of the whole batch.
    """

    name: str
    title: str
    run: Run
    split: bool
    applies: Callable[[Work], bool] = lambda work: True
    exact: Callable[[Work], bool] = lambda work: True


def full(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """Gradient of the full batch without micro-batches."""
    work.loss(model, work.encode(model, batch)).backward()


def offloaded(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """Gradient of the full batch with autograd's saved tensors in host memory."""
    with torch.autograd.graph.save_on_cpu():
        full(work, model, batch, size)


def checkpointed(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """Gradient of the full batch with each block recomputed in the backward."""
    chains = [module for module in model.modules() if isinstance(module, Blocks)]
    for chain in chains:
        chain.checkpointed = True
    try:
        full(work, model, batch, size)
    finally:
        for chain in chains:
            chain.checkpointed = False


def _parts(batch: Data, size: int) -> list[Data]:
    samples = len(next(iter(batch.values())))
    return [{name: x[start : start + size] for name, x in batch.items()} for start in range(0, samples, size)]


def accumulated(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """Plain accumulation of the mean of micro-batch losses, which is not the gradient of the batch."""
    parts = _parts(batch, size)
    for part in parts:
        (work.loss(model, work.encode(model, part)) / len(parts)).backward()


def grad_cache(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """Loop of sentence-transformers' Cached* losses, which restores the random state of each micro-batch."""
    parts = _parts(batch, size)
    states, found = [], []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            found.append(work.encode(model, part))
    embeddings = [[z.detach().requires_grad_() for z in row] for row in found]
    del found
    work.loss(model, [torch.cat(column) for column in zip(*embeddings, strict=True)]).backward()
    gradients = [[z.grad for z in row] for row in embeddings]
    del embeddings
    for part, state, row in zip(parts, states, gradients, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            surrogate = sum(
                ((z * g).sum() for z, g in zip(work.encode(model, part), row, strict=True)), torch.zeros(())
            )
        surrogate.backward()


def cached(work: Work, model: nn.Module, batch: Data, size: int) -> None:
    """`cached_gradients` in two passes."""
    cached_gradients(
        lambda part: work.encode(model, part), lambda z: work.loss(model, z), batch, size, models=model
    )


def _virtual(budget: int | None) -> Run:
    def run(work: Work, model: nn.Module, batch: Data, size: int) -> CouplingReport:
        with virtual_batch(model, size, device_budget=budget) as virtual:
            work.loss(model, work.encode(model, virtual(batch))).backward()
        return virtual.report()

    return run


def _fitting(work: Work, model: nn.Module, batch: Data, size: int) -> CouplingReport:
    """`virtual_batch` with the largest micro-batch that fits in memory: here the whole batch."""
    with virtual_batch(model, "auto") as virtual:
        work.loss(model, work.encode(model, virtual(batch))).backward()
    return virtual.report()


def _never(work: Work) -> bool:
    return False


def _embeds(work: Work) -> bool:
    return work.embeds


def _embeds_singly(work: Work) -> bool:
    return work.embeds and not work.normalises


WAYS = (
    Way("full", "full batch", full, split=False),
    Way("offload", "full batch, save_on_cpu", offloaded, split=False),
    Way("checkpoint", "full batch, checkpoint per block", checkpointed, split=False),
    Way("accumulation", "plain accumulation (inexact)", accumulated, split=True, exact=_never),
    Way(
        "gradcache",
        "GradCache by hand",
        grad_cache,
        split=True,
        applies=_embeds,
        exact=_embeds_singly,
    ),
    Way("cached", "cached_gradients", cached, split=True, applies=_embeds_singly),
    Way("virtual-auto", 'virtual_batch, "auto": what fits', _fitting, split=False),
    Way("virtual", "virtual_batch, kept on the device", _virtual(None), split=True),
    Way("virtual-host", "virtual_batch, kept on the host", _virtual(0), split=True),
)


def gradient(
    way: Way, work: Work, samples: int, size: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], CouplingReport | None]:
    """Return the gradient of a new model by parameter name, and the report."""
    model = work.build(dtype)
    report = way.run(work, model, work.batch(samples, dtype), size)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, report


def error(found: dict[str, Tensor], real: dict[str, Tensor]) -> float:
    """Return the distance of two gradients, relative to the norm of the real one."""
    assert found.keys() == real.keys()
    squares = sum(float((found[name].double() - g.double()).square().sum()) for name, g in real.items())
    return (squares / sum(float(g.double().square().sum()) for g in real.values())) ** 0.5
