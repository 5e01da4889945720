"""Folder of checkpoints: each is written aside and renamed when it is whole; the last few are kept."""

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
_ASIDE = re.compile(r"\.\d+-update-\d+\.(writing|deleting)")  # what a kill may leave behind


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order in which they were written.

    Examples:
        >>> checkpoints_in(Path("no such folder"))
        []
    """
    if not folder.is_dir():
        return []
    # Sorted by number, not by name: numbers may outgrow six digits.
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def place_of(folder: Path, updates: int) -> tuple[Path, Path]:
    """Return where the next checkpoint is written, and the name that it gets when it is whole.

    Args:
        folder: of the checkpoints.
        updates: that were made.

    Examples:
        >>> [path.name for path in place_of(Path("run"), 120)]
        ['.000001-update-120.writing', '000001-update-120']
    """
    earlier = checkpoints_in(folder)
    # Not the number of folders: older ones are deleted.
    number = 1 + (int(earlier[-1].name.split("-")[0]) if earlier else 0)
    name = f"{number:06d}-update-{updates}"
    return folder / f".{name}.writing", folder / name


def prepare(aside: Path) -> None:
    """Make the folder that a checkpoint is written in, and delete what killed programs left there."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    # A kill leaves at most these names; folders of users are not touched.
    for path in aside.parent.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
    aside.mkdir()


def write_head(aside: Path, facts: Mapping[str, Any]) -> None:
    """Write the file that makes a folder a checkpoint, with a checksum of its own."""
    head = {"format": FORMAT, "version": VERSION, **facts}
    # The checksum is part of the file and is taken without itself.
    write_json(aside / HEAD, {**head, "sum": digest_of_json(head)})


def read_head(path: Path) -> dict[str, Any]:
    """Read and check the file that describes a checkpoint.

    Raises:
        CheckpointError: it is no checkpoint of ours, a newer one, or damaged.
    """
    file = path / HEAD
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {HEAD}. Pass what save_checkpoint() returned."
        )
    # Format before version: the version of another program's file says nothing.
    head = read_json(file)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f"{file} was not written by save_checkpoint(). Pass a folder that it returned.")
    if head.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {head.get('version')!r} of the format, and this superbatch reads {VERSION}. "
            "Install the superbatch that wrote it."
        )
    if head.pop("sum", None) != digest_of_json(head):
        raise CheckpointError(f"{file} is damaged: its checksum has changed. {OLDER}")
    return head


def publish(aside: Path, final: Path) -> None:
    """Give a whole checkpoint its name, on the disk too."""
    # The names in the folder must be on the disk before the folder has its final name.
    flush(aside)
    aside.rename(final)
    # The rename itself is durable once the parent is flushed.
    flush(final.parent)


def keep_last(folder: Path, count: int) -> None:
    """Delete all checkpoints of a folder but the last ones.

    Examples:
        >>> keep_last(Path("no such folder"), 3)
    """
    for path in checkpoints_in(folder)[:-count]:
        aside = path.with_name(f".{path.name}.deleting")
        # A rename is atomic, and deleting a folder is not.
        path.rename(aside)  # one that is half deleted is no checkpoint
        shutil.rmtree(aside)


def newest(path: Path) -> Path | None:
    """Return a checkpoint: the path itself, or the newest one in it; None where there is none yet.

    Raises:
        CheckpointError: the path is named like a checkpoint, and is not there.

    Examples:
        >>> newest(Path("no such folder")) is None
        True
    """
    # One checkpoint may be passed by its own path.
    if (path / HEAD).is_file():
        return path
    if path.is_dir() and _NAME.fullmatch(path.name):
        return path  # without its head, which `read_head` tells
    if path.is_file() or _NAME.fullmatch(path.name):
        what = "a file" if path.is_file() else "not there"
        raise CheckpointError(f"{path} is {what}. Pass the folder that save_checkpoint() was given.")
    found = checkpoints_in(path)
    return found[-1] if found else None
