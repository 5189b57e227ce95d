"""`judge`: the audit of records that a job of yours has in a DataFrame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipeline.access import DEFAULT_PREFIX
from halfway.pipeline.engines.engine import SparkEngine, where
from halfway.pipeline.engines.spark_session import NO_PACKAGES, packages, session_of_job
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources.pinned import COMMITTED, Part, Rows, Source
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.sources.spark import COLUMNS, nothing
from halfway.pipeline.transforms import verdict


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The tables of an audit: a row for each transaction, those that did not end as intended, and unusable records."""

    verdicts: DataFrame
    anomalies: DataFrame
    quarantine: DataFrame


def judge(
    records: DataFrame,
    *,
    prefix: str = DEFAULT_PREFIX,
    at_ms: int | None = None,
    compacted: Sequence[str] = (),
    options: audit.AuditOptions | None = None,
) -> Judged:
    """Judge the transactions in records with the columns of Spark's Kafka source (`includeHeaders`, `read_committed`).

    The records are those of halfway's topics under a prefix (op, half and parked; groups and owners too, if they are
    there), and of all real topics, as they were at a time, by default now. What lies before the first record of a
    partition counts as removed. `compacted` names the real topics that are compacted. PipelineError if a column, or one
    of halfway's topics, is missing, or if it is a session of Spark Connect, or has no package for Avro.
    """
    if missing := [name for name in COLUMNS if name not in records.columns]:
        raise PipelineError(f"the records have no column {', '.join(missing)}: read them with includeHeaders=true")
    caller = records.sparkSession
    session = session_of_job(caller)
    try:
        session.sql("select from_avro(X'', '\"long\"', map())").schema  # noqa: B018 - it is found out here
    except AnalysisException as error:
        raise PipelineError(NO_PACKAGES + ",".join(packages())) from error
    engine = SparkEngine(session)
    source = _Given(engine, engine.keep(_moved(records.select(*COLUMNS), session)), prefix, at_ms, compacted)
    read = audit.evidence(engine, source, options or audit.AuditOptions())
    judged = engine.keep(verdict.verdicts(engine, read.evidence, read.limits))
    found = where(engine, judged, verdict.IS_ANOMALY)
    verdicts, anomalies, quarantine = (_moved(frame, caller) for frame in (judged, found, read.quarantine))
    return Judged(verdicts=verdicts, anomalies=anomalies, quarantine=quarantine)


def _moved(frame: DataFrame, session: SparkSession) -> DataFrame:
    """Return a frame in another session of the same application."""
    name = f"halfway_{uuid4().hex}"
    frame.createGlobalTempView(name)
    moved = session.table(f"global_temp.{name}")
    session.catalog.dropGlobalTempView(name)
    return moved


class _Given(Source):
    """The records of a DataFrame as a source. Nothing is ever added to them or removed."""

    def __init__(
        self, engine: SparkEngine, records: DataFrame, prefix: str, at_ms: int | None, compacted: Sequence[str]
    ) -> None:
        self._engine, self._records = engine, records
        at = round(time.time() * 1000) if at_ms is None else at_ms
        bounds = records.groupBy("topic", "partition").agg(
            F.min("offset").alias("start"),
            F.max("offset").alias("last"),
            F.unix_millis(F.min_by("timestamp", "offset")).alias("first_at"),
        )
        partitions: dict[str, list[PartitionPin]] = {}
        for row in bounds.orderBy("topic", "partition").collect():
            topic, number, start, last, first_at = row
            pin = PartitionPin(partition=number, start=start, end=last + 1, high=last + 1, first_at=first_at)
            partitions.setdefault(topic, []).append(pin)
        found = {
            name: TopicPin(topic=name, at=at, partitions=tuple(pins), compacted=name in compacted)
            for name, pins in partitions.items()
        }
        own = [prefix + kind for kind in ("op", "half", "parked")]
        shards = max((pin.partition + 1 for name in own if name in found for pin in found[name].partitions), default=0)
        for name in own[1:]:
            found.setdefault(name, TopicPin(topic=name, at=at, partitions=()))
        for name in filter(found.get, own):
            there = {pin.partition: pin for pin in found[name].partitions}
            # Nothing says what a partition without a record has lost, except that its neighbours have lost nothing.
            begin = max((pin.start for pin in there.values()), default=0)
            empty = (PartitionPin(partition=number, start=begin, end=begin, high=begin) for number in range(shards))
            found[name] = replace(found[name], partitions=tuple(there.get(pin.partition, pin) for pin in empty))
        super().__init__(prefix, Pins(at=at, topics=found), fixed=True)

    def reopened(self) -> _Given:
        return self

    def _read(self, what: str, parts: Sequence[Part], rows: Rows) -> Any:
        if what != COMMITTED:
            return self._engine.query(rows.sql, records=nothing(self._engine.spark))
        topics = list({part[0] for part in parts})
        return self._engine.query(rows.sql, records=self._records.where(F.col("topic").isin(topics)))
