"""*evidence*: what was read, told as events of transactions: what is known of which use of an id, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from halfway.pipeline.engines import union
from halfway.pipeline.records import COMMITTED, content, server_made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.pipeline.engines import Dialect, Engine, Frame

_CONTENT: Final = ("wanted", "wanted_headers", "wanted_key", "lowest", "highest", "lowest_headers", "highest_headers")
"""Hashes, as numbers: those of millions of messages are compared, and texts would take most of the memory."""
_COLUMNS: Final = {
    **dict.fromkeys(("group", "outcome", "cause", "topic"), "string"),
    **dict.fromkeys((*_CONTENT, "at", "prepared_at", "ended_at", "found", "first_place", "last_place"), "bigint"),
    **dict.fromkeys(
        ("slot", "wanted_total", "wanted_partition", "least_total", "most_total", "least_partition", "most_partition"),
        "int",
    ),
}
"""What an event tells beside its id, its source and its span; null where it does not."""
_PARTITIONS: Final = 1 << 46
"""A place is one number: the partition, times more than a partition has offsets, and the offset."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What time and settings allow to be told; times in ms.

    `cut`: what happened later is not judged yet. `op_whole_since`: by shard, an older op may have been deleted by age.
    `created_at`: when the deployment's topics were created, 0 if that is not known.
    `horizon_ms`: after it an id that a client brought can be used again. `slack_ms`: by how much clocks and the order
    of a log may differ. `now`: nothing can have been written later; None: as `cut`.
    """

    cut: int
    op_whole_since: Mapping[int, int] = field(default_factory=dict)
    created_at: int = 0
    horizon_ms: int = 900_000
    slack_ms: int = 5_000
    now: int | None = None

    @property
    def latest(self) -> int:
        """What is dated later is dated wrongly."""
        return (self.cut if self.now is None else self.now) + self.slack_ms

    @property
    def apart_ms(self) -> int:
        """By how much two uses of an id are apart at least, by clocks that differ: half a horizon in any case."""
        return max(self.horizon_ms - self.slack_ms, self.horizon_ms // 2)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was read. `ops` and `named` are as `of_ops` gives them, `messages` as `records.messages` does.

    `halves` and `parked` are all records of these topics, with `prepared_at` where it is known. `unsettled`,
    `unreadable` and `later` are ids with the time of the record: of what stands in an unsettled part of a log, of an
    outcome that cannot be read, and of what was written to op after everything that is judged. `topics` says of each
    real topic since when a missing message proves a loss (`provable_since`) and whether it is `compacted`;
    `latest_of_keys` is needed where one is.
    """

    ops: Frame
    named: Frame
    halves: Frame
    parked: Frame
    messages: Frame
    unsettled: Frame
    topics: Frame
    unreadable: Frame | None = None
    later: Frame | None = None
    latest_of_keys: Frame | None = None


def of_ops(engine: Engine, decoded: Frame) -> tuple[Frame, Frame]:
    """Return decoded outcomes as `verdicts` takes them: the ends, and each message that a commit names, in order."""
    d = engine.dialect
    ends = """
    select id, "group", lower(kind) as outcome, cause, prepared_at, "at" as ended_at, written_at as "at", "partition",
        "offset"
    from $decoded
    """
    key, value = "lower(hex(one.key_hash))", "lower(hex(one.value_hash))"
    named = f"""
    select id, prepared_at, greatest(prepared_at, ended_at) as until, ended_at, op_at, "offset", one.topic as topic,
        cast(number + 1 as int) as slot, total, {content(key, value)} as content, {key} as key_hash,
        substr(lower(hex(one.headers_hash)), 1, 16) as own_headers, one."partition" as "partition"
    from (
        select id, prepared_at, "at" as ended_at, written_at as op_at, "offset",
            cast({d.size("messages")} as int) as total, {d.numbered("messages", "number", "one")}
        from $decoded
        where lower(kind) = '{COMMITTED}'
    ) exploded
    """  # noqa: S608
    return engine.query(ends, decoded=decoded), engine.query(named, decoded=decoded)


