"""What the Spark jobs cost by the size of the topics, beside DuckDB.

For each size an archive of made-up topics is written, then `halfway-pipeline audit` and `sweep` read it, each as a
process of its own as a user starts it; `audit --continue` does so after a run over nine tenths of it. Wall time and CPU
time are those of the whole process with its children; memory is the most that all of them held together; shuffle is
what Spark wrote between its stages, by its own event log.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from bench.pipeline import archive as made_up
from bench.system.processes import Watch
from bench.system.rig import RigError

Job = Literal["audit", "audit-continue", "duckdb", "duckdb-continue", "sweep"]
JOBS: Final[tuple[Job, ...]] = ("audit", "audit-continue", "duckdb", "duckdb-continue", "sweep")
_MIB: Final = 1 << 20


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs and sizes to run. Archives are in `folder`. With `keep` they stay there, and existing ones are used."""

    halves: tuple[int, ...] = (100_000, 1_000_000)
    jobs: tuple[Job, ...] = JOBS
    folder: Path
    memory: str = "4g"
    """Of Spark."""
    duckdb_memory: str | None = None
    """The limit for DuckDB; None for the free memory."""
    seed: int = 1
    keep: bool = False


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took; bytes in MiB."""

    job: Job
    halves: int
    seconds: float
    cpu_s: float
    memory_mib: int
    shuffle_mib: int | None = None
    spilled_mib: int | None = None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, and by job the factor by which the time grows from one size to the next, for ten times the work."""

    costs: list[Cost]
    growth: dict[str, list[float]]


def scale(wanted: Scale, say: Callable[[str], None]) -> Costs:
    """Write archives of made-up topics and run the jobs over them."""
    folder = wanted.folder.resolve()
    real = wanted.jobs != ("sweep",)
    costs = []
    for count in sorted(wanted.halves):
        archive = folder / f"{count}-{'whole' if real else 'sweep'}"
        if not (wanted.keep and (archive / "offsets.json").exists()):
            shutil.rmtree(archive, ignore_errors=True)
            began = time.monotonic()
            made_up.write(archive, count, messages=real, seed=wanted.seed)
            size = sum(file.stat().st_size for file in archive.rglob("*") if file.is_file())
            took = time.monotonic() - began
            say(f"{count:,} halves (seed {wanted.seed}): {size / _MIB:,.0f} MiB written in {took:.0f} s")
        for job in wanted.jobs:
            say(f"{job} of {count:,} halves")
            costs.append(run(job, count, archive, folder / "scratch", wanted))
        if not wanted.keep:
            shutil.rmtree(archive)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return Costs(costs=costs, growth=growth(costs))


def run(job: Job, halves: int, archive: Path, scratch: Path, wanted: Scale) -> Cost:
    """Run one job over an archive and check its result."""
    output, events = scratch / job, scratch / f"{job}-events"
    for folder in (output, events):
        shutil.rmtree(folder, ignore_errors=True)
    events.mkdir(parents=True)
    if job in {"audit-continue", "duckdb-continue"}:
        engine, memory = ("duckdb", wanted.duckdb_memory) if job == "duckdb-continue" else ("spark", wanted.memory)

        def window(pins: str) -> list[str]:
            return ["bench.pipeline.continued", engine, str(archive), pins, str(output), memory or ""]

        # What is measured is the second run, with a tenth that is new.
        _measured([sys.executable, "-m", *window(made_up.CUT)])
        command = window("offsets.json")
    elif job == "duckdb":
        command = ["halfway.pipeline", "audit", "--snapshot", str(archive), "--output", str(output), "--json"]
        command += ["--engine", "duckdb"]
        command += [] if wanted.duckdb_memory is None else ["--memory", wanted.duckdb_memory]
    else:
        log = {"enabled": "true", "dir": events.as_uri(), "rolling.enabled": "false", "compress": "false"}
        conf = [part for name, value in log.items() for part in ("--conf", f"spark.eventLog.{name}={value}")]
        local = f"spark.local.dir={scratch / 'local'}"
        command = ["halfway.pipeline", job, "--snapshot", str(archive), "--output", str(output), "--json"]
        command += ["--memory", wanted.memory, "--conf", local, *conf]
    printed, seconds, used = _measured([sys.executable, "-m", *command])
    _demand(job, halves, json.loads(printed))
    shuffled = _shuffled(events)
    shutil.rmtree(output, ignore_errors=True)
    return Cost(
        job=job,
        halves=halves,
        seconds=round(seconds, 1),
        cpu_s=round(used.cpu_s, 1),
        memory_mib=used.peak_bytes // _MIB,
        shuffle_mib=None if shuffled is None else shuffled[0] // _MIB,
        spilled_mib=None if shuffled is None else shuffled[1] // _MIB,
    )


def _measured(command: Sequence[str]) -> tuple[str, float, Watch]:
    """Run a command; return its output, its seconds and its resources."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Watch(process.pid) as used:  # noqa: S603 - commands of this file
        printed, _ = process.communicate()
    if process.returncode not in (0, 1):
        raise RigError(f"{' '.join(command)} failed")
    return printed, time.monotonic() - began, used


def _shuffled(events: Path) -> tuple[int, int] | None:
    """Return the bytes that Spark has shuffled, and those that it has spilled to disk."""
    written = spilled = 0
    logs = [path for path in events.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for log in logs:
        with log.open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith('{"Event":"SparkListenerTaskEnd"'):
                    metrics: dict[str, Any] = json.loads(line).get("Task Metrics") or {}
                    written += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
                    spilled += metrics.get("Disk Bytes Spilled", 0)
    return (written, spilled) if logs else None


def _demand(job: str, halves: int, printed: Any) -> None:
    wanted = made_up.expected(halves)
    if job == "sweep":
        found = {"pending": sum(row["pending"] for row in printed)}
        wanted = {"pending": wanted["pending"]}
    else:
        found = {name: count for name, count in printed.items() if count}
    if found != wanted:
        raise RigError(f"{job} of {halves:,} halves says {found}, which should be {wanted}")


def growth(costs: Iterable[Cost]) -> dict[str, list[float]]:
    """Return by job the factor by which the time grows from one size to the next, for ten times the work."""
    by_job: dict[str, list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.halves):
        by_job.setdefault(cost.job, []).append(cost)
    return {
        job: [round(b.seconds / a.seconds / (b.halves / a.halves) * 10, 1) for a, b in pairwise(ordered)]
        for job, ordered in by_job.items()
    }
