"""*ledger*: how each transaction ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.pipeline.engines.engine import Merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from halfway.pipeline.engines.engine import SparkEngine

_IS_LATER: Final = 'new."offset" >= old."offset"'
MERGE: Final = Merge(
    same="old.id = new.id and old.state = new.state",
    deletes=f"(coalesce({_IS_LATER}, false) and not new.open) "
    f"or (not coalesce({_IS_LATER}, false) and old.since < new.horizon)",
    replaces=f"{_IS_LATER} and new.open",
    begins="new.open",
    deciding=("open", "horizon"),
)
"""How `changes` change the table of pending transactions."""
SETTINGS: Final = {
    # Each batch replaces files: those of a week would be many times the size of the table.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.logRetentionDuration": "interval 1 days",
}
"""The settings of that table."""


def ledger(engine: SparkEngine, decoded: DataFrame) -> DataFrame:
    """Return one row for each transaction that has ended, from decoded outcomes.

    `latency_ms` is the time from prepare to outcome, `size` the bytes of its messages (null if the op of a rollback
    does not have it), `checks` the number of checks that were sent, `ended_date` the day (UTC) of the outcome. An
    outcome that was read twice has one row.
    """
    rows: DataFrame = engine.query(
        """select id, "group", lower(kind) as outcome, cause, timestamp_millis(prepared_at) as prepared_at,
            timestamp_millis("at") as ended_at, greatest("at" - prepared_at, 0) as latency_ms, checks,
            sort_array(array_distinct(messages.topic)) as topics, size(messages) as messages,
            case when size(messages) > 0
                then aggregate(messages, cast(0 as bigint), (total, one) -> total + one.size) end as size,
            "partition" as shard, "offset" as op_offset, to_date(timestamp_millis("at")) as ended_date
        from $decoded where error is null""",
        decoded=decoded,
    )
    return rows.dropDuplicates(["shard", "op_offset"])


def changes(engine: SparkEngine, records: DataFrame, outcomes: DataFrame, *, horizon_ms: int) -> DataFrame:
    """Return how new records of half and parked, and outcomes, change the pending transactions. Apply it with `MERGE`.

    In each topic the last record of an id wins, and a tombstone removes it. An outcome (id, at) removes it too, because
    Kafka deletes tombstones after a time; but not an outcome that is a horizon older than the record: then a client has
    used the id again. The topics have no order between them.

    Returns:
        The columns of the table (state: `prepared` or `parked`; since: ms, the time of the prepare if it is known),
        null without a new record; `open`, whether there is a new record that has not ended; and `horizon`: an older
        record has ended.

    """
    found: DataFrame = engine.query(
        f"""select id, newest."group" as "group", state, newest.since as since, newest.shard as shard, "offset",
            coalesce(newest.alive and (horizon is null or newest.since >= horizon), false) as open, horizon
        from (
            select id, state, max_by(record, "offset") as newest, max("offset") as "offset", max(horizon) as horizon
            from (
                select id, case when kind = 'parked' then 'parked' else 'prepared' end as state, "offset",
                    named_struct('alive', alive, 'group', "group", 'since', coalesce(prepared_at, "at"),
                        'shard', "partition") as record, cast(null as bigint) as horizon
                from $records where fault is null
                union all
                select id, explode(array('prepared', 'parked')), null, null, "at" + {horizon_ms} from $outcomes
            ) together group by id, state
        ) of_each""",  # noqa: S608
        records=records,
        outcomes=outcomes,
    )
    return found
