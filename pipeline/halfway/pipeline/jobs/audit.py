"""The job `audit`: verdicts and anomalies of every transaction, in Delta tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import Engine, between, union, where
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import Source
from halfway.pipeline.sources.pins import Ends, Pins, TopicPin
from halfway.pipeline.tables import ANOMALIES, QUARANTINE, VERDICTS, Files, Tables
from halfway.pipeline.transforms import verdict
from halfway.pipeline.transforms.evidence import Evidence, Limits, of_ops

OFFSETS: Final = "offsets.json"
SUMMARY: Final = "summary.json"
ENDS: Final = "ends"
"""In the state of a whole audit: where the topics ended at this audit and at earlier ones into the same folder."""
_SHOWN_TOPICS: Final = 20
_NEVER: Final = 1 << 62
_SEARCHED: Final = (10_000, _NEVER)
"""The number of offsets after the first message of a partition in which a message that op names is searched, and how
far it is searched in the partitions that have none there."""
_PLACE: Final = 'topic, "partition", "offset"'
_NO_ENDS: Final = Ends()


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options of the command line; times in ms. `topics` are read beside those that op and the groups name."""

    topics: Sequence[str] = ()
    grace_ms: int = 5_000
    horizon_ms: int = 900_000
    skew_ms: int = 5_000
    since_ms: int | None = None
    """Transactions that were prepared earlier, or from `until_ms` on, are judged but not written."""
    until_ms: int | None = None
    engine_because: str = ""

    @property
    def rules(self) -> dict[str, int]:
        """The options that affect verdicts, by their names; times in ms."""
        return {
            "--grace-s": self.grace_ms,
            "HALFWAY_OUTCOME_HORIZON_S": self.horizon_ms,
            "--clock-skew-s": self.skew_ms,
        }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of an audit."""

    verdicts: Mapping[str, int]
    quarantined: int
    by_group: Sequence[tuple[str, str, int]] = ()
    """Verdict, group (empty if it is not known) and number of transactions."""
    found: Frame = None
    """The anomalies of this run."""
    differences: int | None = None
    """The number of transactions for which an audit with --continue has another verdict; None without --cross-check."""
    differing: Sequence[Mapping[str, Any]] = ()
    provable_since: Mapping[str, int] = field(default_factory=dict)
    """By real topic, the time since which any missing message proves a loss; 0 for ever."""

    @property
    def anomalies(self) -> int:
        return sum(self.verdicts.get(name, 0) for name in verdict.ANOMALIES)

    @property
    def not_judged(self) -> int:
        return self.verdicts.get(verdict.NOT_JUDGED, 0)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything that was read, and the records in it that cannot be used."""

    evidence: Evidence
    limits: Limits
    quarantine: Frame
    provable_since: Mapping[str, Mapping[int, int]]
    """By real topic and partition, the time since which a missing message proves a loss; 0 for ever."""

    @property
    def proved_since(self) -> dict[str, int]:
        """The same by real topic alone."""
        return {topic: max(times.values(), default=0) for topic, times in self.provable_since.items()}


@dataclass(frozen=True, kw_only=True)
class Before:
    """What the previous run has left for this one; nothing, if there was none."""

    pins: Pins = field(default_factory=Pins)
    provable_since: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    halves_since: int = 0
    """The time since which no run has missed a tombstone of half, because it was removed before the run."""


_NOTHING: Final = Before()


def run(engine: Engine, source: Source, output: Files, options: AuditOptions) -> Summary:
    """Judge every transaction. Write `verdicts`, `anomalies` and `quarantine`, and the offsets that were read.

    PipelineError if the folder is that of an audit with --continue, whose verdicts this one would replace.
    """
    tables, ends, summary = judge(engine, source, output, options)
    finish(tables, source, output, summary, options, {ENDS: ends})
    return summary


