"""Reading of a checkpoint: all of it is checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from superbatch.errors import CheckpointError, InputError, SuperbatchError

from ..interrupts import DeferredInterrupts
from ..window.engine import Engine
from . import files, folders
from .codec import decode, sharded_in
from .group import Group, group_of
from .random_state import check_generators, restore_random
from .saving import HasEngine
from .shards import read_shards
from .state import check_shared, load_shared, masters_here


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: its folder.
        updates: that had been made.
        samples: of the data that had been worked through, as `save_checkpoint` was told.
        extra: the program's own state.
        ranks: that wrote it.
        in_flight: whether it was written within a window, which the next call resumes.
    """

    path: Path
    updates: int
    samples: int
    extra: dict[str, Any]
    ranks: int
    in_flight: bool


def load_checkpoint(
    path: str | Path,
    accumulate: HasEngine,
    *,
    generators: Mapping[str, torch.Generator] | None = None,
) -> Checkpoint | None:
    """Load the newest checkpoint of a folder into a program that was just set up; all ranks together.

    At the boundary of windows any number of ranks, another wrapping of the model (none, DDP, FSDP2) and any
    micro-batch size may continue: updates are those of an uninterrupted training, to rounding, where
    no random operation depends on the split. Each rank restores the random generators that it had; those of a
    rank that is new stay as they are. A window in flight is resumed by the same number of ranks, with the
    same batch.

    Args:
        path: the folder that `save_checkpoint` was given, or that of one checkpoint in it.
        accumulate: an `Accumulator` or a `WholeBatch`, over models and optimizers as those that were saved.
        generators: the program's own random generators, by the names that they were saved with.

    Returns:
        What was loaded; None where the folder has no checkpoint yet, at the start of a training.

    Raises:
        InputError: `accumulate` is no accumulator.
        CheckpointError: the checkpoint is damaged, of a newer version, or of another program. Nothing has
            changed; an older one can be loaded by its own path.
        WindowError: a window is open.

    Examples:
        >>> from torch import nn
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(2, 1)
        >>> accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> load_checkpoint("a folder without checkpoints", accumulate) is None
        True
    """
    if not isinstance(getattr(accumulate, "engine", None), Engine):
        raise InputError(
            f"accumulate is of type {type(accumulate).__name__}. Pass the Accumulator or the WholeBatch."
        )
    engine, own_generators = accumulate.engine, generators or {}
    group = group_of(engine.config.sync, engine.config.models)
    # Rank 0 chooses: on a shared disk, ranks may see a new folder at different times.
    found = group.first(lambda: folders.newest(Path(path)))
    if found is None:
        return None
    # On every rank before the first collective: one may lack the package.
    group.each(files.require_safetensors)
    head = group.each(lambda: _checked_head(found, group))
    tree = group.each(lambda: files.read_json(found / "state.json"))
    # A collective, so outside of `each`.
    shards = read_shards(found, sharded_in(tree), engine.config.models)
    shared, own = group.each(lambda: _decoded(found, head, group, tree, shards))
    # Ranks beyond those that wrote have no random state of their own.
    had_this_rank = group.rank < head["ranks"]
    # To undo a load that fails on another rank.
    before = engine.state_dict()

    def check() -> None:
        check_shared(engine, shared)
        if had_this_rank:
            check_generators(own["random"], own_generators)

    # All ranks check before one loads.
    group.each(check)
    # A Ctrl-C between two loads would leave half a state.
    with DeferredInterrupts():
        # First, since it may still refuse; the rest was checked to fit.
        _load_own(engine, group, own["accumulator"], shared["masters"], before)
        load_shared(engine, shared)
        if had_this_rank:
            restore_random(own["random"], own_generators)
    facts = {name: head[name] for name in ("updates", "samples", "ranks", "in_flight")}
    return Checkpoint(path=found, extra=shared["extra"], **facts)


def _checked_head(path: Path, group: Group) -> dict[str, Any]:
    """Return the facts of a checkpoint whose files are all as they were written.

    Each rank checks what all ranks read, and its share of the rest.
    """
    # Its own checksum first: it names the other files.
    head = folders.read_head(path)
    files.check_sums(path, head["files"])
    # Shared among ranks: each file is hashed once.
    for rank in range(group.rank, head["ranks"], group.count):
        files.check_sums(path, files.read_json(path / f"rank-{rank}.json")["files"])
    # Positions inside a window belong to ranks, and cannot be dealt out again.
    if head["in_flight"] and head["ranks"] != group.count:
        raise CheckpointError(
            f"{path} was written within a window by {head['ranks']} ranks, and here are {group.count}. Start "
            f"{head['ranks']}, or load a checkpoint that was written between windows."
        )
    return head


def _decoded(
    path: Path, head: Mapping[str, Any], group: Group, tree: Any, shards: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that ranks share, and this rank's own: the first one's for a rank that is new."""
    shared = decode(tree, {**files.read_tensors(path / "state.safetensors"), **shards})
    rank = group.rank if group.rank < head["ranks"] else 0
    own = files.read_json(path / f"rank-{rank}.json")["state"]
    return shared, decode(own, files.read_tensors(path / f"rank-{rank}.safetensors"))


def _load_own(
    engine: Engine,
    group: Group,
    own: dict[str, Any],
    masters: dict[str, torch.Tensor] | None,
    before: dict[str, Any],
) -> None:
    """Load the accumulator's state, which checks that it fits; on all ranks or on none."""
    state = {**own, "masters": masters_here(engine, masters)}
    loaded = False
    try:
        # On all ranks or, after an error on one, on none.
        group.each(lambda: engine.load_state_dict(state))
        loaded = True
    except SuperbatchError as error:
        # One type for the caller, with the accumulator's own text.
        raise error if isinstance(error, CheckpointError) else CheckpointError(str(error)) from error
    finally:
        if not loaded:
            engine.load_state_dict(before)
