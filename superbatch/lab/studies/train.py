"""Training of a recipe from start to end: resumed, logged, stopped by signals, on any number of ranks."""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch imports this with its first optimizer. Its defaults are the default group of that moment, which would
# then outlive destroy_process_group with gloo's threads.
import torch.distributed.nn.functional
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.checkpoint import Checkpoint, StopSignals, load_checkpoint, save_checkpoint
from superbatch.torch.options import PerSampleRandom
from superbatch.torch.process_group import join_process_group

from ..recipes import Recipe, load_recipe
from .on_torch import cast_batch
from .options import TrainOptions as Options
from .participants import accumulator
from .shared_options import Progress
from .train_log import TrainLog

PRECISIONS = ("float32", "float64", "bf16")
SCHEDULES = ("constant", "linear", "cosine")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training that ended, or was stopped by a signal."""

    updates: int  # that were made, with those before it was resumed
    loss: float | None  # of the last update; None: none was made
    metric: float | None  # of the recipe; None: it was stopped, or this is not the first rank
    noise: Noise | None  # of the gradient; None: not measured
    resumed: Path | None  # the checkpoint from which it was resumed
    exit_code: int  # 0, or 130 or 143 after a signal
    rank: int  # of this process


def train(
    recipe: str | Recipe,
    options: Options,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Trained:
    """Train a recipe, on one device or, started by torchrun, on as many as there are ranks."""
    recipe = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    batch_size = recipe.batch_size if options.batch_size is None else options.batch_size
    updates = recipe.updates if options.updates is None else options.updates
    _check(recipe, options, batch_size)
    with _ranks(options.device) as place, torch.random.fork_rng():
        return _trained(recipe, options, batch_size, updates, place, progress)


def _trained(
    recipe: Recipe,
    options: Options,
    batch_size: int,
    updates: int,
    place: tuple[int, int, torch.device],
    progress: Callable[[Progress], None],
) -> Trained:
    """Train in a function of its own: when it returns, nothing uses the process group any more."""
    rank, ranks, device = place
    model = recipe.model(options.seed).to(device)
    model = model.double() if options.precision == "float64" else model
    accumulate = _accumulator(recipe, options, model, updates, ranks)
    torch.manual_seed(options.seed + rank)  # resumed ranks load the states that they had
    checkpoint = _resume(recipe, options, accumulate)
    samples, first = checkpoint.samples if checkpoint else 0, accumulate.updates
    log = TrainLog(options.log, options.tensorboard, first) if rank == 0 else None
    batches, loss, end = batches_from(recipe.samples, options.seed, samples, batch_size), None, False
    dtype = "float64" if options.precision == "float64" else "float32"
    with StopSignals() as stop:
        while accumulate.updates < updates and not end:
            own = next(batches).tensor_split(ranks)[rank]
            update = accumulate(cast_batch(recipe.batch(own), dtype))
            samples, loss, done = samples + batch_size, update.loss, accumulate.updates
            end = stop.requested(accumulate)
            if log is not None:
                due = options.evaluate_every and done % options.evaluate_every == 0
                log.write(done, update, samples, _metric(recipe, model) if due else None)
                text = f"update {done} of {updates}, loss {loss:.4g}"
                progress(Progress(done - first, updates - first, text))
            if options.checkpoints and (end or done == updates or done % options.every == 0):
                facts = {"recipe": recipe.name, "seed": options.seed}
                save_checkpoint(
                    options.checkpoints, accumulate, samples=samples, extra=facts, keep=options.keep
                )
    return Trained(
        updates=accumulate.updates,
        loss=loss,
        metric=None if end or rank else _metric(recipe, model),
        noise=accumulate.noise if isinstance(accumulate, Accumulator) else None,
        resumed=checkpoint.path if checkpoint else None,
        exit_code=stop.exit_code,
        rank=rank,
    )


def batches_from(samples: int, seed: int, start: int, size: int) -> Iterator[Tensor]:
    """Draw the batches that come after some samples: permutation after permutation, one for each epoch."""

    def permutation(epoch: int) -> Tensor:
        return torch.randperm(samples, generator=torch.Generator().manual_seed((seed << 24) + epoch))

    epoch, begin = divmod(start, samples)
    pending = permutation(epoch)[begin:]
    while True:
        while len(pending) < size:
            epoch += 1
            pending = torch.cat([pending, permutation(epoch)])
        yield pending[:size]
        pending = pending[size:]


def _check(recipe: Recipe, options: Options, batch_size: int) -> None:
    recipe.require("evaluate", "metric", "learning_rates", by="superbatch train")
    if isinstance(options.microbatch_size, str) and options.microbatch_size not in ("auto", "largest"):
        raise InputError(
            f"--microbatch-size {options.microbatch_size} is no size. Pass a number, auto or largest."
        )
    fewest = int(os.environ.get("WORLD_SIZE", "1"))  # a sample for each rank
    if not fewest <= batch_size <= recipe.samples:
        raise InputError(f"--batch-size {batch_size} is not possible. Pass {fewest} to {recipe.samples}.")
    for name, value, choices in (
        ("--precision", options.precision, PRECISIONS),
        ("--schedule", options.schedule, SCHEDULES),
        ("--device", options.device, DEVICES),
        ("--optimizer", options.optimizer or recipe.default_optimizer, recipe.offered),
    ):
        if value not in choices:
            *others, last = choices
            known = " or ".join(filter(None, (", ".join(others), last)))
            raise InputError(f"{name} {value} is unknown. Use {known}.")
    for name in ("updates", "every", "keep", "evaluate_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value} is too small. Pass 1 or more.")
    if not 0 <= options.seed < 2**31:
        raise InputError(f"--seed {options.seed} is out of range. Pass 0 to {2**31 - 1}.")
    if recipe.coupled == "exact" and (options.noise or options.sample_rng):
        raise InputError(
            f"--noise and --sample-rng need separate samples, and {recipe.name!r} couples them. Pass neither."
        )


@contextmanager
def _ranks(device: str) -> Iterator[tuple[int, int, torch.device]]:
    """Join the ranks that torchrun has started, if it has; give the rank, their number and the device."""
    if "RANK" not in os.environ:
        yield 0, 1, torch.device(device)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_process_group("nccl" if device == "cuda" else "gloo")
    yield dist.get_rank(), dist.get_world_size(), torch.device(device)
    dist.barrier()  # a rank that leaves first may abort the others in gloo; after an error none waits
    gc.collect()  # a group that is still held keeps gloo's threads, which may abort the process at its end
    dist.destroy_process_group()


def _accumulator(
    recipe: Recipe, options: Options, model: nn.Module, updates: int, ranks: int
) -> Accumulator | WholeBatch:
    name = options.optimizer or recipe.default_optimizer
    rate = recipe.learning_rates[name] if options.learning_rate is None else options.learning_rate
    optimizer = recipe.optimizers[name](model.parameters(), rate)
    shape: dict[str, Callable[[int], float]] = {
        "constant": lambda update: 1.0,
        "linear": lambda update: max(0.0, 1 - update / updates),
        "cosine": lambda update: (1 + math.cos(math.pi * min(update / updates, 1.0))) / 2,
    }
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape[options.schedule])
    plain_loss = recipe.loss_fn(model)

    def loss_fn(batch: Any) -> Any:
        low = options.precision == "bf16"
        with torch.autocast(options.device, dtype=torch.bfloat16) if low else nullcontext():
            return plain_loss(batch)

    common: dict[str, Any] = {
        "max_grad_norm": options.clip,
        "scheduler": scheduler,
        "sync": "all_reduce" if ranks > 1 else "auto",
    }
    if recipe.coupled == "exact":
        size = "auto" if options.microbatch_size == "largest" else options.microbatch_size
        return WholeBatch(model, optimizer, loss_fn, microbatch_size=size, **common)
    return accumulator(
        recipe,
        model,
        optimizer,
        loss_fn=loss_fn,
        microbatch_size=options.microbatch_size,
        participants=[PerSampleRandom()] if options.sample_rng else [],
        observers=[NoiseMeter(data_size=recipe.samples)] if options.noise else [],
        **common,
    )


def _resume(recipe: Recipe, options: Options, accumulate: Accumulator | WholeBatch) -> Checkpoint | None:
    found = load_checkpoint(options.checkpoints, accumulate) if options.checkpoints else None
    for name, value in (("recipe", recipe.name), ("seed", options.seed)) if found else ():
        saved = found.extra.get(name) if found else None
        if saved != value:
            raise InputError(
                f"{options.checkpoints} was written with {name} {saved!r}, and here it is {value!r}. "
                "Pass the same, or another folder in --checkpoints."
            )
    return found


def _metric(recipe: Recipe, model: nn.Module) -> float:
    """Measure a copy on the CPU, where the recipe's data is: the training does not notice."""
    with torch.random.fork_rng():
        return float(recipe.evaluate(copy.deepcopy(model).cpu()))
