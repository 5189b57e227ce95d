"""A ledger in an Iceberg catalog: as of one batch, no row twice, read back with PyIceberg."""

import builtins
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.transforms import IdentityTransform
from pyiceberg.utils.config import Config

from halfway.pipeline import cli
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import export, ledger
from halfway.pipeline.tables import delta
from halfway.pipeline.tables.folders import LocalFolder
from halfway.pipeline.tables.iceberg import Tables

BEGIN = datetime(2026, 1, 30, 22, tzinfo=UTC)
MOMENT = pa.timestamp("us", "UTC")
ENDED = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "group", "outcome", "cause")),
        *((name, MOMENT) for name in ("prepared_at", "ended_at")),
        ("latency_ms", pa.int64()),
        ("checks", pa.int32()),
        ("topics", pa.list_(pa.string())),
        *((name, kind) for name, kind in (("messages", pa.int32()), ("size", pa.int64()), ("shard", pa.int32()))),
        ("op_offset", pa.int64()),
        ("ended_date", pa.date32()),
    ]
)
PENDING = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "group", "state")),
        ("since", pa.int64()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
    ]
)


class Rows:
    """What Spark's DataFrame gives."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return self._table


class Ledger:
    """A ledger as the job leaves it, written without Spark: of two shards, an outcome an hour."""

    def __init__(self, folder: Path, writer: str = "stream-1") -> None:
        self.folder = LocalFolder(str(folder))
        self.writer = writer
        self.number = 0
        self.ended: list[str] = []
        self.pending: list[str] = []
        self.folder.write(json.dumps({"id": writer}), ledger.CHECKPOINT, "metadata")

    def write(self, count: int, *, pending: Sequence[str]) -> None:
        """Write a batch: so many have ended, and these are pending."""
        batch = delta.Batch(writer=self.writer, number=self.number)
        rows = [self._outcome(len(self.ended) + number) for number in range(count)]
        self.ended += [row["id"] for row in rows]
        self._append(pa.Table.from_pylist(rows, ENDED), ledger.ENDED, batch, by=(ledger.DAY,))
        self.pending = [*pending]
        waiting = [
            {"id": name, "group": "g", "state": "prepared", "since": 1, "shard": 0, "offset": number}
            for number, name in enumerate(pending)
        ]
        self._replace(pa.Table.from_pylist(waiting, PENDING), batch)
        self.number += 1

    def _outcome(self, number: int) -> dict[str, Any]:
        at = BEGIN + timedelta(hours=number)
        return {
            "id": f"id-{number}", "group": "g", "outcome": "committed", "cause": "producer", "prepared_at": at,
            "ended_at": at, "latency_ms": 5, "checks": 0, "topics": ["orders"], "messages": 1, "size": 10,
            "shard": number % 2, "op_offset": number // 2, "ended_date": at.date(),
        }  # fmt: skip

    def _append(self, table: pa.Table, name: str, batch: delta.Batch, *, by: tuple[str, ...] = ()) -> None:
        delta.append(cast(Any, Rows(table)), self.folder.qualified(name), batch, by=by)

    def _replace(self, table: pa.Table, batch: delta.Batch) -> None:
        from deltalake import write_deltalake

        uri = self.folder.qualified(ledger.PENDING)
        write_deltalake(uri, table, mode="overwrite", commit_properties=batch.properties)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Return a catalog in SQLite, configured as PyIceberg has it."""
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    for name, value in properties.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LOCAL__{name.upper()}", value)
    # It was read when PyIceberg was imported.
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return load_catalog("local")


def exported(written: Ledger, namespace: str = "halfway") -> export.Exported:
    return export.to_iceberg(written.folder, Tables("local", namespace))


def ids(catalog: Catalog, table: str) -> list[str]:
    """Return the ids in a table, as PyIceberg reads it."""
    found: list[str] = catalog.load_table(table).scan().to_arrow().column("id").to_pylist()
    return sorted(found)