def events(engine: Engine, evidence: Evidence, limits: Limits) -> Frame:
    """Return what is known of each use of an id, with its number as `life` and whether the id was `used_again` later.

    A new use begins a horizon after everything before it, never for an id that halfway made. A coordinator whose clock
    was set back says that it was less: what the lane wrote is of a new use all the same. A half is not: it may be a
    late repeat, which the coordinator buries. What was written to op `later` ends uses, and is of none that is judged.
    A message that belongs to a use by halfway's own records does not prolong it: anybody can write a message, and one
    that is dated between two uses would join them.
    """
    made = server_made(engine.dialect)
    # They are used more than once.
    evidence = replace(
        evidence,
        # An id has one group as long as anything stands of it.
        halves=engine.keep(_last(engine, evidence.halves, limits, '"group"', by='id, "group"')),
        parked=engine.keep(_last(engine, evidence.parked, limits, 'max_by("group", "offset")', by="id")),
    )
    columns = ", ".join(f'"{name}"' for name in ("id", "source", "begin", "until", *_COLUMNS))
    alone = replace(evidence, messages=_alone(engine, evidence.messages, limits))
    once = engine.query(
        f"select {columns}, 0 as life, false as used_again from $told where source <> 'later'",  # noqa: S608
        told=_told(engine, alone, made, limits),
    )
    preceding = "partition by id order by begin range between unbounded preceding and 1 preceding"
    sql = f"""
    select {columns}, dense_rank() over (partition by id, source = 'later' order by since) - 1 as life,
        since < last_since as used_again
    from (
        select *, max(begun) over (partition by id, source = 'later' order by begin) as since,
            max(begun) over (partition by id) as last_since
        from (
            select *, case when until is not null and begin >= before
                + case when source in ('half', 'parked') then {limits.horizon_ms} else {limits.apart_ms} end
                then begin else 0 end as begun
            from (
                select *, max(case when source <> 'message' or begin >= before_of_own + {limits.apart_ms}
                        or before_of_own is null then until end) over ({preceding}) as before
                from (
                    select *, max(case when source <> 'message' then until end) over ({preceding}) as before_of_own
                    from $told
                ) own
            ) preceded
        ) started
    ) numbered
    """  # noqa: S608
    # However many copies of a message there are, a window sees a few.
    copies = replace(evidence, messages=_copies(engine, evidence, f"not {made}", limits))
    again = engine.query(sql, told=_told(engine, copies, f"not {made}", limits))
    again = engine.keep(engine.query("select * from $lives where source <> 'later'", lives=again))
    return union(engine, [once, again])


def _event(source: str, frame: str, begin: str, until: str, **columns: str) -> str:
    """Return a select of what a frame tells, with nulls for everything else."""
    told = ", ".join(f'cast({columns.get(name, "null")} as {kind}) as "{name}"' for name, kind in _COLUMNS.items())
    return (
        f"select id, '{source}' as source, cast({begin} as bigint) as begin, cast({until} as bigint) as until, "  # noqa: S608
        f"{told} from {frame}"
    )


_PLACE: Final = f'cast("partition" as bigint) * {_PARTITIONS} + "offset"'


def place(d: Dialect, number: str) -> str:
    """Return the partition and the offset that a place tells."""
    offset = f"{number} % {_PARTITIONS}"
    return d.struct(partition=f"cast(({number} - {offset}) / {_PARTITIONS} as bigint)", offset=offset)


def _time(limits: Limits, name: str = '"at"') -> str:
    """Return a time; one that has not come yet is false, and taken for the cut: nothing hides behind."""
    return f"case when {name} > {limits.latest} then {limits.cut} else {name} end"


def _last(engine: Engine, records: Frame, limits: Limits, group: str, *, by: str) -> Frame:
    """Return what the last records say."""
    at = _time(limits)
    return engine.query(
        f"""select id, {group} as "group", max_by(alive, "offset") as alive, max_by({at}, "offset") as "at",
            max_by(coalesce(prepared_at, {at}), "offset") as prepared_at
        from $records group by {by}""",  # noqa: S608
        records=records,
    )


def _alone(engine: Engine, messages: Frame, limits: Limits) -> Frame:
    """Return messages as `_copies` does, each by itself."""
    d = engine.dialect
    content, headers = d.number_of("content"), d.number_of("own_headers")
    prepared_at = _time(limits, "prepared_at")
    return engine.query(
        f"""select id, topic, slot, {prepared_at} as prepared_at, {prepared_at} as until, {_time(limits)} as "at",
            1 as found,
            {content} as lowest, {content} as highest, {headers} as lowest_headers, {headers} as highest_headers,
            total as least_total, total as most_total, "partition" as least_partition, "partition" as most_partition,
            {_PLACE} as first_place, {_PLACE} as last_place
        from $messages""",  # noqa: S608
        messages=messages,
    )


