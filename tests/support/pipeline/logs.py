"""Logs in memory: what the topics hold, read by an audit as of any time, and random ones whose verdicts are known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from halfway.domain.ids import server_id
from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.domain.transaction import Cause
from halfway.kafka.records import codec
from halfway.pipeline.engines import SparkEngine
from halfway.pipeline.pins import PartitionPin, Pins, TopicPin
from halfway.pipeline.quick import DuckEngine
from halfway.pipeline.quick_sources import RECORD
from halfway.pipeline.sources import nothing

PREFIX = "_halfway."
START = 1_700_000_000_000
HORIZON = 900_000
SLACK = 5_000
REAL = ("orders", "mails")
KINDS = ("half", "op", "parked", "groups", "owners")
Headers = Sequence[tuple[str, str | bytes | None]]


@dataclass
class Written:
    """A record, when it was written, and when by the clock of its writer."""

    topic: str
    key: bytes | None
    value: bytes | None
    at: int
    told_at: int
    headers: Headers
    offset: int = -1
    gone: bool = False
    aborted: bool = False
    """It stands in a Kafka transaction that was aborted."""


@dataclass
class Log:
    """All topics, one partition each, in the order of time."""

    records: list[Written] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    compacted: frozenset[str] = frozenset()
    kept_ms: int | None = None
    """For how long every topic keeps a record, None for ever."""
    ahead: int = 0
    """By how much the clock of whoever writes is wrong."""
    missing: frozenset[str] = frozenset()
    """Topics that do not exist."""
    made: dict[str, int] = field(default_factory=dict)
    """How often topics were made again."""
    aborting: bool = False
    """What is written stands in a Kafka transaction that will be aborted."""

    def write(
        self, topic: str, key: bytes | None, value: bytes | None, at: int, headers: Headers, *, prepared_at: int = 0
    ) -> None:
        """`prepared_at`: of a record of halfway's own topics, which is never dated before it."""
        told_at = max(at + self.ahead, prepared_at)
        self.records.append(Written(topic, key, value, at, told_at, headers, aborted=self.aborting))

    def settle(self) -> None:
        """Give every record its offset."""
        self.records.sort(key=lambda record: record.at)
        ends: dict[str, int] = {}
        for record in self.records:
            record.offset = ends.get(record.topic, 0)
            ends[record.topic] = record.offset + 1

    def trim(self, topic: str, before: int) -> None:
        """Remove what stands before an offset."""
        self.starts[topic] = max(before, self.starts.get(topic, 0))

    def make_again(self, topic: str) -> None:
        """Delete a topic, and make one of its name."""
        self.records = [record for record in self.records if record.topic != topic]
        self.made[topic] = self.made.get(topic, 0) + 1

    def compact(self, topic: str, until: int) -> None:
        """Keep, of what is older than a time, the last record of each key, and no tombstones."""
        there = [record for record in self.records if record.topic == topic and record.at < until]
        last = {record.key: record for record in there}
        for record in there:
            record.gone |= record is not last[record.key] or record.value is None


