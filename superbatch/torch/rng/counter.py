"""Counter-based random generator in tensor arithmetic: each value depends only on its position.

* A position is an int64; `finalise` (two xor-shift-multiply rounds of splitmix64, Steele, Lea & Flood, OOPSLA
  2014, doi:10.1145/2660193.2660195) turns it into 64 random bits.
* int64 arithmetic wraps around in the same way on every device, so bits, uniforms and integers agree bit for
  bit between CPU and GPU; results of `log` or `cos` agree up to rounding.
* Shifts are arithmetic, because torch has no unsigned 64-bit ones. Each loses one bit of the position, which
  is harmless, because positions are hashed. A mask would cost one more pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
# The multipliers of splitmix64.
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Digits of the mantissa. With more digits some numbers would round to 1.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def signed(word: int) -> int:
    """Return the int64 that has the same low 64 bits as ``word``.

    Examples:
        >>> signed(2**64 - 1)
        -1
    """
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def mix(word: int) -> int:
    """Return splitmix64's finaliser of one Python int as an int64, for keys and strides.

    Examples:
        >>> mix(1) != mix(2)
        True
    """
    word &= _WORD
    word = ((word ^ (word >> 30)) * _M1) & _WORD
    word = ((word ^ (word >> 27)) * _M2) & _WORD
    return signed(word ^ (word >> 31))


# Odd, so that no two steps along a dimension are equal modulo 2**64.
STRIDES = tuple(mix(0x9E3779B97F4A7C15 * (d + 1)) | 1 for d in range(16))
"""Increments of the position for a step along each dimension, counted from the last dimension."""


def positions(start: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return ``start[j] + sum_d index_d * STRIDES[d]``: j indexes ``axis``, d is any other dimension.

    Dimensions of size 1 are not counted, so that the position of an element does not depend on them.

    Args:
        start: int64, shape (shape[axis],).
        shape: shape of the result; no dimension is 0.
        axis: the dimension of ``start``.

    Examples:
        >>> positions(torch.tensor([10, 20]), (2, 1), axis=0).tolist()
        [[10], [20]]
    """
    result = start.view([-1 if d == axis else 1 for d in range(len(shape))])
    counted = 0
    # From the last dimension, so that more leading dimensions do not change strides.
    for d in reversed(range(len(shape))):
        if d != axis and shape[d] > 1:
            index = torch.arange(shape[d], device=start.device).mul_(STRIDES[counted])
            result = result + index.view([-1] + [1] * (len(shape) - d - 1))
            counted += 1
    # `finalise` writes in place, which an expanded tensor does not allow.
    return result.expand(shape).contiguous()


def finalise(position: Tensor) -> Tensor:
    """Turn positions into random bits, in place; the upper bits are the most random.

    Examples:
        >>> finalise(torch.tensor([1, 2])).tolist() == finalise(torch.tensor([1, 2])).tolist()
        True
    """
    # In place, so that dropout of large activations needs no further copy.
    position.bitwise_xor_(position >> 30).mul_(signed(_M1))
    return position.bitwise_xor_(position >> 27).mul_(signed(_M2))


def below(bits: Tensor, p: float) -> Tensor:
    """Return a bool tensor, true with probability ``p`` (to 2**-63), from the bits of `finalise`.

    Examples:
        >>> below(torch.tensor([-(2**63), 0, 2**63 - 1]), 0.5).tolist()
        [True, False, False]
    """
    # Integers compare exactly, and equally on every device.
    return bits < min(round((p - 0.5) * 2.0**64), 2**63 - 1)


def uniform(bits: Tensor, dtype: torch.dtype, *, open: bool = False) -> Tensor:
    """Return numbers of [0, 1), or (0, 1) if `open`, equally spaced with the binary digits of ``dtype``.

    Examples:
        >>> uniform(torch.tensor([-(2**63), 0]), torch.float32).tolist()
        [0.0, 0.5]
    """
    digits = _DIGITS[dtype]
    top = bits >> (64 - digits)
    if open:
        top.bitwise_or_(1)
    # `top` is a signed number of `digits` bits, which scaled is in [-0.5, 0.5).
    return top.to(dtype).mul_(2.0**-digits).add_(0.5)


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers (Box-Muller: ``sqrt(-2 log u) cos(2 pi v)``).

    float16 and bfloat16 are computed in float32.

    Examples:
        >>> normal(finalise(torch.arange(4)), torch.float32).shape
        torch.Size([4])
    """
    work = torch.float64 if dtype is torch.float64 else torch.float32
    # For float64 the radius uses 53 of the 64 bits, so the angle needs new bits. For float32 the lower bits
    # remain for it.
    angle = uniform(finalise(bits + STRIDES[-1]) if dtype is torch.float64 else bits << 24, work)
    radius = uniform(bits, work, open=True).log_().mul_(-2).sqrt_()
    return radius.mul_(angle.mul_(2 * math.pi).cos_()).to(dtype)


def integers(bits: Tensor, low: int, high: int) -> Tensor:
    """Return integers of ``low <= i < high``, uniform to ``(high - low) / 2**63``; at most 2**63 values.

    Examples:
        >>> set(integers(finalise(torch.arange(100)), 3, 5).tolist())
        {3, 4}
    """
    # The upper bits are mixed in, because remainder depends on the lower ones, which are less random.
    mixed = (bits ^ (bits >> 31)) & (2**63 - 1)
    return mixed.remainder_(high - low).add_(low) if high - low < 2**63 else mixed.add_(low)
