"""Reading halfway's own topics: which are there, their records, decoded if needed, and the faults in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from halfway.pipeline.engines import decoding
from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import Engine, union
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import Source
from halfway.schemas import LAYOUT_KEY

_PLACE: Final = 'topic, "partition", "offset"'
_LARGEST: Final = 1 << 40
"""More bytes than any message has."""


def require(source: Source, kinds: Sequence[str]) -> None:
    """Refuse to go on without one of halfway's own topics: an audit of nothing would find nothing wrong."""
    missing = [source.prefix + kind for kind in kinds if source.prefix + kind not in source.pins.topics]
    if missing:
        raise PipelineError(
            f"there is no topic {', '.join(missing)}: is HALFWAY_KAFKA_PREFIX the coordinator's, and has it ever run?"
        )


def require_given(source: Source, topics: Sequence[str]) -> None:
    """Raise PipelineError if a topic that the command line names does not exist."""
    if missing := [name for name in topics if name not in source.pins.topics]:
        raise PipelineError(f"there is no topic {', '.join(missing)}, which --topic names")


def decoded_outcomes(engine: Engine, ops: Frame) -> Frame:
    """Return the decoded outcomes among op records.

    An outcome whose value has another id, no outcome, or an impossible time or size has an `error`, like one that
    cannot be decoded.
    """
    ended = engine.query(
        f'select id as "key", "at" as written_at, "value", {_PLACE} from $ops',  # noqa: S608
        ops=headers.outcomes(engine, ops),
    )
    final = ", ".join(f"'{state}'" for state in headers.FINAL)
    sql = f"""
    select "key", written_at, {_PLACE}, kind, id, "group", cause, prepared_at, "at", checks, messages, case
            when error is not null then error
            when id <> "key" then 'the value has another id than the key'
            when lower(kind) not in ({final}) then concat('the header has an outcome, the value is ', kind)
            when prepared_at not between 0 and {headers.LATEST_MS} or "at" not between 0 and {headers.LATEST_MS}
                then 'an impossible time'
            when {engine.dialect.any("messages", f"one.size not between 0 and {_LARGEST}")} then 'an impossible size'
            end as error
    from $decoded
    """  # noqa: S608
    return engine.query(sql, decoded=engine.decode(ended, "op", decoding.OP))


def decoded_parked(engine: Engine, parked: Frame) -> Frame:
    """Return the records of parked with `prepared_at` and `reason`, and tombstones. Damaged ones have an `error`."""
    alive = engine.query(
        f"""select id as parked_id, "at", "group" as parked_group, "value", {_PLACE} from $parked where alive""",  # noqa: S608
        parked=parked,
    )
    sql = f"""
    select parked_id as id, "at", parked_group as "group", true as alive, {_PLACE},
        case when half.prepared_at between 0 and {headers.LATEST_MS} then half.prepared_at end as prepared_at, reason,
        error
    from $decoded
    union all
    select id, "at", "group", false, {_PLACE}, cast(null as bigint), cast(null as string), cast(null as string)
    from $parked where not alive
    """  # noqa: S608
    return engine.query(sql, decoded=engine.decode(alive, "parked", decoding.PARKED), parked=parked)


def unusable(engine: Engine, faulty: Iterable[Frame], damaged: Iterable[Frame]) -> Frame:
    """Return where the records are that have a fault, or were damaged when they were decoded, and the `error`."""
    frames = [*((frame, "fault") for frame in faulty), *((frame, "error") for frame in damaged)]
    return union(
        engine,
        [
            engine.query(f"select {_PLACE}, {wrong} as error from $frame where {wrong} is not null", frame=frame)  # noqa: S608
            for frame, wrong in frames
        ],
    )


def groups(engine: Engine, source: Source) -> Frame:
    """Return the registered groups with their topics and policy. Damaged ones have an `error`."""
    present = engine.query(
        f"""select "value", {_PLACE} from (
            select *, row_number() over (partition by "key" order by "offset" desc) as newest from $read
        ) last where newest = 1 and "value" is not null""",  # noqa: S608
        read=source.committed([source.prefix + "groups"]),
    )
    return engine.decode(present, "group", decoding.GROUP)


def created_at(engine: Engine, source: Source) -> int:
    """Return when the topics were created, in ms; 0 if it is not known."""
    owners = source.committed([source.prefix + "owners"])
    layouts = engine.query(
        f"""select "value", {_PLACE} from $owners where {engine.dialect.text('"key"')} = '{LAYOUT_KEY}'""",  # noqa: S608
        owners=owners,
    )
    found = engine.rows(engine.decode(layouts, "layout", decoding.LAYOUT))
    times = [row["created_at"] for row in found if row["error"] is None]
    return min((time for time in times if 0 <= time <= headers.LATEST_MS), default=0)


def audit_trail(engine: Engine, records: Frame) -> Frame:
    """Return the events among records of the topic `audit`, each once. A record that is no event has an `error`."""
    values = engine.query(f'select "value", {_PLACE} from $records', records=records)  # noqa: S608
    return engine.query(
        f"""select * from (select *, row_number() over (
                partition by coalesce(id, concat_ws('-', topic, "partition", "offset")) order by {_PLACE}
            ) as copy from $decoded) each_once where copy = 1""",  # noqa: S608
        decoded=engine.decode(values, "audit", decoding.AUDIT),
    )


def real_topics(
    engine: Engine, outcomes: Frame | None, registered: Frame, prefix: str, given: Sequence[str]
) -> list[str]:
    """Return the real topics that outcomes or groups name, and those of the command line."""
    d = engine.dialect
    of_groups, of_ops = d.numbered("topics", "n", "topic"), d.numbered("messages", "n", "one")
    named = [engine.query(f"select {of_groups} from $groups", groups=registered)]  # noqa: S608
    if outcomes is not None:
        named.append(engine.query(f"select n, one.topic from (select {of_ops} from $ops) each", ops=outcomes))  # noqa: S608
    rows = engine.rows(engine.query("select distinct topic from $named", named=union(engine, named)))
    return sorted(name for name in {row["topic"] for row in rows}.union(given) if not name.startswith(prefix))
