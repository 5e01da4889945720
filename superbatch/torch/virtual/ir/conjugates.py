"""Lazy conjugation inside a handler of `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MARKS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


@contextmanager
def conjugates_seen() -> Iterator[None]:
    """Enable the Conjugate and Negative dispatch keys, which torch excludes inside `__torch_dispatch__`."""
    # `x.conj()` only sets a bit, which the Conjugate key resolves before a kernel runs. A handler runs below
    # that key, with it excluded. So a kernel that conjugates internally is wrong under any handler, even an
    # empty one: e.g. torch.linalg.pinv of a complex matrix.
    off = [key for key in _MARKS if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in off:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        # Only the keys that were excluded before: nested contexts restore the state that they found.
        for key in off:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
