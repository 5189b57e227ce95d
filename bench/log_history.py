"""Writes the log of a long run of a coordinator, in a fraction of the time.

Halves that stay pending come first, then others that are prepared and committed. The coordinator's own code makes all
records in half and op: headers, encoding, the writes of a commit and a re-anchor, and the same number of ends in a
Kafka transaction. Only the times are chosen here, and the real messages are left out, because no recovery reads them.
`python -m bench.log_history <plan> <result>` writes a part of the shards.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from bench.plan import GROUP, KEYS
from halfway.coordinator import changes
from halfway.coordinator.ports import LaneWrite
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import TransactionalProducer
from halfway.kafka.ownership.incarnation import INITIALISE_S, lane_producers, new_incarnation_id
from halfway.kafka.records.codec import encode_half, half_headers
from halfway.kafka.records.lane_records import Encoded, InternalRecord, RecordLimits, encode
from halfway.protocol.entries import Pending
from halfway.protocol.ids import IdMaker
from halfway.protocol.policy import reanchor_distance
from halfway.protocol.records import Half, Message, Origin, fingerprint
from halfway.protocol.transactions import Cause, State

MAX_PREPARE_BYTES: Final = 4 * 1024 * 1024
_END_AFTER_MS: Final = 10
_PATIENCE_S: Final = 60.0
_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The log to write: `pending` transactions, then `ended` ones, of which the last ended at `until_ms`."""

    bootstrap_servers: str
    prefix: str
    shards: int
    own: tuple[int, ...]
    """The shards of this part; the numbers below are for these shards only."""
    topic: str
    value_bytes: int
    pending: int
    ended: int
    until_ms: int
    rate_per_s: float
    reanchor_after: int
    group: str = GROUP
    wave: int = 1_000
    """Transactions in flight, and ends in a Kafka transaction: the maximum of a lane."""

    @property
    def config(self) -> KafkaConfig:
        """The coordinator's configuration for Kafka."""
        return KafkaConfig(
            properties={"bootstrap.servers": self.bootstrap_servers},
            prefix=self.prefix,
            shards=self.shards,
            max_prepare_bytes=MAX_PREPARE_BYTES,
        )


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The written log: the cursors that each shard would have, and its end offsets."""

    half_cursors: dict[int, int]
    half_ends: dict[int, int]
    op_ends: dict[int, int]
    reanchored: int
    last_pending: str | None

    @classmethod
    def of(cls, parts: Sequence[History]) -> History:
        """Return the log whose parts were written separately."""
        return cls(
            half_cursors={number: at for part in parts for number, at in part.half_cursors.items()},
            half_ends={number: at for part in parts for number, at in part.half_ends.items()},
            op_ends={number: at for part in parts for number, at in part.op_ends.items()},
            reanchored=sum(part.reanchored for part in parts),
            last_pending=next((part.last_pending for part in parts if part.last_pending), None),
        )


def payloads(topic: str, value_bytes: int) -> Sequence[tuple[Message, ...]]:
    """Return the payloads of the transactions, used in turn."""
    values = [(_LETTERS[number % 26 :] + _LETTERS * (value_bytes // 26 + 1))[:value_bytes] for number in range(KEYS)]
    return [(Message(topic=topic, key=b"key-%05d" % number, value=value),) for number, value in enumerate(values)]


class _Shard:
    """The writer's state of a shard."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.end = 0
        self.pending: deque[tuple[int, Half]] = deque()


Prepared = tuple[_Shard, Half, list[int]]
"""A half that was produced; its offset is added to the list."""
Report = Callable[[Any, Any], None]


