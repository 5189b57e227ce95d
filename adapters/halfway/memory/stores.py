"""Cursors, groups and topics in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from halfway.domain.errors import KafkaUnavailableError, NotAuthorisedError
from halfway.domain.keys import Key, KeyTable
from halfway.domain.records import Group
from halfway.memory.faults import Faults
from halfway.memory.log import MemoryLog
from halfway.service.ports import Cursors, TopicFacts


class MemoryCursors:
    """The port `service.ports.CursorStore`, and reads of the committed cursors."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        """Keep the log."""
        self._log = log
        self._faults = faults

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors of shards; do nothing while Kafka is unavailable."""
        await asyncio.sleep(0)
        if not self._faults.unavailable:
            self._log.cursors.update(cursors)

    def load(self, shard: int) -> Cursors:
        """Return the cursors of a shard, both 0 if none were committed."""
        return self._log.cursors.get(shard, Cursors(half=0, op=0))


class MemoryGroups:
    """The port `service.ports.GroupStore`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        """Keep the log."""
        self._log = log
        self._faults = faults

    def get(self, name: str) -> Group | None:
        """Return a group by its name."""
        return self._log.groups.get(name)

    def all(self) -> Sequence[Group]:
        """Return every group, by name."""
        return [self._log.groups[name] for name in sorted(self._log.groups)]

    async def change(self, name: str, decide: Callable[[Group | None], Group | None], *, deadline: float) -> None:
        """Write the decided group, or raise KafkaUnavailableError past the deadline."""
        await self._check_available(deadline)
        group = decide(self._log.groups.get(name))
        if group is None:
            self._log.groups.pop(name, None)
        else:
            self._log.groups[name] = group

    async def refresh(self, *, deadline: float) -> None:
        """Do nothing, because writes are visible at once; KafkaUnavailableError past the deadline."""
        await self._check_available(deadline)

    async def _check_available(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("the groups' topic did not answer in time")


class MemoryTopics:
    """The port `service.ports.Topics`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        """Keep the log."""
        self._log = log
        self._faults = faults

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name if all of the topics are visible; None otherwise."""
        facts = {name: self._log.topics[name].facts for name in names if name in self._log.topics}
        if self._faults.unavailable or len(facts) < len(names) or self._faults.denied_topics.intersection(names):
            return None
        return facts

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, None for a topic that does not exist; see the port for the errors."""
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not describe the topics in time")
        denied = self._faults.denied_topics.intersection(names)
        if denied:
            raise NotAuthorisedError(f"halfway may not see topic {min(denied)!r}", topic=min(denied))
        topics = {name: self._log.topics.get(name) for name in names}
        return {name: None if topic is None else topic.facts for name, topic in topics.items()}


class MemoryKeys:
    """The port `service.ports.KeyStore`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        """Keep the log."""
        self._log = log
        self._faults = faults

    @property
    def table(self) -> KeyTable:
        """The keys in the log."""
        return self._log.keys

    async def put(self, key: Key, *, deadline: float) -> None:
        """Write a key; KafkaUnavailableError past the deadline."""
        await self.refresh(deadline=deadline)
        self._log.keys.apply(key.id, key)

    async def delete(self, key_id: str, *, deadline: float) -> None:
        """Delete a key; KafkaUnavailableError past the deadline."""
        await self.refresh(deadline=deadline)
        self._log.keys.apply(key_id, None)

    async def refresh(self, *, deadline: float) -> None:
        """Do nothing, because writes are visible at once; KafkaUnavailableError past the deadline."""
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("the keys' topic did not answer in time")
