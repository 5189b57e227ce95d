"""*verdict*: what became of every transaction, told by the topics alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from halfway.pipeline.decoding import columns_of
from halfway.pipeline.records import COMMITTED, ROLLED_BACK, SERVER_MADE, content, hexadecimal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column

FINE: Final = ("committed_ok", "rolled_back_ok", "pending", "parked", "expired_unknown")
ANOMALIES: Final = ("contradicted", "leaked", "lost", "torn", "doubled", "payload_changed")
"""Strongest first: a transaction with several gets the first as its verdict and lists all."""
_DIGESTS: Final = "array<struct<topic: string, slot: int, total: int, content: bigint, key_hash: string>>"
_EVENT: Final = (
    "id string, source string, begin bigint, until bigint, at bigint, `group` string, outcome string, cause string, "
    "prepared_at bigint, ended_at bigint, topic string, slot int, total int, content bigint, key_hash string, "
    f"partition int, offset bigint, digests {_DIGESTS}"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What time and settings allow to be told; times in ms.

    `cut`: what happened later is not judged yet. `op_whole_since`: by shard, an older op may have been deleted by age.
    `horizon_ms`: after it an id that a client brought can be used again. `slack_ms`: by how much clocks and the order
    of a log may differ.
    """

    cut: int
    op_whole_since: Mapping[int, int] = field(default_factory=dict)
    horizon_ms: int = 900_000
    slack_ms: int = 5_000


def verdicts(
    *,
    ops: DataFrame,
    halves: DataFrame,
    parked: DataFrame,
    messages: DataFrame,
    unsettled: DataFrame,
    topics: DataFrame,
    latest_of_keys: DataFrame | None,
    limits: Limits,
) -> DataFrame:
    """Return one row for each transaction with exactly one verdict.

    | verdict | rule |
    | --- | --- |
    | `committed_ok` | op says committed, and each message it names stands once in its topic, as it was prepared |
    | `rolled_back_ok` | op says rolled back, and no message stands anywhere |
    | `parked` | no outcome; the last record in parked is not a tombstone |
    | `pending` | no outcome, and the last record in half is not a tombstone; or it is too young to be judged |
    | `expired_unknown` | there are traces, but the op, or a message that it names, may have been deleted by age |
    | `contradicted` | op says committed and rolled back, or says its outcome twice |
    | `leaked` | a message without a commit that names it |
    | `lost` | committed, and none of its messages is there; or its half has gone, and no op tells of an outcome |
    | `torn` | committed, and some of its messages are not there, or they count themselves to another number |
    | `doubled` | committed, and a message (by `halfway-message`) stands more than once |
    | `payload_changed` | committed, and a message has another key or value than was prepared |

    Grace: an anomaly is one only when everything about the transaction is older than the cut and nothing of it stands
    in an unsettled part of a log. A message counts as missing only where its topic cannot have deleted it by age,
    and, in a compacted topic, where no later record has its key. A message without op is leaked, and a half that has
    gone without op is lost, only where the op cannot have been deleted by age, nor compacted away by a later use of
    the same id. A transaction is an id and,
    where a client brought the id, one use of it: what was prepared a horizon after an outcome is a new transaction,
    as for the coordinator.

    `ops` has the outcomes as `of_ops` gives them, `halves` and `parked` all records of these topics (`parked` with
    `prepared_at` where it is known), `messages` what `records.messages` gives, `unsettled` ids with the time of the
    record. `topics` says of each real topic since when a missing message proves a loss (`provable_since`) and whether
    it is `compacted`; `latest_of_keys` is needed where one is.
    """
    events = _events(ops=ops, halves=halves, parked=parked, messages=messages, unsettled=unsettled)
    slots = _slots(_with_lives(events, limits.horizon_ms), topics, latest_of_keys, limits)
    return _judged(_transactions(slots), limits)


