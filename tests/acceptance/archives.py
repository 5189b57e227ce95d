"""Archives of small histories, written without a broker."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfway.domain.records import Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline.folders import Folder
from halfway.pipeline.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.sources import RECORD, archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PREFIX = "_halfway."
AT = 1_700_000_000_000
REAL = "orders"


class ListSource:
    """A source that holds its records itself."""

    prefix = PREFIX

    def __init__(self, spark: "SparkSession", records: Sequence[tuple[Any, ...]], *, at: int = AT + 60_000) -> None:
        """Take records with the columns RECORD, pinned at a time in ms; their topics have lost nothing."""
        self._frame = spark.createDataFrame(list(records), RECORD).persist()
        self._none = spark.createDataFrame([], RECORD)
        names = {PREFIX + kind for kind in ("op", "half", "parked", "groups")} | {record[2] for record in records}
        partitions = tuple(
            PartitionPin(partition=number, start=0, end=len(records), high=len(records))
            for number in sorted({record[3] for record in records})
        )
        self.pins = Pins(at=at, topics={name: TopicPin(topic=name, at=at, partitions=partitions) for name in names})

    def pin(self, topics: Sequence[str]) -> None:
        """Change nothing."""

    def settle(self, topic: str) -> None:
        """Change nothing."""

    def anew(self) -> "ListSource":
        return self

    def committed(self, topics: Sequence[str]) -> "DataFrame":
        return self._frame.where(self._frame["topic"].isin(list(topics)))

    def unsettled(self, topics: Sequence[str]) -> "DataFrame":
        return self._none


def write_archive(
    spark: "SparkSession",
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
    source = ListSource(spark, records)
    archive(source, list(source.pins.topics), Folder(spark, str(folder)))
