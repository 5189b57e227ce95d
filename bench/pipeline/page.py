"""`python -m bench.pipeline.page FOLDER`: the report of some thousand made-up transactions, to look at.

They are made of halfway's own records, judged by the audit and written down by the ledger as those of a broker are.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.domain.transaction import Cause
from halfway.kafka.records import codec
from tests.support.pipeline.archives import PREFIX, write_records

START: Final = 1_750_000_000_000 // 60_000 * 60_000
LASTS_MS: Final = 70 * 60_000
SEED: Final = 7
_CHECKED_AFTER_MS: Final = (6_000, 36_000, 96_000, 216_000)
_WRONG: Final = {
    ("checkout", 100): "lost",
    ("checkout", 101): "torn",
    ("checkout", 102): "doubled",
    ("billing", 50): "doubled",
    ("inventory", 70): "payload_changed",
    ("returns", 20): "leaked",
    ("notifications", 30): "contradicted",
}
_RESUMED: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Service:
    """A producer group: how many transactions, into which topics, how fast (median, ms), and how it fails."""

    name: str
    transactions: int
    topics: tuple[str, ...]
    median_ms: float
    rolled_back: float = 0.04
    forgotten: float = 0.01


SERVICES: Final = (
    Service(name="checkout", transactions=2600, topics=("orders", "payments"), median_ms=35),
    Service(name="inventory", transactions=1500, topics=("stock-movements",), median_ms=18),
    Service(name="billing", transactions=900, topics=("invoices", "ledger-entries"), median_ms=120, rolled_back=0.09),
    Service(name="notifications", transactions=1100, topics=("mails",), median_ms=9),
    Service(name="loyalty-points", transactions=420, topics=("points",), median_ms=60, forgotten=0.12),
    Service(name="returns", transactions=180, topics=("orders", "stock-movements"), median_ms=240, forgotten=0.06),
)


@dataclass
class Topics:
    """The records so far. Each gets the next offset of its partition."""

    records: list[tuple[Any, ...]] = field(default_factory=list)
    _next: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, topic: str, key: bytes | None, value: bytes | None, at: int, headers: codec.Headers) -> None:
        """Append a record."""
        partition = (sum(key or b"") % 3) if not topic.startswith(PREFIX) else 0
        offset = self._next[topic, partition]
        self._next[topic, partition] += 1
        pairs = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
        self.records.append((key, value, topic, partition, offset, datetime.fromtimestamp(at / 1000, UTC), pairs))


def made_up(rng: random.Random) -> list[tuple[Any, ...]]:
    """Return the records of all topics."""
    topics = Topics()
    for service in SERVICES:
        for number in range(service.transactions):
            _transaction(topics, service, number, rng)
    return topics.records


def _transaction(topics: Topics, service: Service, number: int, rng: random.Random) -> None:
    wrong = _WRONG.get((service.name, number))
    prepared_at = START + int(LASTS_MS * rng.random())
    name = f"{number % 8}-{UUID(int=rng.getrandbits(128), version=4)}"
    messages = tuple(
        Message(topic=topic, key=f"{service.name}-{number}".encode(), value=rng.randbytes(80))
        for topic in service.topics
    )
    half = Half(
        id=name,
        group=service.name,
        messages=messages,
        prepared_at=prepared_at,
        since=prepared_at,
        fingerprint=bytes(16),
    )
    of_half = codec.record_headers(codec.KIND_HALF, service.name, "prepared")
    topics.add(PREFIX + "half", name.encode(), codec.encode_half(half), prepared_at, of_half)
    latency, cause, checks = _ended(service, rng)
    ended_at = prepared_at + latency
    if wrong is None and cause is Cause.POLICY:
        parked = Parked(half=half, reason="max_checks", parked_at=ended_at, checks=checks)
        of_parked = codec.record_headers(codec.KIND_PARKED, service.name, "parked")
        topics.add(PREFIX + "parked", name.encode(), codec.encode_parked(parked), ended_at, of_parked)
        topics.add(PREFIX + "half", name.encode(), None, ended_at, of_half)
        return
    if wrong is None and ended_at > START + LASTS_MS:
        return
    rolled_back = wrong == "leaked" or (wrong is None and rng.random() < service.rolled_back)
    kinds = [OpKind.ROLLED_BACK] if rolled_back else [OpKind.COMMITTED]
    for kind in kinds + [OpKind.ROLLED_BACK] * (wrong == "contradicted"):
        op = Op(
            kind=kind,
            id=name,
            group=service.name,
            half_offset=0,
            cause=Cause.PRODUCER if cause is Cause.POLICY else cause,
            prepared_at=prepared_at,
            at=ended_at,
            checks=checks,
            messages=tuple(map(MessageDigest.of, messages)),
        )
        of_op = codec.record_headers(codec.KIND_OP, service.name, kind.value.lower())
        topics.add(PREFIX + "op", name.encode(), codec.encode_op(op), ended_at, of_op)
    topics.add(PREFIX + "half", name.encode(), None, ended_at, of_half)
    for slot, message in enumerate(messages, 1):
        copies = 2 if wrong == "doubled" else 0 if wrong == "lost" or (wrong, slot) == ("torn", 2) else 1
        value = b"something else" if (wrong, slot) == ("payload_changed", 1) else message.value
        headers: codec.Headers = [
            ("halfway-transaction-id", name.encode()),
            ("halfway-message", f"{slot}/{len(messages)}".encode()),
            ("halfway-prefix", PREFIX.encode()),
        ]
        for _ in range(0 if rolled_back and wrong != "leaked" else copies):
            topics.add(message.topic, message.key, value, ended_at, headers)


def _ended(service: Service, rng: random.Random) -> tuple[int, Cause, int]:
    """Return the duration of a transaction in ms, the cause of its end, and the number of checks."""
    if rng.random() >= service.forgotten:
        return max(1, int(rng.lognormvariate(0, 0.6) * service.median_ms)), Cause.PRODUCER, 0
    check = min(int(rng.expovariate(0.7)), len(_CHECKED_AFTER_MS))
    if check == len(_CHECKED_AFTER_MS):
        return 600_000, Cause.OPERATOR if rng.random() < _RESUMED else Cause.POLICY, len(_CHECKED_AFTER_MS)
    return _CHECKED_AFTER_MS[check] + rng.randrange(20, 900), Cause.CHECK, check + 1


def main(folder: Path) -> None:
    """Write the results of `ledger`, `audit` and `report` below a folder."""
    from halfway.pipeline.engines.engine import SparkEngine
    from halfway.pipeline.engines.spark_session import SparkOptions, prepared
    from halfway.pipeline.jobs import audit, ledger, report
    from halfway.pipeline.sources.spark import SnapshotSource
    from halfway.pipeline.tables.folders import Folder

    spark = prepared("halfway-page", SparkOptions(conf={"spark.sql.shuffle.partitions": "4"}), packages=False)()
    try:
        write_records(folder / "archive", made_up(random.Random(SEED)), at=START + LASTS_MS + 30_000)
        source = SnapshotSource(spark, Folder(spark, str(folder / "archive")))
        ledger_folder, audit_folder = Folder(spark, str(folder / "ledger")), Folder(spark, str(folder / "audit"))
        # As Spark's stream would name itself.
        ledger_folder.write(json.dumps({"id": "page"}), ledger.CHECKPOINT, "metadata")
        tables = ledger.Tables(ledger_folder, PREFIX, ledger.LedgerOptions(), lambda _: None)
        tables.write(source.committed([PREFIX + kind for kind in ledger.KINDS]), 0)
        audit.run(SparkEngine(spark), source, audit_folder, audit.AuditOptions())
        sources = report.Sources(ledger=ledger_folder, audit=audit_folder)
        print(report.run(spark, sources, Folder(spark, str(folder / "report"))))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