def of_ops(decoded: DataFrame) -> DataFrame:
    """Return decoded outcomes as `verdicts` takes them: what each names, in order, as topic, slot and content."""
    digests = F.transform(
        "messages",
        lambda each, index: F.struct(
            each["topic"].alias("topic"),
            (index + 1).alias("slot"),
            F.size("messages").alias("total"),
            content(hexadecimal(each["key_hash"]), hexadecimal(each["value_hash"])).alias("content"),
            hexadecimal(each["key_hash"]).alias("key_hash"),
        ),
    )
    return decoded.select(
        "id",
        "group",
        F.lower("kind").alias("outcome"),
        "cause",
        "prepared_at",
        F.col("at").alias("ended_at"),
        F.col("written_at").alias("at"),
        "partition",
        "offset",
        F.when(F.lower("kind") == COMMITTED, digests).alias("digests"),
    )


def _events(
    *, ops: DataFrame, halves: DataFrame, parked: DataFrame, messages: DataFrame, unsettled: DataFrame
) -> DataFrame:
    """Everything that is known of an id, one row each, with the time span that tells which use of the id it is about.

    A tombstone and an unsettled record have no span: they say something about whatever stands there.
    """
    # An id has one group as long as anything stands of it. Aggregates of numbers alone need no sorting.
    last_half = halves.groupBy("id", "group").agg(*(F.max_by(name, "offset").alias(name) for name in ("alive", "at")))
    last_parked = parked.groupBy("id").agg(
        F.max_by(F.struct("alive", "at", "group", "prepared_at"), "offset").alias("last")
    )
    named = {
        "op": ops.withColumns({"begin": F.col("prepared_at"), "until": F.greatest("prepared_at", "ended_at")}),
        "message": messages.withColumns({"begin": F.col("prepared_at"), "until": F.col("prepared_at")}),
        "half": last_half.where("alive").withColumns({"begin": F.col("at"), "until": F.col("at")}),
        "gone": last_half.where(~F.col("alive")).withColumn("begin", F.col("at")),
        "parked": last_parked.where("last.alive")
        .select("id", "last.*")
        # Of one that cannot be decoded it is not known when it was prepared.
        .withColumns(dict.fromkeys(("begin", "until"), F.coalesce("prepared_at", "at"))),
        "unsettled": unsettled.withColumn("begin", F.col("at")),
    }
    shape = columns_of(_EVENT)
    shaped = (frame.withColumn("source", F.lit(source)).to(shape) for source, frame in named.items())
    return reduce(DataFrame.unionAll, shaped)


def _with_lives(events: DataFrame, horizon_ms: int) -> DataFrame:
    """Number the uses of an id: a new one begins a horizon after everything before it, never for an id halfway made."""
    of_id = Window.partitionBy("id")
    in_order = of_id.orderBy(F.col("begin").asc_nulls_first())
    before = F.max("until").over(in_order.rowsBetween(Window.unboundedPreceding, -1))
    begins = F.col("until").isNotNull() & (F.col("begin") >= before + horizon_ms) & ~F.col("id").rlike(SERVER_MADE)
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return (
        events.withColumn("begins", F.coalesce(begins.cast("int"), F.lit(0)))
        .withColumn("life", F.sum("begins").over(so_far))
        .withColumn("used_again", F.sum("begins").over(of_id) > F.col("life"))
        .drop("begins", "begin", "until")
    )


