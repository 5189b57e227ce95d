"""What a record's key, headers and timestamp say, without decoding its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.pipeline.sources.pinned import Rows

if TYPE_CHECKING:
    from halfway.pipeline.engines.dialect import Dialect, Frame
    from halfway.pipeline.engines.engine import Engine

COMMITTED: Final = "committed"
ROLLED_BACK: Final = "rolled_back"
FINAL: Final = (COMMITTED, ROLLED_BACK)
"""The values of `halfway-state` on an op that is an outcome."""
LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999. halfway writes no later time, and a horizon can be added to it without an overflow."""
UNREADABLE: Final = "halfway-unreadable"
"""The only header of a record whose headers the client cannot read."""
_TRANSACTION: Final = "halfway-transaction-id"
_ID: Final = "[A-Za-z0-9._~-]{1,128}"
_SHARD: Final = "(0|[1-9][0-9]{0,4})-"
_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_PLACE: Final = "[1-9][0-9]{0,8}/[1-9][0-9]{0,8}"
_AT: Final = 'greatest(unix_millis("timestamp"), 0)'
"""The timestamp of a record in ms. Kafka takes -1 for none, which is 0 here, on every engine."""
_MILLIS: Final = "[0-9]{1,15}"
"""Other forms (1e3, 0x10, 1_000, with spaces) are numbers to one engine only."""


def lives_once(dialect: Dialect, text: str = "id") -> str:
    """Return whether an id is never used twice: a UUIDv7, which earlier releases put behind a shard."""
    return dialect.matches(text, f"({_SHARD})?{_UUID}")


def shards_of(engine: Engine, ids: Frame, shards: int) -> Frame:
    """Return `shard_id` and `shard` of ids: one that an earlier release made names it, any other is hashed as a key.

    The hash is Kafka's murmur2, as in `halfway.protocol.ids.partition_for_key`. An id is ASCII.
    """
    d, mask, factor = engine.dialect, 0xFFFFFFFF, 0x5BD1E995

    def times(number: str) -> str:
        return f"(({number}) * {factor} & {mask})"

    def little_endian(word: str, length: int) -> str:
        digits = (f"substr(digits, cast({word} * 8 + {2 * byte + 1} as int), 2)" for byte in reversed(range(length)))
        return _number_of_hex(f"concat({', '.join(digits)})")

    word = times(little_endian("number", 4))
    # One word of four bytes after the other, then up to three bytes that are left.
    mixed = d.folded(
        "words",
        d.xor(f"{0x9747B28C}", "cast(length(id) as bigint)"),
        d.xor(times("so_far"), times(d.xor(word, f"shiftright({word}, 24)"))),
    )
    whole = f"case when length(id) % 4 = 0 then mixed else {times(d.xor('mixed', little_endian('words', 3)))} end"
    sql = f"""
    select id as shard_id, case when {d.matches("id", _SHARD + _UUID)} then try_cast(split_part(id, '-', 1) as bigint)
        else ({d.xor("last", "shiftright(last, 15)")} & {0x7FFFFFFF}) % {shards} end as shard
    from (
        select id, {times(d.xor("whole", "shiftright(whole, 13)"))} as last from (
            select id, {whole} as whole from (
                select id, digits, words, {mixed} as mixed from (
                    select id, hex(id) as digits, cast(floor(length(id) / 4) as bigint) as words from $ids
                ) one
            ) two
        ) three
    ) four
    """  # noqa: S608
    return engine.query(sql, ids=ids)


def internal(d: Dialect, kind: str, *, columns: str = "*", where: str = "true") -> Rows:
    """Return rows of half, op or parked with id, state, group, time (`at`, ms) and whether they are `alive`.

    `kind` is SQL for the kind that the records of the topic must have. Barriers are left out. A record that halfway
    cannot have written has a `fault`, which is null for all others. `prepared_at` of a half is when its transaction was
    prepared: `at` is later if it was re-anchored or resumed. `columns` and `where` select among the rows.
    """
    sql = f"""
    select {columns} from (select *, case
        when kind is null then 'no header halfway-kind'
        when kind <> {kind} then concat('a record of the kind ', substr(kind, 1, 40))
        when id is null then 'no key'
        when not {d.matches("id", _ID)} then 'the key is no transaction id'
        when state is null or "group" is null then 'no header halfway-state or halfway-group'
        end as fault
    from (
        select {d.text("key")} as id, {d.header("halfway-kind")} as kind, {d.header("halfway-state")} as state,
            {d.header("halfway-group")} as "group", {_AT} as "at",
            {_prepared_at(d, d.text("key"))} as prepared_at, "value" is not null as alive, "value", topic, "partition",
            "offset"
        from $records
    ) fields
    where coalesce(kind not in ('barrier', 'layout'), true)) judged
    where {where}
    """  # noqa: S608 - it contains no input
    return Rows(sql=sql)


