"""Training of a recipe from start to end: resumed, logged, stopped by signals, on any number of ranks."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Default arguments in torch.distributed.nn hold the process group that exists at its import. The first
# optimizer would import it later, and keep the group and gloo's threads alive after destroy_process_group.
import torch.distributed.nn.functional
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.results.update import Update
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.checkpoint import Checkpoint, StopSignals, load_checkpoint, save_checkpoint
from superbatch.torch.options import FrozenBatchNorm, PerSampleRandom
from superbatch.torch.process_group import join_process_group

from ..recipes import Recipe
from .arms import accumulator
from .checks import check_choice, check_counts, optimizer_and_rate
from .on_torch import cast_batch
from .options import TrainOptions as Options
from .shared_options import Progress, Show, resolve_recipe, silent

PRECISIONS = ("float32", "float64", "bf16")
DEVICES = ("cpu", "cuda")
# Schedule -> factor of the learning rate after a share of the updates.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: max(0.0, 1 - share),
    "cosine": lambda share: (1 + math.cos(math.pi * min(share, 1.0))) / 2,
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training that ended, or that a signal stopped."""

    updates: int  # updates made, including those before it was resumed
    loss: float | None  # loss of the last update; None: no update was made
    metric: float | None  # metric of the recipe; None: stopped, or not the first rank
    noise: Noise | None  # noise of the gradient; None: not measured
    resumed: Path | None  # the checkpoint from which it was resumed
    exit_code: int  # 0, or 130 or 143 after a signal
    rank: int  # of this process


def train(recipe: str | Recipe, options: Options, *, progress: Show = silent) -> Trained:
    """Train a recipe on one device or, if torchrun started this process, on all ranks."""
    recipe = resolve_recipe(recipe, options)
    batch_size = recipe.batch_size if options.batch_size is None else options.batch_size
    updates = recipe.updates if options.updates is None else options.updates
    _check(recipe, options, batch_size)
    options = replace(options, batch_size=batch_size, updates=updates)
    with _ranks(options.device) as (rank, ranks, device), torch.random.fork_rng():
        # A function of its own: when it returns, nothing uses the process group any more.
        return _trained(recipe, options, rank, ranks, device, progress)


def _trained(
    recipe: Recipe,
    options: Options,
    rank: int,
    ranks: int,
    device: torch.device,
    progress: Show,
) -> Trained:
    """Train with options whose batch size and updates are stated."""
    batch_size, updates = options.batch_size, options.updates
    assert batch_size is not None and updates is not None
    model = recipe.model(options.seed).to(device)
    model = model.double() if options.precision == "float64" else model
    accumulate = _accumulator(recipe, options, model, updates, ranks)
    torch.manual_seed(options.seed + rank)  # after a resume, ranks load their saved random states
    checkpoint = _resume(recipe, options, accumulate)
    samples, first = checkpoint.samples if checkpoint else 0, accumulate.updates
    log = _Log(options.log, options.tensorboard, first) if rank == 0 else None
    batches, loss, end = batches_from(recipe.samples, options.seed, samples, batch_size), None, False
    dtype = "float64" if options.precision == "float64" else "float32"
    with StopSignals() as stop:
        while accumulate.updates < updates and not end:
            own = next(batches).tensor_split(ranks)[rank]
            update = accumulate(cast_batch(recipe.batch(own), dtype))
            samples, loss, done = samples + batch_size, update.loss, accumulate.updates
            end = stop.requested(accumulate)
            if log is not None:
                evaluate = options.evaluate_every and done % options.evaluate_every == 0
                log.write(done, update, samples, _metric(recipe, model) if evaluate else None)
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
    """Yield the batches after the first `start` samples, cut from one random permutation for each epoch."""

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
    """Raise `InputError` for options that cannot be used."""
    recipe.require("evaluate", "metric", "learning_rates", by="superbatch train")
    if isinstance(options.microbatch_size, str) and options.microbatch_size not in ("auto", "largest"):
        raise InputError(
            f"microbatch_size={options.microbatch_size!r} is not a size. Give a number, auto or largest."
        )
    fewest = int(os.environ.get("WORLD_SIZE", "1"))  # one sample for each rank
    if not fewest <= batch_size <= recipe.samples:
        raise InputError(f"batch_size={batch_size} is out of range. Give {fewest} to {recipe.samples}.")
    check_choice("precision", options.precision, PRECISIONS)
    check_choice("schedule", options.schedule, SCHEDULES)
    check_choice("device", options.device, DEVICES)
    check_counts(options, "updates", "every", "keep", "evaluate_every")
    if not 0 <= options.seed < 2**31:
        raise InputError(f"seed={options.seed} is out of range. Give 0 to {2**31 - 1}.")
    if recipe.coupled == "exact" and (options.noise or options.sample_rng):
        raise InputError(
            f"--noise and --sample-rng need separate samples, and {recipe.name!r} couples them. Pass neither."
        )
    optimizer_and_rate(recipe, options, by="superbatch train")


