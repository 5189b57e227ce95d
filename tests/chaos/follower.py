"""Follows the topics during the run, to read the records that compaction, retention and deletion remove."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
from confluent_kafka import KafkaException

from checker.dump import Topics
from checker.records import AnyRecord, Half, Op, Parked

_INTERVAL_S: Final = 5.0


class Follower:
    """Appends every committed record to a file, and tracks pending and parked transactions."""

    def __init__(
        self,
        read: Callable[[], Iterator[AnyRecord]],
        path: Path,
        begin_again: Callable[[str], None],
        go_back: Callable[[str, Mapping[int, int]], None],
    ) -> None:
        self._read = read
        self._path = path
        self._begin_again = begin_again
        self._go_back = go_back
        self._encode = msgspec.json.Encoder().encode
        self._one_at_a_time = Lock()
        self.prepared: dict[str, tuple[int, int]] = {}
        """The partition and the offset of the half of each pending transaction."""
        self.parked: set[str] = set()
        self.records: Counter[str] = Counter()
        """The number of read records, by kind."""
        self.reasons: Counter[str] = Counter()
        """Why policy gave up, as text without the numbers."""
        self.failures = 0

    @classmethod
    def of(cls, topics: Topics, path: Path) -> Follower:
        return cls(topics.read, path, topics.begin_again, topics.go_back)

    async def run(self) -> None:
        """Read at intervals until cancelled; if Kafka does not answer, the next read yields the missing records."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await asyncio.to_thread(self.look)
            except (KafkaException, TimeoutError):
                self.failures += 1

    def look(self) -> None:
        """Read the records since the last time, all or none."""
        with self._one_at_a_time:
            self._look()

    def _look(self) -> None:
        records = list(self._read())
        with self._path.open("ab") as file:
            file.writelines(self._encode(record) + b"\n" for record in records)
        for record in records:
            self._take(record)

    @contextmanager
    def away(self, topic: str) -> Iterator[None]:
        """Read a topic to its current end, but not while it is deleted and recreated; then from its beginning."""
        with self._at_rest():
            yield
            self._begin_again(topic)

    @contextmanager
    def shortened(self) -> Iterator[dict[str, dict[int, int]]]:
        """Read the topics, but not while they lose their ends; then from the new ones, which the caller fills in."""
        ends: dict[str, dict[int, int]] = defaultdict(dict)
        with self._at_rest():
            yield ends
            for topic, of_topic in ends.items():
                self._go_back(topic, of_topic)
                if topic.endswith("half"):
                    left = {name: at for name, at in self.prepared.items() if at[1] < of_topic.get(at[0], sys.maxsize)}
                    self.prepared = left

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        with self._one_at_a_time:
            try:
                self._look()
            except (KafkaException, TimeoutError):
                self.failures += 1
            yield

    def _take(self, record: AnyRecord) -> None:
        self.records[type(record).__name__.lower()] += 1
        match record:
            case Half(contents=None):
                self.prepared.pop(record.id, None)
            case Half():
                self.prepared[record.id] = record.shard, record.offset
            case Parked(tombstone=True):
                self.parked.discard(record.id)
            case Parked():
                self.parked.add(record.id)
            case Op(remark=str() as reason):
                self.reasons[" ".join(word for word in reason.split() if word.isalpha())] += 1
            case _:
                pass
