"""The engines that run the rules: Spark, and DuckDB for what fits one machine. The rules are SQL that both accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from halfway.pipeline.engines.decoding import arrow_of, decode
from halfway.pipeline.engines.dialect import INPUT, SPARK, Doing, Frame, Merge, Once
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.spark_session import is_one_machine

_NUMBERS: Final = count()
_CONFLICT: Final = "org.apache.spark.sql.delta.DeltaConcurrentModificationException"
_TXN: Final = "spark.databricks.delta.write.txn"
"""With the name of a number, a setting for the commit of a statement that is no write of a frame."""


def _named(path: str) -> str:
    """Return the name of a table in SQL of Spark."""
    return f"delta.`{path.replace('`', '``')}`"


def union(engine: Engine, frames: Iterable[Frame]) -> Frame:
    """Return all rows of frames with the same columns."""
    named: Mapping[str, Frame] = {f"part_{'x' * number}": frame for number, frame in enumerate(frames)}
    together = " union all ".join(f"select * from ${name}" for name in named)  # noqa: S608 - names of this function
    return engine.query(together, **named)


def where(engine: Engine, frame: Frame, condition: str, **others: Frame) -> Frame:
    """Return the rows of a frame (which the condition can call `frame`) that meet a condition."""
    return engine.query(f"select * from $frame frame where {condition}", frame=frame, **others)  # noqa: S608


def between(engine: Engine, frame: Frame, since_ms: int | None, until_ms: int | None, *times: str) -> Frame:
    """Return the rows whose first known time is not before one time, and before another, and those without any."""
    at = f"coalesce({', '.join(f'unix_millis({time})' for time in times)})"
    bounds = [f"coalesce({at} >= {since_ms}, true)"] if since_ms is not None else []
    bounds += [f"coalesce({at} < {until_ms}, true)"] if until_ms is not None else []
    return where(engine, frame, " and ".join(bounds) or "true")


class SparkEngine:
    """Spark."""

    name = "spark"
    dialect = SPARK

    def __init__(self, spark: SparkSession) -> None:
        """Take a session of a job (spark_session.session_of_job)."""
        self.spark = spark
        self._kept: list[DataFrame] = []

    def query(self, sql: str, **frames: Frame) -> Frame:
        """Return the result of a select in which `$name` is a frame. It may run only when the result is used."""
        views = {name: f"halfway_{next(_NUMBERS)}" for name in frames}
        for name, view in views.items():
            frames[name].createOrReplaceTempView(view)
        try:
            return self.spark.sql(INPUT.sub(lambda found: views[found[1]], sql))
        finally:
            # PySpark's own dropTempView also ends the cache of a frame that is persisted.
            catalog = self.spark._jsparkSession.sessionState().catalog()  # noqa: SLF001
            for view in views.values():
                catalog.dropTempView(view)

    def keep(self, frame: Frame) -> Frame:
        """Return the same frame, which is then computed once. It is on disk, because sorting needs the memory.

        The steps after it are planned without those before it, because the plan of a use of a use has millions of
        nodes. On a cluster the rows are computed again if a machine that kept some of them is lost.
        """
        if is_one_machine(str(self.spark.sparkContext.master)):
            return frame.localCheckpoint(eager=False, storageLevel=StorageLevel.DISK_ONLY)
        self._kept.append(frame.persist(StorageLevel.DISK_ONLY))
        java, session = frame._jdf, self.spark._jsparkSession  # noqa: SLF001 - PySpark itself makes frames of rows so
        rows = session.internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
        return DataFrame(rows, self.spark)

    def decode(self, records: Frame, kind: str, fields: str) -> Frame:
        """Return records with the fields of their values, and `error` (decoding.decode)."""
        return decode(records, kind, fields)

    def table(self, rows: Sequence[tuple[Any, ...]], columns: str) -> Frame:
        """Return a frame of a few rows. The columns are DDL."""
        schema = arrow_of(columns)
        # Of a list PySpark would make a frame that needs Python on the executors.
        return self.spark.createDataFrame(
            pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        )

    def rows(self, frame: Frame) -> list[dict[str, Any]]:
        return [row.asDict(recursive=True) for row in frame.collect()]

    def stream(self, frame: Frame, order: str) -> Iterator[dict[str, Any]]:
        """Return all rows in an order, of which only some are in memory at a time."""
        ordered = self.query(f"select * from $frame order by {order}", frame=frame)  # noqa: S608 - columns
        return (row.asDict(recursive=True) for row in ordered.toLocalIterator())

    def save(
        self,
        frame: Frame,
        path: str,
        *,
        replace: bool = False,
        once: Once | None = None,
        by: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Append rows to a Delta table, or replace all. A new table has settings, and is partitioned `by` a column."""
        writer = frame.write.format("delta").mode("overwrite" if replace else "append")
        writer = writer.option("overwriteSchema", replace).options(**(settings or {}))
        if by is not None:
            writer = writer.partitionBy(by)
        if once is not None:
            writer = writer.option("txnAppId", once.application).option("txnVersion", once.number)
        writer.save(path)

    def merge(self, changes: Frame, path: str, rule: Merge, *, once: Once | None = None) -> None:
        """Apply changes to a Delta table. Only files with a row that changes are written again."""
        names = [name for name in changes.columns if name not in rule.deciding]
        sets, columns, values = (
            ", ".join(form.format(name) for name in names) for form in ('old."{0}" = new."{0}"', '"{0}"', 'new."{0}"')
        )
        sql = f"""merge into {_named(path)} old using $changes new on {rule.same}
        when matched and {rule.deletes} then delete
        when matched and {rule.replaces} then update set {sets}
        when not matched and {rule.begins} then insert ({columns}) values ({values})"""  # noqa: S608
        conf = self.spark.conf
        settings = {} if once is None else {_TXN + "AppId": once.application, _TXN + "Version": str(once.number)}
        for name, value in settings.items():
            conf.set(name, value)
        try:
            self.query(sql, changes=changes)
        finally:
            for name in settings:
                conf.unset(name)

    def load(self, path: str, version: int | None = None) -> Frame:
        """Return a Delta table, by default as it is now."""
        reader = self.spark.read.format("delta")
        return (reader if version is None else reader.option("versionAsOf", version)).load(path)

    def restore(self, path: str, version: int) -> None:
        """Bring a Delta table back to a version, by another commit."""
        self.spark.sql(f"restore table {_named(path)} to version as of {version}")

    def tidy(self, path: str, outdated: str = "false") -> None:
        """Delete outdated rows of a Delta table, combine small files, and delete those that are out of use for long."""
        # VACUUM prints how much it has deleted. stdout is for the result alone.
        jvm: Any = self.spark.sparkContext._jvm  # noqa: SLF001 - the documented way into Spark's JVM from Python
        getattr(getattr(jvm, "scala.Console$"), "MODULE$").setOutDirect(jvm.java.lang.System.err)
        table = _named(path)
        for does in (f"delete from {table} where {outdated}", f"optimize {table}", f"vacuum {table}"):  # noqa: S608
            self.spark.sql(does)

    def overtaken(self, error: Exception) -> bool:
        """Return whether Delta has refused a commit because of another one."""
        cause: Any = getattr(error, "java_exception", None)
        while cause is not None:
            kind = cause.getClass()
            while kind is not None:
                if kind.getName() == _CONFLICT:
                    return True
                kind = kind.getSuperclass()
            cause = cause.getCause()
        return False

    def doing(self) -> Doing | None:
        """Return how many tasks of the present stages are done. Another thread may ask."""
        tracker = self.spark.sparkContext.statusTracker()
        stages = [stage for stage in map(tracker.getStageInfo, tracker.getActiveStageIds()) if stage is not None]
        if not stages:
            return None
        return Doing(
            what=f"reads, judges and writes (stage {max(stage.stageId for stage in stages)})",
            done=sum(stage.numCompletedTasks for stage in stages),
            total=sum(stage.numTasks for stage in stages),
            unit="tasks",
        )

    def close(self) -> None:
        for frame in self._kept:
            frame.unpersist()
        self._kept.clear()


Engine = SparkEngine | DuckEngine
"""What runs SQL over frames and makes frames. The methods of `SparkEngine` say what both do."""