class LogSource:
    """A log as of a time."""

    def __init__(
        self,
        engine: DuckEngine | SparkEngine,
        log: Log,
        at: int,
        *,
        open_since: int | None = None,
        prefix: str = PREFIX,
    ) -> None:
        """`open_since`: what was written since stands in Kafka transactions that are not finished."""
        self._engine = engine
        self._log = log
        self._at = at
        self._committed_until = at if open_since is None else open_since
        self._begun = Pins(at=0, topics={})
        self._again = False
        self.pins = Pins(at=at, topics={})
        self.prefix = prefix
        self.when_settled: Callable[[], None] = lambda: None

    def pin(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if self._again or topic in self.pins.topics or topic in self._log.missing:
                continue
            there = [record for record in self._log.records if record.topic == topic and record.at <= self._at]
            end = sum(record.at <= self._committed_until for record in there)
            start = self._log.starts.get(topic, 0)
            first = next((record.told_at for record in there if record.offset >= start), None)
            one = PartitionPin(partition=0, start=min(start, end), end=end, high=len(there), first_at=first)
            pin = TopicPin(
                topic=topic, at=self._at, partitions=(one,), compacted=topic in self._log.compacted,
                made=f"{self._log.made.get(topic, 0)}", kept_ms=self._log.kept_ms,
            )  # fmt: skip
            self.pins = replace(self.pins, topics={**self.pins.topics, topic: self._begun.followed_by(pin)})

    def extend_unsettled(self, topic: str) -> None:
        self.when_settled()

    def continue_from(self, pins: Pins) -> None:
        self._begun = pins.without(PREFIX + "groups", PREFIX + "owners")

    def cover(self, pins: Pins) -> None:
        now = self.reopened()
        now.pin(list(pins.topics))
        self.pins = pins.again(now.pins)
        self._again = True

    def reopened(self) -> "LogSource":
        now = max((record.at for record in self._log.records), default=self._at)
        return LogSource(self._engine, self._log, max(now, self._at))

    def committed(self, topics: Sequence[str]) -> Any:
        return self._read({name: (pin.start, pin.end) for name, pin in self._pinned(topics)})

    def unsettled(self, topics: Sequence[str]) -> Any:
        return self._read({name: (pin.end, pin.high) for name, pin in self._pinned(topics)}, aborted=True)

    def later(self, topics: Sequence[str], now: Pins) -> Any:
        return self._read({name: parts[0] for name, parts in self.pins.behind(topics, now).items()})

    def _pinned(self, topics: Sequence[str]) -> list[tuple[str, PartitionPin]]:
        return [(name, self.pins.topics[name].partitions[0]) for name in topics if name in self.pins.topics]

    def _read(self, ranges: dict[str, tuple[int, int]], *, aborted: bool = False) -> Any:
        rows = [
            {
                "key": record.key,
                "value": record.value,
                "topic": record.topic,
                "partition": 0,
                "offset": record.offset,
                "timestamp": datetime.fromtimestamp(record.told_at / 1000, UTC),
                "headers": [
                    {"key": name, "value": value.encode() if isinstance(value, str) else value}
                    for name, value in record.headers
                ],
            }
            for record in self._log.records
            if not record.gone
            and (aborted or not record.aborted)
            and record.topic in ranges
            and record.offset >= self._log.starts.get(record.topic, 0)
            and ranges[record.topic][0] <= record.offset < ranges[record.topic][1]
        ]
        table = pa.Table.from_pylist(rows, RECORD)
        if isinstance(self._engine, DuckEngine):
            return self._engine.take(table)
        return nothing(self._engine.spark) if not rows else self._engine.spark.createDataFrame(table)


@dataclass
class Writer:
    """Writes what the lane writes."""

    log: Log
    group: str = "g"

    def lay_out(self, created_at: int) -> None:
        """Tell when the topics were created."""
        layout = codec.encode_layout(codec.Layout(shards=8, created_at=created_at))
        headers = codec.record_headers(codec.KIND_LAYOUT, "", "created")
        self.log.write(PREFIX + "owners", codec.LAYOUT_KEY, layout, created_at, headers)

    def half(self, name: str, messages: Sequence[Message], at: int, *, prepared_at: int | None = None) -> None:
        now = at + self.log.ahead
        prepared = now if prepared_at is None else prepared_at
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared, since=now, fingerprint=b"f" * 16
        )
        self.log.write(
            PREFIX + "half", name.encode(), codec.encode_half(half), at, codec.half_headers(half, "prepared")
        )

    def write_tombstone(self, kind: str, name: str, at: int, state: str, prepared_at: int = 0) -> None:
        headers = codec.record_headers(kind, self.group, state)
        self.log.write(PREFIX + kind, name.encode(), None, at, headers, prepared_at=prepared_at)

    def park(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        half = Half(
            id=name, group=self.group, messages=tuple(messages), prepared_at=prepared_at, since=at,
            fingerprint=b"f" * 16,
        )  # fmt: skip
        parked = Parked(half=half, reason="asked enough", parked_at=at, checks=3)
        headers = codec.record_headers("parked", self.group, "parked")
        self.log.write(PREFIX + "parked", name.encode(), codec.encode_parked(parked), at, headers)
        self.write_tombstone("half", name, at, "parked")

    def op(self, name: str, kind: OpKind, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        op = Op(
            kind=kind, id=name, group=self.group, half_offset=0, cause=Cause.PRODUCER, prepared_at=prepared_at,
            at=at + self.log.ahead, messages=tuple(map(MessageDigest.of, messages)),
        )  # fmt: skip
        state = "committed" if kind is OpKind.COMMITTED else "rolled_back"
        self.raw_op(name, codec.encode_op(op), at, state, prepared_at)

    def raw_op(self, name: str, value: bytes, at: int, state: str, prepared_at: int = 0) -> None:
        headers = codec.record_headers("op", self.group, state)
        self.log.write(PREFIX + "op", name.encode(), value, at, headers, prepared_at=prepared_at)

    def message(
        self, name: str, what: Message, place: str, at: int, prepared_at: int | str, *, prefix: str | None = PREFIX
    ) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            *what.headers,
            ("halfway-transaction-id", name),
            ("halfway-message", place),
            ("halfway-prepared-at", f"{prepared_at}"),
        ]
        if prefix is not None:
            headers.append(("halfway-prefix", prefix))
        self.log.write(what.topic, what.key, what.value, at, headers)

    def commit(self, name: str, messages: Sequence[Message], at: int, prepared_at: int) -> None:
        for number, message in enumerate(messages, 1):
            self.message(name, message, f"{number}/{len(messages)}", at, prepared_at)
        self.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self.write_tombstone("half", name, at, "committed", prepared_at)

    def roll_back(self, name: str, at: int, prepared_at: int) -> None:
        self.op(name, OpKind.ROLLED_BACK, (), at, prepared_at)
        self.write_tombstone("half", name, at, "rolled_back", prepared_at)


Expected = dict[tuple[str, int], str]


class RandomLog:
    """A log of transactions that went well or wrong in every way; `expected` is by id and use."""

    def __init__(self, seed: int, count: int = 60) -> None:
        self.random = random.Random(seed)
        self.log = Log()
        self.expected: Expected = {}
        self._writer = Writer(self.log)
        self._at = START
        self._writer.lay_out(START)
        ways = [getattr(self, name) for name in dir(type(self)) if name.startswith("way_")]
        for number in range(count):
            self._at += self.random.randrange(1, 20_000)
            # Each way at least once, where there is room for all.
            way = ways[number] if number < len(ways) else self.random.choice(ways)
            way(f"mine-{number}" if self.random.random() < 0.5 else self._server_id())
        self.log.settle()
        self.end = max(record.at for record in self.log.records if record.at < START * 2)

    def _server_id(self) -> str:
        chance = self.random.getrandbits(62)
        return server_id(0, UUID(int=self._at << 80 | 7 << 76 | 2 << 62 | chance))

    def _messages(self) -> list[Message]:
        count = self.random.randrange(1, 4)
        return [
            Message(
                topic=self.random.choice(REAL),
                key=self.random.choice((None, b"k", b"")),
                value=self.random.choice((None, b"v", self.random.randbytes(5))),
                headers=self.random.choice(((), (("h", b"1"),), (("h", None), ("h", b"")))),
            )
            for _ in range(count)
        ]

    def _prepared(self, name: str) -> tuple[list[Message], int, int]:
        messages, took = self._messages(), self.random.choice((3, 50, 4_000, 2 * HORIZON))
        self._writer.half(name, messages, self._at)
        return messages, self._at, self._at + took

    def way_committed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self.expected[name, 0] = "committed_ok"

    def way_rolled_back(self, name: str) -> None:
        _, prepared_at, at = self._prepared(name)
        self._writer.roll_back(name, at, prepared_at)
        self.expected[name, 0] = "rolled_back_ok"

    def way_pending(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        if self.random.random() < 0.5:
            self._writer.half(name, messages, at, prepared_at=prepared_at)
        self.expected[name, 0] = "pending"

    def way_parked(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.park(name, messages, at, prepared_at)
        self.expected[name, 0] = "parked"

    def way_resumed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.park(name, messages, at, prepared_at)
        again = at + self.random.choice((10, 2 * HORIZON))
        self._writer.half(name, messages, again, prepared_at=prepared_at)
        self._writer.write_tombstone("parked", name, again, "prepared")
        self.expected[name, 0] = "pending"
        if self.random.random() < 0.5:
            self._writer.commit(name, messages, again + 100, prepared_at)
            self.expected[name, 0] = "committed_ok"

    def way_leaked_while_pending(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.half(name, messages, at + 10, prepared_at=prepared_at)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_leaked_though_rolled_back(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self._writer.roll_back(name, at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_forged(self, name: str) -> None:
        """Anything may stand in a header that others can write."""
        absurd = self.random.choice((9_223_372_036_854_775_807, -1, "soon", 10**30, ""))
        for _ in range(2):
            self._writer.message(name, self._messages()[0], "1/1", self._at, absurd, prefix=None)
        self.expected[name, 0] = "leaked"

    def way_lost(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "lost"

    def way_gone(self, name: str) -> None:
        _, _, at = self._prepared(name)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "lost"

    def way_torn(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        messages.append(messages[0])
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, prepared_at)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "torn"

    def way_doubled(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        for _ in range(self.random.randrange(1, 30)):
            late = at + self.random.choice((0, 7, HORIZON // 2, 3 * HORIZON))
            self._writer.message(name, messages[0], f"1/{len(messages)}", late, prepared_at)
        self.expected[name, 0] = "doubled"

    def way_changed(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        other = [Message(topic=each.topic, key=each.key, value=b"other") for each in messages]
        for number, message in enumerate(other, 1):
            self._writer.message(name, message, f"{number}/{len(other)}", at, prepared_at)
        self._writer.op(name, OpKind.COMMITTED, messages, at, prepared_at)
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "payload_changed"

    def way_contradicted(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self._writer.op(name, OpKind.ROLLED_BACK, (), at + 20, prepared_at)
        self.expected[name, 0] = "contradicted"

    def way_not_judged(self, name: str) -> None:
        messages, prepared_at, at = self._prepared(name)
        for number, message in enumerate(messages, 1):
            self._writer.message(name, message, f"{number}/{len(messages)}", at, prepared_at)
        self._writer.raw_op(name, b"\xc3\x01newer...and what it says", at, "committed")
        self._writer.write_tombstone("half", name, at, "committed")
        self.expected[name, 0] = "not_judged"

    def way_foreign(self, name: str) -> None:
        """Another deployment writes to the same topics, and may use the same ids."""
        messages, prepared_at, at = self._prepared(name)
        self._writer.commit(name, messages, at, prepared_at)
        self._writer.message(name, messages[0], "1/1", at + 5, at, prefix="other.")
        self._writer.message(f"theirs-{name}", messages[0], "1/1", at + 5, at, prefix="other.")
        self.expected[name, 0] = "committed_ok"

    def way_older(self, name: str) -> None:
        """A deployment that was there before wrote to the same topics; it goes on, and may have used the same ids."""
        name = f"older-{name}"
        prefix = self.random.choice((None, PREFIX))
        late = self.random.choice((0, 10_000, 4 * HORIZON))
        self._writer.message(name, self._messages()[0], "1/1", self._at + late, START - 3 * HORIZON, prefix=prefix)
        if self.random.random() < 0.5:
            messages, prepared_at, at = self._prepared(name)
            self._writer.commit(name, messages, at, prepared_at)
            self.expected[name, 1] = "committed_ok"

    def way_leaked_beside_an_older_one(self, _: str) -> None:
        """What is of this deployment is judged, whatever else says that it is of the same transaction."""
        name = self._server_id()
        for prepared_at in (self._at, START - 3 * HORIZON):
            self._writer.message(name, self._messages()[0], "1/1", self._at, prepared_at)
        self.expected[name, 0] = "leaked"

    def way_forged_before_it_is_committed(self, _: str) -> None:
        """Whoever forges a message of an id that is made only later says when it was prepared."""
        at, self._at = self._at, self._at + 3_600_000
        name = self._server_id()
        messages, prepared_at, ended_at = self._prepared(name)
        self._writer.message(name, messages[0], f"1/{len(messages)}", at, self.random.choice((5, prepared_at)))
        self._writer.commit(name, messages, ended_at, prepared_at)
        self.expected[name, 0] = "doubled"

    def way_aborted(self, name: str) -> None:
        """Nobody knows the id of what stands in a Kafka transaction that is aborted."""
        self.log.aborting = True
        self._writer.commit(name, self._messages(), self._at, self._at)
        self.log.aborting = False

    def way_used_again(self, name: str) -> None:
        """An id that a client brought is another transaction after the horizon."""
        name = f"again-{name}"
        for life in range(2):
            messages, prepared_at = self._messages(), self._at + life * 3 * HORIZON
            self._writer.half(name, messages, prepared_at)
            self._writer.commit(name, messages, prepared_at + 9, prepared_at)
            self.expected[name, life] = "committed_ok"

    def way_clock_set(self, name: str) -> None:
        """Between prepare and end a clock is set, right or wrong."""
        self.log.ahead, then = self.random.choice(((0, -3 * HORIZON), (0, -60_000), (60_000, 0), (3 * HORIZON, 0)))
        prepared_at = self._at + self.log.ahead
        messages, _, at = self._prepared(name)
        self.log.ahead = then
        self._writer.commit(name, messages, at, prepared_at)
        self.log.ahead = 0
        self.expected[name, 0] = "committed_ok"

    def way_used_again_by_another_clock(self, name: str) -> None:
        """Whoever prepares it has forgotten it, and is behind by as much as clocks may differ."""
        name = f"again-{name}"
        for life in range(2):
            self.log.ahead = -SLACK * life
            at = self._at + (HORIZON + 10) * life
            messages, prepared_at = self._messages(), at + self.log.ahead
            self._writer.half(name, messages, at)
            self._writer.commit(name, messages, at + 9, prepared_at)
            self.expected[name, life] = "committed_ok"
        self.log.ahead = 0

    def age(self, until: int) -> int:
        """Let retention remove about half of what the real topics had by a time; return up to when at the most.

        What stands first then was written by a clock that is right: no other would tell since when the rest is whole.
        One log in four loses all of a topic, whatever its retention is.
        """
        if self.random.random() < 0.25:
            topic = self.random.choice(REAL)
            self.log.kept_ms = self.random.choice((None, 1000 * HORIZON))
            self.log.trim(topic, sum(record.topic == topic and record.at <= until for record in self.log.records))
            return until
        own = ("halfway-prefix", PREFIX)
        oldest = START
        for topic in REAL:
            there = [record for record in self.log.records if record.topic == topic and record.at <= until]
            firsts = [each for each in there if own in each.headers and each.told_at == each.at and not each.aborted]
            if firsts:
                first = self.random.choice(firsts)
                self.log.trim(topic, first.offset)
                oldest = max(oldest, first.at)
        return oldest

    def compact(self) -> None:
        """Let the cleaner come by: the first use of an id loses its outcome, and contradictions one of theirs."""
        self.log.compacted = frozenset(PREFIX + kind for kind in KINDS)
        until = self.end + 1
        for kind in ("half", "op", "parked"):
            self.log.compact(PREFIX + kind, until)
        ops = {record.key for record in self.log.records if record.topic == PREFIX + "op" and not record.gone}
        assert ops
        for (name, life), verdict in [*self.expected.items()]:
            if name.startswith("again-") and life == 0:
                self.expected[name, life] = "expired_unknown"
            elif verdict == "contradicted":
                # The rollback is the last word in op now, and the messages stand all the same.
                self.expected[name, life] = "leaked"
            elif verdict == "lost" and not any(
                record.key == name.encode() and not record.gone
                for record in self.log.records
                if record.topic.startswith(PREFIX)
            ):
                del self.expected[name, life]  # fmt: skip
