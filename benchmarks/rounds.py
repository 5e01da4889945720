"""Rounds of contestants: each once, in random order, with garbage collection only between rounds."""

import gc
import random
from collections.abc import Iterable, Iterator


def in_rounds(names: Iterable[str], rounds: int, *, seed: int = 0) -> Iterator[str]:
    """Yield each name once per round, in a new random order."""
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
