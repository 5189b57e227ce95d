"""Decoding: every version; values that cannot be read have an error, the same on both engines, and raise none."""

import os
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from halfway import schemas
from halfway.kafka.records import codec
from halfway.kafka.records.codec import Registry
from halfway.pipeline.engines import decoding
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import reading
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.protocol.transactions import Cause
from halfway.schemas.single_object import HEADER_BYTES
from tests.support.pipeline.fixtures import assert_same_rows
from tests.support.records.samples import AUDIT_EVENT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ID = "7-01890a5d-ac96-774b-bcce-b302099a8057"
OP = Op(
    kind=OpKind.COMMITTED,
    id=ID,
    group="shop",
    half_offset=3,
    cause=Cause.CHECK,
    prepared_at=1_000,
    at=2_000,
    checks=2,
    messages=(MessageDigest(topic="orders", key_hash=None, value_hash=b"v" * 16, size=7),),
)
RECORD = "value binary, topic string, partition int, offset bigint"
PARKED = Parked(
    half=Half(
        id=ID,
        group="shop",
        messages=(Message(topic="orders", key=b"k", value=b"v" * 2_000, headers=(("h", b"1"),)),),
        prepared_at=1_000,
        since=1_000,
        fingerprint=b"f" * 16,
    ),
    reason="exhausted",
    parked_at=2_000,
    checks=15,
)
SEED = int(os.environ.get("SEED") or (20 if "CI" in os.environ else random.randrange(1 << 30)))


def test_ops_are_decoded_and_what_is_damaged_is_told(spark: "SparkSession") -> None:
    """Good ones have their fields; garbage, nothing and cut values have their place and an error, and stop nothing."""
    good = codec.encode_op(OP)
    values = [good, b"\x00garbage", None, good[:-1], good + b"x"]
    records = spark.createDataFrame([(value, "op", 0, n) for n, value in enumerate(values)], RECORD)
    decoded = decoding.decode(records, "op", decoding.OP)
    fields = "kind", "id", "group", "cause", "prepared_at", "at", "checks", "messages.size"
    wanted = [("COMMITTED", ID, "shop", "check", 1_000, 2_000, 2, [7])]
    columns = (
        "kind string, id string, `group` string, cause string, prepared_at bigint, at bigint, "
        "checks int, size array<bigint>"
    )
    assert_same_rows(decoded.where("error is null").select(*fields), spark.createDataFrame(wanted, columns))
    told = {row["offset"]: row["error"] for row in decoded.where("error is not null").collect()}
    assert told.keys() == {1, 2, 3, 4}
    assert "single-object" in told[1]
    assert told[4] == "a damaged record of the kind op"


def test_the_audit_trail_is_a_table_of_events_each_once(spark: "SparkSession") -> None:
    """An event that was written twice is one row, and what is no event says so."""
    good = codec.encode_audit(AUDIT_EVENT)
    values = [good, b"\x00garbage", good, None]
    records = spark.createDataFrame([(value, "audit", 0, n) for n, value in enumerate(values)], RECORD)
    events = reading.audit_trail(SparkEngine(spark), records)
    [event] = events.where("error is null").collect()
    assert (event["action"], event["actor"], event["key_id"], event["at"]) == (
        AUDIT_EVENT.action,
        AUDIT_EVENT.actor,
        AUDIT_EVENT.key_id,
        AUDIT_EVENT.at,
    )
    assert {row["offset"] for row in events.where("error is not null").collect()} == {1, 3}


def on_both(spark: "SparkSession", values: list[bytes | None], kind: str, fields: str) -> list[dict[str, Any]]:
    """Return the decoded rows, which must be the same on Spark and on DuckDB's side."""
    records = spark.createDataFrame([(value, kind, 0, n) for n, value in enumerate(values)], RECORD)
    on_spark = decoding.decode(records, kind, fields).drop("topic", "partition").toArrow().sort_by("offset").to_pylist()
    batch = pa.record_batch({"value": pa.array(values, pa.binary())})
    on_duckdb: list[dict[str, Any]] = decoding.decoded(batch, kind, fields).to_pylist()
    for offset, (one, other) in enumerate(zip(on_spark, on_duckdb, strict=True)):
        assert one == {**other, "offset": offset}, f"seed {SEED}: {values[offset]!r}"
    return on_duckdb


