"""Writing of a checkpoint: to a temporary folder, which is flushed and then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from superbatch import _version

from ..window.engine import Engine
from . import files, folders
from .arguments import check_common, check_saving
from .codec import Encoder
from .group import Group, group_of
from .random_state import random_state
from .shards import FOLDER, sharding_names, write_shards
from .state import shared_state


class HasEngine(Protocol):
    """An `Accumulator` or a `WholeBatch`."""

    engine: Engine


def save_checkpoint(
    folder: str | Path,
    accumulate: HasEngine,
    *,
    samples: int = 0,
    extra: Mapping[str, Any] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    keep: int = 3,
) -> Path:
    """Write everything that a training needs to resume.

    A program that is killed at any time leaves no partial checkpoint. A checkpoint contains models,
    optimizers, schedulers, scaler and float32 masters; an open window; the states of torch's, Python's and
    NumPy's random generators; and the sizes that ``"auto"`` has found. Tensors are written as safetensors,
    sharded tensors (FSDP2, tensor parallel) by ``torch.distributed.checkpoint``, and everything else as JSON
    with checksums. Call it on all ranks, with a folder that all of them can access.

    Args:
        folder: folder of the checkpoints of one training; each is a folder in it, ``000007-update-1200``.
        accumulate: an `Accumulator` or a `WholeBatch`, between windows or after a ``backward`` of a window.
        samples: number of samples that all ranks together have used, to find the position in the data.
        extra: a dict of further state, equal on all ranks. Its values are numbers, strings, tensors, lists,
            tuples and dicts.
        generators: the program's own random generators, by names.
        keep: number of checkpoints to keep; older ones are deleted when the new one is complete.

    Returns:
        The folder of this checkpoint.

    Raises:
        InputError: an argument has the wrong type or value.
        CheckpointError: safetensors is not installed, a state contains an object that JSON and safetensors
            cannot store, or another rank failed. No checkpoint has changed.
        OSError: the disk is full or the folder cannot be written. No checkpoint has changed.
        WindowError: it was called between the forward and the backward of a micro-batch, or while a window
            begins or ends.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from superbatch.torch import Accumulator
        >>> from superbatch.torch.checkpoint import load_checkpoint
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulate = Accumulator(model, sgd, lambda x: model(x).square().mean())
        >>> update = accumulate(torch.randn(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, accumulate, samples=8)
        ...     load_checkpoint(folder, accumulate).samples
        8

    Source: https://huggingface.co/docs/safetensors
    """
    check_common(accumulate, folder, generators)
    check_saving(samples, extra, keep)
    engine = accumulate.engine
    group = group_of(engine.config.sync, engine.config.models)
    # On every rank before the first collective, because one may lack the package.
    group.on_all_ranks(files.require_safetensors)
    # A sharded tensor is saved with the name of a parameter, whose sharding it gets when it is loaded.
    encoder = Encoder(sharding_names(engine.config.models))
    # state_dict() may raise between forward and backward, on one rank only.
    state = group.on_all_ranks(engine.state_dict)
    shared = encoder.encode(shared_state(engine.config, state, extra or {}), "state")
    own = Encoder()
    tree = group.on_all_ranks(lambda: own.encode(_of_rank(engine, state, generators or {}), "rank"))
    # Rank 0 makes the folder and sends its name to the others.
    temporary, final = group.on_first_rank(lambda: _begin(Path(folder), engine.updates))
    try:
        if encoder.sharded:
            # A collective of torch.distributed.checkpoint, called on every rank.
            write_shards(temporary, encoder.sharded)
        group.on_all_ranks(lambda: _write_own(temporary, group, tree, own))
        facts = {
            "superbatch": _version.__version__,
            "torch": torch.__version__,
            "updates": engine.updates,
            "samples": samples,
            "ranks": group.count,
        }
        in_flight = any(group.gather(state["window"] is not None))
        # Last, because the head file makes the folder a checkpoint.
        group.on_first_rank(
            lambda: _finish(temporary, final, {**facts, "in_flight": in_flight}, shared, encoder, keep)
        )
    # BaseException, because a Ctrl-C must not leave a partial checkpoint either.
    except BaseException:
        # Only on rank 0, because two deletions at the same time would fail.
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _of_rank(
    engine: Engine, state: dict[str, Any], generators: Mapping[str, torch.Generator]
) -> dict[str, Any]:
    return {
        # Masters are equal on all ranks, so they are in the shared state.
        "accumulator": {**state, "masters": None},
        "random": random_state(engine.config.models, generators),
    }


def _begin(folder: Path, updates: int) -> tuple[Path, Path]:
    temporary, final = folders.next_paths(folder, updates)
    folders.prepare(temporary)
    return temporary, final


def _write_own(temporary: Path, group: Group, tree: Any, own: Encoder) -> None:
    """Write this rank's own state, and the checksums of all files that it has written."""
    name = f"rank-{group.rank}.safetensors"
    files.write_tensors(temporary / name, own.tensors)
    # torch names a rank's files "__<rank>_<number>.distcp".
    shards = [f"{FOLDER}/{path.name}" for path in sorted((temporary / FOLDER).glob(f"__{group.rank}_*"))]
    if group.rank == 0 and (temporary / FOLDER).is_dir():
        # Rank 0 has written the index of all shards.
        shards.append(f"{FOLDER}/.metadata")
    # torch does not flush these files.
    for shard in shards:
        files.flush(temporary / shard)
    sums = files.sums_of(temporary, [name, *shards])
    files.write_json(temporary / f"rank-{group.rank}.json", {"state": tree, "files": sums})


def _finish(
    temporary: Path, final: Path, facts: dict[str, Any], shared: Any, encoder: Encoder, keep: int
) -> None:
    """Write the shared state and the head file, and rename the folder."""
    files.write_tensors(temporary / "state.safetensors", encoder.tensors)
    files.write_json(temporary / "state.json", shared)
    if (temporary / FOLDER).is_dir():
        files.flush(temporary / FOLDER)
    names = ["state.json", "state.safetensors", *(f"rank-{rank}.json" for rank in range(facts["ranks"]))]
    folders.write_head(temporary, {**facts, "files": files.sums_of(temporary, names)})
    folders.publish(temporary, final)
    # After publishing, because until then only the older checkpoints are complete.
    folders.keep_last(final.parent, keep)
