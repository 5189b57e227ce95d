"""The rules of *ledger* and *sweep* on small tables."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable

from halfway.pipeline.engines.dialect import Once
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import ledger, sweep
from tests.support.pipeline.fixtures import assert_same_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HORIZON = 900_000
DECODED = (
    "id string, `group` string, kind string, cause string, prepared_at bigint, at bigint, checks int, "
    "messages array<struct<topic: string, size: bigint>>, partition int, offset bigint, error string"
)
RECORDS = (
    "id string, `group` string, alive boolean, at bigint, partition int, offset bigint, fault string, "
    "prepared_at bigint"
)
OUTCOMES = "id string, at bigint"


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC).replace(tzinfo=None)


def of_kinds(spark: "SparkSession", **rows: list[tuple[Any, ...]]) -> "DataFrame":
    """Return the records of several topics in one frame."""
    return spark.createDataFrame([(*row, None, kind) for kind in rows for row in rows[kind]], RECORDS + ", kind string")


def test_ledger_has_one_row_for_each_outcome(spark: "SparkSession") -> None:
    """A row has times, latency, topics and size. A damaged outcome has none."""
    committed = ("a", "g", "COMMITTED", "producer", 1_000, 3_500, 1, [("y", 3), ("x", 4), ("y", 5)], 2, 7, None)
    rolled_back: tuple[Any, ...] = ("b", "g", "ROLLED_BACK", "policy", 1_000, 2_000, 15, [], 1, 8, None)
    damaged = (None, None, None, None, None, None, None, None, 1, 9, "EOFError")
    rows = ledger.ledger(SparkEngine(spark), spark.createDataFrame([committed, rolled_back, damaged], DECODED))
    shown = ["id", "outcome", "cause", "latency_ms", "checks", "topics", "messages", "size", "shard"]
    assert_same_rows(
        rows.select(*shown),
        spark.createDataFrame(
            [
                ("a", "committed", "producer", 2_500, 1, ["x", "y"], 3, 12, 2),
                ("b", "rolled_back", "policy", 1_000, 15, [], 0, None, 1),
            ],
            "id string, outcome string, cause string, latency_ms bigint, checks int, topics array<string>, "
            "messages int, size bigint, shard int",
        ),
    )


def merged(
    folder: Path, before: list[tuple[Any, ...]], records: "DataFrame", outcomes: "DataFrame"
) -> list[tuple[Any, ...]]:
    """Return what a table of what is pending holds when records and outcomes have changed it."""
    spark = records.sparkSession
    first = of_kinds(
        spark,
        **{
            kind: [(name, group, True, at, shard, offset, None) for name, group, _, at, shard, offset in rows]
            for kind, state in (("half", "prepared"), ("parked", "parked"))
            if (rows := [row for row in before if row[2] == state])
        },
    )
    for number, (new, ends) in enumerate(((first, spark.createDataFrame([], OUTCOMES)), (records, outcomes))):
        changes = ledger.changes(SparkEngine(spark), new, ends, horizon_ms=HORIZON)
        # Done again, as after a crash, a batch changes nothing.
        for _ in range(2):
            merge(changes, folder, number)
    return sorted(tuple(row) for row in SparkEngine(spark).load(str(folder)).collect())


def merge(changes: "DataFrame", folder: Path, number: int) -> None:
    """Apply changes to a table, which is made first."""
    engine, path = SparkEngine(changes.sparkSession), str(folder)
    if number == 0 and not DeltaTable.is_deltatable(path):
        engine.save(changes.drop(*ledger.MERGE.deciding).limit(0), path, settings=ledger.SETTINGS)
    engine.merge(changes, path, ledger.MERGE, once=Once("w", number))


def test_pending_is_what_was_pending_with_the_last_record_of_each_id_applied(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """A tombstone removes, a later record stays, parked and prepared differ, faulty records change nothing."""
    before = [
        ("ends", "g", "prepared", 1, 0, 1),
        ("stays", "g", "prepared", 2, 0, 2),
        ("parks", "g", "prepared", 3, 0, 3),
        ("again", "g", "prepared", 4, 0, 4),
        ("resumes", "g", "parked", 5, 0, 5),
    ]
    halves = [
        ("new", "g", True, 10, 0, 10, None),
        ("ends", "g", False, 11, 0, 11, None),
        ("parks", "g", False, 12, 0, 12, None),
        ("again", "h", True, 12, 1, 13, None),
        ("brief", "g", True, 13, 0, 13, None),
        ("brief", "g", False, 14, 0, 14, None),
        ("stays", "g", False, 15, 0, 15, "no key"),
        ("resumes", "g", True, 16, 0, 16, None),
    ]
    parked = [("parks", "g", True, 12, 0, 4, None)]
    records = of_kinds(spark, half=halves, parked=parked)
    assert merged(tmp_path, before, records, spark.createDataFrame([], OUTCOMES)) == [
        ("again", "h", "prepared", 12, 1, 13),
        ("new", "g", "prepared", 10, 0, 10),
        ("parks", "g", "parked", 12, 0, 4),
        ("resumes", "g", "parked", 5, 0, 5),
        ("resumes", "g", "prepared", 16, 0, 16),
        ("stays", "g", "prepared", 2, 0, 2),
    ]


def test_an_outcome_ends_what_is_pending_though_its_tombstone_is_gone(spark: "SparkSession", tmp_path: Path) -> None:
    """Known before or new, prepared or parked; one that is a horizon older belongs to an earlier use of the id."""
    before = [
        ("known", "g", "prepared", 1_000, 0, 1),
        ("parked", "g", "parked", 1_000, 0, 2),
        ("parked", "g", "prepared", 1_000, 0, 2),
        ("used-again", "g", "prepared", 1_000, 0, 3),
        ("stays", "g", "prepared", 1_000, 0, 4),
        ("again-at-once", "g", "prepared", 2_000 + HORIZON, 0, 5),
        ("used-before", "g", "prepared", 2_000 + HORIZON, 0, 6),
    ]
    halves = [("new", "g", True, 1_000, 0, 10, None), ("used-again", "g", True, 2_000 + HORIZON, 0, 11, None)]
    ended = ("known", "parked", "used-again", "used-before", "again-at-once", "new", "never-seen")
    outcomes = spark.createDataFrame([*((name, 2_000) for name in ended), ("again-at-once", 2_001)], OUTCOMES)
    assert merged(tmp_path, before, of_kinds(spark, half=halves), outcomes) == [
        ("stays", "g", "prepared", 1_000, 0, 4),
        ("used-again", "g", "prepared", 2_000 + HORIZON, 0, 11),
        ("used-before", "g", "prepared", 2_000 + HORIZON, 0, 6),
    ]


def test_sweep_is_half_minus_op(spark: "SparkSession") -> None:
    """Tombstones and outcomes end; an outcome a horizon older than the half belongs to an earlier use of the id."""

    def half(name: str, offset: int, at: int, *, alive: bool = True, prepared_at: int | None = None) -> tuple[Any, ...]:
        return (name, "g", alive, at, 0, offset, None, prepared_at)

    halves = [
        half("pending", 1, 1_000),
        half("ended", 2, 1_000),
        half("ended", 3, 2_000, alive=False),
        half("late-duplicate", 4, 2_000),
        half("used-again", 5, 1_000_000),
        ("in-another-group", "h", False, 1_000, 0, 6, None, None),
        half("in-another-group", 7, 1_000_000),
        half("re-anchored", 8, 1_000_000, prepared_at=1_000),
    ]
    outcomes = [
        ("late-duplicate", "g", 1_500),
        ("used-again", "g", 1_000),
        ("ended", "g", 2_000),
        ("in-another-group", "h", 1_000),
    ]
    open_still = sweep.unresolved(
        SparkEngine(spark),
        spark.createDataFrame(halves, RECORDS),
        spark.createDataFrame(outcomes, "id string, `group` string, at bigint"),
        horizon_ms=HORIZON,
    )
    assert_same_rows(
        open_still,
        spark.createDataFrame(
            [
                ("pending", "g", 0, 1_000, 1_000),
                ("used-again", "g", 0, 1_000_000, 1_000_000),
                ("in-another-group", "g", 0, 1_000_000, 1_000_000),
                ("re-anchored", "g", 0, 1_000, 1_000_000),
            ],
            "id string, `group` string, shard int, since bigint, written_at bigint",
        ),
    )


def test_sweep_counts_what_is_due_and_overdue_by_group_and_age(spark: "SparkSession") -> None:
    """A group's own policy decides, else the default. What was resumed or re-anchored counts from then on."""
    now = 100_000_000
    old = now - 3_600_001
    open_still = spark.createDataFrame(
        [
            ("a", "slow", 0, now - 30_000, now - 30_000),
            ("b", "slow", 0, old, old),
            ("c", "quick", 0, now - 30_000, now - 30_000),
            ("d", "quick", 0, old, old),
            ("e", "quick", 0, old, now - 30_000),
        ],
        "id string, `group` string, shard int, since bigint, written_at bigint",
    )
    policies: DataFrame = spark.createDataFrame(
        [("slow", 60_000, 7_200_000)], "`group` string, due_after_ms bigint, max_age_ms bigint"
    )
    options = sweep.SweepOptions(due_after_ms=6_000, max_age_ms=2_700_000, horizon_ms=900_000)
    table = sweep.sweep(SparkEngine(spark), open_still, policies, now, options)
    assert_same_rows(
        table.select("group", "age", "pending", "due", "overdue", "oldest_ms"),
        spark.createDataFrame(
            [
                ("slow", "under 1 min", 1, 0, 0, 30_000),
                ("slow", "1 to 12 h", 1, 1, 0, 3_600_001),
                ("quick", "under 1 min", 1, 1, 0, 30_000),
                ("quick", "1 to 12 h", 2, 2, 1, 3_600_001),
            ],
            "`group` string, age string, pending bigint, due bigint, overdue bigint, oldest_ms bigint",
        ),
    )
