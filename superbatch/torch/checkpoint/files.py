"""Files of a checkpoint: written, flushed to the disk, and summed up by a checksum."""

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

_PIECE = 1 << 20  # bytes hashed at a time

Sums = dict[str, tuple[int, str]]  # name of a file -> its bytes and its SHA-256


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "a.json", {"updates": 3})
        ...     read_json(Path(folder) / "a.json")
        {'updates': 3}
    """
    # allow_nan=False: Python would write NaN, which is no JSON.
    text = json.dumps(value, allow_nan=False)
    path.write_text(text, encoding="utf-8")
    # Before the rename that publishes the folder.
    flush(path)


def read_json(path: Path) -> Any:
    """Read a value from JSON.

    Raises:
        CheckpointError: the file is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: it is damaged. {OLDER}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors.

    Args:
        path: of the file.
        tensors: of any device; views of one memory are written each on its own.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    storages: set[int] = set()
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # To the host, with conjugation and negation done: safetensors writes raw bytes.
        contiguous = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        storage = contiguous.untyped_storage()
        # A view of a larger memory would be written with all of it.
        if storage.data_ptr() in storages or storage.nbytes() != contiguous.nbytes:
            contiguous = contiguous.clone()  # safetensors takes no part of a memory, and none twice
        storages.add(contiguous.untyped_storage().data_ptr())
        whole[name] = contiguous
    safetensors = _safetensors()
    try:
        safetensors.torch.save_file(whole, path)
    except safetensors.SafetensorError as error:  # the system's error is in its text
        raise OSError(f"{path} cannot be written: {error}") from None
    flush(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors from safetensors, to the host.

    Raises:
        CheckpointError: the file is not in that format.
    """
    safetensors = _safetensors()
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}). {OLDER}") from None


def flush(path: Path) -> None:
    """Make the disk have a file, or the names in a folder, before anything else happens."""
    # fsync works on folders too, where it makes names durable.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sums_of(folder: Path, names: list[str]) -> Sums:
    """Return bytes and checksums of files.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a").write_bytes(b"abc")
        ...     sums_of(Path(folder), ["a"])["a"][0]
        3
    """
    return {name: ((folder / name).stat().st_size, _sha256(folder / name)) for name in names}


def check_sums(folder: Path, sums: Mapping[str, Any]) -> None:
    """Check that files are as they were written.

    Args:
        folder: that they are in.
        sums: from `sums_of`, perhaps read from JSON.

    Raises:
        CheckpointError: one is missing, shorter or longer, or changed.
    """
    for name, (size, digest) in sums.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. {OLDER}")
        # The size first: it costs no read of the file.
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, and {size} were written: it is truncated or "
                f"damaged. {OLDER}"
            )
        if _sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum has changed. {OLDER}")


def digest_of_json(value: Any) -> str:
    """Return the checksum of a JSON value.

    Examples:
        >>> digest_of_json({"a": 1, "b": 2}) == digest_of_json({"b": 2, "a": 1})
        True
    """
    # Sorted keys: the digest does not depend on the order in a file.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def require_safetensors() -> None:
    """Check that safetensors is there.

    Raises:
        CheckpointError: it is not installed.
    """
    _safetensors()


OLDER = "Pass the folder of an older checkpoint to load_checkpoint()."


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        # In pieces: a file may be larger than memory.
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _safetensors() -> Any:
    try:
        # Imported where it is used: it is an optional dependency.
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            'Checkpoints need safetensors, which is not installed: pip install "superbatch[checkpoint]"'
        ) from None
    return safetensors


def as_dtype(name: str) -> torch.dtype:
    """Return a dtype by its name.

    Raises:
        CheckpointError: torch has none of this name.

    Examples:
        >>> as_dtype("float32")
        torch.float32
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"The checkpoint has a tensor of dtype {name!r}, which this torch does not have."
        )
    return found