def assert_equal(catalog: Catalog, written: Ledger) -> None:
    assert ids(catalog, "halfway.ended") == sorted(written.ended)
    assert ids(catalog, "halfway.pending") == sorted(written.pending)
    for name in ("ended", "pending"):
        assert catalog.load_table(f"halfway.{name}").properties["halfway.batch"] == str(written.number - 1)


def test_each_export_appends_what_has_ended_since_and_replaces_what_is_pending(
    catalog: Catalog, tmp_path: Path
) -> None:
    """However many batches the ledger has written, and however often the export is repeated."""
    written = Ledger(tmp_path / "ledger")
    written.write(5, pending=["p-1", "p-2"])
    assert exported(written) == export.Exported(batch=0, appended=5, pending=2)
    assert_equal(catalog, written)
    snapshots = len(catalog.load_table("halfway.ended").snapshots())
    assert exported(written).appended == 0
    assert len(catalog.load_table("halfway.ended").snapshots()) == snapshots, "nothing was written"
    written.write(3, pending=["p-2", "p-3"])
    written.write(0, pending=["p-3"])
    delta.compact(written.folder.qualified(ledger.ENDED))
    assert exported(written).appended == 3
    assert_equal(catalog, written)
    written.write(0, pending=[])
    assert exported(written) == export.Exported(batch=3, appended=0, pending=0)
    assert_equal(catalog, written)


def test_ended_is_partitioned_by_day_and_keeps_its_types(catalog: Catalog, tmp_path: Path) -> None:
    """A reader with a filter on the time leaves out the files of other days."""
    written = Ledger(tmp_path / "ledger")
    written.write(5, pending=[])
    exported(written)
    table = catalog.load_table("halfway.ended")
    (by,) = table.spec().fields
    assert (table.schema().find_column_name(by.source_id), by.transform) == (ledger.DAY, IdentityTransform())
    read = table.scan().to_arrow()
    assert read.schema.field("ended_at").type == MOMENT
    assert read.sort_by("op_offset").select(["id", "ended_at", "topics", "size", "ended_date"]).to_pylist()[0] == {
        "id": "id-0", "ended_at": BEGIN, "topics": ["orders"], "size": 10, "ended_date": BEGIN.date(),
    }  # fmt: skip
    days = pc.count_distinct(read.column("ended_date")).as_py()
    assert days == 2
    assert len(list(table.scan().plan_files())) == days
    assert len(list(table.scan(row_filter="ended_at >= '2026-01-31T00:00:00+00:00'").plan_files())) == 1