IS_FINAL: Final = "state in (" + ", ".join(f"'{state}'" for state in FINAL) + ")"


def outcomes(engine: Engine, ops: Frame) -> Frame:
    """Return the op records that are outcomes, without faulty ones."""
    return engine.query(f"select * from $ops where fault is null and {IS_FINAL}", ops=ops)  # noqa: S608


def messages(d: Dialect, prefix: str) -> Rows:
    """Return rows of the real messages of a deployment: which transaction, which of its messages, which content.

    Messages of another deployment name its prefix. `slot` and `total` are i and n of `halfway-message: i/n`, null if
    the header is missing or wrong. `content` represents key and value, `own_headers` the headers that the producer
    chose. A record whose headers cannot be read has a `fault` and no id.
    """
    key, value, place = _sha256('"key"'), _sha256('"value"'), d.header("halfway-message")
    sql = f"""
    select id, prepared_at, "at", key_hash, {content("key_hash", "value_hash")} as content, own_headers, topic,
        "partition", "offset", try_cast(split_part(place, '/', 1) as int) as slot,
        try_cast(split_part(place, '/', 2) as int) as total,
        case when id is null then 'the name of a header is not UTF-8' end as fault
    from (
        select {d.header(_TRANSACTION)} as id,
            case when {d.matches(place, _PLACE)} then {place} end as place,
            coalesce({_prepared_at(d, d.header(_TRANSACTION))}, {_AT}) as prepared_at,
            {_AT} as "at", {key} as key_hash, {value} as value_hash,
            substr({_sha256(d.own_headers())}, 1, 16) as own_headers, topic, "partition", "offset",
            case when {d.header(_TRANSACTION)} is null
                then {d.any("headers", f"one.key = '{UNREADABLE}'")} else false end as unreadable
        from $records
        where coalesce({d.header("halfway-prefix")} = '{prefix}', true)
    ) fields
    where id is not null or unreadable
    """  # noqa: S608 - a prefix has no quotes
    return Rows(sql=sql, headers=(_TRANSACTION, UNREADABLE))


def keys(d: Dialect) -> Rows:
    """Return rows of the keys of real topics: which of them halfway has written, and when."""
    sql = f"""
    select topic, "partition", "offset", {_sha256('"key"')} as key_hash, {_AT} as "at",
        {d.header(_TRANSACTION)} is not null as mine
    from $records
    where "key" is not null
    """  # noqa: S608
    return Rows(sql=sql)


def latest_of_keys(engine: Engine, keys: Frame) -> Frame:
    """Return for each topic and key (as `key_hash`) the time of its last record, null if that is not halfway's."""
    sql = """
    select topic, key_hash, case when count("at") = count(*) then max("at") end as last_at
    from (
        select topic, "partition", key_hash, case when max("offset") = max("offset") filter (where mine)
                then max_by("at", "offset") filter (where mine) end as "at"
        from $keys
        group by topic, "partition", key_hash
    ) last
    group by topic, key_hash
    """
    return engine.query(sql, keys=keys)


def content(key_hash: str, value_hash: str) -> str:
    """Return a text that represents the hashes (hex, null for no key or no value) of a message."""
    absent = "-" * 16
    return f"concat(coalesce(substr({key_hash}, 1, 16), '{absent}'), coalesce(substr({value_hash}, 1, 16), '{absent}'))"


def made_at(d: Dialect, of_id: str = "id") -> str:
    """Return the time in ms that an id with a UUIDv7 contains, null for any other id."""
    digits = f"concat(substr(right({of_id}, 36), 1, 8), substr(right({of_id}, 36), 10, 4))"
    return f"case when {lives_once(d, of_id)} then {_number_of_hex(digits)} end"


def _sha256(binary: str) -> str:
    """Return the first 32 hexadecimal digits of a hash, null for null."""
    return f"substr(sha2({binary}, 256), 1, 32)"


def _number_of_hex(digits: str) -> str:
    return f"try_cast(conv({digits}, 16, 10) as bigint)"


def _prepared_at(d: Dialect, of_id: str) -> str:
    """Return the time of the prepare by a header or by the id, null if neither has a possible one."""
    header = d.header("halfway-prepared-at")
    millis = f"try_cast(case when {d.matches(header, _MILLIS)} then {header} end as bigint)"
    return f"coalesce(case when {millis} <= {LATEST_MS} then {millis} end, {made_at(d, of_id)})"