def judge(engine: Engine, source: Source, output: Files, options: AuditOptions) -> tuple[Tables, Any, Summary]:
    """Write the tables of a whole audit. They count when it is finished with the ends of the topics."""
    tables = Tables(engine, output)
    if tables.run >= 0 and ENDS not in tables.content:
        raise PipelineError(f"{output.path()} is of an audit with --continue: give another folder")
    ends = Ends(seen=tuple(map(Pins.of, tables.content.get(ENDS, []))))
    tables.begin(anew=True)
    read = evidence(engine, source, options, ends=ends)
    judged = verdict.verdicts(engine, read.evidence, read.limits)
    written = tables.write(VERDICTS, between(engine, judged, options.since_ms, options.until_ms, "prepared_at"))
    anomalies = tables.write(ANOMALIES, where(engine, written, verdict.IS_ANOMALY))
    by_group = """select verdict, coalesce("group", '') as "group", count(*) as count from $written group by 1, 2"""
    counted = engine.rows(engine.query(by_group, written=written))
    counts = {(row["verdict"], row["group"]): int(row["count"]) for row in counted}
    quarantined = rows_in(engine, tables.write(QUARANTINE, read.quarantine))
    summary = summary_of(counts, found=anomalies, quarantined=quarantined, provable_since=read.proved_since)
    return tables, [pins.content for pins in ends.followed_by(source.pins).seen], summary


