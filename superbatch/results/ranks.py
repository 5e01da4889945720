"""Report on the ranks of a window."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass
from typing import Literal

from .memory import binary_text

Reduction = Literal["never", "window", "microbatch"]


@dataclass(frozen=True)
class RanksReport:
    """Report on the ranks that share a window, and the memory of their gradients.

    Attributes:
        kind: how the ranks share the model: ``"alone"`` (one rank), replicas (``"all_reduce"``, ``"DDP"``),
            or shards (``"FSDP2"``, ``"HSDP"``, ``"tensor parallel"``, ``"FSDP2 x tensor parallel"``).
        ranks: number of ranks whose data makes one batch.
        reduced: when gradients are reduced: once per ``"window"``, after each ``"microbatch"``, or
            ``"never"``.
        kept: bytes of unreduced gradients on this rank if they are reduced once per window.
        shards: bytes of gradients on this rank if they are reduced after each micro-batch; 0 if that is
            impossible.
        why: the reason for the choice.

    Examples:
        >>> print(RanksReport("FSDP2", 8, "window", kept=2**30, shards=2**27, why="as passed"))
        FSDP2 over 8 ranks: gradients are reduced once in a window (as passed); 1.00 GiB of gradients are...
    """

    kind: str
    ranks: int
    reduced: Reduction
    kept: int = 0
    shards: int = 0
    why: str = ""

    def __str__(self) -> str:
        over = f"{self.kind} over {self.ranks} ranks"
        if not self.kept:
            return over if self.ranks > 1 else self.kind
        kept, shards = binary_text(self.kept), binary_text(self.shards)
        if self.reduced == "window":
            when = "once in a window"
            less = f", {shards} if reduced after each micro-batch" if self.shards else ""
            bytes_ = f"{kept} of gradients are kept until then{less}"
        else:
            when = "after each micro-batch"
            bytes_ = f"{shards} of gradients are kept until the end of a window, {kept} if reduced once"
        return f"{over}: gradients are reduced {when} ({self.why}); {bytes_}"
