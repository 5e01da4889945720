"""Lazy conjugation inside a handler of `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LAZY_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


@contextmanager
def lazy_conjugation() -> Iterator[None]:
    """Enable the Conjugate and Negative dispatch keys, which torch excludes inside `__torch_dispatch__`."""
    # `x.conj()` only sets a bit, which the Conjugate key resolves before a kernel runs. Inside a handler that
    # key is excluded, so kernels that conjugate internally, such as torch.linalg.pinv of a complex matrix,
    # return wrong results.
    off = [key for key in _LAZY_KEYS if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in off:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        # Only the keys that this context enabled, so that contexts can be nested.
        for key in off:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
