"""Archives of small histories, written without a broker and without Spark."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from halfway.domain.records import Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline.pins import PartitionPin, Pins, TopicPin

PREFIX = "_halfway."
AT = 1_700_000_000_000
REAL = "orders"
RECORD = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


def write_records(folder: Path, records: Sequence[tuple[Any, ...]], *, at: int) -> None:
    """Write records with the columns RECORD as an archive made at a time in ms; its topics have lost nothing."""
    names = {PREFIX + kind for kind in ("op", "half", "parked", "groups")} | {record[2] for record in records}
    partitions = tuple(
        PartitionPin(partition=number, start=0, end=len(records), high=len(records))
        for number in sorted({record[3] for record in records})
    )
    for name in {record[2] for record in records}:
        rows = [dict(zip(RECORD.names, record, strict=True)) for record in records if record[2] == name]
        for row in rows:
            row["headers"] = [{"key": key, "value": value} for key, value in row["headers"]]
        there = folder / "committed" / f"topic={name}"
        there.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, RECORD).drop_columns("topic"), there / "part-0.parquet")
    pins = Pins(at=at, topics={name: TopicPin(topic=name, at=at, partitions=partitions) for name in names})
    (folder / "archive.json").write_text(json.dumps({"prefix": PREFIX}))
    (folder / "offsets.json").write_text(pins.to_json())


def write_archive(
    folder: Path,
    *,
    fine: Sequence[str],
    lost: Sequence[str] = (),
    doubled: Sequence[str] = (),
    open_still: Sequence[str] = (),
) -> None:
    """Archive committed transactions of one message each: those of `lost` stand nowhere, those of `doubled` twice.

    Those of `open_still` have no outcome.
    """
    moment = datetime.fromtimestamp(AT / 1000, UTC)
    message = Message(topic=REAL, key=b"k", value=b"v")
    records: list[tuple[Any, ...]] = []
    for offset, name in enumerate((*fine, *doubled, *lost)):
        op = Op(
            kind=OpKind.COMMITTED,
            id=name,
            group="shop",
            half_offset=0,
            cause=Cause.PRODUCER,
            prepared_at=AT - 10,
            at=AT,
            messages=(MessageDigest.of(message),),
        )
        of_op = codec.record_headers(codec.KIND_OP, "shop", "committed")
        records.append((name.encode(), codec.encode_op(op), PREFIX + "op", 0, offset, moment, of_op))
        of_message = [("halfway-transaction-id", name.encode()), ("halfway-message", b"1/1")]
        copies = 0 if name in lost else 2 if name in doubled else 1
        records += [(message.key, message.value, REAL, copy, offset, moment, of_message) for copy in range(copies)]
    of_half = codec.record_headers(codec.KIND_HALF, "shop", "prepared")
    records += [(name.encode(), b"", PREFIX + "half", 0, n, moment, of_half) for n, name in enumerate(open_still)]
    write_records(folder, records, at=AT + 60_000)