def test_an_export_that_was_killed_between_the_tables_is_made_up_for(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ended` has the batch by then, `pending` has not: no row is appended twice."""
    written = Ledger(tmp_path / "ledger")
    written.write(4, pending=["p-1"])
    with monkeypatch.context() as dying:
        dying.setattr(Tables, "replace", _die)
        with pytest.raises(KeyboardInterrupt):
            exported(written)
    assert ids(catalog, "halfway.ended") == sorted(written.ended)
    assert ids(catalog, "halfway.pending") == []
    assert exported(written) == export.Exported(batch=0, appended=0, pending=1)
    assert_equal(catalog, written)


def test_an_export_that_is_killed_while_it_appends_leaves_nothing(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and batch are one commit, however many parts there are."""
    monkeypatch.setattr(export, "_AT_ONCE", 1)
    written = Ledger(tmp_path / "ledger")
    written.write(30, pending=[])
    lacking, parts = export._lacking, 0

    def dying(*source: Any) -> Any:
        nonlocal parts
        for part in lacking(*source):
            parts += 1
            yield part
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(export, "_lacking", dying)
        with pytest.raises(KeyboardInterrupt):
            exported(written)
    assert parts == 1
    assert ids(catalog, "halfway.ended") == []
    assert exported(written).appended == 30
    assert_equal(catalog, written)


def _die(*_: Any) -> None:
    raise KeyboardInterrupt


def test_tables_of_something_else_are_left_alone(catalog: Catalog, tmp_path: Path) -> None:
    """Of another ledger, of one that was restored since, or with other columns; each is named with what to do."""
    written = Ledger(tmp_path / "ledger")
    written.write(2, pending=["p-1"])
    written.write(2, pending=["p-1"])
    exported(written)
    other = Ledger(tmp_path / "other", writer="stream-2")
    other.write(1, pending=[])
    with pytest.raises(SourceError, match=r"halfway\.ended is of another ledger: give another --namespace"):
        exported(other)
    restored = Ledger(tmp_path / "restored")
    restored.write(2, pending=["p-1"])
    with pytest.raises(SourceError, match=r"has batch 1 of this ledger, whose last one is 0: was the ledger restored"):
        exported(restored)
    assert_equal(catalog, written)
    catalog.create_namespace("taken")
    catalog.create_table("taken.ended", schema=pa.schema([("id", pa.string()), ("ended_at", pa.int64())]))
    with pytest.raises(SourceError, match=r"taken\.ended has other columns than the ledger \(cause, .*give another"):
        exported(written, "taken")
    with catalog.load_table("halfway.ended").transaction() as changing:
        changing.set_properties({"halfway.offsets": "[]"})
    with pytest.raises(SourceError, match=r"halfway\.batch and halfway\.offsets of the Iceberg table .* are damaged"):
        exported(written)


def test_two_exports_at_once_append_no_row_twice(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog accepts the commit of one of them. The other one fails, and can be run again."""
    written = Ledger(tmp_path / "ledger")
    written.write(4, pending=[])
    lacking = export._lacking

    def beside(*source: Any) -> Any:
        monkeypatch.setattr(export, "_lacking", lacking)
        exported(written)
        return lacking(*source)

    monkeypatch.setattr(export, "_lacking", beside)
    with pytest.raises(SourceError, match="another writer has changed a table of the Iceberg catalog 'local'"):
        exported(written)
    assert exported(written).appended == 0
    assert_equal(catalog, written)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.pipeline, ["export", *arguments])


def test_the_command_needs_no_spark_for_a_ledger_on_this_machine(catalog: Catalog, tmp_path: Path) -> None:
    """And says what it wrote, or what is missing."""
    written = Ledger(tmp_path / "ledger")
    written.write(3, pending=["p-1"])
    given = ("--ledger", str(tmp_path / "ledger"), "--format", "iceberg")
    ended = run(*given, "--catalog", "local", "--namespace", "sales")
    assert (ended.exit_code, ended.output) == (0, "batch 0: 3 rows into ended, 1 in pending\n")
    assert ids(catalog, "sales.ended") == ["id-0", "id-1", "id-2"]
    unknown = run(*given, "--catalog", "nowhere")
    assert unknown.exit_code == 2
    assert "the Iceberg catalog 'nowhere' cannot be used: " in unknown.output
    assert "configure it in ~/.pyiceberg.yaml or by PYICEBERG_CATALOG__<NAME>__URI" in unknown.output
    none = run("--ledger", str(tmp_path), "--format", "iceberg", "--catalog", "local")
    assert none.exit_code == 2
    assert "holds no ledger: run halfway-pipeline ledger first" in none.output


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "give --output"),
        (("--output", "o", "--catalog", "local"), "--catalog and --namespace are for --format iceberg"),
        (("--format", "iceberg", "--output", "o"), "give --catalog in place of --output"),
    ],
)
def test_options_of_the_other_format_are_refused(arguments: tuple[str, ...], told: str) -> None:
    refused = run("--ledger", "ledger", *arguments)
    assert refused.exit_code == 2
    assert told in refused.output


def test_without_pyiceberg_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyiceberg"):
            raise ImportError(name)
        return load(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(SourceError, match=r"pip install 'halfway\[iceberg\]'"):
        Tables("local", "halfway")
