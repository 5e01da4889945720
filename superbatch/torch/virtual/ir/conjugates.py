"""Let torch see that a complex tensor is a conjugate, where an operator's kernel makes one inside itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MARKS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


@contextmanager
def conjugates_seen() -> Iterator[None]:
    """Run operators in a handler of `__torch_dispatch__` as they run outside one.

    A tensor is conjugated by a mark, which a layer of torch's dispatcher reads. A handler is called beneath
    that layer, with it switched off: `torch.linalg.pinv` of a complex matrix, which multiplies with a
    conjugate in its kernel, is wrong under any handler, even one that does nothing.
    """
    off = [key for key in _MARKS if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in off:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in off:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
