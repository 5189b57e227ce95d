"""What the Spark jobs cost by the size of the topics, beside DuckDB: `python -m bench.pipeline --halves 1000000`.

For each size an archive of made-up topics is written, then `halfway-pipeline audit` and `sweep` read it, each as a
process of its own as a user starts it. Wall time and CPU time are those of the whole process with its children; memory
is the most that all of them held together; shuffle is what Spark wrote between its stages, by its own event log.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from bench import pipeline_snapshot as made_up
from bench.processes import Watch
from bench.rig import RigError

JOBS: Final = ("audit", "duckdb", "sweep")
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run took; bytes in MiB."""

    job: str
    halves: int
    seconds: float
    cpu_s: float
    memory_mib: int
    shuffle_mib: int | None = None
    spilled_mib: int | None = None


def run(job: str, halves: int, archive: Path, scratch: Path, spark: Sequence[str]) -> Cost:
    """Run one job over an archive and check what it says."""
    output, events = scratch / job, scratch / f"{job}-events"
    for folder in (output, events):
        shutil.rmtree(folder, ignore_errors=True)
    events.mkdir(parents=True)
    if job == "duckdb":
        command = ["bench.pipeline_duckdb", str(archive), str(output.with_suffix(".parquet"))]
    else:
        log = {"enabled": "true", "dir": events.as_uri(), "rolling.enabled": "false", "compress": "false"}
        conf = [part for name, value in log.items() for part in ("--conf", f"spark.eventLog.{name}={value}")]
        local = f"spark.local.dir={scratch / 'local'}"
        command = ["halfway.pipeline", job, "--snapshot", str(archive), "--output", str(output), "--json", *spark]
        command += ["--conf", local, *conf]
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
    """Run a command; return what it printed, its seconds and what it used."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Watch(process.pid) as used:  # noqa: S603 - commands of this file
        printed, _ = process.communicate()
    if process.returncode not in (0, 1):
        raise RigError(f"{' '.join(command)} failed")
    return printed, time.monotonic() - began, used


def _shuffled(events: Path) -> tuple[int, int] | None:
    """Return the bytes that Spark has shuffled, and those that it spilled to disk."""
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
        raise click.ClickException(f"{job} of {halves:,} halves says {found}, which should be {wanted}")


def growth(costs: Iterable[Cost]) -> dict[str, list[float]]:
    """Return by job how many times as long each size takes as the one before, for ten times the work."""
    by_job: dict[str, list[Cost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.halves):
        by_job.setdefault(cost.job, []).append(cost)
    return {
        job: [round(b.seconds / a.seconds / (b.halves / a.halves) * 10, 1) for a, b in pairwise(ordered)]
        for job, ordered in by_job.items()
    }


def _shown(costs: Sequence[Cost], growths: Mapping[str, list[float]]) -> None:
    table = Table("job", "halves", "seconds", "CPU s", "memory MiB", "shuffle MiB", "spilled MiB")
    for cost in costs:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in asdict(cost).values()))
    console = Console()
    console.print(table)
    for job, factors in growths.items():
        if factors:
            console.print(f"{job}: ten times the work takes {', '.join(map(str, factors))} times as long")
    print(json.dumps({"costs": [asdict(cost) for cost in costs], "growth": growths}))


@click.command()
@click.option("--halves", multiple=True, type=click.IntRange(min=100), default=[100_000, 1_000_000], show_default=True)
@click.option("--job", "jobs", multiple=True, type=click.Choice(JOBS), default=JOBS, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default="build/bench-pipeline", show_default=True)
@click.option("--master", default="local[*]", show_default=True)
@click.option("--memory", default="4g", show_default=True, help="Of Spark.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--keep", is_flag=True, help="Keep the archives, and take those that are there.")
def main(
    halves: tuple[int, ...], jobs: tuple[str, ...], folder: Path, master: str, memory: str, seed: int, *, keep: bool
) -> None:
    """Write archives of made-up topics and measure the jobs over them; give --halves and --job several times."""
    folder = folder.resolve()
    real = jobs != ("sweep",)
    costs = []
    for count in sorted(halves):
        archive = folder / f"{count}-{'whole' if real else 'sweep'}"
        if not (keep and (archive / "offsets.json").exists()):
            shutil.rmtree(archive, ignore_errors=True)
            began = time.monotonic()
            made_up.write(archive, count, messages=real, seed=seed)
            size = sum(file.stat().st_size for file in archive.rglob("*") if file.is_file())
            took = time.monotonic() - began
            print(f"{count:,} halves (seed {seed}): {size / _MIB:,.0f} MiB written in {took:.0f} s", file=sys.stderr)
        for job in jobs:
            cost = run(job, count, archive, folder / "scratch", ["--master", master, "--memory", memory])
            print(cost, file=sys.stderr)
            costs.append(cost)
        if not keep:
            shutil.rmtree(archive)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    _shown(costs, growth(costs))


if __name__ == "__main__":
    main()
