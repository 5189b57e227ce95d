"""On which engine an audit runs, and what it says about it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from halfway.pipeline import cli
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.commands import running
from halfway.pipeline.commands.running import Name, Places, engine_of
from halfway.pipeline.engines.duckdb import DuckEngine, free_memory
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources.pins import Brokers, PartitionPin, Pins, TopicPin
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
    return Places(output=str(folder / "audit"), snapshot=str(folder))


NOTHING_ASKED: dict[str, Any] = {"config": None, "master": None, "memory": None, "conf": ()}


def test_duckdb_looks_at_the_disk_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what it reads, and for what its memory cannot hold: the error names the folder, what is free and needed."""
    monkeypatch.setattr(running, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * GIB, 98 * GIB, 2 * GIB))
    monkeypatch.setattr(running, "gettempdir", lambda: "/full")
    places = archive(tmp_path, 3_000_000)
    found = engine_of("audit", "auto", places, NOTHING_ASKED | {"memory": "4g"})
    assert (found.engine, found.because) == ("duckdb", "this machine has all folders")
    with pytest.raises(
        PipelineError, match=r"about 4\.2 GiB in '/full', and 2\.0 GiB are free: make room, .* in TMPDIR, or"
    ):
        engine_of("audit", "auto", places, NOTHING_ASKED | {"memory": "1g"})


@pytest.mark.parametrize("records, few", [(running.FEW, True), (running.FEW + 2, False)])
def test_spark_knows_that_there_are_few_records(tmp_path: Path, records: int, few: bool) -> None:
    """Whatever has chosen it. It then compiles less, because its start and its plans take longest."""
    options = NOTHING_ASKED | {"master": "local[1]"}
    for name in ("auto", "spark"):
        found = engine_of("audit", name, archive(tmp_path, records), options)
        assert (found.engine, found.few) == ("spark", few)


def test_a_report_chooses_its_engine_as_an_audit_does() -> None:
    """By where its folders are, whatever their size. DuckDB cannot read one that is elsewhere, and says so."""
    report = ["report", "--audit", "s3a://bucket/audit", "--output", "report"]
    found = CliRunner().invoke(cli.pipeline, [*report, "--engine", "duckdb"])
    assert (found.exit_code, found.stderr) == (
        2,
        "halfway-pipeline report: --engine duckdb cannot be used: 's3a://bucket/audit' is not on this machine\n",
    )
    places = Places(output="report", topics=False, tables=["audit", None])
    for conf, engine in (((), "duckdb"), (("spark.ui.enabled=true",), "spark")):
        assert engine_of("report", "auto", places, NOTHING_ASKED | {"conf": conf}).engine == engine


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
    continued(committed(20), START + 600_000, LocalFolder(str(tmp_path)))
    [read] = [pin for pin in pins_in(tmp_path).topics.values() if pin.topic == PREFIX + "op"]
    now = replace(read, partitions=tuple(replace(each, end=10_000_000) for each in read.partitions))
    monkeypatch.setattr(Brokers, "pin", lambda *_: [now])
    access = KafkaAccess(librdkafka={"bootstrap.servers": "127.0.0.1:1"})
    places = Places(output=str(tmp_path))
    assert running._records(places, access) == 10_000_000
    assert running._records(replace(places, continued=True), access) == 10_000_000 - read.partitions[0].end


def pins_in(folder: Path) -> Pins:
    """Return what the last run into a folder has read."""
    return Pins.from_json((folder / "offsets.json").read_text())


def test_an_engine_that_is_asked_for_is_taken_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a wish it is DuckDB, unless a folder is elsewhere."""
    places = archive(tmp_path, 2)
    names: tuple[Name, ...] = ("duckdb", "spark")
    for name in names:
        assert engine_of("audit", name, places, NOTHING_ASKED).engine == name
    assert engine_of("audit", "auto", places, NOTHING_ASKED).engine == "duckdb"
    assert engine_of("audit", "auto", places, NOTHING_ASKED | {"master": "local[2]"}).engine == "spark"
    far = Places(output="s3a://bucket/audit", snapshot=str(tmp_path))
    assert "not on this machine" in engine_of("audit", "auto", far, NOTHING_ASKED).because
    assert "audit: runs on Spark: 's3a://bucket/audit' is not on this machine" in capsys.readouterr().err
    with pytest.raises(
        PipelineError, match="--engine duckdb cannot be used: 's3a://bucket/audit' is not on this machine"
    ):
        engine_of("audit", "duckdb", far, NOTHING_ASKED)


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason."""
    taken = tmp_path / "taken"
    taken.touch()
    places = Places(output=str(taken), topics=False, tables=[str(taken)])
    with pytest.raises(SystemExit), running.opened("report", "duckdb", places, NOTHING_ASKED) as opened:
        opened.engine.save(opened.engine.table([], "id string"), opened.folder(str(taken)).path("verdicts"))
    told = capsys.readouterr().err
    assert f"a table in '{taken}' cannot be used: " in told
    assert "Not a directory" in told


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
