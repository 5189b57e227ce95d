"""The records of the internal topics as bytes."""

import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway import schemas
from halfway.kafka.records import codec
from halfway.kafka.records.codec import Registry, registry
from halfway.protocol.records import Group, Half, LimitOverrides, Message, MessageDigest, Op, OpKind, Origin, Parked
from halfway.protocol.transactions import Cause
from halfway.schemas.single_object import MARKER
from tests.support.records.samples import HALF, OP, RECORDS
from tests.support.structure.figures import ROOT

HERE = Path(__file__).parent
COMMITTED = json.loads((HERE / "records.json").read_text())
ENCODE: dict[str, Callable[[Any], bytes]] = {
    "half": codec.encode_half,
    "op": codec.encode_op,
    "parked": codec.encode_parked,
    "group": codec.encode_group,
    "key": codec.encode_key,
    "audit": codec.encode_audit,
    "owner": codec.encode_owner,
    "barrier": codec.encode_barrier,
    "layout": codec.encode_layout,
}
DECODE: dict[str, Callable[[bytes | None], object]] = {
    "half": codec.decode_half,
    "op": codec.decode_op,
    "parked": codec.decode_parked,
    "group": codec.decode_group,
    "key": codec.decode_key,
    "audit": codec.decode_audit,
    "owner": codec.decode_owner,
    "barrier": codec.decode_barrier,
    "layout": codec.decode_layout,
}

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=30)
BYTES = st.binary(max_size=300)
MESSAGES = st.builds(
    Message,
    topic=TEXT,
    key=st.none() | BYTES,
    value=st.none() | BYTES,
    headers=st.lists(st.tuples(TEXT, st.none() | BYTES), max_size=3).map(tuple),
    partition=st.none() | INT32,
)
HALVES = st.builds(
    Half,
    id=TEXT,
    group=TEXT,
    messages=st.lists(MESSAGES, max_size=3).map(tuple),
    prepared_at=INT64,
    since=INT64,
    fingerprint=BYTES,
    check_after_ms=st.none() | INT64,
    origin=st.sampled_from(Origin),
    checks=INT32,
    checked_at=st.none() | INT64,
    commit_verdict=st.booleans(),
    remark=st.none() | TEXT,
)
DIGESTS = st.builds(
    MessageDigest,
    topic=TEXT,
    key_hash=st.none() | BYTES,
    value_hash=st.none() | BYTES,
    size=INT64,
    headers_hash=st.none() | BYTES,
    partition=st.none() | INT32,
)
OPS = st.builds(
    Op,
    kind=st.sampled_from(OpKind),
    id=TEXT,
    group=TEXT,
    half_offset=INT64,
    cause=st.sampled_from(Cause),
    prepared_at=INT64,
    at=INT64,
    fingerprint=BYTES,
    checks=INT32,
    checked_at=st.none() | INT64,
    commit_verdict=st.booleans(),
    remark=st.none() | TEXT,
    messages=st.lists(DIGESTS, max_size=3).map(tuple),
)


OLDER = {
    "op": msgspec.structs.replace(
        OP, messages=tuple(msgspec.structs.replace(one, headers_hash=None, partition=None) for one in OP.messages)
    )
}
"""The same records in older schemas, which lack fields."""


def builtins(record: msgspec.Struct) -> Any:
    """Return a record as input for fastavro's writer."""
    fields: Any = msgspec.to_builtins(record, builtin_types=(bytes,))
    for message in fields.get("half", fields).get("messages", ()):
        if "headers" in message:
            message["headers"] = [{"name": name, "value": value} for name, value in message["headers"]]
    return fields


@given(half=HALVES)
def test_any_half_is_what_fastavro_writes(half: Half) -> None:
    """The quick encoder and fastavro agree byte for byte, and the half comes back."""
    data = codec.encode_half(half)
    assert data == registry("half").encode(builtins(half))
    assert codec.decode_half(data) == half


@given(op=OPS)
def test_any_op_is_what_fastavro_writes(op: Op) -> None:
    """The quick encoder and fastavro agree byte for byte, and the op comes back."""
    data = codec.encode_op(op)
    assert data == registry("op").encode(builtins(op))
    assert codec.decode_op(data) == op


