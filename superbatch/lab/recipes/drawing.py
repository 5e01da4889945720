"""Random numbers as torch draws them from a seed, without torch: both it and numpy use a Mersenne Twister.

So a run on another backend starts from the weights, and sees the samples in the order, of the run on torch
with the same seed. A test compares the two, number by number.
"""

from __future__ import annotations

import math

import numpy as np


class Draws:
    """A generator that draws what torch's draws on the CPU after ``manual_seed(seed)``."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed)

    def permutation(self, count: int) -> np.ndarray:
        """Draw what ``torch.randperm(count)`` draws."""
        order = list(range(count))
        for place, word in enumerate(self._words(count - 1).tolist()):
            other = place + word % (count - place)
            order[place], order[other] = order[other], order[place]
        return np.array(order, np.int64)

    def linear(self, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the initial weights of ``torch.nn.Linear(inputs, outputs)``."""
        bound = 1 / math.sqrt(inputs)  # what kaiming_uniform_(a=sqrt(5)) comes to
        return self._uniform((outputs, inputs), bound), self._uniform((outputs,), bound)

    def _uniform(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        limit = float(np.float32(bound))
        unit = (self._words(math.prod(shape)) % 2**24).astype(np.float64) / 2**24
        # torch multiplies and adds in float32 with one rounding: the float64 result is exact until then.
        return (unit * (2 * limit) - limit).astype(np.float32).reshape(shape)

    def _words(self, count: int) -> np.ndarray:
        return self._twister.randint(0, 2**32, size=count, dtype=np.uint32)
