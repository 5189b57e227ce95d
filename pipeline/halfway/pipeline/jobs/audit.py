"""The job `audit`: verdicts and anomalies of every transaction, as Parquet."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from halfway.pipeline import records
from halfway.pipeline.engines import union
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import reading
from halfway.pipeline.transforms import verdict
from halfway.pipeline.transforms.evidence import Evidence, Limits, of_ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from halfway.pipeline.engines import Engine, Frame
    from halfway.pipeline.folders import Files
    from halfway.pipeline.pinned import Source
    from halfway.pipeline.pins import Pins, TopicPin

VERDICTS: Final = "verdicts"
ANOMALIES: Final = "anomalies"
QUARANTINE: Final = "quarantine"
DIFFERENCES: Final = "differences"
OFFSETS: Final = "offsets.json"
SUMMARY: Final = "summary.json"
STATE: Final = "continued.json"
"""What an audit with --continue has left for the next one."""
_NEVER: Final = 1 << 62
_LOOKED_THROUGH: Final = 10_000
"""Offsets behind the first message of a partition among which one that op names is looked for."""
_PLACE: Final = 'topic, "partition", "offset"'


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the command line says: times in ms; `topics` are read beside those that op and the groups name."""

    topics: Sequence[str] = ()
    grace_ms: int = 5_000
    horizon_ms: int = 900_000
    skew_ms: int = 5_000
    since_ms: int | None = None
    """What was prepared earlier is judged, but not told; likewise from `until_ms` on."""
    until_ms: int | None = None
    engine_because: str = ""
    """Why it runs on its engine."""

    @property
    def rules(self) -> dict[str, int]:
        """What decides about verdicts, by the option of the command line; times in ms."""
        return {"--grace-s": self.grace_ms, "--horizon-s": self.horizon_ms, "--clock-skew-s": self.skew_ms}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How an audit went."""

    verdicts: Mapping[str, int]
    quarantined: int
    by_group: Sequence[tuple[str, str, int]] = ()
    """Verdict, group (empty where it is not known) and transactions."""
    found: str = ""
    """Where the anomalies are, as Parquet."""
    differences: int | None = None
    """Of how many transactions an audit with --continue says something else; None where it was not asked."""
    differing: Sequence[Mapping[str, Any]] = ()
    """The first of them."""
    provable_since: Mapping[str, int] = field(default_factory=dict)
    """By real topic, since when a missing message proves a loss."""

    @property
    def anomalies(self) -> int:
        """Transactions that did not end as their producers meant."""
        return sum(self.verdicts.get(name, 0) for name in verdict.ANOMALIES)

    @property
    def not_judged(self) -> int:
        """Transactions whose outcome cannot be read."""
        return self.verdicts.get(verdict.NOT_JUDGED, 0)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All that was read, and what is wrong in it."""

    evidence: Evidence
    limits: Limits
    quarantine: Frame
    provable_since: Mapping[str, int]
    """By real topic, since when a missing message proves a loss."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """What the run before has left that this one goes on from."""

    pins: Pins
    provable_since: Mapping[str, int]


def run(engine: Engine, source: Source, output: Files, options: AuditOptions) -> Summary:
    """Judge every transaction up to now; write `verdicts`, `anomalies`, `quarantine` and the offsets that were read.

    Raises:
        SourceError: the folder is that of an audit with --continue, whose verdicts would be replaced.

    """
    if output.exists(STATE):
        raise SourceError(f"{output.path()} is of an audit with --continue: give another folder")
    # Until it is written again, the folder holds no audit that was finished.
    output.delete(SUMMARY)
    output.delete(DIFFERENCES)
    read = evidence(engine, source, options)
    judged = between(engine, verdict.verdicts(engine, read.evidence, read.limits), options.since_ms, options.until_ms)
    engine.write(judged, output.path(VERDICTS))
    engine.write(read.quarantine, output.path(QUARANTINE))
    return replace(_summed_up(engine, source, output, options), provable_since=read.provable_since)


def between(engine: Engine, judged: Frame, since_ms: int | None, until_ms: int | None) -> Frame:
    """Return what was prepared from a time on and before another; of what is not known when, all."""
    at = engine.dialect.millis("prepared_at")
    bounds = [f"coalesce({at} >= {since_ms}, true)"] if since_ms is not None else []
    bounds += [f"coalesce({at} < {until_ms}, true)"] if until_ms is not None else []
    return engine.query(f"select * from $judged where {' and '.join(bounds)}", judged=judged) if bounds else judged  # noqa: S608


def evidence(engine: Engine, source: Source, options: AuditOptions, *, before: Before | None = None) -> Reading:
    """Read everything, once; what is new, if there was a run before.

    op's ends are taken first, so that whatever an op tells of must stand in the other topics when theirs are taken.
    What stands behind them, in Kafka transactions that are not finished, is looked at only to leave its ids unjudged.
    What Kafka has removed is asked last, when everything has been read, so that nothing can go unnoticed meanwhile.
    """
    op_topic, half_topic, parked_topic, groups_topic = (
        source.prefix + kind for kind in ("op", "half", "parked", "groups")
    )
    source.pin([op_topic])
    reading.demand(source, ["op"])
    final = ", ".join(f"'{state}'" for state in records.FINAL)
    op = engine.keep(
        engine.query(
            f"select * from $told where fault is not null or state in ({final})",  # noqa: S608
            told=records.internal(engine, source.committed([op_topic]), "'op'"),
        )
    )
    outcomes = engine.keep(reading.decoded_outcomes(engine, op))
    source.pin([half_topic, parked_topic, groups_topic, source.prefix + "owners"])
    reading.demand(source, ["half", "parked"])
    half = engine.keep(
        engine.query(
            f'select id, "group", "at", prepared_at, alive, fault, {_PLACE} from $told',  # noqa: S608
            told=records.internal(engine, source.committed([half_topic]), "'half'"),
        )
    )
    told = engine.keep(records.internal(engine, source.committed([parked_topic]), "'parked'"))
    parked = engine.keep(
        reading.decoded_parked(engine, engine.query("select * from $told where fault is null", told=told))
    )
    registered = engine.keep(reading.groups(engine, source))
    named = reading.real_topics(engine, outcomes, registered, source.prefix, options.topics)
    # What was read before is read on, whether or not anything names it in this part.
    names = sorted({*named, *(before.provable_since if before else ())})
    source.pin(names)
    reading.demand_given(source, options.topics)
    source.extend_unsettled(op_topic)
    told_messages = engine.keep(records.messages(engine, source.committed(names), source.prefix))
    messages = engine.query("select * from $told where fault is null", told=told_messages)
    unsettled = engine.keep(_unsettled(engine, source, names))
    # All has been read when this is known: what has gone by now may have gone before it was read.
    engine.rows(
        engine.query(
            "select count(*) as read from (select id from $messages union all select id from $unsettled) ids",
            messages=messages,
            unsettled=unsettled,
        )
    )
    now = source.reopened()
    now.pin([op_topic, *names])
    ends, of_commits = of_ops(engine, engine.query("select * from $read where error is null", read=outcomes))
    first = _first_messages(engine, messages, of_commits, now.pins, options.skew_ms)
    provable = _provable_since(now.pins, names, first, before)
    found = Evidence(
        ops=ends,
        named=of_commits,
        halves=engine.query("select * from $half where fault is null", half=half),
        # That it is parked is told without decoding it.
        parked=parked,
        messages=messages,
        unsettled=unsettled,
        unreadable=engine.query(
            'select "key" as id, written_at as "at" from $read where error is not null', read=outcomes
        ),
        topics=_facts(engine, source.pins, now.pins, provable),
        later=_later(engine, source, now.pins, op_topic),
        latest_of_keys=_latest_of_keys(engine, now, names),
    )
    faulty = [
        engine.query(f"select {_PLACE}, fault as error from $told where fault is not null", told=frame)  # noqa: S608
        for frame in (op, half, told, told_messages)
    ]
    # Groups are read whole each time: what the runs before have read of them was told by those.
    pin = source.pins.topics.get(groups_topic)
    told_before = {} if before is None or pin is None else before.pins.ends_of(pin)
    anew = "".join(f' and ("partition" <> {number} or "offset" >= {end})' for number, end in told_before.items())
    damaged = [
        engine.query(f"select {_PLACE}, error from $read where error is not null{condition}", read=frame)  # noqa: S608
        for frame, condition in ((outcomes, ""), (parked, ""), (registered, anew))
    ]
    return Reading(
        evidence=found,
        limits=_limits(source, now.pins.topics.get(op_topic), options, reading.created_at(engine, source)),
        quarantine=union(engine, [*faulty, *damaged]),
        provable_since=provable,
    )


def _summed_up(engine: Engine, source: Source, output: Files, options: AuditOptions) -> Summary:
    written = engine.read(output.path(VERDICTS))
    names = ", ".join(f"'{name}'" for name in verdict.ANOMALIES)
    anomalies = engine.query(f"select * from $written where verdict in ({names})", written=written)  # noqa: S608
    engine.write(anomalies, output.path(ANOMALIES), files=1)
    counted = engine.query(
        """select verdict, coalesce("group", '') as "group", count(*) as count from $written group by 1, 2""",
        written=written,
    )
    by_group = sorted((row["verdict"], row["group"], int(row["count"])) for row in engine.rows(counted))
    counts: Counter[str] = Counter()
    for name, _, count in by_group:
        counts[name] += count
    wrong = engine.query("select count(*) as count from $read", read=engine.read(output.path(QUARANTINE)))
    summary = Summary(
        verdicts={name: counts[name] for name in verdict.VERDICTS},
        by_group=by_group,
        found=output.path(ANOMALIES),
        quarantined=int(engine.rows(wrong)[0]["count"]),
    )
    tell(engine, source, output, summary, options)
    return summary


def tell(engine: Engine, source: Source, output: Files, summary: Summary, options: AuditOptions) -> None:
    """Write what was read and what was found; the summary comes last."""
    output.write(source.pins.to_json(), OFFSETS)
    told: dict[str, Any] = {
        **summary.verdicts,
        "quarantined": summary.quarantined,
        "judged_at": source.pins.at,
        "engine": engine.name,
        "engine_because": options.engine_because,
    }
    output.write(json.dumps(told) + "\n", SUMMARY)


def _unsettled(engine: Engine, source: Source, names: Sequence[str]) -> Frame:
    """Return the ids of what stands in Kafka transactions that were not finished, with its time.

    One that ends or resumes a transaction shows in its topics one after the other: half can lack yet what parked or op
    has already.
    """
    kinds = {kind: records.internal(engine, source.unsettled([source.prefix + kind]), f"'{kind}'") for kind in _KINDS}
    frames = [records.outcomes(engine, kinds["op"])]
    frames += [engine.query("select * from $told where fault is null", told=kinds[kind]) for kind in ("half", "parked")]
    frames.append(records.messages(engine, source.unsettled(names), source.prefix))
    known = 'select id, "at" from $frame where id is not null'
    return union(engine, [engine.query(known, frame=frame) for frame in frames])


_KINDS: Final = ("op", "half", "parked")


def _later(engine: Engine, source: Source, now: Pins, op_topic: str) -> Frame:
    """Return what was written to op since: compaction may remove the outcome of an id that is used again."""
    written = records.internal(engine, source.later([op_topic], now), "'op'")
    return engine.query('select id, "at" from $written where fault is null', written=written)


def _first_messages(
    engine: Engine, messages: Frame, named: Frame, now: Pins, skew_ms: int
) -> dict[str, dict[int, int]]:
    """Return, by topic and partition from which something was removed, the time of the first message that is there.

    Messages that were read before it, but have gone, prove nothing: their neighbours may have gone before they were
    read. Neither does a message that no op names, since anybody can write one with any time: only a message that was
    committed counts, with the time of its op if its own is earlier. One that is dated in the future would hide losses
    until then.
    """
    starts = [
        (topic, each.partition, each.start)
        for topic, pin in now.topics.items()
        for each in pin.partitions
        if each.start > 0
    ]
    if not starts:
        return {}
    sql = f"""
    select topic, "partition", min_by("at", "offset") as "at" from (
        select read.topic as topic, read."partition" as "partition", read."offset" as "offset",
            max(greatest(read."at", named.op_at)) as "at"
        from $messages read
        join (
            select read.topic as topic, read."partition" as "partition", min(read."offset") as head
            from $messages read join $starts starts on read.topic = starts.topic
                and read."partition" = starts."partition" and read."offset" >= starts."start"
            group by read.topic, read."partition"
        ) heads on read.topic = heads.topic and read."partition" = heads."partition"
            and read."offset" between heads.head and heads.head + {_LOOKED_THROUGH}
        join $named named on named.id = read.id and named.topic = read.topic and named.slot = read.slot
            and named.content = read.content
        group by read.topic, read."partition", read."offset"
    ) committed where "at" <= {now.at + skew_ms} group by topic, "partition"
    """  # noqa: S608
    frame = engine.table(starts, "topic string, partition int, start bigint")
    found: dict[str, dict[int, int]] = {}
    for row in engine.rows(engine.query(sql, messages=messages, named=named, starts=frame)):
        found.setdefault(row["topic"], {})[row["partition"]] = row["at"]
    return found


def _provable_since(
    now: Pins, names: Sequence[str], first: Mapping[str, Mapping[int, int]], before: Before | None
) -> dict[str, int]:
    """Return by topic since when a missing message proves a loss, as far as is known of one that is not there.

    What the runs before have read needs no proof: only what has gone unread since can be missed.
    """
    found = {}
    for name in names:
        known = before.provable_since.get(name, 0) if before else 0
        pin = now.topics.get(name)
        if pin is not None and before is not None:
            read = before.pins.ends_of(pin)
            unread = tuple(
                replace(each, start=0) if each.start <= read[each.partition] else each for each in pin.partitions
            )
            pin = replace(pin, partitions=unread)
        found[name] = known if pin is None else max(pin.provable_since(first.get(name, {})), known)
    return found


def _facts(engine: Engine, read: Pins, now: Pins, provable: Mapping[str, int]) -> Frame:
    """A topic that does not exist (any more), or of which something was not read, proves nothing about any time."""
    there = now.topics
    rows = [
        (
            name,
            since if _is_read(read.topics.get(name), there.get(name)) else _NEVER,
            name in there and there[name].compacted,
        )
        for name, since in provable.items()
    ]
    return engine.table(rows, "topic string, provable_since bigint, compacted boolean")


def _is_read(read: TopicPin | None, now: TopicPin | None) -> bool:
    """Whether what was read is the topic that is there now, with all its partitions.

    It can have been made, or made again, meanwhile, or a broker that had not heard of it yet was asked before.
    """
    if read is None or now is None or read.is_another(now):
        return False
    return {each.partition for each in now.partitions} <= {each.partition for each in read.partitions}


def _latest_of_keys(engine: Engine, now: Source, names: Sequence[str]) -> Frame | None:
    compacted = [name for name in names if name in now.pins.topics and now.pins.topics[name].compacted]
    return records.latest_of_keys(engine, now.committed(compacted)) if compacted else None


def _limits(source: Source, op: TopicPin | None, options: AuditOptions, created_at: int) -> Limits:
    return Limits(
        created_at=created_at,
        cut=source.pins.at - options.grace_ms,
        now=source.pins.at,
        op_whole_since={} if op is None else op.whole_since,
        horizon_ms=options.horizon_ms,
        slack_ms=options.skew_ms,
    )
