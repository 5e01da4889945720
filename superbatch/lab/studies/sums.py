"""Ways to sum K gradients one after the other, in few bits: what each is, and what it keeps.

Each is a function of gradients of shape (K, coordinates), seen in order. u = 2^-p is the unit roundoff: p = 8
for bfloat16, 11 for float16, 24 for float32. A sum of like signs stops growing where a gradient is less than
half a unit in the last place of the sum: after 2^p to 2^(p+1) gradients. Reference: Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., chapter 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive(gradients: Tensor) -> Tensor:
    """``s = round(s + g)`` in the gradients' own dtype: what ``.grad`` does."""
    return _in_turn(gradients, gradients.dtype)


def in_float32(gradients: Tensor) -> Tensor:
    """The sum of low-precision gradients in a float32 buffer: what `superbatch.torch.Accumulator` does."""
    return _in_turn(gradients, torch.float32)


def _in_turn(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(gradients[0], dtype=dtype)
    for gradient in gradients:
        total += gradient
    return total


def kahan(gradients: Tensor) -> Tensor:
    """Compensated: a second buffer of the same dtype keeps what rounding took, error 2u."""
    total, lost = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for gradient in gradients:
        corrected = gradient - lost
        grown = total + corrected
        lost = (grown - total) - corrected
        total = grown
    return total


def pairwise(gradients: Tensor) -> Tensor:
    """Sums of equally many gradients are added up, like digits that carry; log2 K buffers, error u log2 K."""
    carried: list[tuple[int, Tensor]] = []
    for gradient in gradients:
        level, total = 0, gradient
        while carried and carried[-1][0] == level:
            total = carried.pop()[1] + total
            level += 1
        carried.append((level, total))
    total = carried.pop()[1]
    while carried:
        total = carried.pop()[1] + total
    return total


def stochastic(gradients: Tensor) -> Tensor:
    """Round up or down at random, up with the probability of what would be lost: no bias; for bfloat16.

    Draws from torch's generator.
    """
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        bits = (total.float() + gradient.float()).view(torch.int32)
        # bfloat16 is the upper half of float32: noise in the lower half carries over with the right chance.
        bits = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)
        total = bits.view(torch.float32).bfloat16()
    return total
