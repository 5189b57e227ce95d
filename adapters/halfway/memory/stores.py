"""Cursors, groups, topics, the owners of shards, and calls between instances, on one log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from halfway.coordinator.cluster.peers import (
    AnswerReader,
    PeerHandler,
    decode_call,
    decode_request,
    encode_answer,
    encode_call,
    encode_request,
)
from halfway.coordinator.cluster.peers import decode_result as read_result
from halfway.coordinator.ports import Cursors, OwnerHint, TopicFacts
from halfway.coordinator.records import PeerCall
from halfway.memory.log import Faults, MemoryLog
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    NotAuthorisedError,
    PeerLostError,
    ShardUnavailableError,
)
from halfway.protocol.keys import Key, KeyTable
from halfway.protocol.principal import Principal
from halfway.protocol.records import Group


class MemoryCursors:
    """The port `service.ports.CursorStore`, and reads of the committed cursors."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
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
        self._log = log
        self._faults = faults

    def get(self, name: str) -> Group | None:
        return self._log.groups.get(name)

    def all(self) -> Sequence[Group]:
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
        self._log = log
        self._faults = faults

    @property
    def table(self) -> KeyTable:
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


_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class MemoryOwners:
    """The port `service.ports.Owners`."""

    def __init__(self, log: MemoryLog, url: str) -> None:
        self._log = log
        self._url = url

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if there is none or if it is this instance."""
        hint = self._log.owners.get(shard)
        return None if hint is None or hint.url == self._url else hint


class MemoryPeers:
    """The port `service.ports.Peers`: calls and answers are encoded as for a connection."""

    def __init__(self, log: MemoryLog, url: str) -> None:
        self._log = log
        self._url = url
        self.lose_answers = 0
        """How many of the next calls are carried out without an answer."""

    def serve(self, answers: PeerHandler) -> None:
        """Answer other instances from now on."""
        self._log.instances[self._url] = answers

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer; see the port for the errors."""
        await asyncio.sleep(0)
        answers = self._log.instances.get(owner.url)
        if answers is None or owner not in self._log.owners.values():
            raise ShardUnavailableError(f"{owner.url} cannot be reached")
        body = encode_request([encode_call(call, within_ms=1, principal=principal)])
        [frame] = decode_request(body)
        try:
            async with asyncio.timeout_at(deadline):
                done = await answers.answer(decode_call(frame.call), deadline=deadline, principal=frame.caller)
                answer = encode_answer(0, done)
        except TimeoutError:
            raise PeerLostError("not in time") from None
        except HalfwayError as error:
            answer = encode_answer(0, error)
        if self.lose_answers:
            self.lose_answers -= 1
            raise PeerLostError("the connection was closed")
        [frame_read] = AnswerReader(_MAX_ANSWER_BYTES).feed(answer)
        return read_result(call, frame_read)