def long_form(number: int) -> bytes:
    """Return a number as Avro writes it."""
    coded, out = (number << 1) ^ (number >> 63), bytearray()
    while coded > 127:
        out.append(coded & 127 | 128)
        coded >>= 7
    return bytes([*out, coded])


def test_both_engines_read_older_and_newer_versions(spark: "SparkSession") -> None:
    """A field that the writer did not have is null, one that the newest schema has is read."""
    current, former = schemas.versions("op")
    record = Registry("op", (current,)).decode(codec.encode_op(OP))
    [digest] = record["messages"]
    added = {"headers_hash": b"h" * 16, "partition": 7}
    written: list[bytes | None] = [
        Registry("op", (former,)).encode({**record, "messages": [{k: digest[k] for k in digest if k not in added}]}),
        Registry("op", (current,)).encode({**record, "messages": [{**digest, **added}]}),
    ]
    older, later = on_both(spark, written, "op", decoding.OP)
    assert (older["error"], later["error"]) == (None, None)
    assert older["messages"] == [{**digest, "headers_hash": None, "partition": None}]
    assert later["messages"] == [{**digest, **added}]
    assert {**older, "messages": 0} == {**later, "messages": 0}


def test_a_value_that_would_make_the_decoder_allocate_gigabytes_is_damaged(spark: "SparkSession") -> None:
    """Whatever length it claims for a text, for bytes or for an array."""
    good = codec.encode_op(OP)
    head, id_at = good[:HEADER_BYTES], good.index(ID.encode())
    claimed = long_form((1 << 31) - 9)
    digest = good.index(b"v" * 16)
    values = [
        head + good[HEADER_BYTES : id_at - 1] + claimed + good[id_at:],
        good[: digest - 1] + claimed + good[digest:],
        good.replace(long_form(1) + long_form(6) + b"orders", claimed + long_form(6) + b"orders"),
    ]
    assert good not in values
    rows = on_both(spark, [*values], "op", decoding.OP)
    assert {row["error"] for row in rows} == {"a damaged record of the kind op"}


def test_a_negative_index_of_an_enum_or_a_union_is_damaged(spark: "SparkSession") -> None:
    """Python would take it as one from the end: another outcome, or the same type as without the damage."""
    good = codec.encode_op(OP)
    hashed = good.index(b"v" * 16) - 2
    values = [good[:at] + long_form(-1) + good[at + 1 :] for at in (HEADER_BYTES, hashed)]
    rows = on_both(spark, [good, *values], "op", decoding.OP)
    assert [row["error"] for row in rows] == [None, *["a damaged record of the kind op"] * 2]


@pytest.mark.parametrize(
    "good, kind, fields",
    [
        (codec.encode_op(OP), "op", decoding.OP),
        (codec.encode_parked(PARKED), "parked", decoding.PARKED),
        (codec.encode_audit(AUDIT_EVENT), "audit", decoding.AUDIT),
    ],
    ids=["op", "parked", "audit"],
)
def test_both_engines_read_damaged_values_in_the_same_way(
    good: bytes, kind: str, fields: str, spark: "SparkSession"
) -> None:
    """Cut, with bytes changed, put in and taken out: each is read to the same fields, or damaged for both."""
    rng = random.Random(SEED)
    values: list[bytes | None] = [None, b"", good, good[:HEADER_BYTES], good + b"\x00", b"\xff" * 40]
    for _ in range(600):
        value, at = bytearray(good), rng.randrange(len(good))
        match rng.randrange(4):
            case 0:
                del value[at:]
            case 1:
                value[at] = rng.randrange(256)
            case 2:
                value[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                del value[at : at + rng.randrange(1, 9)]
        values.append(bytes(value))
    rows = on_both(spark, values, kind, fields)
    assert rows[2]["error"] is None
    assert len({row["error"] for row in rows}) >= 4
