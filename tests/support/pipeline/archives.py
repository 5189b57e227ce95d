"""Archives of small histories, written without a broker and without Spark."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from halfway.kafka.records import codec
from halfway.pipeline.sources.duckdb import RECORD
from halfway.pipeline.sources.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.tables import STATE, VERDICTS
from halfway.protocol.records import Message, MessageDigest, Op, OpKind
from halfway.protocol.transactions import Cause

PREFIX = "_halfway."
AT = 1_700_000_000_000
REAL = "orders"
HISTORY: Mapping[str, Sequence[str]] = {
    "fine": [f"fine-{number}" for number in range(200)],
    "lost": ["gone-1", "gone-2"],
    "doubled": ["twice-1"],
}
"""What is audited in a local session and on a cluster; its rows must be the same."""


def write_records(folder: Path, records: Sequence[tuple[Any, ...]], *, at: int, emptied: Sequence[str] = ()) -> None:
    """Write records with the columns RECORD as an archive made at a time in ms.

    The topics in `emptied` have lost all their records, and the others none.
    """
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
    nothing_left = (PartitionPin(partition=0, start=1, end=1, high=1),)
    found = {**dict.fromkeys(names, partitions), **dict.fromkeys(emptied, nothing_left)}
    topics = {name: TopicPin(topic=name, at=at, partitions=parts) for name, parts in found.items()}
    pins = Pins(at=at, topics=topics)
    (folder / "archive.json").write_text(json.dumps({"prefix": PREFIX}))
    (folder / "offsets.json").write_text(pins.to_json())


def write_archive(
    folder: Path,
    *,
    fine: Sequence[str],
    lost: Sequence[str] = (),
    doubled: Sequence[str] = (),
    open_still: Sequence[str] = (),
    emptied: Sequence[str] = (),
) -> None:
    """Archive committed transactions of one message each, which `lost` ones lack and `doubled` ones have twice.

    Those of `open_still` have no outcome. `verdicts_of` gives what an audit must write of the others.
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
    write_records(folder, records, at=AT + 60_000, emptied=emptied)


def verdicts_of(*, fine: Sequence[str], lost: Sequence[str] = (), doubled: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of an audit of the archive that `write_archive` writes of the same ids, in the order of ids."""
    rows = []
    for offset, name in enumerate((*fine, *doubled, *lost)):
        verdict, problem, found = "committed_ok", "", 1
        if name in lost:
            verdict, problem, found = "lost", "missing", 0
        if name in doubled:
            verdict, problem, found = "doubled", "doubled", 2
        places = [{"partition": copy, "offset": offset} for copy in range(found)]
        evidence = [{"topic": REAL, "slot": 1, "problem": problem, "found": found, "places": places}]
        rows.append(
            {
                "id": name,
                "life": 0,
                "verdict": verdict,
                "anomalies": [verdict] if problem else [],
                "group": "shop",
                "cause": "producer",
                "topics": [REAL],
                "expected": 1,
                "found": found,
                "prepared_at": datetime.fromtimestamp((AT - 10) / 1000, UTC),
                "ended_at": datetime.fromtimestamp(AT / 1000, UTC),
                "evidence": evidence if problem else None,
            }
        )
    return sorted(rows, key=itemgetter("id"))


def verdicts_in(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that an audit has written, in the order of ids and their uses."""
    return sorted(rows_in(folder, VERDICTS), key=itemgetter("id", "life"))


def rows_in(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table that counts."""
    [state] = DeltaTable(folder / STATE).to_pyarrow_table().to_pylist()
    version = json.loads(state["versions"])[table]
    rows: list[dict[str, Any]] = DeltaTable(folder / table, version=version).to_pyarrow_table().to_pylist()
    return rows
