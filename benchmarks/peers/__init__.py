"""One file per way of accumulating, and the table that names them.

Every file has three functions with one signature, so that a case means the same thing for every column:

* ``train(task)``: the documented loop over the task's micro-batches;
* ``resume(task)``: the same, killed after ``task.stop_after`` micro-batches and resumed from a checkpoint;
* ``leave(task)``: two epochs, the first of which ends by `break` after ``task.stop_after`` micro-batches.

Each returns the parameters after training. `libraries` loads the file of a selected column.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A column of the scorecard."""

    name: str
    title: str
    module: str
    package: str | None  # the distribution that has to be installed; None: only torch and superbatch
    variants: tuple[str | None, ...] = (None,)  # ways to run it: the cell shows the worst


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
    """The columns for ``--peers``: "all", "none" (the tutorial loop and ours) or names separated by commas.

    Raises:
        ValueError: a name is not in the table.
    """
    control = {"tutorial", "ours"}  # the tutorial loop is every case's proof that the wrong way differs
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
