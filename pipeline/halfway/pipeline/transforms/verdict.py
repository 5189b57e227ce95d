"""*verdict*: how every transaction ended, by the topics alone. The rules are the same for every engine."""

from __future__ import annotations

from typing import Final

from halfway.pipeline.engines.dialect import Dialect, Frame, number_of
from halfway.pipeline.engines.engine import Engine
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.headers import COMMITTED, ROLLED_BACK
from halfway.pipeline.transforms.evidence import PARTITIONS, Evidence, Limits, events, place

FINE: Final = ("committed_ok", "rolled_back_ok", "pending", "parked", "expired_unknown")
UNPROVED: Final = "unproved"
NOT_JUDGED: Final = "not_judged"
ANOMALIES: Final = (
    "contradicted", "leaked", "lost", "torn", "doubled", "payload_changed", "reordered", "unprepared", "half_left",
)  # fmt: skip
"""Strongest first: a transaction with several anomalies gets the first one as its verdict, and lists all."""
VERDICTS: Final = (*FINE, UNPROVED, NOT_JUDGED, *ANOMALIES)
IS_ANOMALY: Final = f"verdict in {ANOMALIES}"
_SHOWN_SLOTS: Final = 10_000
"""Evidence names the messages of a transaction up to this number, because anyone can forge any number of them."""
_IS_MESSAGE: Final = "source in ('named', 'message')"
"""Whether an event has a topic. By its source an engine knows this without reading it."""


def verdicts(engine: Engine, evidence: Evidence, limits: Limits) -> Frame:
    """Return one row with exactly one verdict for each transaction: docs/pipeline.md#verdicts has their meanings.

    An anomaly counts only if everything about the transaction is older than the cut, and no record of it is in an
    unsettled part of a log. A message is missing only if its partition (each partition of its topic, if its own is not
    known) cannot have lost it and, in a compacted topic, if no later record has its key. A message without op is
    leaked, and a half that has gone without op is lost, only if the op partition of its id's shard cannot have lost the
    op, and if a later use of the same id cannot have compacted it away. A transaction is
    an id and, if it is no UUIDv7, one use of it: an id that is prepared a horizon after its outcome is a new
    transaction, as for the coordinator. Messages that were prepared before the topics were created, and that nothing
    else mentions, are of another deployment and have no row.
    """
    d = engine.dialect
    lives = events(engine, evidence, limits)
    slots = _slots(engine, lives, evidence, limits)
    transactions = engine.query(_transactions(d), slots=slots)
    return engine.query(_judged(d, limits), transactions=_with_shards(engine, transactions, limits))


def _with_shards(engine: Engine, transactions: Frame, limits: Limits) -> Frame:
    """Return transactions with their `shard`, if it matters: of those that may have lost their op."""
    if not any(limits.op_whole_since.values()):
        return engine.query("select *, cast(null as bigint) as shard from $transactions", transactions=transactions)
    kept = engine.keep(transactions)
    ids = engine.query(
        """select distinct id from $kept
        where not (committed or rolled_back) and (found > 0 or gone_at is not null)""",
        kept=kept,
    )
    return engine.query(
        "select kept.*, shard from $kept kept left join $shards on shard_id = kept.id",
        kept=kept,
        shards=headers.shards_of(engine, ids, len(limits.op_whole_since)),
    )


