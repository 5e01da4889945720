"""Folder of checkpoints: each is written under a temporary name and renamed; the last few are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superbatch.errors import CheckpointError

from .files import OLDER, digest_of_json, flush, read_json, write_json

FORMAT, VERSION = "superbatch checkpoint", 1
HEAD = "checkpoint.json"
_NAME = re.compile(r"(\d+)-update-(\d+)")
# Names of folders that a killed program may leave.
_TEMPORARY = re.compile(r"\.\d+-update-\d+\.(writing|deleting)")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order in which they were written.

    Examples:
        >>> checkpoints_in(Path("no such folder"))
        []
    """
    if not folder.is_dir():
        return []
    # Sorted by number, not by name, because a number may have more than six digits.
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def next_paths(folder: Path, updates: int) -> tuple[Path, Path]:
    """Return the temporary path of the next checkpoint, and the final one.

    Examples:
        >>> [path.name for path in next_paths(Path("run"), 120)]
        ['.000001-update-120.writing', '000001-update-120']
    """
    earlier = checkpoints_in(folder)
    # Not the number of folders, because older ones are deleted.
    number = 1 + (int(earlier[-1].name.split("-")[0]) if earlier else 0)
    name = f"{number:06d}-update-{updates}"
    return folder / f".{name}.writing", folder / name


def prepare(temporary: Path) -> None:
    """Make the temporary folder of a checkpoint, and delete those that killed programs have left."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    # Only folders with such names, because users may have others beside them.
    for path in temporary.parent.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path)
    temporary.mkdir()


def write_head(temporary: Path, facts: Mapping[str, Any]) -> None:
    """Write the head file, which makes a folder a checkpoint, with its own checksum."""
    head = {"format": FORMAT, "version": VERSION, **facts}
    # The checksum is that of all other entries.
    write_json(temporary / HEAD, {**head, "sum": digest_of_json(head)})


def read_head(path: Path) -> dict[str, Any]:
    """Read and check the head file of a checkpoint.

    Raises:
        CheckpointError: it is not from `save_checkpoint`, of a newer version, or damaged.
    """
    file = path / HEAD
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {HEAD}. Pass the path that save_checkpoint() returned."
        )
    # The format first, because a file of another program may have a version too.
    head = read_json(file)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f"{file} was not written by save_checkpoint(). Pass a folder that it returned.")
    if head.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {head.get('version')!r} of the format, but this superbatch reads version "
            f"{VERSION}. Install the superbatch that wrote it."
        )
    if head.pop("sum", None) != digest_of_json(head):
        raise CheckpointError(f"{file} is damaged: its checksum has changed. {OLDER}")
    return head


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, and wait until that is on disk."""
    # The folder's list of files must be on disk before the folder gets its final name.
    flush(temporary)
    temporary.rename(final)
    # The rename is on disk once the parent is flushed.
    flush(final.parent)


def keep_last(folder: Path, count: int) -> None:
    """Delete all checkpoints of a folder except the last `count`.

    Examples:
        >>> keep_last(Path("no such folder"), 3)
    """
    for path in checkpoints_in(folder)[:-count]:
        temporary = path.with_name(f".{path.name}.deleting")
        # Renamed first, because deleting a folder is not atomic.
        path.rename(temporary)
        shutil.rmtree(temporary)


def newest(path: Path) -> Path | None:
    """Return the path itself if it is a checkpoint, or the newest checkpoint in it; None if it has none.

    Raises:
        CheckpointError: the path is a file, or has the name of a checkpoint and does not exist.

    Examples:
        >>> newest(Path("no such folder")) is None
        True
    """
    if (path / HEAD).is_file():
        return path
    if path.is_dir() and _NAME.fullmatch(path.name):
        return path  # its head is missing, for which `read_head` raises
    if path.is_file() or _NAME.fullmatch(path.name):
        what = "is a file" if path.is_file() else "does not exist"
        raise CheckpointError(f"{path} {what}. Pass the folder that you pass to save_checkpoint().")
    found = checkpoints_in(path)
    return found[-1] if found else None