@given(half=HALVES, reason=TEXT, parked_at=INT64, checks=INT32)
def test_any_parked_is_what_fastavro_writes(half: Half, reason: str, parked_at: int, checks: int) -> None:
    """The quick encoder and fastavro agree byte for byte, and the record comes back."""
    parked = Parked(half=half, reason=reason, parked_at=parked_at, checks=checks)
    data = codec.encode_parked(parked)
    assert data == registry("parked").encode(builtins(parked))
    assert codec.decode_parked(data) == parked


@pytest.mark.parametrize("kind", schemas.NAMES)
def test_committed_bytes_stay_readable(kind: str) -> None:
    """Records that were written once stay readable: a changed schema keeps its old version in `history/`."""
    for data in COMMITTED[kind]:
        assert DECODE[kind](bytes.fromhex(data)) in (RECORDS[kind], OLDER.get(kind))


@pytest.mark.parametrize("kind", schemas.NAMES)
def test_what_is_written_now_is_committed(kind: str) -> None:
    """The bytes of the current schema are among the committed ones, so that later releases must read them."""
    assert ENCODE[kind](RECORDS[kind]).hex() in COMMITTED[kind]


def test_a_record_of_an_older_schema_is_read() -> None:
    """A half that was written before the field `remark` existed has no remark."""
    older = json.loads((HERE / "half_without_remark.avsc").read_text())
    fields = {name: value for name, value in builtins(HALF).items() if name not in ("remark", "barrier")}
    written = Registry("half", (older,)).encode(fields)
    both = Registry("half", (schemas.current("half"), older))
    assert written[:10] != both.header
    read = both.decode(written)
    assert read == {**fields, "messages": list(fields["messages"]), "remark": None}


def test_an_older_version_in_history_is_among_the_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader returns the current schema first, then those of `history/` from new to old."""
    (tmp_path / "history").mkdir()
    (tmp_path / "op.avsc").write_text('{"version": "now"}')
    for number in (2, 10, 1):
        (tmp_path / "history" / f"op.v{number}.avsc").write_text(json.dumps({"version": number}))
    (tmp_path / "history" / "owner.v1.avsc").write_text("{}")
    monkeypatch.setattr(schemas, "files", lambda _name: tmp_path)
    schemas.text.cache_clear()
    try:
        assert [schema["version"] for schema in schemas.versions("op")] == ["now", 10, 2, 1]
    finally:
        schemas.text.cache_clear()


@pytest.mark.parametrize("kind", schemas.NAMES)
def test_each_schema_stands_alone_and_says_what_its_fields_are(kind: str) -> None:
    """A reader without halfway's code needs one file; every record and field has a doc."""
    schema = schemas.current(kind)
    fastavro.parse_schema(schema)

    def documented(part: Any) -> None:
        if isinstance(part, list):
            for choice in part:
                documented(choice)
        elif isinstance(part, dict) and part.get("type") == "record":
            assert part["doc"]
            for field in part["fields"]:
                assert field["doc"], field["name"]
                documented(field["type"])
        elif isinstance(part, dict) and part.get("type") == "array":
            documented(part["items"])

    documented(schema)


def test_the_half_inside_parked_is_the_half() -> None:
    """The two schemas of a half have the same fields."""
    inside = next(field for field in schemas.current("parked")["fields"] if field["name"] == "half")
    assert inside["type"]["fields"] == schemas.current("half")["fields"]


def test_times_are_timestamps_for_readers_of_the_schema() -> None:
    """A reader that knows logical types, such as Spark, sees times as times; the bytes are the same."""
    data = codec.encode_op(OP)
    schema = fastavro.parse_schema(schemas.current("op"))
    read = fastavro.schemaless_reader(BytesIO(data[10:]), schema, None)
    assert isinstance(read, dict)
    assert read["at"].timestamp() * 1000 == OP.at


@pytest.mark.parametrize("kind", schemas.NAMES)
def test_what_is_no_record_is_undecodable(kind: str) -> None:
    """No value, an empty one, text, JSON, a cut or longer record, a changed header: each error names the problem."""
    good = ENCODE[kind](RECORDS[kind])
    bad = {
        None: "no value",
        b"": "single-object",
        b"text": "single-object",
        b'{"id": "1"}': "single-object",
        MARKER: "single-object",
        good[:-1]: "damaged",
        good + b"\0": "bytes too many",
        good[:10]: "damaged",
        MARKER + bytes(8) + good[10:]: "unknown schema fingerprint 0000000000000000",
    }
    for data, reason in bad.items():
        with pytest.raises(codec.UndecodableError, match=reason):
            DECODE[kind](data)