def _slots(engine: Engine, lives: Frame, evidence: Evidence, limits: Limits) -> Frame:
    """Return one row for each message that an op names or that is in a topic, and for each other event."""
    of_op = "source = 'op'"
    of_both = {"prepared_at": "min", "ended_at": "max", "used_again": "bool_or"}
    of_both |= {"first_place": "min", "last_place": "max"}
    alone = {
        "group": '"group"',
        "cause": "cause",
        **{name: f"source = '{name}'" for name in ("half", "parked", "unsettled", "unreadable")},
        "committed": f"{of_op} and outcome = '{COMMITTED}'",
        "rolled_back": f"{of_op} and outcome = '{ROLLED_BACK}'",
        "gone_at": """case when source = 'gone' then "at" end""",
        "half_at": """case when source = 'half' then "at" end""",
        "parked_at": """case when source = 'parked' then "at" end""",
        "unparked": "source = 'unparked'",
    }
    parts = ("", "_headers", "_total", "_partition")
    compared = ("wanted_key", *(f"{of}{part}" for of in ("wanted", "got") for part in parts))
    of_messages = {
        **{name: f"{function}({name})" for name, function in of_both.items()},
        **{name: f"max({name})" for name in compared},
        "expected": "bool_or(source = 'named')",
        "found": "coalesce(sum(found), 0)",
        "op_at": """max(case when source = 'named' then "at" end)""",
        "message_at": """max(case when source = 'message' then "at" end)""",
        "older": f"bool_and(source = 'message' and until < {limits.created_at - limits.slack_ms})",
    }
    together = ", ".join(f'{value} as "{name}"' for name, value in of_messages.items())
    # The clock of the prepare can have been ahead. Then messages are dated before it, and an op never is.
    decided_at, slack = "least(op_at, ended_at)", limits.slack_ms
    provable = f"""(provable_since = 0 or own_since = 0
        or coalesce({decided_at} >= least(provable_since, coalesce(own_since, provable_since)) + {slack}, false))"""
    keys, superseded = "", "false"
    frames = {"lives": lives, "topics": evidence.topics, "partitions": evidence.partitions}
    if evidence.latest_of_keys is not None:
        keys = f"""left join (
                select topic as key_topic, {number_of("key_hash")} as key_number, last_at
                from $latest_of_keys
            ) keys on key_topic = grouped.topic and key_number = wanted_key and compacted"""  # noqa: S608
        # The time of another producer's record proves nothing.
        superseded = f"key_topic is not null and coalesce(last_at >= ended_at - {limits.slack_ms}, true)"
        frames["latest_of_keys"] = evidence.latest_of_keys
    kept = ", ".join(of_both)
    single = ", ".join(f'{value} as "{name}"' for name, value in alone.items())
    nothing = ", ".join(f'{_NOTHING.get(name, "false")} as "{name}"' for name in alone)
    sql = f"""
    select id, life, topic, slot, {kept}, {nothing}, expected, found, op_at, message_at, older, case
        when absent and {provable} then 'missing'
        when absent and coalesce({decided_at} >= kept_since + {slack}, false) then 'unproved'
        when absent then 'expired'
        when expected and found > 1 then 'doubled'
        when expected and got <> wanted then 'changed'
        when expected and got_headers <> wanted_headers then 'other headers'
        when expected and got_partition <> wanted_partition then 'other partition'
        when expected and got_total <> wanted_total then 'miscounted'
        when not expected and found > 0 then 'not named'
        when expected and found = 1 and first_place < greatest_before then 'before an earlier one' end as problem
    from (
        select grouped.*, {_BEFORE}, facts.provable_since as provable_since, own.provable_since as own_since,
            kept_since, expected and found = 0 and not ({superseded}) as absent
        from (
            select id, life, topic, slot, {together} from $lives where {_IS_MESSAGE}
            group by id, life, topic, slot
        ) grouped
        left join $topics facts on facts.topic = grouped.topic
        left join $partitions own on own.topic = grouped.topic and own."partition" = wanted_partition
        {keys}
    ) slots
    union all
    select id, life, topic, slot, {kept}, {single}, false, 0, case when {of_op} then "at" end, null, false, null
    from $lives where not {_IS_MESSAGE}
    """  # noqa: S608
    return engine.query(sql, **frames)


_BEFORE: Final = """max(case when expected and found = 1 then first_place end) over (
    partition by id, life, grouped.topic, case when found = 1 then first_place - first_place % PARTITIONS end
    order by slot range between unbounded preceding and 1 preceding) as greatest_before""".replace(
    "PARTITIONS", str(PARTITIONS)
)
"""The last place of the earlier messages of a transaction in the same partition."""
_NOTHING: Final = {
    **dict.fromkeys(("group", "cause"), "cast(null as string)"),
    **dict.fromkeys(("gone_at", "half_at", "parked_at"), "cast(null as bigint)"),
}


def _transactions(d: Dialect) -> str:
    """Return one row for each transaction, with its problems counted and listed."""
    flags = ("committed", "rolled_back", "half", "parked", "unparked", "unsettled", "unreadable", "used_again")
    greatest = ("group", "cause", "ended_at", "op_at", "message_at", "gone_at", "half_at", "parked_at")
    counted = {
        "expected": "expected",
        **{
            name: f"problem = '{name.replace('_', ' ')}'"
            for name in ("missing", "unproved", "expired", "doubled", "miscounted", "not_named")
        },
        "changed": "problem in ('changed', 'other headers', 'other partition')",
        "reordered": "problem = 'before an earlier one'",
    }
    first, last = place(d, "first_place"), place(d, "last_place")
    places = f"""case when found = 0 then {d.array}() when first_place = last_place then {d.array}({first})
        else {d.array}({first}, {last}) end"""
    evidence = d.struct(topic="topic", slot="slot", problem="problem", found="cast(found as int)", places=places)
    columns = {
        **{name: f"bool_or({name})" for name in flags},
        **{name: f'max("{name}")' for name in greatest},
        **{name: f"cast(count_if({condition}) as int)" for name, condition in counted.items()},
        "prepared_at": "min(prepared_at)",
        "topics": "sort_array(collect_set(topic))",
        "found": "cast(sum(found) as int)",
        "older": "bool_and(older)",
        "ended_again": """min(case when topic is null then first_place end)
            <> max(case when topic is null then last_place end)""",
        "evidence": f"""sort_array(collect_list(
            case when problem is not null and coalesce(slot, 0) <= {_SHOWN_SLOTS} then {evidence} end))""",
    }
    together = ", ".join(f'{value} as "{name}"' for name, value in columns.items())
    return f"select id, life, {together} from $slots group by id, life"  # noqa: S608


