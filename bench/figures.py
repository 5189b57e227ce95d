"""Percentiles, metrics, and the kernel's figures of a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

_TICK_US: Final = 1_000_000 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_UTIME, _STIME = 11, 12
_THREADS, _RSS = 17, 21


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a process at a moment."""

    rss_mib: float
    threads: int
    fds: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 if there are no values."""
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * share // 1)
    return ordered[max(0, int(rank) - 1)]


def metric(text: str, name: str) -> float:
    """Return a metric from a text in Prometheus format, summed over its labels."""
    lines = text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process so far, user and system, of all threads, in microseconds."""
    fields = _stat(pid)
    return (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_US


def standing(pid: int) -> Standing:
    """Return the current resources of a process."""
    fields = _stat(pid)
    return Standing(
        rss_mib=int(fields[_RSS]) * _PAGE_BYTES / 1024**2,
        threads=int(fields[_THREADS]),
        fds=len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - names are enough
    )


def memory_mib(pid: int) -> tuple[float, float]:
    """Return the current and the peak resident memory of a process, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if " kB" in rest}
    return kib["VmRSS"] / 1024, kib["VmHWM"] / 1024


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the process name, which may contain spaces."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text[text.rindex(")") + 2 :].split()
