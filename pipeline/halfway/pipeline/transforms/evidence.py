"""*evidence*: what was read, as events of transactions, and to which use of an id each of them belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from halfway.pipeline.engines.dialect import Dialect, Frame, number_of
from halfway.pipeline.engines.engine import Engine, union, where
from halfway.pipeline.sources.headers import COMMITTED, content, lives_once

_CONTENT: Final = ("wanted", "wanted_headers", "wanted_key", "got", "got_headers")
"""Hashes, as numbers: as texts, those of millions of messages would need most of the memory."""
_COLUMNS: Final = {
    **dict.fromkeys(("group", "outcome", "cause", "topic"), "string"),
    **dict.fromkeys((*_CONTENT, "at", "prepared_at", "ended_at", "found", "first_place", "last_place"), "bigint"),
    **dict.fromkeys(("slot", "wanted_total", "wanted_partition", "got_total", "got_partition"), "int"),
}
"""The columns of an event beside its id, its source and its span. A column that an event does not have is null."""
PARTITIONS: Final = 1 << 46
"""A place is one number: the partition times this number, which is larger than any offset, plus the offset."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that times and settings set to verdicts; times in ms.

    `cut`: later events are not judged yet. `op_whole_since`: by shard, the time before which an op may have been
    deleted by age. `op_kept_since`: the time since which, by op's configuration, none is. `created_at`: when the
    deployment's topics were created, 0 if unknown. `half_kept_since`: the time since which half keeps a tombstone, None
    if it is not known. `halves_since`: a half of before may have lost its tombstone unread. `horizon_ms`: the time
    after which an id that is no UUIDv7 can be used again. `slack_ms`: how much clocks, and times and offsets of a
    log, can differ. `now`: nothing can have been written later; None means the same as `cut`.
    """

    cut: int
    op_whole_since: Mapping[int, int] = field(default_factory=dict)
    op_kept_since: int = 0
    half_kept_since: int | None = None
    halves_since: int = 0
    created_at: int = 0
    horizon_ms: int = 900_000
    slack_ms: int = 5_000
    now: int | None = None

    @property
    def latest(self) -> int:
        """The latest time that can be right."""
        return (self.cut if self.now is None else self.now) + self.slack_ms

    @property
    def apart_ms(self) -> int:
        """The least time between two uses of an id, given the difference of clocks, and at least half a horizon."""
        return max(self.horizon_ms - self.slack_ms, self.horizon_ms // 2)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that was read. `of_ops` returns `ops` and `named`, `records.messages` returns `messages`.

    `halves` and `parked` are all records of these topics, with `prepared_at` if it is known. `unsettled`, `unreadable`
    and `later` are ids with the time of a record: one in an unsettled part of a log, an outcome that cannot be read,
    and one that was written to op after everything that is judged. `topics` has for each real topic the time since
    which any missing message proves a loss (`provable_since`), the time since which the configuration keeps its records
    (`kept_since`), and whether it is `compacted`. If one is, `latest_of_keys` is needed. `partitions` has
    `provable_since` for each partition: enough for a message whose partition is known.
    """

    ops: Frame
    named: Frame
    halves: Frame
    parked: Frame
    messages: Frame
    unsettled: Frame
    topics: Frame
    partitions: Frame
    unreadable: Frame | None = None
    later: Frame | None = None
    latest_of_keys: Frame | None = None


_KEPT: Final = {
    **dict.fromkeys(("group", "outcome", "cause", "topic", "content", "key_hash", "own_headers", "verdict"), "string"),
    **dict.fromkeys(("prepared_at", "until", "ended_at", "op_at", "at", "offset", "run"), "bigint"),
    **dict.fromkeys(("slot", "total", "partition", "life"), "int"),
    "alive": "boolean",
}
"""The columns in which records are kept for later runs, beside their kind and id."""
_OF_STATE: Final = ("group", "at", "prepared_at", "alive", "offset")
_OF_USE: Final = ("verdict", "life", "group", "prepared_at", "run")
_KEPT_OF: Final = {
    "ops": ("group", "outcome", "cause", "prepared_at", "ended_at", "at", "partition", "offset"),
    "named": (
        "prepared_at", "until", "ended_at", "op_at", "offset", "topic", "slot", "total", "content", "key_hash",
        "own_headers", "partition",
    ),
    "halves": _OF_STATE,
    "parked": _OF_STATE,
    "messages": (
        "prepared_at", "at", "key_hash", "content", "own_headers", "topic", "partition", "offset", "slot", "total",
    ),
    "unreadable": ("at",),
    "verdict": _OF_USE,
    "reported": _OF_USE,
}  # fmt: skip
KINDS: Final = tuple(_KEPT_OF)[:6]
"""The kinds of records. The others are uses of ids with their verdicts."""


