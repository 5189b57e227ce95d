"""The job `audit`: verdicts and anomalies of every transaction, as Parquet."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import StorageLevel
from pyspark.sql import functions as F

from halfway.pipeline import decoding, records
from halfway.pipeline.jobs import reading
from halfway.pipeline.transforms import verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from halfway.pipeline.folders import Folder
    from halfway.pipeline.pins import Pins, TopicPin
    from halfway.pipeline.sources import Source

VERDICTS: Final = "verdicts"
ANOMALIES: Final = "anomalies"
QUARANTINE: Final = "quarantine"
OFFSETS: Final = "offsets.json"
SUMMARY: Final = "summary.json"


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the command line says: times in ms; `topics` are read beside those that op and the groups name."""

    topics: Sequence[str] = ()
    grace_ms: int = 5_000
    horizon_ms: int = 900_000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How an audit went."""

    verdicts: Mapping[str, int]
    quarantined: int

    @property
    def anomalies(self) -> int:
        """Transactions that did not end as their producers meant."""
        return sum(self.verdicts.get(name, 0) for name in verdict.ANOMALIES)


def run(spark: SparkSession, source: Source, output: Folder, options: AuditOptions) -> Summary:
    """Judge every transaction up to now and write `verdicts`, `anomalies`, `quarantine` and the offsets that were read.

    op's ends are taken first, so that whatever an op tells of must stand in the other topics when theirs are taken.
    What stands behind them, in Kafka transactions that are not finished, is looked at only to leave its ids unjudged.
    What Kafka has removed is asked last, when everything has been read, so that nothing can go unnoticed meanwhile.
    """
    # Until it is written again, the folder holds no audit that was finished.
    output.delete(SUMMARY)
    op_topic, half_topic, parked_topic = (source.prefix + kind for kind in ("op", "half", "parked"))
    source.pin([op_topic])
    reading.demand(source, ["op"])
    op = reading.InternalRecords(source.committed([op_topic]), "op")
    with ExitStack() as held:
        # On disk: kept in memory, they take away what sorting needs.
        outcomes = reading.decoded_outcomes(op.records).persist(StorageLevel.DISK_ONLY)
        held.callback(outcomes.unpersist)
        source.pin([half_topic, parked_topic, source.prefix + "groups"])
        reading.demand(source, ["half", "parked"])
        half = reading.InternalRecords(source.committed([half_topic]), "half")
        parked = reading.InternalRecords(source.committed([parked_topic]), "parked")
        registered, kept = reading.groups(source), reading.decoded_parked(parked.records)
        held.callback(registered.unpersist)
        held.callback(kept.unpersist)
        names = reading.real_topics(outcomes, registered, source.prefix, options.topics)
        source.pin(names)
        reading.demand_given(source, options.topics)
        source.settle(op_topic)
        messages = records.messages(source.committed(names)).persist(StorageLevel.DISK_ONLY)
        held.callback(messages.unpersist)
        first = _first_messages(messages)
        now = source.anew()
        now.pin([op_topic, *names])
        unreadable = outcomes.where(F.col("error").isNotNull()).select(F.col("key").alias("id"), "written_at")
        judged = verdict.verdicts(
            ops=verdict.of_ops(outcomes.where(F.col("error").isNull())),
            halves=half.records,
            # That it is parked is told without decoding it.
            parked=kept,
            messages=messages,
            # An op that cannot be read tells that there is an outcome, not what it names.
            unsettled=_unsettled(source, op_topic, names).unionAll(unreadable),
            topics=_facts(spark, now.pins, names, first),
            latest_of_keys=_latest_of_keys(now, names),
            limits=_limits(source, now.pins.topics.get(op_topic), options),
        )
        judged.write.mode("overwrite").parquet(output.path(VERDICTS))
        wrong = [topic.faulty() for topic in (op, half, parked)]
        wrong += [decoding.quarantined(frame) for frame in (outcomes, kept, registered)]
        quarantine = reading.all_of(wrong)
        assert quarantine is not None  # noqa: S101 - three of them are always there
        quarantine.write.mode("overwrite").parquet(output.path(QUARANTINE))
    return _summed_up(spark, source, output)


def _summed_up(spark: SparkSession, source: Source, output: Folder) -> Summary:
    written = spark.read.parquet(output.path(VERDICTS))
    anomalies = written.where(F.size("anomalies") > 0)
    anomalies.coalesce(1).write.mode("overwrite").parquet(output.path(ANOMALIES))
    counts = {row["verdict"]: int(row["count"]) for row in written.groupBy("verdict").count().collect()}
    summary = Summary(
        verdicts={name: counts.get(name, 0) for name in (*verdict.FINE, *verdict.ANOMALIES)},
        quarantined=spark.read.parquet(output.path(QUARANTINE)).count(),
    )
    output.write(source.pins.to_json(), OFFSETS)
    told = {**summary.verdicts, "quarantined": summary.quarantined, "judged_at": source.pins.at}
    output.write(json.dumps(told) + "\n", SUMMARY)
    return summary


def _unsettled(source: Source, op_topic: str, names: Sequence[str]) -> DataFrame:
    ended = records.outcomes(records.internal(source.unsettled([op_topic]), "op")).select("id", "at")
    return ended.unionAll(records.messages(source.unsettled(names)).select("id", "at"))


def _first_messages(messages: DataFrame) -> dict[str, dict[int, int]]:
    """Return by topic and partition the time of the first message; all of them are read for it, and kept."""
    found: dict[str, dict[int, int]] = {}
    for row in messages.groupBy("topic", "partition").agg(F.min_by("at", "offset").alias("at")).collect():
        found.setdefault(row["topic"], {})[row["partition"]] = row["at"]
    return found


def _facts(spark: SparkSession, now: Pins, names: Sequence[str], first: Mapping[str, Mapping[int, int]]) -> DataFrame:
    """A topic that does not exist (any more) proves nothing about any time."""
    rows = []
    for name in names:
        pin = now.topics.get(name)
        never = (1 << 62, False)
        rows.append((name, *((pin.provable_since(first.get(name, {})), pin.compacted) if pin is not None else never)))
    return spark.createDataFrame(rows, "topic string, provable_since bigint, compacted boolean")


def _latest_of_keys(source: Source, names: Sequence[str]) -> DataFrame | None:
    compacted = [name for name in names if name in source.pins.topics and source.pins.topics[name].compacted]
    return records.latest_of_keys(source.committed(compacted)) if compacted else None


def _limits(source: Source, op: TopicPin | None, options: AuditOptions) -> verdict.Limits:
    return verdict.Limits(
        cut=source.pins.at - options.grace_ms,
        op_whole_since={} if op is None else op.whole_since,
        horizon_ms=options.horizon_ms,
    )
