"""Memory limits of control groups on Linux, set by containers, batch systems or systemd."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from superbatch.results.memory import Limit, binary_text

# Without a limit, version 1 reports the largest multiple of a page; no machine has an exbibyte.
_UNLIMITED = 1 << 60


def cgroup_limits(proc: Path) -> Iterator[Limit]:
    """Yield the memory that the control group of this process, and each group above it, may still use.

    Yields:
        A `Limit` for each group that has one.

    Examples:
        >>> list(cgroup_limits(Path("/nowhere")))
        []
    """
    # Any group may have the smallest limit, which `memory_limit` uses.
    for directory, version in _groups(proc):
        names = _NAMES[version]
        most = _read_number(directory / names[0])
        if most is None or most >= _UNLIMITED:
            continue
        used = _read_number(directory / names[1])
        if used is not None:
            # The kernel drops cached file pages before it refuses memory.
            free = most - used + _droppable_cache(directory, names[2])
            yield Limit(free, f"control group {directory.name or '/'} of {binary_text(most)}")


# Names of the files of limit and usage, and of the file caches in memory.stat.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@lru_cache(maxsize=4)
def _groups(proc: Path) -> tuple[tuple[Path, int], ...]:
    """Return the directories of the group of this process and of those above it, and the version.

    Cached, because limits are read in every window and a process seldom changes its group.
    """
    return tuple(
        (group, version) for group, version in _directories(proc) if (group / _NAMES[version][0]).exists()
    )


def _directories(proc: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directories of the group of this process and of those above it, which may not exist."""
    for version, path in _memberships(proc):
        for root, mount in _mounts(proc, version):
            directory = mount / _below(path, root)
            if not directory.is_dir():  # inside a container the path does not exist
                directory = mount
            while True:
                yield directory, version
                if directory == mount:
                    break
                directory = directory.parent


def _memberships(proc: Path) -> Iterator[tuple[int, str]]:
    """Yield the version and the path of each memory group of this process."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        # Version 2 has a single line, without controllers.
        if number == "0" and not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _mounts(proc: Path, version: int) -> Iterator[tuple[str, Path]]:
    """Yield the mounted group and the mount point of each mount of the memory controller."""
    kind = "cgroup2" if version == 2 else "cgroup"
    for line in _lines(proc / "self" / "mountinfo"):
        fields, _, rest = line.partition(" - ")
        # The fields are mount id, parent, device, root and mount point; see proc(5).
        _, _, _, root, where, *_ = fields.split()
        filesystem, _, options = rest.split(maxsplit=2)
        if filesystem == kind and (version == 2 or "memory" in options.split(",")):
            yield root, Path(where)


def _below(path: str, root: str) -> str:
    """Return the group's path relative to the mounted group."""
    inside = path == root or path.startswith(root.rstrip("/") + "/")
    return (path[len(root) :] if inside else path).strip("/")


def _droppable_cache(directory: Path, name: str) -> int:
    """Return the bytes of file caches that the kernel drops when memory runs short."""
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read_number(file: Path) -> int | None:
    for line in _lines(file):
        # "max" means no limit.
        return int(line) if line.isdigit() else None
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
