"""The rules on DuckDB, for data that fits one machine: no JVM, no start-up time."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cached_property
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from halfway.pipeline.engines import decoding
from halfway.pipeline.engines.decoding import arrow_of
from halfway.pipeline.engines.dialect import DUCKDB, INPUT, MACROS, Doing, Frame, Merge, Once
from halfway.pipeline.errors import PipelineError

if TYPE_CHECKING:
    import duckdb
    from deltalake import DeltaTable

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


_NUMBERS: Final = count()
_BATCH: Final = 20_000
_IN_FLIGHT: Final = 4 * (os.cpu_count() or 1)
"""The number of batches in memory while they are decoded."""
_ALONE: Final = 20_000
"""The number of values that are decoded sooner than other processes start."""
_MISREAD: Final = re.compile(r"%[0-9a-fA-F]{2}|[][|\\^]")
"""What `deltalake` cannot have in the path of a table: it would look in another folder, or panic."""


def connected(settings: Mapping[str, Any]) -> duckdb.DuckDBPyConnection:
    """Return a new database that knows the functions of Spark's which the rules use."""
    import duckdb

    database = duckdb.connect(config=dict(settings))
    for macro in MACROS:
        database.execute(f"create macro {macro}")
    return database


class DuckEngine:
    """DuckDB in memory. Data that does not fit goes to a temporary folder, which is deleted at the end."""

    name = "duckdb"
    dialect = DUCKDB

    def __init__(self, *, memory: str | None = None) -> None:
        """Open a database. `memory` (such as 2GB) is its limit, by default most of the free memory."""
        settings: dict[str, Any] = {"preserve_insertion_order": "false"}
        if (limit := duckdb_limit(memory)) is not None:
            settings["memory_limit"] = f"{limit >> 10}KiB"
        self._folder = tempfile.TemporaryDirectory(prefix="halfway-duckdb-")
        self.scratch = Path(self._folder.name)
        settings["temp_directory"] = str(self.scratch / "spilled")
        self.database: duckdb.DuckDBPyConnection = connected(settings)
        self.database.execute("set enable_progress_bar = true; set enable_progress_bar_print = false")
        self.reading: Callable[[], Doing] | None = None
        """What is read or decoded now."""
        self._selects: dict[str, tuple[str, Sequence[Frame]]] = {}
        """Selects by name, with the frames in them. DuckDB would look through views whenever another one is created."""

    def query(self, sql: str, **frames: Frame) -> Frame:
        name = f"halfway_{next(_NUMBERS)}"
        self._selects[name] = INPUT.sub(lambda found: str(frames[found[1]]), sql), tuple(frames.values())
        return name

    def keep(self, frame: Frame) -> Frame:
        name = f"halfway_{next(_NUMBERS)}"
        self.database.execute(f"create temp table {name} as {self._whole(frame)}")
        return name

    def _whole(self, frame: Frame) -> str:
        """Return a select of a frame, with the selects that it is built from."""
        parts: set[Frame] = set()
        wanted = [frame]
        while wanted:
            name = wanted.pop()
            if name in self._selects and name not in parts:
                parts.add(name)
                wanted += self._selects[name][1]
        selects = [f"{name} as not materialized ({sql})" for name, (sql, _) in self._selects.items() if name in parts]
        return f"{'with ' if selects else ''}{', '.join(selects)} select * from {frame}"  # noqa: S608 - a name of this class

    @cached_property
    def pool(self) -> Executor:
        """As many processes as there are cores. They start when they are first needed."""
        return ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("forkserver"))

    def take(self, table: pa.Table) -> Frame:
        """Return a frame of a table in memory."""
        name = f"halfway_{next(_NUMBERS)}"
        self.database.register(name, table)
        return name

    def decode(self, records: Frame, kind: str, fields: str) -> Frame:
        """Return records with the fields of their values, decoded by as many processes as there are cores."""
        reader = self.database.sql(self._whole(records)).to_arrow_reader(_BATCH)
        kept = [field for field in reader.schema if field.name != "value"]
        whole = pa.schema([*kept, *arrow_of(fields), decoding.ERROR])
        batches = (batch for batch in reader if batch.num_rows)
        file = self.scratch / f"decoded-{next(_NUMBERS)}.parquet"
        done = 0
        self.reading = lambda: Doing(what=f"decodes {kind}", done=done, unit="records")
        with pq.ParquetWriter(file, whole, compression="lz4") as writer:
            while some := list(islice(batches, _IN_FLIGHT)):
                values = [batch.select(["value"]) for batch in some]
                run = map if sum(batch.num_rows for batch in some) <= _ALONE else self.pool.map
                decoded = run(decoding.decoded, values, [kind] * len(some), [fields] * len(some))
                for batch, made in zip(some, decoded, strict=True):
                    columns = [*(batch.column(field.name) for field in kept), *made.columns]
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=whole))
                done += sum(batch.num_rows for batch in some)
        self.reading = None
        return self.query(f"select * from read_parquet({quoted(file)})")  # noqa: S608 - a name of this class

    def table(self, rows: Sequence[tuple[Any, ...]], columns: str) -> Frame:
        schema = arrow_of(columns)
        return self.take(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema))

    def rows(self, frame: Frame) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.database.sql(self._whole(frame)).to_arrow_table().to_pylist()
        return found

    def stream(self, frame: Frame, order: str) -> Iterator[dict[str, Any]]:
        ordered = self.database.sql(f"{self._whole(frame)} order by {order}")
        for batch in ordered.to_arrow_reader(_BATCH):
            yield from batch.to_pylist()

    def save(self, frame: Frame, path: str, *, replace: bool = False, once: Once | None = None) -> None:
        from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

        table: Any = _table(path) if DeltaTable.is_deltatable(_checked(path)) else None
        done = None if table is None or once is None else table.transaction_version(once.application)
        if once is not None and done is not None and done >= once.number:
            return
        write_deltalake(
            path if table is None else table,
            self._reader(frame),
            mode="overwrite" if replace else "append",
            schema_mode="overwrite" if replace and table is not None else None,
            commit_properties=CommitProperties(app_transactions=None if once is None else [Transaction(*once)]),
        )

    def merge(self, changes: Frame, path: str, rule: Merge) -> None:
        merging = _table(path).merge(self._reader(changes), rule.same, source_alias="new", target_alias="old")
        merging.when_matched_delete(rule.deletes).when_matched_update_all(rule.replaces)
        merging.when_not_matched_insert_all(rule.begins).execute()

    def load(self, path: str, version: int | None = None) -> Frame:
        table = _table(path, version)
        schema = pa.schema(table.schema().to_arrow())
        files = ", ".join(quoted(Path(unquote(file))) for file in table.file_uris())
        if not files:
            return self.take(schema.empty_table())
        # The names of the folders of a table have the column by which it is partitioned. Those above it can look alike.
        names = ", ".join(f'"{name}"' for name in schema.names)
        return self.query(f"select {names} from read_parquet([{files}], hive_partitioning = true)")  # noqa: S608

    def restore(self, path: str, version: int) -> None:
        _table(path).restore(version)

    def tidy(self, path: str, outdated: str = "false") -> None:
        table = _table(path)
        table.delete(outdated)
        table.optimize.compact()
        table.vacuum(dry_run=False)

    def _reader(self, frame: Frame) -> pa.RecordBatchReader:
        return self.database.sql(self._whole(frame)).to_arrow_reader(_BATCH)

    def overtaken(self, error: Exception) -> bool:
        from deltalake.exceptions import CommitFailedError

        return isinstance(error, CommitFailedError)

    def doing(self) -> Doing | None:
        """Return what is read or decoded now, else how much of the present query is done."""
        if self.reading is not None:
            return self.reading()
        return Doing(what="judges and writes", done=max(0.0, self.database.query_progress()), total=100)

    def close(self) -> None:
        if "pool" in vars(self):
            self.pool.shutdown()
        self.database.close()
        self._folder.cleanup()


def _table(path: str, version: int | None = None) -> DeltaTable:
    from deltalake import DeltaTable

    return DeltaTable(_checked(path), version=version)


def _checked(path: str) -> str:
    """Return the path of a table. PipelineError if `deltalake` cannot use it."""
    whole = os.path.realpath(path)
    if found := _MISREAD.search(whole):
        raise PipelineError(
            f"{whole!r}: DuckDB cannot use tables in a folder with {found[0]!r} in its name: rename the folder, or "
            "choose --engine spark"
        )
    return path


def quoted(text: object) -> str:
    return "'" + str(text).replace("'", "''") + "'"
