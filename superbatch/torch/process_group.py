"""Process group of a program that `torchrun` starts and may restart."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from superbatch.errors import InputError, RankError

_KEYS = "superbatch"
_LONGEST = timedelta(minutes=30)  # the default of init_process_group for gloo


def join_process_group(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """Call `init_process_group` so that a restart by ``torchrun --max-restarts`` cannot hang.

    torchrun keeps one key-value store for all attempts. After a restart a rank may read the address of a dead
    rank there, and waits for it (https://github.com/pytorch/pytorch/issues/135712). Here the ranks of an
    attempt agree on a new prefix first, under which they then exchange addresses.

    Args:
        backend: as for `init_process_group`: ``"gloo"``, ``"nccl"``.
        timeout: timeout of the process group; None: the default of `init_process_group`. A rank that waits
            longer for another rank raises an error.

    Raises:
        InputError: the program was not started by `torchrun`.
        RankError: another rank has not started within the timeout.

    Examples:
        >>> from unittest.mock import patch
        >>> torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        >>> with patch.dict(os.environ, torchrun):  # as torchrun sets them
        ...     join_process_group("gloo")
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    if "RANK" not in os.environ:
        raise InputError("RANK is not set. Start the program by torchrun, which sets it.")
    longest = _LONGEST if timeout is None else timeout
    store, rank, ranks = next(rendezvous("env://", timeout=longest))
    if ranks > 1:
        name = _name_attempt(store, ranks, longest) if rank == 0 else _join_attempt(store, rank, longest)
        store = PrefixStore(name, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def _name_attempt(store: Store, ranks: int, timeout: timedelta) -> str:
    """Choose a name for this attempt, and answer every rank that asks for it (see `_join_attempt`)."""
    name, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    answered: dict[int, str] = {}
    while missing := [rank for rank in range(1, ranks) if not store.check([_joined(name, rank)])]:
        for rank in missing:
            # A token of the previous attempt is answered too; no rank reads that answer.
            token = store.get(_token(rank)).decode() if store.check([_token(rank)]) else None
            if token is not None and token != answered.get(rank):
                store.set(_answer(token), name)
                answered[rank] = token
        if time.monotonic() > end:
            raise _missing(f"Rank {missing[0]}", timeout)
        time.sleep(0.01)
    return name


def _join_attempt(store: Store, rank: int, timeout: timedelta) -> str:
    """Ask rank 0 for the name of this attempt, and return it."""
    # A new token, because the store still has the answers of the previous attempt.
    token = uuid.uuid4().hex
    store.set(_token(rank), token)
    try:
        store.wait([_answer(token)], timeout)
    except RuntimeError as error:
        raise _missing("Rank 0", timeout) from error
    name = store.get(_answer(token)).decode()
    store.set(_joined(name, rank), "")
    return name


def _missing(who: str, timeout: timedelta) -> RankError:
    return RankError(
        f"{who} has not started within {timeout.total_seconds():g} s. Look for its error in the output of "
        "torchrun; join_process_group(timeout=...) sets how long a rank waits."
    )


def _token(rank: int) -> str:
    return f"{_KEYS}/token/{rank}"


def _answer(token: str) -> str:
    return f"{_KEYS}/attempt/{token}"


def _joined(name: str, rank: int) -> str:
    return f"{_KEYS}/joined/{name}/{rank}"
