"""Rounds of contestants: each once, in random order; garbage is collected only between rounds."""

import gc
import random
from collections.abc import Iterable, Iterator


def in_rounds(names: Iterable[str], rounds: int, *, seed: int = 0) -> Iterator[str]:
    """Yield each name once per round, in an order that is drawn anew."""
    order, generator = list(names), random.Random(seed)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            generator.shuffle(order)
            yield from order
            gc.collect()
    finally:
        gc.enable()