def _slots(events: DataFrame, topics: DataFrame, latest_of_keys: DataFrame | None, limits: Limits) -> DataFrame:
    """One row for each message that an op names or that stands in a topic, and one for whatever else is known."""
    named = events.withColumn("named", F.explode_outer("digests"))
    expected = F.col("named").isNotNull()
    found = F.col("source") == "message"
    each = named.select(
        "id",
        "life",
        F.coalesce("named.topic", "topic").alias("topic"),
        F.coalesce("named.slot", "slot").alias("slot"),
        *(
            name
            for name in events.columns
            if name not in ("id", "life", "topic", "slot", "digests", "total", "content", "key_hash")
        ),
        F.when(expected, F.struct("offset", "named.content", "named.key_hash", "named.total")).alias("expectation"),
        F.when(found, F.col("content")).alias("found_content"),
        F.when(found, F.col("total")).alias("found_total"),
        F.when(F.col("source") == "op", F.struct("partition", "offset")).alias("marker"),
    )
    op = F.col("source") == "op"
    slots = each.groupBy("id", "life", "topic", "slot").agg(
        F.max("expectation").alias("expectation"),
        F.count("found_content").alias("found"),
        F.min("found_content").alias("lowest"),
        F.max("found_content").alias("highest"),
        F.min("found_total").alias("least_total"),
        F.max("found_total").alias("most_total"),
        F.min("marker").alias("first_marker"),
        F.max("marker").alias("last_marker"),
        F.sort_array(F.collect_list(F.when(found, F.struct("partition", "offset")))).alias("places"),
        F.bool_or(op & (F.col("outcome") == COMMITTED)).alias("committed"),
        F.bool_or(op & (F.col("outcome") == ROLLED_BACK)).alias("rolled_back"),
        F.bool_or(F.col("source") == "half").alias("half"),
        F.bool_or(F.col("source") == "parked").alias("parked"),
        F.bool_or(F.col("source") == "unsettled").alias("unsettled"),
        F.bool_or("used_again").alias("used_again"),
        F.max("group").alias("group"),
        F.max(F.when(op, F.col("cause"))).alias("cause"),
        F.min("prepared_at").alias("prepared_at"),
        F.max("ended_at").alias("ended_at"),
        F.max(F.when(op, F.col("at"))).alias("op_at"),
        F.max(F.when(found, F.col("at"))).alias("message_at"),
        F.max(F.when(F.col("source") == "half", F.col("at"))).alias("half_at"),
        F.max(F.when(F.col("source") == "gone", F.col("at"))).alias("gone_at"),
    )
    slots = slots.join(F.broadcast(topics), "topic", "left")
    superseded = F.lit(False)
    if latest_of_keys is not None:
        keys = latest_of_keys.withColumnRenamed("topic", "key_topic")
        same = (F.col("key_topic") == F.col("topic")) & (keys["key_hash"] == F.col("expectation.key_hash"))
        slots = slots.join(keys, same & F.col("compacted"), "left")
        # Of somebody else's record the time proves nothing.
        later = F.coalesce(F.col("last_at") >= F.col("ended_at") - limits.slack_ms, F.lit(True))
        superseded = F.col("key_topic").isNotNull() & later
    expected = F.col("expectation").isNotNull()
    provable = F.col("op_at") >= F.col("provable_since") + limits.slack_ms
    provable = F.when(F.col("provable_since") == 0, True).otherwise(F.coalesce(provable, F.lit(False)))
    not_there = expected & (F.col("found") == 0) & ~superseded
    wanted, total = F.col("expectation.content"), F.col("expectation.total")
    return slots.withColumn(
        "problem",
        F.when(not_there & provable, "missing")
        .when(not_there, "unproved")
        .when(expected & (F.col("found") > 1), "doubled")
        .when(expected & ((F.col("lowest") != wanted) | (F.col("highest") != wanted)), "changed")
        .when(expected & ((F.col("least_total") != total) | (F.col("most_total") != total)), "miscounted")
        .when(~expected & (F.col("found") > 0), "not named"),
    ).withColumn("expected", expected)


def _transactions(slots: DataFrame) -> DataFrame:
    """One row for each transaction, with what is wrong counted and shown."""

    def count(condition: Column) -> Column:
        return F.count_if(condition)

    problem = F.col("problem")
    flags = ("committed", "rolled_back", "half", "parked", "unsettled", "used_again")
    evidence = F.struct("topic", "slot", problem.alias("problem"), F.col("found").cast("int").alias("found"), "places")
    return slots.groupBy("id", "life").agg(
        *(F.bool_or(flag).alias(flag) for flag in flags),
        F.max("group").alias("group"),
        F.max("cause").alias("cause"),
        F.coalesce(F.min("prepared_at"), F.min("half_at")).alias("prepared_at"),
        F.max("ended_at").alias("ended_at"),
        F.max("op_at").alias("op_at"),
        F.max("message_at").alias("message_at"),
        F.max("half_at").alias("half_at"),
        F.max("gone_at").alias("gone_at"),
        F.sort_array(F.collect_set("topic")).alias("topics"),
        count(F.col("expected")).cast("int").alias("expected"),
        F.sum("found").cast("int").alias("found"),
        count(problem == "missing").cast("int").alias("missing"),
        count(problem == "unproved").cast("int").alias("unproved"),
        count(problem == "doubled").cast("int").alias("doubled"),
        count(problem == "changed").cast("int").alias("changed"),
        count(problem == "miscounted").cast("int").alias("miscounted"),
        count(problem == "not named").cast("int").alias("not_named"),
        (F.min("first_marker") != F.max("last_marker")).alias("ended_again"),
        F.sort_array(F.collect_list(F.when(problem.isNotNull(), evidence))).alias("evidence"),
    )


