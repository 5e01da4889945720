"""Digest of a saved window, which tells whether it is as it was saved."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# A digest of gigabytes would take longer than saving them.
_LARGEST = 1 << 16  # bytes of a tensor whose values count; of larger ones dtype and shape do


def digest_of(state: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a saved state: keys, numbers, texts, small tensors, forms of large tensors.

    Args:
        state: tensors, numbers and texts in mappings, lists and tuples; its "digest" is left out.

    Examples:
        >>> digest_of({"next": 1, "losses": (0.5,)}) == digest_of({"losses": [0.5], "next": 1})
        True
        >>> digest_of({"next": 1}) == digest_of({"next": 2})
        False
    """
    found = 0
    for part in _parts({key: value for key, value in state.items() if key != "digest"}):
        # Chained: the order of the parts counts too.
        found = zlib.crc32(part, found)
    return found


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{value.layout}".encode()
        if value.layout is torch.strided and value.device.type != "meta" and value.nbytes <= _LARGEST:
            # view(uint8) needs plain bits: a conjugated view has a flag in place of them.
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield bytes(plain.reshape(-1).view(torch.uint8).tolist())
    elif isinstance(value, Mapping):
        yield b"{"
        # In an order that loading keeps: a mapping may come back sorted.
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"["
        for item in value:
            yield from _parts(item)
        yield b"]"
    else:
        # The type too: 1 and True, or 1 and 1.0, are equal in Python.
        yield f"{type(value).__name__}{value!r};".encode()
