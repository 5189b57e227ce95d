"""Percentiles, metrics, the kernel's figures of a process, and the record that every run prints and writes."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

_LARGE: Final = 100
_SMALL: Final = 10

Say: TypeAlias = Callable[[str], None]
Row: TypeAlias = dict[str, Any]
"""The figures of one line by name, which is the column of the table and the member of the JSON."""


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


# --- a process


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a process at a moment."""

    rss_mib: float
    threads: int
    fds: int


def cpu_us(pid: int) -> float:
    """Return the CPU time of a process and its children so far, user and system, of all threads, in microseconds."""
    first = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (first, *first.children())) * 1_000_000


def standing(pid: int) -> Standing:
    """Return the current resources of a process."""
    one = psutil.Process(pid)
    return Standing(rss_mib=one.memory_info().rss / 1024**2, threads=one.num_threads(), fds=one.num_fds())


def memory_mib(pid: int) -> tuple[float, float]:
    """Return the current and the peak resident memory of a process, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if " kB" in rest}
    return kib["VmRSS"] / 1024, kib["VmHWM"] / 1024


# --- the record


def python_build() -> str:
    """Return which Python runs everything: a build without profile-guided optimisation is slower."""
    arguments = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    profiled = "with" if "--enable-optimizations" in arguments else "without"
    return f"{platform.python_implementation()} {platform.python_version()}, built {profiled} PGO"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run; `clean`: nothing was lost, doubled or refused without a reason."""

    title: str
    rows: list[Row]
    notes: list[str] = []
    clean: bool = True
    python: str = msgspec.field(default_factory=python_build)

    def show(self, console: Console) -> None:
        """Print a line for each row, or for each figure of an only row, without what is missing or 0 in all rows."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        names = [name for name in names if any(row.get(name) not in (None, "", {}, 0) for row in self.rows)]
        table = Table(title=f"{self.title} ({self.python})")
        if len(self.rows) == 1:
            table.add_column("")
            table.add_column("", justify="right")
            for name in names:
                table.add_row(name, _shown(self.rows[0].get(name)))
        else:
            for name in names:
                table.add_column(name, justify="left" if isinstance(self.rows[0].get(name), str) else "right")
            for row in self.rows:
                table.add_row(*(_shown(row.get(name)) for name in names))
        console.print(table)
        for note in (*self.notes, "clean" if self.clean else "NOT CLEAN"):
            console.print(note, markup=False)

    def write(self, path: Path) -> None:
        """Write the record as indented JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        digits = 0 if abs(value) >= _LARGE else 1 if abs(value) >= _SMALL else 2
        return f"{value:,.{digits}f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_shown(count)} {name}" for name, count in sorted(value.items()))
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def wide_console() -> Console:
    """Return a console that does not fold tables when it writes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=240)
