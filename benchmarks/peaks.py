"""Peak memory of a training, in units of the logits of a micro-batch.

Nearly all activations of a language model with a large vocabulary are the logits of the micro-batch. The unit
U is the bytes of these logits; P is the bytes of the gradients. The backward of cross entropy needs the
log-probabilities, their gradient and that of the logits at the same time: 3 U. A loop that keeps its outputs
in a variable needs 4 U.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from peers import PEERS, by_hand
from peers.libraries import load, version_of
from peers.work import Clock, Timing, TrainerWindow, Window, Work
from workloads import Transformer, text, workloads

from superbatch.torch.memory.ledger import Ledger
from superbatch.torch.memory.meter import peak_bytes


class LargeVocabulary(Transformer):
    """Language model whose logits dominate its memory."""

    VOCABULARY, WIDTH = 32768, 64


@dataclass(frozen=True)
class Peak:
    """Peak of one window on top of parameters and data.

    Attributes:
        bytes: the ledger's peak.
        units: (bytes - gradients) / bytes of a micro-batch's logits.
    """

    name: str
    bytes: int
    units: float


def language_model() -> Work:
    """Return a training with four micro-batches of two sequences and an optimizer without state."""
    return replace(
        workloads()["transformer"],
        name="large vocabulary",
        model=LargeVocabulary,
        batch=text(8),
        microbatch_size=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


def contestants(peers: bool) -> list[tuple[str, Callable[[Work], Window | TrainerWindow]]]:
    """Return the rows: hand-written loops, loops of installed libraries, superbatch."""
    rows: list[tuple[str, Callable[[Work], Window | TrainerWindow]]] = [
        ("by hand, best", by_hand.best),
        ("by hand, usual", by_hand.usual),
    ]
    wanted = {"accelerate": "documented", "fabric-fixed": "documented", "hf": None, "lightning": None}
    for peer in PEERS if peers else ():
        if peer.name in wanted and version_of(peer.package) is not None:
            rows += [(peer.title, lambda work, p=peer: load(p.module).window(work, wanted[p.name]))]
    ours = load(next(peer.module for peer in PEERS if peer.name == "ours"))
    return [
        *rows,
        ("superbatch", ours.window),
        ("superbatch, whole batch", lambda w: ours.window(w, "slices")),
    ]


def measure(*, peers: bool) -> list[Peak]:
    """Measure the second window of each, because the first loads modules and creates state."""
    work = language_model()
    part = work.part(0)["inputs"]
    unit = part.numel() * LargeVocabulary.VOCABULARY * 4
    gradients = sum(p.numel() * p.element_size() for p in work.build()[0].parameters())
    peaks = []
    for name, make in contestants(peers):
        contestant = make(work)
        contestant.timed()
        peak = (
            _trainer_peak(contestant) if isinstance(contestant, TrainerWindow) else peak_bytes(contestant.run)
        )
        contestant.close()
        peaks.append(Peak(name, peak, (peak - gradients) / unit))
    return peaks


class _LedgerClock(Clock):
    """Ledger with the interface of a clock, for the thread of a Trainer."""

    def __init__(self) -> None:
        self.ledger = Ledger(torch.device("cpu"))

    def start(self) -> None:
        self.ledger.__enter__()

    def stop(self) -> Timing:
        self.ledger.__exit__(None, None, None)
        return Timing(0.0, 0.0)


def _trainer_peak(contestant: TrainerWindow) -> int:
    clock = _LedgerClock()
    contestant.make_clock = lambda: clock
    contestant.timed()
    return clock.ledger.peak
