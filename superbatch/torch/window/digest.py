"""Digest of a saved window, to detect that it was changed after it was saved."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Only tensors up to this many bytes enter with their values, because a digest of gigabytes is slow.
_LARGEST = 1 << 16


def digest_of(state: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a saved state.

    It covers keys, numbers, strings and small tensors. Large tensors enter with their dtype and shape only.

    Args:
        state: tensors, numbers and strings in mappings, lists and tuples; its "digest" is left out.

    Examples:
        >>> digest_of({"next": 1, "losses": (0.5,)}) == digest_of({"losses": [0.5], "next": 1})
        True
        >>> digest_of({"next": 1}) == digest_of({"next": 2})
        False
    """
    found = 0
    for part in _parts({key: value for key, value in state.items() if key != "digest"}):
        # Chained, so that the order of the parts counts too.
        found = zlib.crc32(part, found)
    return found


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}{value.layout}".encode()
        if value.layout is torch.strided and value.device.type != "meta" and value.nbytes <= _LARGEST:
            # A conjugated or negated view has a flag in place of the changed bits.
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield bytes(plain.reshape(-1).view(torch.uint8).tolist())
    elif isinstance(value, Mapping):
        yield b"{"
        # Sorted, because loading may change the order of a mapping.
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
        # With the type, because 1, True and 1.0 are equal in Python.
        yield f"{type(value).__name__}{value!r};".encode()