@contextmanager
def _ranks(device: str) -> Iterator[tuple[int, int, torch.device]]:
    """Join the process group if torchrun started this process; yield rank, number of ranks and device."""
    if "RANK" not in os.environ:
        yield 0, 1, torch.device(device)
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_process_group("nccl" if device == "cuda" else "gloo")
    yield dist.get_rank(), dist.get_world_size(), torch.device(device)
    # Not in a `finally`: after an error no rank may wait for the others.
    dist.barrier()  # in gloo, a rank that leaves early may abort the others
    gc.collect()  # a group that is still referenced keeps gloo's threads, which may abort the process at exit
    dist.destroy_process_group()


def _accumulator(
    recipe: Recipe, options: Options, model: nn.Module, updates: int, ranks: int
) -> Accumulator | WholeBatch:
    """Return the accumulator of the training, with its optimizer and schedule."""
    name, rate = optimizer_and_rate(recipe, options, by="superbatch train")
    optimizer = recipe.optimizers[name](model.parameters(), rate)
    factor = SCHEDULES[options.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: factor(update / updates))
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
        # WholeBatch has no "largest": its "auto" takes as many samples as fit into memory.
        size = "auto" if options.microbatch_size == "largest" else options.microbatch_size
        norms = [FrozenBatchNorm()] if recipe.batchnorm == "frozen" else []
        return WholeBatch(model, optimizer, loss_fn, microbatch_size=size, participants=norms, **common)
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
    """Load the newest checkpoint, if there is one; it must be of the same recipe and seed."""
    found = load_checkpoint(options.checkpoints, accumulate) if options.checkpoints else None
    if found is None:
        return None
    for name, value in (("recipe", recipe.name), ("seed", options.seed)):
        if (saved := found.extra.get(name)) != value:
            raise InputError(
                f"{options.checkpoints} was written with {name} {saved!r}, and here it is {value!r}. "
                "Pass the same, or another folder in --checkpoints."
            )
    return found


def _metric(recipe: Recipe, model: nn.Module) -> float:
    """Evaluate a copy of the model on the CPU, where the recipe's data are."""
    with torch.random.fork_rng():  # the evaluation must not change the random numbers of the training
        return float(recipe.evaluate(copy.deepcopy(model).cpu()))


class _Log:
    """Log with a row of JSON for each update, and TensorBoard.

    A resumed training continues the file: rows of updates after the checkpoint are removed.
    """

    def __init__(self, file: Path | None, tensorboard: Path | None, done: int) -> None:
        self.file, self.board = file, None if tensorboard is None else _board(tensorboard, done)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = file.read_text(encoding="utf-8").splitlines() if done and file.exists() else []
            # After a kill the last line may be incomplete; its update is after the checkpoint.
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["update"] <= done]
            file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"--log-file {file} cannot be continued ({error}). Name another file."
            ) from error

    def write(self, done: int, update: Update, samples: int, metric: float | None) -> None:
        """Write the row of an update; `samples` counts those of all ranks so far."""
        row: dict[str, Any] = {
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rates[0],
        }
        if metric is not None:
            row["metric"] = metric
        if self.file is not None:
            facts = {"samples": samples, "weight": update.weight, "microbatches": update.microbatches}
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"update": done, **row, **facts, "seconds": update.seconds}) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if value is not None:
                    self.board.add_scalar(name, value, done)
            self.board.flush()


def _board(folder: Path, done: int) -> Any:
    """Return the TensorBoard writer, which drops events after a number of updates."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            f"--tensorboard {folder} needs the package tensorboard, which is not installed. "
            "Use pip install tensorboard, or --log-file FILE."
        ) from error
    return SummaryWriter(str(folder), purge_step=done + 1)
