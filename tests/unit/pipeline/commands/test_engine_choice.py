"""On which engine an audit runs, and what it says about it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import duckdb
import pytest
from click.testing import CliRunner

from halfway.pipeline import cli
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.commands import running
from halfway.pipeline.commands.running import Places, chosen
from halfway.pipeline.engines.duckdb import DuckEngine, free_memory
from halfway.pipeline.errors import SourceError
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.tables import LocalFolder
from tests.support.pipeline.audits import committed, continued
from tests.support.pipeline.logs import PREFIX, START

GIB = 1 << 30


def archive(folder: Path, records: int) -> Places:
    """Return an archive whose pins give half and op this number of records, beside a real topic."""
    partition = PartitionPin(partition=0, start=0, end=records // 2, high=records // 2, first_at=None)
    names = ("_halfway.half", "_halfway.op", "shop")
    pins = Pins(at=0, topics={name: TopicPin(topic=name, at=0, partitions=(partition,)) for name in names})
    (folder / "offsets.json").write_text(pins.to_json())
    (folder / "archive.json").write_text('{"prefix": "_halfway."}')
    return Places(output=str(folder / "audit"), snapshot=str(folder), offsets=None, access=None)


@pytest.mark.parametrize(
    "records, free, memory, engine, because",
    [
        (3_000, GIB, None, "duckdb", "half and op have 3,000 records"),
        # A million transactions, which take 3.5 GiB (docs/pipeline.md).
        (2_900_000, 5 * GIB, None, "duckdb", "half and op have 2,900,000 records"),
        (2_900_000, 7 * GIB // 2, None, "spark", "DuckDB takes about 4.3 GiB of memory, and 3.5 GiB are free"),
        (running.MOST, 16 * GIB, None, "duckdb", "half and op have 10,000,000 records"),
        (3_000_000, 2 * GIB, None, "spark", "2.0 GiB are free: with --engine duckdb --memory it goes to disk"),
        (3_000_000, 2 * GIB, "1g", "duckdb", "half and op have 3,000,000 records"),
        (3_000_000, None, None, "duckdb", "half and op have 3,000,000 records"),
        (running.MOST + 2, 1_000 * GIB, None, "spark", "more than 10,000,000"),
    ],
)
def test_the_engine_is_chosen_by_size_and_by_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    records: int,
    free: int | None,
    memory: str | None,
    engine: Literal["duckdb", "spark"],
    because: str,
) -> None:
    """With a limit DuckDB uses the disk. If the free memory is unknown, the size decides."""
    monkeypatch.setattr(running, "free_memory", lambda: free)
    monkeypatch.setattr(running, "_require_disk", lambda *_: None)
    found = chosen("auto", archive(tmp_path, records), spark_asked=False, memory=memory)
    assert found.engine == engine
    assert because in found.because


def test_real_topics_count_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few transactions can be among many records of others, which take their time."""
    monkeypatch.setattr(running, "MOST_REAL", 1_000)
    assert chosen("auto", archive(tmp_path, 2_000), spark_asked=False).engine == "duckdb"
    found = chosen("auto", archive(tmp_path, 2_002), spark_asked=False)
    assert (found.engine, found.because) == ("spark", "the real topics have 1,001 records, more than 1,000")


def test_duckdb_looks_at_the_disk_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what it reads, and for what its memory cannot hold: the error names the folder, what is free and needed."""
    monkeypatch.setattr(running, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * GIB, 98 * GIB, 2 * GIB))
    monkeypatch.setattr(running, "gettempdir", lambda: "/full")
    places = archive(tmp_path, 3_000_000)
    assert chosen("duckdb", places, spark_asked=False, memory="4g").engine == "duckdb"
    with pytest.raises(
        SourceError, match=r"about 4\.2 GiB in '/full', and 2\.0 GiB are free: make room, .* in TMPDIR, or"
    ):
        chosen("duckdb", places, spark_asked=False, memory="1g")


@pytest.mark.parametrize("records, few", [(running.FEW, True), (running.FEW + 2, False)])
def test_spark_knows_that_there_are_few_records(tmp_path: Path, records: int, few: bool) -> None:
    """Whatever has chosen it. It then compiles less, because its start and its plans take longest."""
    options = {"master": "local[1]", "memory": None}
    for name in ("auto", "spark"):
        found = running.engine_of("audit", name, archive(tmp_path, records), options)
        assert (found.engine, found.few) == ("spark", few)


def test_a_report_chooses_its_engine_as_an_audit_does() -> None:
    """By where its folders are, whatever their size. DuckDB cannot read one that is elsewhere, and says so."""
    report = ["report", "--audit", "s3a://bucket/audit", "--output", "report"]
    found = CliRunner().invoke(cli.pipeline, [*report, "--engine", "duckdb"])
    assert (found.exit_code, found.stderr) == (
        2,
        "halfway-pipeline report: --engine duckdb cannot be used: 's3a://bucket/audit' is not on this machine\n",
    )
    places = Places(output="report", snapshot=None, offsets=None, access=None, tables=["audit", None])
    assert chosen("auto", places, spark_asked=False, sized=False).engine == "duckdb"
    assert chosen("auto", places, spark_asked=True, sized=False).engine == "spark"


def test_a_full_disk_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As what could not be done, if the estimate was too low."""
    archive(tmp_path, 2)

    def full(*_: object, **__: object) -> None:
        raise duckdb.IOException("Could not write file: No space left on device")

    monkeypatch.setattr(DuckEngine, "query", full)
    found = CliRunner().invoke(
        cli.pipeline, ["audit", "--snapshot", str(tmp_path), "--output", str(tmp_path / "audit")]
    )
    assert found.exit_code == 2, found.output
    assert "is full: make room" in found.stderr