@pytest.mark.parametrize("version", range(2), ids=["current", "former"])
def test_a_negative_index_of_an_enum_or_a_union_is_damaged(version: int) -> None:
    """One damaged byte does not turn an op into that of another outcome, which Python's index from the end would do."""
    plain = msgspec.structs.replace(OP, messages=(), remark=None)
    good = Registry("op", (schemas.versions("op")[version],)).encode(builtins(plain))
    assert codec.decode_op(good) == plain
    assert good.endswith(b"\0\0")
    for damaged in (good[:10] + codec.long(-1) + good[11:], good[:-2] + codec.long(-2) + good[-1:]):
        with pytest.raises(codec.UndecodableError, match="IndexError"):
            codec.decode_op(damaged)


@given(kind=st.sampled_from(schemas.NAMES), garbage=st.binary(max_size=200))
def test_garbage_is_undecodable_or_a_record(kind: str, garbage: bytes) -> None:
    """After a valid header, any bytes raise UndecodableError and nothing else."""
    try:
        record = DECODE[kind](registry(kind).header + garbage)
    except codec.UndecodableError:
        return
    assert type(record) is type(RECORDS[kind])


def test_another_kind_of_record_is_undecodable() -> None:
    """A barrier is not a half, in any topic."""
    with pytest.raises(codec.UndecodableError, match="unknown schema fingerprint"):
        codec.decode_half(codec.encode_barrier(codec.decode_barrier(bytes.fromhex(COMMITTED["barrier"][0]))))


@pytest.mark.parametrize("field, symbol", [("kind", "UNKNOWN"), ("cause", "unknown")])
def test_an_op_of_a_later_release_is_undecodable_not_misread(field: str, symbol: str) -> None:
    """The symbol for unknown values is never read as an outcome or a cause."""
    data = registry("op").encode({**builtins(OP), field: symbol})
    with pytest.raises(codec.UndecodableError, match="cannot use"):
        codec.decode_op(data)


def test_headers_tell_kind_group_and_state() -> None:
    """Tools need not decode records or tombstones."""
    headers = codec.record_headers(codec.KIND_HALF, "größe", "committed")
    assert headers == [("halfway-kind", b"half"), ("halfway-group", "größe".encode()), ("halfway-state", b"committed")]
    assert codec.kind_of(headers) == "half"
    assert codec.kind_of(None) is None
    assert codec.kind_of([("other", b"x")]) is None


def test_the_limits_of_a_group_are_in_a_header_that_earlier_releases_ignore() -> None:
    """The value stays as they know it. Unknown limits of a later release are ignored, unreadable ones reported."""
    plain = RECORDS["group"]
    assert isinstance(plain, Group)
    limits = LimitOverrides(pending=7, prepares_per_s=0.5, bytes_in_flight=9)
    limited = msgspec.structs.replace(plain, limits=limits, reject_prepares=True)
    value, headers = codec.encode_group(limited), codec.group_headers("orders", limited)
    assert value == codec.encode_group(plain)
    assert codec.decode_group(value) == plain
    assert codec.decode_group(value, headers) == limited
    assert codec.group_headers("orders", plain) == codec.record_headers(codec.KIND_GROUP, "orders", "registered")
    later = [(codec.HEADER_LIMITS, b'{"pending": 7, "checks_per_s": 1}')]
    assert codec.decode_group(value, later).limits == LimitOverrides(pending=7)
    for broken in (b'{"pending": 0}', b"{", b"\xff"):
        with pytest.raises(codec.UndecodableError, match="limits"):
            codec.decode_group(value, [(codec.HEADER_LIMITS, broken)])


FIRST = """
import sys
from halfway.kafka.records import codec
from tests.support.records.samples import RECORDS

def refuse(frame, event, _):
    assert event != "call" or "msgspec" not in frame.f_code.co_filename, (kind, frame.f_code.co_name)

for kind, record in RECORDS.items():
    data = getattr(codec, f"encode_{kind}")(record)
    sys.setprofile(refuse)
    getattr(codec, f"decode_{kind}")(data)
    sys.setprofile(None)
"""


def test_the_first_record_of_a_kind_may_be_decoded_on_several_threads() -> None:
    """Every class is complete before: msgspec would do it in Python, and threads could take turns in between."""
    subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, check=True)