def _judged(d: Dialect, limits: Limits) -> str:
    whole_since, kept_since = _op_whole_since(limits), limits.op_kept_since + limits.slack_ms
    lost = "expected > 0 and missing = expected"
    # A stray half of an ended id gets its tombstone within a horizon of its outcome.
    gone = "gone_at is not null and not (committed or rolled_back or found > 0 or half or parked or used_again)"
    vanished = f"(coalesce(gone_at >= whole_since + {limits.horizon_ms}, false) and {gone})"
    # The tombstone can have been removed unread, and a later use has replaced the outcome.
    unread = f"used_again and coalesce(greatest(half_at, parked_at) < {limits.halves_since}, false)"
    # What no op explains, although it is too young to have lost its op by age.
    unexplained = f"""(not (committed or rolled_back or used_again) and found > 0
            and coalesce(message_at >= {kept_since}, false)
        or {gone} and coalesce(gone_at >= {kept_since + limits.horizon_ms}, false))"""
    # A tombstone of half is written with the outcome, and kept for a time.
    traced = "half or gone_at is not null or parked or unparked or used_again"
    unprepared = (
        "false"
        if limits.half_kept_since is None
        else f"""((committed or rolled_back) and not ({traced})
        and coalesce(op_at >= {limits.half_kept_since + limits.slack_ms}, false))"""
    )
    findings = (
        ("contradicted", "(committed and rolled_back or coalesce(ended_again, false))"),
        ("leaked", """(found > 0 and case when committed then not_named > 0 when rolled_back then true
            else coalesce(message_at >= whole_since, false) and not used_again end)"""),
        ("lost", f"(case when committed then {lost} else {vanished} end)"),
        ("torn", f"(committed and not ({lost}) and (missing > 0 or miscounted > 0))"),
        ("doubled", "(committed and doubled > 0)"),
        ("payload_changed", "(committed and changed > 0)"),
        ("reordered", "(committed and reordered > 0)"),
        ("unprepared", unprepared),
        ("half_left", f"""((committed or rolled_back) and half
            and coalesce(half_at between {limits.halves_since} and {limits.cut - limits.horizon_ms - limits.slack_ms},
                false))"""),
    )  # fmt: skip
    found = ", ".join(f"case when {wrong} then '{name}' end" for name, wrong in findings)
    anomalies = f"array_compact({d.array}({found}))"
    first = " ".join(f"when {wrong} then '{name}'" for name, wrong in findings)
    nowhere = d.struct(partition="cast(0 as bigint)", offset="cast(0 as bigint)")
    gone = d.struct(
        topic="'half'",
        slot="cast(null as int)",
        problem="'gone without an outcome'",
        found="cast(0 as int)",
        places=f"case when false then {d.array}({nowhere}) else {d.array}() end",
    )
    newest = "greatest(coalesce(op_at, 0), coalesce(message_at, 0), coalesce(gone_at, 0))"
    return f"""
    select id, cast(life as int) as life, verdict,
        case when {IS_ANOMALY} then anomalies else {d.array}() end as anomalies, "group", cause, topics, expected,
        found, timestamp_millis(prepared_at) as prepared_at, timestamp_millis(ended_at) as ended_at,
        case when {IS_ANOMALY} then case when vanished then {d.array}({gone}) else evidence end end as evidence
    from (
        select *, {vanished} as vanished, {anomalies} as anomalies, case
            when unreadable or (committed and expected = 0 and not rolled_back) then '{NOT_JUDGED}'
            when finding is not null and not unsettled and {newest} <= {limits.cut} then finding
            when finding is not null then 'pending'
            when not unsettled and {newest} <= {limits.cut} and (committed and unproved > 0 or {unexplained})
                then '{UNPROVED}'
            when committed and (unproved > 0 or expired > 0) then 'expired_unknown'
            when committed then 'committed_ok'
            when rolled_back then 'rolled_back_ok'
            when {unread} and not unsettled then 'expired_unknown'
            when parked then 'parked'
            when unsettled or half then 'pending'
            else 'expired_unknown' end as verdict
        from (
            select *, case {first} end as finding
            from (select *, {whole_since} as whole_since from $transactions) dated
        ) found
    ) judged
    where not older
    """  # noqa: S608


def _op_whole_since(limits: Limits) -> str:
    """Return the time since which the op of a transaction's `shard` cannot have been deleted by age.

    For a shard that does not exist it is the latest time of all shards.
    """
    known = {shard: since + limits.slack_ms for shard, since in limits.op_whole_since.items() if since}
    if not known:
        return "0"
    cases = " ".join(f"when {shard} then {known.get(shard, 0)}" for shard in limits.op_whole_since)
    return f"case shard {cases} else {max(known.values())} end"
