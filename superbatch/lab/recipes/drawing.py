"""Random numbers of torch's CPU generator, drawn without torch.

NumPy has the same generator, a Mersenne Twister. So with the same seed, a run on another backend starts from
the weights of the run on torch, and sees the samples in its order. A test compares the numbers of the two.
"""

from __future__ import annotations

import math

import numpy as np


class Draws:
    """Generator with the numbers of torch's CPU generator after ``manual_seed(seed)``."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed)

    def permutation(self, count: int) -> np.ndarray:
        """Return the permutation of ``torch.randperm(count)``."""
        order = list(range(count))
        for index, word in enumerate(self._words(count - 1).tolist()):
            other = index + word % (count - index)
            order[index], order[other] = order[other], order[index]
        return np.array(order, np.int64)

    def linear(self, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the initial weight and bias of ``torch.nn.Linear(inputs, outputs)``."""
        bound = 1 / math.sqrt(inputs)  # the bound of kaiming_uniform_(a=sqrt(5))
        return self._uniform((outputs, inputs), bound), self._uniform((outputs,), bound)

    def _uniform(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        limit = float(np.float32(bound))
        unit = (self._words(math.prod(shape)) % 2**24).astype(np.float64) / 2**24
        # torch rounds this once, to float32. In float64 the product and the sum are exact, so the only
        # rounding is the last one here too.
        return (unit * (2 * limit) - limit).astype(np.float32).reshape(shape)

    def _words(self, count: int) -> np.ndarray:
        return self._twister.randint(0, 2**32, size=count, dtype=np.uint32)