def test_a_run_that_continues_counts_what_is_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However much there is before it."""
    folder = LocalFolder(str(tmp_path))
    log = committed(20)
    continued(log, START + 600_000, folder)
    read = running._state(str(tmp_path))
    assert read is not None
    now = {name: replace(pin, partitions=tuple(replace(each, end=10_000_000) for each in pin.partitions))
           for name, pin in read.pins.topics.items()}  # fmt: skip
    own, real = [now[PREFIX + "op"]], [now["orders"]]
    monkeypatch.setattr(running, "_pinned", lambda *_: (own, real))
    monkeypatch.setattr(running, "free_memory", lambda: None)
    access = KafkaAccess(librdkafka={"bootstrap.servers": "127.0.0.1:1"})
    places = Places(output=str(tmp_path), snapshot=None, offsets=None, access=access)
    whole = chosen("auto", places, spark_asked=False)
    new = chosen("auto", replace(places, continued=True), spark_asked=False)
    ended = read.pins.topics[PREFIX + "op"].partitions[0].end
    assert whole.because == "half and op have 10,000,000 records"
    assert new.because == f"half and op have {10_000_000 - ended:,} records"


def test_an_engine_that_is_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However much there is to read."""
    monkeypatch.setattr(running, "free_memory", lambda: None)
    monkeypatch.setattr(running, "_DISK_EACH", 0)
    places = archive(tmp_path, 2 * running.MOST)
    for name in ("duckdb", "spark"):
        assert chosen(name, places, spark_asked=False).engine == name
    assert chosen("auto", archive(tmp_path, 2), spark_asked=True).engine == "spark"
    far = Places(output="s3a://bucket/audit", snapshot=str(tmp_path), offsets=None, access=None)
    assert "not on this machine" in chosen("auto", far, spark_asked=False).because
    with pytest.raises(
        SourceError, match="--engine duckdb cannot be used: 's3a://bucket/audit' is not on this machine"
    ):
        chosen("duckdb", far, spark_asked=False)


def test_too_little_memory_for_duckdb_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As what could not be done, not as an anomaly."""
    archive(tmp_path, 2)
    (tmp_path / "archive.json").write_text(json.dumps({"prefix": "_halfway."}))

    def full(*_: object, **__: object) -> None:
        raise duckdb.OutOfMemoryException("could not allocate block")

    monkeypatch.setattr(DuckEngine, "query", full)
    told = ["audit", "--snapshot", str(tmp_path), "--output", str(tmp_path / "audit"), "--engine", "duckdb"]
    found = CliRunner().invoke(cli.pipeline, told)
    assert found.exit_code == 2, found.output
    assert "give more with --memory, or --engine spark" in found.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the reason."""
    taken = tmp_path / "taken"
    taken.touch()
    with (
        pytest.raises(SourceError, match=rf"(?s)a table in '{taken}' cannot be used: .*Not a directory"),
        running.on_duckdb("audit", None, str(taken), [str(taken)]) as opened,
    ):
        opened.engine.save(opened.engine.table([], "id string"), opened.folder(str(taken)).path("verdicts"))


@pytest.mark.parametrize(
    "files, free",
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB\nHugePages_Total: 0\n"}, 8 << 10),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
                "sys/fs/cgroup/memory.stat": "anon 3500\ninactive_file 500\n",
            },
            1_500,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "4000\n",
            },
            1_000 << 10,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
    ],
    ids=["not Linux", "a machine", "a container", "a container without a limit", "a container of version 1"],
)
def test_free_memory_is_the_machines_and_the_containers(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    """The least of what each may still take; what a container has read from files does not count as used."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free
