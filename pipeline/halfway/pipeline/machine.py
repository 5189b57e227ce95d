"""What this machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUPS: Final = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Version 2 and version 1, as they are seen from within a container."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes processes can still take here, in this container; None where nobody tells (not Linux)."""
    known = [kib << 10 for name, kib in _numbers(root / "proc/meminfo").items() if name == "MemAvailable:"]
    for folder, limit, used, cache in _CGROUPS:
        most, held = (_number(root / folder / name) for name in (limit, used))
        if most is not None and held is not None:
            # Files that were read and are not in use count as used, and are given up first.
            known.append(max(0, most - held + _numbers(root / folder / "memory.stat").get(cache, 0)))
    return min(known, default=None)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, int]:
    """Return the lines `name number` of a file, none where there is no such file."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines) if number.isdecimal()}