def _judged(transactions: DataFrame, limits: Limits) -> DataFrame:
    committed, rolled_back = F.col("committed"), F.col("rolled_back")
    found = F.col("found") > 0
    op_whole_since = _op_whole_since(limits)
    could_have_op = (F.col("message_at") >= op_whole_since) & ~F.col("used_again")
    leaked = F.when(rolled_back, found).otherwise(found & could_have_op)
    lost = (F.col("expected") > 0) & (F.col("missing") == F.col("expected"))
    # A stray half of an ended id is buried within the horizon of its outcome.
    vanished = F.col("gone_at") >= op_whole_since + limits.horizon_ms
    vanished &= ~(committed | rolled_back | found | F.col("half") | F.col("parked") | F.col("used_again"))
    findings = (
        ("contradicted", committed & rolled_back),
        ("leaked", F.when(committed, F.col("not_named") > 0).otherwise(leaked)),
        ("lost", F.when(committed, lost).otherwise(vanished)),
        ("torn", committed & ~lost & ((F.col("missing") > 0) | (F.col("miscounted") > 0))),
        ("doubled", committed & (F.col("doubled") > 0)),
        ("payload_changed", committed & (F.col("changed") > 0)),
        ("contradicted", F.coalesce("ended_again", F.lit(False)) & ~(committed & rolled_back)),
    )
    anomalies = F.filter(
        F.array(*(F.when(wrong, F.lit(name)) for name, wrong in findings)), lambda each: each.isNotNull()
    )
    newest = F.greatest("op_at", "message_at", "gone_at")
    settled = ~F.col("unsettled") & (F.coalesce(newest, F.lit(0)) <= limits.cut)
    wrong = F.size("anomalies") > 0
    verdict = (
        F.when(wrong & F.col("settled"), F.get("anomalies", F.lit(0)))
        .when(wrong, "pending")
        .when(committed & (F.col("unproved") > 0), "expired_unknown")
        .when(committed, "committed_ok")
        .when(rolled_back, "rolled_back_ok")
        .when(F.col("parked"), "parked")
        .when(F.col("unsettled"), "pending")
        .when(F.col("half"), "pending")
        .otherwise("expired_unknown")
    )
    return (
        transactions.withColumns({"anomalies": anomalies, "settled": settled})
        .withColumn("verdict", verdict)
        .withColumn("anomalies", F.when(F.col("verdict").isin(*ANOMALIES), F.col("anomalies")).otherwise(F.array()))
        .select(
            "id",
            "life",
            "verdict",
            "anomalies",
            "group",
            "cause",
            "topics",
            "expected",
            "found",
            "prepared_at",
            "ended_at",
            F.when(F.size("anomalies") > 0, F.when(vanished, _gone()).otherwise(F.col("evidence"))).alias("evidence"),
        )
    )


def _gone() -> Column:
    """Return the evidence of a half that has gone without an outcome."""
    places = F.array().cast("array<struct<partition: int, offset: bigint>>")
    problem, slot = F.lit("gone without an outcome"), F.lit(None).cast("int")
    of_half = F.struct(
        F.lit("half").alias("topic"),
        slot.alias("slot"),
        problem.alias("problem"),
        F.lit(0).alias("found"),
        places.alias("places"),
    )
    return F.array(of_half)


def _op_whole_since(limits: Limits) -> Column:
    """Return the time from which on the op of an id cannot have been deleted by age.

    It is that of its shard, which an id that halfway made tells; that of the shard with the latest for other ids.
    """
    known = {shard: since + limits.slack_ms for shard, since in limits.op_whole_since.items() if since}
    latest = F.lit(max(known.values(), default=0))
    of_shard = latest
    for shard, since in {**dict.fromkeys(limits.op_whole_since, 0), **known}.items():
        of_shard = F.when(F.col("id").startswith(f"{shard}-"), since).otherwise(of_shard)
    return F.when(F.col("id").rlike(SERVER_MADE), of_shard).otherwise(latest)