def latest_proofs(provable_since: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the first of the topics in which not every loss can be proved, the latest time first."""
    late = [(topic, at) for topic, at in provable_since.items() if at]
    return sorted(late, key=lambda each: (-each[1], each[0]))[:_SHOWN_TOPICS]


def rows_in(engine: Engine, frame: Frame) -> int:
    return int(engine.rows(engine.query("select count(*) as count from $read", read=frame))[0]["count"])


def summary_of(counts: Mapping[tuple[str, str], int], **others: Any) -> Summary:
    """Return a summary from the number of transactions by verdict and group."""
    verdicts: Counter[str] = Counter()
    for (name, _), count in counts.items():
        verdicts[name] += count
    return Summary(
        verdicts={name: verdicts[name] for name in verdict.VERDICTS},
        by_group=sorted((name, group, count) for (name, group), count in counts.items() if count),
        **others,
    )


def evidence(
    engine: Engine, source: Source, options: AuditOptions, *, before: Before = _NOTHING, ends: Ends = _NO_ENDS
) -> Reading:
    """Read everything once; after an earlier run, only what is new. `ends` are of earlier audits of the same topics.

    The ends of op are pinned first. So everything that an op names is in the other topics when their ends are pinned.
    Records after the ends, in Kafka transactions that are not finished, are read only so that their ids are not judged.
    Kafka is asked last which records it has removed, when everything has been read, so that no removal goes unnoticed.
    """
    op_topic, half_topic, parked_topic, groups_topic = (
        source.prefix + kind for kind in ("op", "half", "parked", "groups")
    )
    source.pin([op_topic])
    reading.require(source, ["op"])
    d = engine.dialect
    ended = headers.internal(d, "'op'", where=f"fault is not null or {headers.IS_FINAL}")
    op = engine.keep(source.committed([op_topic], ended))
    outcomes = engine.keep(reading.decoded_outcomes(engine, op))
    source.pin([half_topic, parked_topic, groups_topic, source.prefix + "owners"])
    reading.require(source, ["half", "parked"])
    without_payload = f'id, "group", "at", prepared_at, alive, fault, {_PLACE}'
    half = engine.keep(source.committed([half_topic], headers.internal(d, "'half'", columns=without_payload)))
    of_parked = engine.keep(source.committed([parked_topic], headers.internal(d, "'parked'")))
    parked = engine.keep(reading.decoded_parked(engine, where(engine, of_parked, "fault is null")))
    registered = engine.keep(reading.groups(engine, source))
    named = reading.real_topics(engine, outcomes, registered, source.prefix, options.topics)
    # A topic of an earlier run is read further, even if no new record names it.
    names = sorted({*named, *before.provable_since})
    source.pin(names)
    reading.require_given(source, options.topics)
    source.extend_unsettled(op_topic)
    real_records = engine.keep(source.committed(names, headers.messages(d, source.prefix)))
    messages = where(engine, real_records, "fault is null")
    unsettled = engine.keep(_unsettled(engine, source, names))
    # This count reads everything. Records that Kafka has removed by then may have been removed before they were read.
    rows_in(engine, union(engine, [engine.query("select id from $read", read=each) for each in (messages, unsettled)]))
    now = source.reopened()
    now.pin([op_topic, half_topic, *names])
    ops, of_commits = of_ops(engine, where(engine, outcomes, "error is null"))
    first = _first_messages(engine, messages, of_commits, now.pins, options.skew_ms)
    provable = _provable_since(now.pins, names, first, ends, before)
    topics, partitions = _facts(engine, source.pins, now.pins, provable)
    ids = headers.internal(d, "'op'", columns='id, "at"', where="fault is null")
    compacted = [name for name in names if name in now.pins.topics and now.pins.topics[name].compacted]
    keys = now.committed(compacted, headers.keys(d)) if compacted else None
    found = Evidence(
        ops=ops,
        named=of_commits,
        halves=where(engine, half, "fault is null"),
        # A record of parked counts even if it cannot be decoded.
        parked=parked,
        messages=messages,
        unsettled=unsettled,
        unreadable=engine.query(
            'select "key" as id, written_at as "at" from $read where error is not null', read=outcomes
        ),
        topics=topics,
        partitions=partitions,
        # Compaction may have removed the earlier outcome of an id that op has a later record of.
        later=source.later([op_topic], now.pins, ids),
        latest_of_keys=None if keys is None else headers.latest_of_keys(engine, keys),
    )
    # Groups are read from the beginning each time. Earlier runs have reported the damaged ones that they have read.
    pin = source.pins.topics.get(groups_topic)
    groups_before = {} if pin is None else before.pins.ends_of(pin)
    unread = "".join(f' and ("partition" <> {number} or "offset" >= {end})' for number, end in groups_before.items())
    damaged = (outcomes, parked, where(engine, registered, f"true{unread}"))
    return Reading(
        evidence=found,
        limits=_limits(source, now.pins, ends, options, reading.created_at(engine, source), before),
        quarantine=reading.unusable(engine, (op, half, of_parked, real_records), damaged),
        provable_since=provable,
    )


def finish(
    tables: Tables,
    source: Source,
    output: Files,
    summary: Summary,
    options: AuditOptions,
    content: Mapping[str, Any],
    **more: Any,
) -> None:
    """End the run with what the next one needs to know, then write its offsets and its summary for people."""
    figures = {
        **summary.verdicts,
        "quarantined": summary.quarantined,
        "provable_since": summary.provable_since,
        "judged_at": source.pins.at,
        "engine": tables.engine.name,
        "engine_because": options.engine_because,
        **more,
    }
    tables.end({**content, "summary": figures}, at=source.pins.at)
    output.write(source.pins.to_json(), OFFSETS)
    output.write(json.dumps(figures) + "\n", SUMMARY)


def _unsettled(engine: Engine, source: Source, names: Sequence[str]) -> Frame:
    """Return the ids of the records in Kafka transactions that were not finished, with their times.

    A Kafka transaction that ends or resumes a transaction becomes visible in one topic after the other: half can still
    lack what parked or op already has.
    """
    d = engine.dialect
    frames = [source.unsettled(names, headers.messages(d, source.prefix))]
    for kind, wanted in (("op", headers.IS_FINAL), ("half", "true"), ("parked", "true")):
        rows = headers.internal(d, f"'{kind}'", columns='id, "at"', where=f"fault is null and {wanted}")
        frames.append(source.unsettled([source.prefix + kind], rows))
    return union(
        engine, [engine.query('select id, "at" from $frame where id is not null', frame=frame) for frame in frames]
    )


def _first_messages(
    engine: Engine, messages: Frame, named: Frame, now: Pins, skew_ms: int
) -> dict[str, dict[int, int]]:
    """Return the time of the first message that is still there, for each partition from which records were removed.

    A message that was read and has been removed since proves nothing: its neighbours may have been removed before they
    were read. A message that no op names proves nothing either, because anyone can write one with any time. Only a
    committed message counts, with the time of its op if its own is earlier. One with a future date would hide losses
    until then.
    """
    wanted = {
        (topic, each.partition): each.start
        for topic, pin in now.topics.items()
        for each in pin.partitions
        if each.start > 0
    }
    found: dict[str, dict[int, int]] = {}
    for searched in _SEARCHED:
        if not wanted:
            break
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
                and read."offset" >= heads.head and read."offset" - heads.head <= {searched}
            join $named named on named.id = read.id and named.topic = read.topic and named.slot = read.slot
                and named.content = read.content and named.prepared_at = read.prepared_at
            group by read.topic, read."partition", read."offset"
        ) committed where "at" <= {now.at + skew_ms} group by topic, "partition"
        """  # noqa: S608
        starts = engine.table(
            [(*place, start) for place, start in wanted.items()], "topic string, partition int, start bigint"
        )
        for row in engine.rows(engine.query(sql, messages=messages, named=named, starts=starts)):
            found.setdefault(row["topic"], {})[row["partition"]] = row["at"]
            del wanted[row["topic"], row["partition"]]
    return found


def _provable_since(
    now: Pins, names: Sequence[str], first: Mapping[str, Mapping[int, int]], ends: Ends, before: Before
) -> dict[str, Mapping[int, int]]:
    """Return, by topic and partition, the time since which a missing message proves a loss; as known if it is gone.

    Records that earlier runs of --continue have read need no proof. Only records that were removed unread matter.
    """
    found: dict[str, Mapping[int, int]] = {}
    for name in names:
        known = before.provable_since.get(name, {})
        pin = now.topics.get(name)
        if pin is None:
            found[name] = known
            continue
        read = before.pins.ends_of(pin)
        unread = tuple(
            replace(each, start=0) if each.start <= read[each.partition] else each for each in pin.partitions
        )
        provable = replace(pin, partitions=unread).provable_since(first.get(name, {}), ends.since(pin))
        found[name] = {number: max(since, known.get(number, 0)) for number, since in provable.items()}
    return found


def _facts(engine: Engine, read: Pins, now: Pins, provable: Mapping[str, Mapping[int, int]]) -> tuple[Frame, Frame]:
    """Return the facts about real topics and about their partitions.

    A topic that does not exist, or was not read as a whole, proves nothing.
    """
    topics, partitions = [], []
    for name, times in provable.items():
        pin = now.topics.get(name)
        if pin is None or not _is_read(read.topics.get(name), pin):
            topics.append((name, _NEVER, _NEVER, pin is not None and pin.compacted))
        else:
            topics.append((name, max(times.values(), default=0), pin.kept_since, pin.compacted))
            partitions += [(name, number, since) for number, since in times.items()]
    return (
        engine.table(topics, "topic string, provable_since bigint, kept_since bigint, compacted boolean"),
        engine.table(partitions, "topic string, partition int, provable_since bigint"),
    )


def _is_read(read: TopicPin | None, now: TopicPin) -> bool:
    """Return whether the topic that was read is the present one, with all its partitions.

    It can have been created, or created again, in the meantime. Or the broker that was asked first did not know it yet.
    """
    if read is None or read.is_another(now):
        return False
    return {each.partition for each in now.partitions} <= {each.partition for each in read.partitions}


def _limits(source: Source, now: Pins, ends: Ends, options: AuditOptions, created_at: int, before: Before) -> Limits:
    op, half = (now.topics.get(source.prefix + kind) for kind in ("op", "half"))
    halves_since, last = before.halves_since, before.pins.topics.get(source.prefix + "half")
    if half is not None and last is not None and half.compacted and half.at - last.at >= half.tombstones_kept_ms:
        halves_since = last.at
    half_kept_since = (
        None
        if half is None or not half.compacted
        else max(half.at - half.tombstones_kept_ms, *half.whole_since(ends.since(half)).values())
    )
    return Limits(
        created_at=created_at,
        cut=source.pins.at - options.grace_ms,
        now=source.pins.at,
        op_whole_since={} if op is None else op.whole_since(ends.since(op)),
        op_kept_since=0 if op is None or op.kept_ms is None else op.at - op.kept_ms,
        half_kept_since=half_kept_since,
        halves_since=halves_since,
        horizon_ms=options.horizon_ms,
        slack_ms=options.skew_ms,
    )
