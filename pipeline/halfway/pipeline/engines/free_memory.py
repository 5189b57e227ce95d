"""The free memory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUPS: Final = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Version 2 and version 1 of cgroups, as a container sees them."""


_SHARE: Final = 0.75
"""The share of the free memory for DuckDB. Python and the processes that decode need the rest."""


def duckdb_limit(memory: str | None) -> int | None:
    """Return the most bytes that DuckDB takes: a size in Spark's form (512m, 2g), else most of the free memory."""
    if memory is None:
        return None if (free := free_memory()) is None else round(free * _SHARE)
    number = memory.lower().rstrip("ib")
    return int(number[:-1]) << 10 * ("kmgt".index(number[-1]) + 1)


def free_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes processes can still allocate in this container; None if it is unknown (not Linux)."""
    known = [kib << 10 for name, kib in _numbers(root / "proc/meminfo").items() if name == "MemAvailable:"]
    for folder, limit, used, cache in _CGROUPS:
        most, held = (_number(root / folder / name) for name in (limit, used))
        if most is not None and held is not None:
            # The cache of files that are not in use counts as used, although it is released first.
            known.append(max(0, most - held + _numbers(root / folder / "memory.stat").get(cache, 0)))
    return min(known, default=None)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, int]:
    """Return the lines `name number` of a file, none if the file does not exist."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines) if number.isdecimal()}
