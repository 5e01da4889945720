"""One file per method of accumulation, and the table of their names.

Every file has three functions with the same signature, so that a case is the same for every column:

* ``train(task)``: run the documented loop over the task's micro-batches;
* ``resume(task)``: the same, killed after ``task.stop_after`` micro-batches and resumed from a checkpoint;
* ``leave(task)``: two epochs, the first of which ends by `break` after ``task.stop_after`` micro-batches.

Each returns the parameters after training. `libraries` loads the file of a selected column.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Column of the scorecard."""

    name: str
    title: str
    module: str
    package: str | None  # required distribution; None: only torch and superbatch
    variants: tuple[str | None, ...] = (None,)  # variants to run: the cell shows the worst


PEERS = (
    Peer("tutorial", "tutorial loop", "tutorial", None),
    Peer("accelerate", "Accelerate accumulate()", "accelerate_loop", "accelerate"),
    Peer(
        "accelerate-items",
        "Accelerate num_items recipe",
        "accelerate_loop",
        "accelerate",
        variants=("items",),
    ),
    Peer("lightning", "Lightning Trainer", "lightning_trainer", "lightning"),
    Peer("fabric", "Fabric docstring", "fabric_loop", "lightning"),
    Peer("fabric-fixed", "Fabric repaired", "fabric_loop", "lightning", variants=("fixed",)),
    Peer("hf", "HF Trainer", "hf_trainer", "transformers"),
    Peer("hf-items", "HF Trainer with loss function", "hf_trainer", "transformers", variants=("items",)),
    Peer("ours", "superbatch", "ours", None, variants=("windows", "whole batches", "owned loop")),
)
"""The columns from left to right."""


def choose(names: str) -> list[Peer]:
    """Return the columns for ``--peers``: "all", "none" (tutorial loop and superbatch) or names with commas.

    Raises:
        ValueError: a name is not in the table.
    """
    control = {"tutorial", "ours"}  # the tutorial loop proves for every case that wrong accumulation differs
    if names == "all":
        return list(PEERS)
    wanted = set() if names == "none" else {name.strip() for name in names.split(",")}
    unknown = wanted - {peer.name for peer in PEERS}
    if unknown:
        known = ", ".join(peer.name for peer in PEERS)
        raise ValueError(
            f"--peers {', '.join(sorted(unknown))!r} is unknown. Pass all, none, or some of {known}."
        )
    return [peer for peer in PEERS if peer.name in wanted | control]