def rows_of(engine: Engine, frames: Mapping[str, Frame], run: int | None) -> Frame:
    """Return the rows of several kinds as one frame, with the run that has read them if it is given."""

    def column(kind: str, name: str) -> str:
        known = str(run) if name == "run" and run is not None else f'"{name}"' if name in _KEPT_OF[kind] else "null"
        return f'cast({known} as {_KEPT[name]}) as "{name}"'

    return union(
        engine,
        [
            engine.query(
                f"select '{kind}' as kind, id, {', '.join(column(kind, name) for name in _KEPT)} from $frame",  # noqa: S608
                frame=frame,
            )
            for kind, frame in frames.items()
        ],
    )


def of_kinds(engine: Engine, rows: Frame) -> dict[str, Frame]:
    """Return the records among such rows, by kind."""
    return {kind: where(engine, rows, f"kind = '{kind}'") for kind in KINDS}


def of_ops(engine: Engine, decoded: Frame) -> tuple[Frame, Frame]:
    """Return the outcomes, and every message that a commit names with its number, from decoded op records."""
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
            cast(case when messages is not null then size(messages) end as int) as total,
            {d.numbered("messages", "number", "one")}
        from $decoded
        where lower(kind) = '{COMMITTED}'
    ) exploded
    """  # noqa: S608
    return engine.query(ends, decoded=decoded), engine.query(named, decoded=decoded)


def events(engine: Engine, evidence: Evidence, limits: Limits) -> Frame:
    """Return the events of each use of an id, with its number (`life`), and whether the id was `used_again` later.

    A use begins if its first event is a horizon after everything before it. A UUIDv7 has one use. After
    a coordinator's clock was set back, the time between two uses looks shorter: for records of the lane less than a
    horizon is enough. For a half the whole horizon is needed, because it can be a late repeat, for which the
    coordinator writes a tombstone. Records that were written to op `later` begin a use, and belong to none that is
    judged. A message that belongs to a use by halfway's own records does not prolong it, because anyone can write a
    message: one with a date between two uses would join them.
    """
    made = lives_once(engine.dialect)
    # Both are used more than once.
    evidence = replace(
        evidence,
        # An id has one group as long as halfway keeps any record of it.
        halves=engine.keep(_last(engine, evidence.halves, limits, '"group"', by='id, "group"')),
        parked=engine.keep(_last(engine, evidence.parked, limits, 'max_by("group", "offset")', by="id")),
    )
    columns = ", ".join(f'"{name}"' for name in ("id", "source", "begin", "until", *_COLUMNS))
    alone = replace(evidence, messages=_alone(engine, evidence.messages, limits))
    once = engine.query(
        f"select {columns}, 0 as life, false as used_again from $events where source <> 'later'",  # noqa: S608
        events=_events_of(engine, alone, made, limits),
    )
    preceding = "partition by id order by begin range between unbounded preceding and 1 preceding"
    sql = f"""
    select {columns}, dense_rank() over (partition by id, source = 'later' order by since) - 1 as life,
        since < last_since as used_again
    from (
        select *, max(begins_at) over (partition by id, source = 'later' order by begin) as since,
            max(begins_at) over (partition by id) as last_since
        from (
            select *, case when until is not null and begin >= before
                + case when source in ('half', 'parked') then {limits.horizon_ms} else {limits.apart_ms} end
                then begin else 0 end as begins_at
            from (
                select *, max(case when source <> 'message' or begin >= before_of_own + {limits.apart_ms}
                        or before_of_own is null then until end) over ({preceding}) as before
                from (
                    select *, max(case when source <> 'message' then until end) over ({preceding}) as before_of_own
                    from $events
                ) own
            ) preceded
        ) started
    ) numbered
    """  # noqa: S608
    # A window then has a few rows, however many copies of a message there are.
    copies = replace(evidence, messages=_copies(engine, evidence, f"not {made}", limits))
    again = engine.query(sql, events=_events_of(engine, copies, f"not {made}", limits))
    again = engine.keep(where(engine, again, "source <> 'later'"))
    return union(engine, [once, again])


def _event(source: str, frame: str, begin: str, until: str, condition: str, **columns: str) -> str:
    """Return a select of the events in a frame, with null for every column that they do not have."""
    values = ", ".join(f'cast({columns.get(name, "null")} as {kind}) as "{name}"' for name, kind in _COLUMNS.items())
    return (
        f"select id, '{source}' as source, cast({begin} as bigint) as begin, cast({until} as bigint) as until, "  # noqa: S608
        f"{values} from {frame} where {condition}"
    )


_PLACE: Final = f'cast("partition" as bigint) * {PARTITIONS} + "offset"'


def place(d: Dialect, number: str) -> str:
    """Return the partition and the offset of a place."""
    offset = f"{number} % {PARTITIONS}"
    return d.struct(partition=f"cast(({number} - {offset}) / {PARTITIONS} as bigint)", offset=offset)


def _time(limits: Limits, name: str = '"at"') -> str:
    """Return a time, or the cut if it is in the future: a wrong date must not put off a verdict."""
    return f"case when {name} > {limits.latest} then {limits.cut} else {name} end"


def _last(engine: Engine, records: Frame, limits: Limits, group: str, *, by: str) -> Frame:
    """Return the state that the last records give."""
    at = _time(limits)
    return engine.query(
        f"""select id, {group} as "group", max_by(alive, "offset") as alive, max_by({at}, "offset") as "at",
            max_by(coalesce(prepared_at, {at}), "offset") as prepared_at
        from $records group by {by}""",  # noqa: S608
        records=records,
    )


def _alone(engine: Engine, messages: Frame, limits: Limits) -> Frame:
    """Return messages in the form of `_copies`, one row for each."""
    content, headers = number_of("content"), number_of("own_headers")
    prepared_at = _time(limits, "prepared_at")
    return engine.query(
        f"""select id, topic, slot, {prepared_at} as prepared_at, {prepared_at} as until, {_time(limits)} as "at",
            1 as found,
            {content} as got, {headers} as got_headers, total as got_total, "partition" as got_partition,
            {_PLACE} as first_place, {_PLACE} as last_place
        from $messages""",  # noqa: S608
        messages=messages,
    )


def _copies(engine: Engine, evidence: Evidence, condition: str, limits: Limits) -> Frame:
    """Return one row for the copies of a message whose dates are so close that they belong to one use of the id.

    Copies with the exact time of a prepare in op have a row of their own. So a forged copy that is dated close to it
    does not move them to another use.
    """
    together = ", ".join(
        f'{"min" if name in ("first_place", "prepared_at") else "max"}("{name}") as "{name}"'
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


_FOUND: Final = ("found", "got", "got_headers", "got_total", "got_partition", "first_place", "last_place")
"""What is known of copies of a message. What they contain (`got…`) counts if there is one; several are doubled."""


def _events_of(engine: Engine, evidence: Evidence, condition: str, limits: Limits) -> Frame:
    """Return all events of the ids that meet a condition, each with the time span that decides to which use it belongs.

    A tombstone, an unsettled record and one that cannot be read have no span: they belong to the use that is there at
    their time. An unsettled record can be a message, and by another clock its prepare can be later.
    """
    at = _time(limits)
    prepared_at = _time(limits, "prepared_at")
    alive = {"group": '"group"', "prepared_at": "prepared_at", "at": '"at"'}
    selects = [
        _event(
            "op", "$ops", prepared_at, _time(limits, "greatest(prepared_at, ended_at)"), condition, at=at,
            group='"group"', outcome="outcome", cause="cause", prepared_at="prepared_at", ended_at="ended_at",
            first_place="ended_at", last_place="ended_at",
        ),
        _event(
            "named", "$named", prepared_at, _time(limits, "until"), condition, prepared_at="prepared_at",
            ended_at="ended_at", at=_time(limits, "op_at"), topic="topic", slot="slot", wanted=number_of("content"),
            wanted_headers=number_of("own_headers"), wanted_key=number_of("key_hash"), wanted_total="total",
            wanted_partition='"partition"',
        ),
        _event(
            "message", "$messages", "prepared_at", "until", condition, prepared_at="prepared_at", at='"at"',
            topic="topic", slot="slot", **{name: name for name in _FOUND},
        ),
        _event("half", "$halves", prepared_at, prepared_at, f"alive and {condition}", **alive),
        _event("gone", "$halves", '"at"', "null", f"not alive and {condition}", at='"at"', group='"group"'),
        # A parked record that cannot be decoded has no time of its prepare.
        _event("parked", "$parked", prepared_at, prepared_at, f"alive and {condition}", **alive),
        _event("unparked", "$parked", '"at"', "null", f"not alive and {condition}", at='"at"'),
        # One that is dated in the future belongs to the newest use.
        _event(
            "unsettled", "$unsettled", f'least("at", {limits.latest}) + {limits.slack_ms}', "null", condition, at=at,
        ),
    ]  # fmt: skip
    names = ("ops", "named", "messages", "halves", "parked", "unsettled")
    frames = {name: getattr(evidence, name) for name in names}
    if evidence.unreadable is not None:
        selects.append(_event("unreadable", "$unreadable", '"at"', "null", condition, at=at))
        frames["unreadable"] = evidence.unreadable
    if evidence.later is not None:
        selects.append(_event("later", "$later", '"at"', '"at"', condition))
        frames["later"] = evidence.later
    return engine.query(" union all ".join(selects), **frames)
