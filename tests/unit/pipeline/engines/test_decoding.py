"""Decoding in batches: every version; values that cannot be read have an error, and raise none."""

import copy
import json
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from pyspark.testing import assertDataFrameEqual

from halfway import schemas
from halfway.domain.records import MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka.records import codec
from halfway.kafka.records.avro import Registry
from halfway.pipeline.engines import decoding
from halfway.pipeline.jobs import reading
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
READ = decoding.reader("op", json.dumps(schemas.versions("op")))


def test_ops_are_decoded_and_what_is_damaged_is_told(spark: "SparkSession") -> None:
    """Good ones have their fields; garbage, nothing and cut values have their place and an error, and stop nothing."""
    good = codec.encode_op(OP)
    values = [good, b"\x00garbage", None, good[:-1], good + b"x"]
    records = spark.createDataFrame([(value, "op", 0, n) for n, value in enumerate(values)], RECORD)
    decoded = decoding.decode(records, "op", decoding.OP)
    fields = "kind", "id", "group", "half_offset", "cause", "prepared_at", "at", "checks", "messages.size"
    wanted = [("COMMITTED", ID, "shop", 3, "check", 1_000, 2_000, 2, [7])]
    columns = (
        "kind string, id string, `group` string, half_offset bigint, cause string, prepared_at bigint, at bigint, "
        "checks int, size array<bigint>"
    )
    assertDataFrameEqual(decoded.where("error is null").select(*fields), spark.createDataFrame(wanted, columns))
    told = {row["offset"]: row["error"] for row in decoding.quarantined(decoded).collect()}
    assert told.keys() == {1, 2, 3, 4}
    assert "single-object" in told[1]
    assert "1 bytes too many" in told[4]


def test_the_audit_trail_is_a_table_of_events_each_once(spark: "SparkSession") -> None:
    """An event that was written twice is one row, and what is no event says so."""
    good = codec.encode_audit(AUDIT_EVENT)
    values = [good, b"\x00garbage", good, None]
    records = spark.createDataFrame([(value, "audit", 0, n) for n, value in enumerate(values)], RECORD)
    events = reading.audit_trail(records)
    [event] = events.where("error is null").collect()
    assert (event["action"], event["actor"], event["key_id"], event["at"]) == (
        AUDIT_EVENT.action,
        AUDIT_EVENT.actor,
        AUDIT_EVENT.key_id,
        AUDIT_EVENT.at,
    )
    assert {row["offset"] for row in decoding.quarantined(events).collect()} == {1, 3}


def test_an_older_version_has_the_fields_that_it_was_written_with() -> None:
    """What was written before a field was added has not got it, which is a null in the table."""
    current = schemas.current("op")
    older = copy.deepcopy(current)
    older["fields"] = [field for field in older["fields"] if field["name"] not in ("remark", "commit_verdict")]
    read = decoding.reader("op", json.dumps([current, older]))
    fields = {**decoding.reader("op", json.dumps([current]))(codec.encode_op(OP))}
    written = Registry("op", (older,)).encode({name: fields[name] for name in fields if name in _names(older)})
    assert read(written) == {name: fields[name] for name in fields if name in _names(older)}


def _names(schema: dict[str, object]) -> set[str]:
    fields = schema["fields"]
    assert isinstance(fields, list)
    return {field["name"] for field in fields}


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_decoded_or_refused_and_nothing_else(data: bytes, headed: bool) -> None:
    """For any value the reader returns fields or raises an Exception, and does not hang."""
    try:
        fields = READ(codec.encode_op(OP)[:10] + data if headed else data)
    except Exception:  # noqa: BLE001  this is what is asked
        return
    assert fields["kind"]