def _copies(engine: Engine, evidence: Evidence, condition: str, limits: Limits) -> Frame:
    """Return the copies of messages together, those of one time in which no two uses of an id can begin.

    The time of a prepare that op names is a time of its own: what others date close to it does not move its messages.
    """
    together = ", ".join(
        f'{"min" if name.startswith(("lowest", "least", "first", "prepared")) else "max"}("{name}") as "{name}"'
        for name in ("prepared_at", "until", "at", *_FOUND)
        if name != "found"
    )
    return engine.query(
        f"""select id, topic, slot, count(*) as found, {together} from (
            select messages.*, case when op_id is null then floor(prepared_at / {limits.apart_ms}) end as period,
                case when op_id is not null then prepared_at end as of_op
            from $messages messages left join (
                select distinct id as op_id, {_time(limits, "prepared_at")} as op_prepared_at
                from $ops where {condition}
            ) ops on op_id = id and op_prepared_at = prepared_at
            where {condition}
        ) dated group by id, topic, slot, period, of_op""",  # noqa: S608
        messages=_alone(engine, evidence.messages, limits),
        ops=evidence.ops,
    )


_FOUND: Final = (
    "found", "lowest", "highest", "lowest_headers", "highest_headers", "least_total", "most_total",
    "least_partition", "most_partition", "first_place", "last_place",
)  # fmt: skip


def _told(engine: Engine, evidence: Evidence, condition: str, limits: Limits) -> Frame:
    """Everything that is known of some ids, with the time span that tells which use of the id it is about.

    A tombstone, an unsettled record and one that cannot be read have no span: they say something about whatever stands
    there. What is unsettled can be a message, whose clock may say that it was prepared only afterwards.
    """
    d = engine.dialect
    at = _time(limits)
    prepared_at = _time(limits, "prepared_at")
    alive = {"group": '"group"', "prepared_at": "prepared_at", "at": '"at"'}
    selects = [
        _event(
            "op", "$ops", prepared_at, _time(limits, "greatest(prepared_at, ended_at)"), at=at, group='"group"',
            outcome="outcome", cause="cause", prepared_at="prepared_at", ended_at="ended_at", first_place=_PLACE,
            last_place=_PLACE,
        ) + f" where {condition}",
        _event(
            "named", "$named", prepared_at, _time(limits, "until"), prepared_at="prepared_at", ended_at="ended_at",
            at=_time(limits, "op_at"), topic="topic", slot="slot", wanted=d.number_of("content"),
            wanted_headers=d.number_of("own_headers"), wanted_key=d.number_of("key_hash"), wanted_total="total",
            wanted_partition='"partition"',
        ) + f" where {condition}",
        _event(
            "message", "$messages", "prepared_at", "until", prepared_at="prepared_at", at='"at"', topic="topic",
            slot="slot", **{name: name for name in _FOUND},
        ) + f" where {condition}",
        _event("half", "$halves", prepared_at, prepared_at, **alive) + f" where alive and {condition}",
        _event("gone", "$halves", '"at"', "null", at='"at"', group='"group"') + f" where not alive and {condition}",
        # Of one that cannot be decoded it is not known when it was prepared.
        _event("parked", "$parked", prepared_at, prepared_at, **alive) + f" where alive and {condition}",
        _event("unsettled", "$unsettled", f"{at} + {limits.slack_ms}", "null", at=at) + f" where {condition}",
    ]  # fmt: skip
    frames = {
        "ops": evidence.ops,
        "named": evidence.named,
        "messages": evidence.messages,
        "halves": evidence.halves,
        "parked": evidence.parked,
        "unsettled": evidence.unsettled,
    }
    if evidence.unreadable is not None:
        selects.append(_event("unreadable", "$unreadable", '"at"', "null", at=at) + f" where {condition}")
        frames["unreadable"] = evidence.unreadable
    if evidence.later is not None:
        selects.append(_event("later", "$later", '"at"', '"at"') + f" where {condition}")
        frames["later"] = evidence.later
    return engine.query(" union all ".join(selects), **frames)
