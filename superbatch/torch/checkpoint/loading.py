"""Reading of a checkpoint, which is checked completely before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from superbatch.errors import CheckpointError, SuperbatchError

from ..interrupts import DeferredInterrupts
from ..window.engine import Engine
from . import files, folders
from .arguments import check_common
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
        updates: number of updates made.
        samples: number of samples used, as passed to `save_checkpoint`.
        extra: the program's own state.
        ranks: number of ranks that wrote it.
        in_flight: whether it was written inside a window, which the next call resumes.
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
    """Load the newest checkpoint of a folder into a program that was just set up; call it on all ranks.

    A checkpoint written between windows loads with any number of ranks, another wrapping of the model (none,
    DDP, FSDP2) and any micro-batch size. Updates are then those of an uninterrupted training, up to rounding,
    if no random operation depends on the split. Each rank restores its own random generators; those of a new
    rank are not changed. A checkpoint written inside a window needs the same number of ranks and the same
    batch.

    Args:
        path: the folder that was passed to `save_checkpoint`, or the folder of one checkpoint in it.
        accumulate: an `Accumulator` or a `WholeBatch` with the same models and optimizers as the saved one.
        generators: the program's own random generators, by the names that they were saved with.

    Returns:
        The checkpoint; None if the folder has none yet, at the start of a training.

    Raises:
        InputError: an argument has the wrong type.
        CheckpointError: the checkpoint is damaged, of a newer version, or of another program. Nothing has
            changed. Pass the path of an older checkpoint to load it instead.
        WindowError: a window is open.

    Examples:
        >>> from torch import nn
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(2, 1)
        >>> accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> load_checkpoint("a folder without checkpoints", accumulate) is None
        True
    """
    check_common(accumulate, path, generators)
    engine, own_generators = accumulate.engine, generators or {}
    group = group_of(engine.config.sync, engine.config.models)
    # Rank 0 chooses, because on a shared disk ranks may see a new folder at different times.
    found = group.on_first_rank(lambda: folders.newest(Path(path)))
    if found is None:
        return None
    # On every rank before the first collective, because one may lack the package.
    group.on_all_ranks(files.require_safetensors)
    head = group.on_all_ranks(lambda: _checked_head(found, group))
    tree = group.on_all_ranks(lambda: files.read_json(found / "state.json"))
    # Outside of `on_all_ranks`, because it is a collective.
    shards = read_shards(found, sharded_in(tree), engine.config.models)
    shared, own = group.on_all_ranks(lambda: _decoded(found, head, group, tree, shards))
    # A new rank has no saved random state.
    had_this_rank = group.rank < head["ranks"]
    # To undo a load that fails on another rank.
    before = engine.state_dict()

    def check() -> None:
        check_shared(engine, shared)
        if had_this_rank:
            check_generators(own["random"], own_generators)

    # All ranks check before one loads.
    group.on_all_ranks(check)
    # Otherwise a Ctrl-C between two loads would leave half of a state.
    with DeferredInterrupts():
        # First, because it may still raise; everything else was checked.
        _load_own(engine, group, own["accumulator"], shared["masters"], before)
        load_shared(engine, shared)
        if had_this_rank:
            restore_random(own["random"], own_generators)
    facts = {name: head[name] for name in ("updates", "samples", "ranks", "in_flight")}
    return Checkpoint(path=found, extra=shared["extra"], **facts)


def _checked_head(path: Path, group: Group) -> dict[str, Any]:
    """Check the files of a checkpoint, and return its head.

    Each rank checks the files that all ranks read, and its share of the others.
    """
    # First, because it names the other files and has a checksum of its own.
    head = folders.read_head(path)
    files.check_sums(path, head["files"])
    # Divided among the ranks, so that each file is hashed once.
    for rank in range(group.rank, head["ranks"], group.count):
        files.check_sums(path, files.read_json(path / f"rank-{rank}.json")["files"])
    # The sums of an open window belong to ranks and cannot be divided again.
    if head["in_flight"] and head["ranks"] != group.count:
        raise CheckpointError(
            f"{path} was written inside a window by {head['ranks']} ranks, but this program has "
            f"{group.count}. Start {head['ranks']} ranks, or load a checkpoint that was written between "
            "windows."
        )
    return head


def _decoded(
    path: Path, head: Mapping[str, Any], group: Group, tree: Any, shards: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shared state, and this rank's own state, or for a new rank that of rank 0."""
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
    """Load the accumulator's state, which raises if it does not fit; on all ranks or on none."""
    state = {**own, "masters": masters_here(engine, masters)}
    loaded = False
    try:
        group.on_all_ranks(lambda: engine.load_state_dict(state))
        loaded = True
    except SuperbatchError as error:
        # As a CheckpointError for the caller, with the accumulator's text.
        raise error if isinstance(error, CheckpointError) else CheckpointError(str(error)) from error
    finally:
        if not loaded:
            engine.load_state_dict(before)
