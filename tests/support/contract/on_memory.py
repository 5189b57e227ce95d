"""The contract's backend in memory."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from halfway.memory import Memory
from halfway.protocol.records import Barrier, Half
from tests.support.contract.instance import SHARDS, Ports, Seen, Stored, facts, new_id


class MemoryBackend:
    def __init__(self) -> None:
        self._memory = Memory(shards=SHARDS, max_record_bytes=1_000_000)

    @asynccontextmanager
    async def ports(self) -> AsyncIterator[Ports]:
        memory = self._memory = self._memory.restarted()
        yield Ports(
            lane=memory.lane,
            half_log=memory.half_log,
            cursors=memory.cursors,
            groups=memory.groups,
            topics=memory.topics,
            owners=memory.owners,
            membership=memory.membership,
        )

    async def create_topic(self, label: str, partitions: int = 3, *, compacted: bool = False) -> str:
        name = new_id(label)
        self._memory.create_topic(name, facts(partitions, compacted=compacted))
        return name

    async def delete_topic(self, name: str) -> None:
        self._memory.delete_topic(name)

    async def records(self, name: str) -> Sequence[Seen]:
        return [
            Seen(record.partition, record.key, record.value, record.headers, record.timestamp)
            for record in self._memory.records(name)
        ]

    async def stored(self, kind: str, shard: int, transaction_id: str) -> Sequence[Stored]:
        partition = getattr(self._memory.log.shards[shard], kind)
        return [
            Stored(record.offset, record.key, record.value, dict(record.headers))
            for record in partition.records
            if record.key == transaction_id and not isinstance(record.value, Barrier)
        ]

    async def foreign_prepare(self, shard: int, half: Half) -> int:
        return self._memory.foreign_prepare(shard, half)

    def now_ms(self) -> int:
        return self._memory.clock.now_ms()