class Writer:
    """The two kinds of producers of a coordinator: for prepares, and for ends, which go through the lane."""

    def __init__(self, plan: Plan) -> None:
        """Connect, and create the lane's producers."""
        self._plan = plan
        self._config = plan.config
        self._shards = [_Shard(number) for number in plan.own]
        self._prepares = Producer(self._config.producer(**{"linger.ms": 5, "queue.buffering.max.messages": 100_000}))
        self._lane: deque[TransactionalProducer] = deque(
            lane_producers(self._config, new_incarnation_id(), INITIALISE_S, lambda: False)[:2]
        )
        all_payloads = payloads(plan.topic, plan.value_bytes)
        self._payloads = [(messages, fingerprint(plan.group, messages, None)) for messages in all_payloads]
        self._prepared_count = 0
        self._failed: list[Any] = []
        self.reanchored = 0
        total = plan.pending + plan.ended
        self._clock = plan.until_ms - round(1000 * total / plan.rate_per_s) - _END_AFTER_MS

    def write(self) -> History:
        """Write everything and return the offsets."""
        plan, last = self._plan, None
        for count in _waves(plan.pending, plan.wave):
            wave = self._prepare(count)
            self._flush()
            for shard, half, offset in wave:
                shard.pending.append((offset[0], half))
                last = half.id
        before = self._prepare(min(plan.wave, plan.ended))
        for count in (*list(_waves(plan.ended, plan.wave))[1:], 0):
            self._flush()
            after = self._prepare(count)
            self._end(before)
            before = after
        self._flush()
        for producer in self._lane:
            producer.abandon()
        ends = {kind: self._ends(kind) for kind in (self._config.half_topic, self._config.op_topic)}
        half_ends = ends[self._config.half_topic]
        cursors = {
            shard.number: shard.pending[0][0] if shard.pending else half_ends[shard.number] for shard in self._shards
        }
        return History(
            half_cursors=cursors,
            half_ends=half_ends,
            op_ends=ends[self._config.op_topic],
            reanchored=self.reanchored,
            last_pending=last,
        )

    def _prepare(self, count: int) -> list[Prepared]:
        """Produce half records as a prepare does; the offset of each is added to its list."""
        plan, topic = self._plan, self._config.half_topic
        wave: list[Prepared] = []
        ids = IdMaker(plan.shards)
        start = self._prepared_count
        for number in range(start, start + count):
            at = self._clock + round((number - start) * 1000 / plan.rate_per_s)
            shard = self._shards[number % len(self._shards)]
            messages, content = self._payloads[number % len(self._payloads)]
            name = ids.make(at, shard.number)
            half = Half(id=name, group=plan.group, messages=messages, prepared_at=at, since=at, fingerprint=content)
            offset: list[int] = []
            self._prepares.produce(
                topic,
                encode_half(half),
                half.id.encode(),
                shard.number,
                on_delivery=self._report(offset),
                timestamp=at,
                headers=half_headers(half, State.PREPARED.value),
            )
            wave.append((shard, half, offset))
        self._prepared_count += count
        self._clock += round(count * 1000 / plan.rate_per_s)
        self._prepares.poll(0)
        return wave

    def _report(self, offset: list[int]) -> Report:
        def report(error: Any, message: Any) -> None:
            if error is None:
                offset.append(message.offset())
            else:
                self._failed.append(error)

        return report

    def _flush(self) -> None:
        if self._prepares.flush(_PATIENCE_S):
            raise RuntimeError("not everything was delivered in time")
        self._require_delivered()

    def _require_delivered(self) -> None:
        if self._failed:
            raise RuntimeError(f"not everything was delivered: {self._failed[0]}")

    def _end(self, wave: Sequence[Prepared]) -> None:
        """Commit a wave in one Kafka transaction, together with the halves to re-anchor by now."""
        ended: list[tuple[_Shard, Encoded, int]] = []
        for shard, half, (offset,) in wave:
            shard.end = max(shard.end, offset + 1)
            at = half.prepared_at + _END_AFTER_MS
            fields = changes.OpFields(cause=Cause.PRODUCER, at=at, deadline=0.0, checks=0)
            write = changes.committed(shard.number, Pending.of(offset, half), half, fields)
            ended.append((shard, encode(write, self._config, RecordLimits.needed(self._config)), at))
        reanchored = [encoded for shard in self._shards for encoded in self._far_behind(shard)]
        producer = self._lane[0]
        self._lane.rotate()
        producer.begin()
        for shard, encoded, at in ended:
            self._produce(producer, self._config.op_topic, shard, encoded.key, encoded.op, at)
        for shard, encoded, at in ended:
            self._produce(producer, self._config.half_topic, shard, encoded.key, encoded.half, at)
            shard.end += 1
        for shard, _, encoded, new_offset in reanchored:
            report = self._report(new_offset)
            self._produce(producer, self._config.half_topic, shard, encoded.key, encoded.half, self._clock, report)
            shard.end += 1
        producer.commit(_PATIENCE_S)
        self._require_delivered()
        for shard, half, _, new_offset in reanchored:
            shard.pending.append((new_offset[0], half))
        for shard in self._shards:
            shard.end += 1  # the marker of the Kafka transaction

    def _produce(
        self,
        producer: TransactionalProducer,
        topic: str,
        shard: _Shard,
        key: bytes,
        record: InternalRecord | None,
        at: int,
        report: Report | None = None,
    ) -> None:
        if record is not None:
            producer.produce(
                topic, record.value, key, shard.number, on_delivery=report, timestamp=at, headers=record.headers
            )

    def _far_behind(self, shard: _Shard) -> Iterable[tuple[_Shard, Half, Encoded, list[int]]]:
        """Take the halves that hold the cursor back too far, which a scan would have re-anchored by now."""
        limit = reanchor_distance(self._plan.reanchor_after, len(shard.pending))
        reanchored: list[tuple[_Shard, Half, Encoded, list[int]]] = []
        while shard.pending and shard.end - shard.pending[0][0] > limit and len(reanchored) < self._plan.wave:
            offset, half = shard.pending.popleft()
            write = LaneWrite(
                shard=shard.number,
                id=half.id,
                group=half.group,
                state=State.PREPARED,
                prepared_at=half.prepared_at,
                half=changes.current_half(Pending.of(offset, half), half),
                size=half.size,
                deadline=0.0,
            )
            new_offset: list[int] = []
            encoded = encode(write, self._plan.config, RecordLimits.needed(self._plan.config))
            reanchored.append((shard, msgspec.structs.replace(half, origin=Origin.LANE), encoded, new_offset))
        self.reanchored += len(reanchored)
        return reanchored

    def _ends(self, topic: str) -> dict[int, int]:
        """Return the end offsets of the partitions, including the markers of the last Kafka transaction."""
        consumer = Consumer(self._config.consumer())
        numbers, deadline = [shard.number for shard in self._shards], time.monotonic() + _PATIENCE_S
        ends: dict[int, int] = {}
        before: dict[int, int] | None = None
        while ends != before and time.monotonic() < deadline:
            before = ends
            time.sleep(0.5)
            places = [TopicPartition(topic, number) for number in numbers]
            found = [consumer.get_watermark_offsets(place, timeout=_PATIENCE_S)[1] for place in places]
            ends = dict(zip(numbers, found, strict=True))
        consumer.close()
        return ends


def _waves(total: int, wave: int) -> Iterable[int]:
    for done in range(0, total, wave):
        yield min(wave, total - done)


def main(plan_path: str, result_path: str) -> None:
    """Write a part and its result."""
    os.nice(5)
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
    Path(result_path).write_bytes(msgspec.json.encode(Writer(plan).write()))


if __name__ == "__main__":
    main(*sys.argv[1:])
