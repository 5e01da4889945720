"""Files of a checkpoint, written, flushed to disk, and protected by checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import CheckpointError

_CHUNK = 1 << 20  # bytes hashed at a time

Sums = dict[str, tuple[int, str]]  # name of a file -> its size in bytes and its SHA-256


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "a.json", {"updates": 3})
        ...     read_json(Path(folder) / "a.json")
        {'updates': 3}
    """
    # allow_nan=False, because NaN is not JSON.
    text = json.dumps(value, allow_nan=False)
    path.write_text(text, encoding="utf-8")
    # The file must be on disk before its folder is renamed.
    flush(path)


def read_json(path: Path) -> Any:
    """Read a value from JSON.

    Raises:
        CheckpointError: the file is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not JSON. {OLDER}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device as safetensors, each separately, even if some share memory.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    storages: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # safetensors writes raw bytes, so conjugation and negation are resolved.
        contiguous = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        storage = contiguous.untyped_storage()
        # safetensors raises for tensors that share a storage, or use only a part of theirs.
        if storage.data_ptr() in storages or storage.nbytes() != contiguous.nbytes:
            contiguous = contiguous.clone()
        storages.add(contiguous.untyped_storage().data_ptr())
        separate[name] = contiguous
    safetensors = _safetensors()
    try:
        safetensors.torch.save_file(separate, path)
    except safetensors.SafetensorError as error:  # its text contains the error of the system
        raise OSError(f"{path} cannot be written: {error}") from None
    flush(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors from safetensors, to the host.

    Raises:
        CheckpointError: the file is not in this format.
    """
    safetensors = _safetensors()
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}). {OLDER}") from None


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    # fsync works on folders too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sums_of(folder: Path, names: list[str]) -> Sums:
    """Return the sizes and checksums of files.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a").write_bytes(b"abc")
        ...     sums_of(Path(folder), ["a"])["a"][0]
        3
    """
    return {name: ((folder / name).stat().st_size, _sha256(folder / name)) for name in names}


def check_sums(folder: Path, sums: Mapping[str, Any]) -> None:
    """Check that files have not changed since they were written.

    Raises:
        CheckpointError: a file is missing or has changed.
    """
    for name, (size, digest) in sums.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. {OLDER}")
        # The size first, because it needs no read of the file.
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is truncated or damaged: it has {path.stat().st_size} bytes, but {size} were "
                f"written. {OLDER}"
            )
        if _sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum has changed. {OLDER}")


def digest_of_json(value: Any) -> str:
    """Return the checksum of a JSON value.

    Examples:
        >>> digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
        True
    """
    # With sorted keys the digest does not depend on their order.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def require_safetensors() -> None:
    """Raise CheckpointError if safetensors is not installed."""
    _safetensors()


OLDER = "Pass the folder of an older checkpoint to load_checkpoint()."


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        # In chunks, because a file may be larger than memory.
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _safetensors() -> Any:
    try:
        # Imported here, because it is an optional dependency.
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            'Checkpoints need safetensors, which is not installed. Run: pip install "superbatch[checkpoint]".'
        ) from None
    return safetensors


def as_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name.

    Raises:
        CheckpointError: torch has no dtype with this name.

    Examples:
        >>> as_dtype("float32")
        torch.float32
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"The checkpoint has a tensor of dtype {name!r}, which this version of torch does not have. "
            "Install the torch that wrote it."
        )
    return found
