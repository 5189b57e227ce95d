"""Faults of topics during writes. Those of real topics must not affect work that does not need the topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # they are there

from checker.history import HistoryWriter, LogLost, LostInMemory, Removed
from tests.chaos.brokers import TopicKind
from tests.chaos.coordinators import Instance
from tests.chaos.stage import LOOK_AGAIN_S, SHARDS, Stage

_MOST_PARTITIONS: Final = 8
_OF_TOPICS: Final = (AclOperation.WRITE, AclOperation.READ)
_RESTORED_S: Final = 300.0
_SETTLED_S: Final = 6.0
"""Shards that stay for so long move no more by themselves, and by then their owners have looked at the topics' ids."""
_NOTICED_S: Final = 15.0
"""By then the owners have looked at the ends of their logs twice."""
_SETTLES_WITHIN_S: Final = 90.0
_FAIL_OVER_MS: Final = 20_000
"""For how long the loss of a broker explains unserved shards; a missing real topic does not explain them."""


class _Watch:
    """Follows which instances claim and acquire shards from now on."""

    def __init__(self, stage: Stage) -> None:
        self._cluster, self._owners = stage.cluster, stage.instances[0].topic("owners")
        self._since = stage.cluster.ends(self._owners)
        self._before = {one: (one.served(), len(one.log)) for one in stage.instances}

    def acquired(self) -> set[int]:
        """Return the shards that an instance has acquired since, be it again."""
        return set().union(*(one.acquired(position) for one, (_, position) in self._before.items()))

    def moved(self) -> set[int]:
        """Return the shards that an instance has claimed since that did not serve them before."""
        claims = self._cluster.values_since(self._owners, self._since)
        owned = [(avro_text(one.url), shards) for one, (shards, _) in self._before.items()]
        return {shard for shard, claim in claims for url, shards in owned if url in claim and shard not in shards}


def avro_text(text: str) -> bytes:
    """Return how Avro writes a text of up to 63 bytes."""
    return bytes([2 * len(text)]) + text.encode()


class TopicFaults:
    """The topics that may get faults: `fleeting` and `strict`."""

    def __init__(
        self, stage: Stage, history: HistoryWriter, fleeting: TopicKind, strict: TopicKind, prefix: str
    ) -> None:
        """Keep the stage; `strict` is below its min.insync.replicas as soon as a broker is gone."""
        self._half = prefix + "half"
        self._op = prefix + "op"
        self._cursors = prefix + "cursors"
        self._stage = stage
        self._history = history
        self._fleeting = fleeting
        self._strict = strict

    async def topic_deleted(self) -> None:
        """Delete a topic, and create it again at once or some time later."""
        stage, since, topic = self._stage, self._stage.now(), self._fleeting
        refused_before = self._refused()
        for_s = stage.chance.choice((0.0, stage.between(1, 8)))

        def away() -> None:
            with stage.follower.away(topic.name):
                stage.cluster.remove_topic(topic.name)
                self._history.write(Removed(topic=topic.name))
                if for_s:
                    time.sleep(for_s)
                stage.cluster.make_topics(topic)

        await asyncio.to_thread(away)
        await asyncio.to_thread(stage.cluster.wait_until_ready)
        refused = self._refused() - refused_before
        stage.note("topic_deleted", topic.name, counts=True, since=since, stops_ms=0, seconds=for_s, refused=refused)

    async def topic_grown(self) -> None:
        """Add one partition to a topic, until it has many."""
        stage, since, topic = self._stage, self._stage.now(), self._fleeting
        grown = await asyncio.to_thread(stage.cluster.grow_topic, topic.name, _MOST_PARTITIONS)
        await asyncio.to_thread(stage.cluster.wait_until_ready)
        stage.note("topic_grown", topic.name, counts=grown, since=since, stops_ms=0)

    async def topic_denied(self) -> None:
        """Deny and restore the permission to write to a topic, or to see it."""
        stage, since, topic = self._stage, self._stage.now(), self._fleeting
        refused_before = self._refused("not_authorised")
        operation = stage.chance.choice((AclOperation.WRITE, AclOperation.DESCRIBE))
        await asyncio.to_thread(stage.cluster.deny, topic.name, operation)
        try:
            await stage.wait(stage.between(3, 12))
        finally:
            await asyncio.to_thread(stage.cluster.allow, topic.name)
        refused = self._refused("not_authorised") - refused_before
        stage.note("topic_denied", topic.name, counts=refused > 0, since=since, stops_ms=0, refused=refused)

    async def internal_denied(self) -> None:
        """Take a permission for an internal topic or for the group away, and give it back.

        Meanwhile no coordinator gets a fault: one that starts without a permission ends, as it should.
        """
        stage = self._stage
        what = stage.chance.choice(("half", "op", "parked", "owners", "groups", "members"))
        name, kind = stage.instances[0].topic(what), ResourceType.GROUP if what == "members" else ResourceType.TOPIC
        operation = AclOperation.READ if kind is ResourceType.GROUP else stage.chance.choice(_OF_TOPICS)
        async with stage.coordinators_free:
            for instance in stage.instances:
                await asyncio.to_thread(instance.wait_until_ready)
            since, positions = stage.now(), {instance: len(instance.log) for instance in stage.instances}
            await asyncio.to_thread(stage.cluster.deny, name, operation, kind)
            try:
                await stage.wait(stage.between(3, 10))
            finally:
                await asyncio.to_thread(stage.cluster.allow, name, kind)
            for instance in stage.instances:
                await asyncio.to_thread(instance.wait_until_ready)
            said = self._say(positions, "kafka-acls.sh")
            stage.note("internal_denied", name, counts=said > 0, since=since, operation=operation.name, said=said)

    async def quota(self) -> None:
        """Let brokers delay the answers to all coordinators for a while."""
        stage, since = self._stage, self._stage.now()
        positions = {instance: len(instance.log) for instance in stage.instances}
        bytes_a_second = stage.chance.choice((5_000, 50_000))
        await asyncio.to_thread(stage.cluster.limit, bytes_a_second)
        try:
            await stage.wait(stage.between(3, 8))
        finally:
            await asyncio.to_thread(stage.cluster.limit, None)
        said = self._say(positions, "kafka_throttled")
        stage.note("quota", "coordinators", counts=said > 0, since=since, bytes_a_second=bytes_a_second, said=said)

    def _say(self, positions: Mapping[Instance, int], words: str) -> int:
        """Return how many coordinators have logged something since."""
        return sum(words in instance.log[position:] for instance, position in positions.items())

    async def topic_below_min_isr(self) -> None:
        """Stop a broker that only this topic needs, for a long time."""
        stage = self._stage
        async with stage.brokers_free:
            since, refused_before, broker = stage.now(), self._refused(), stage.chance.choice(stage.cluster.brokers)
            before = stage.coordinator_faults
            await asyncio.to_thread(broker.kill)
            below, until = False, asyncio.get_running_loop().time() + self._length_s()
            while asyncio.get_running_loop().time() < until and not stage.is_over.is_set():
                below = below or await asyncio.to_thread(self._is_below)
                await stage.wait(10 * LOOK_AGAIN_S)
            await asyncio.to_thread(broker.launch)
            await asyncio.to_thread(stage.cluster.wait_until_ready)
            stage.note(
                "topic_below_min_isr",
                self._strict.name,
                counts=below,
                since=since,
                # The last transaction of a failed coordinator on that topic is waited for until the broker is back.
                stops_ms=_FAIL_OVER_MS if before == stage.coordinator_faults else None,
                broker=broker.name,
                refused=self._refused() - refused_before,
            )

    def _length_s(self) -> float:
        stage = self._stage
        return stage.between(120, 160) if stage.long and stage.chance.random() < 0.3 else stage.between(10, 30)

    def _is_below(self) -> bool:
        try:
            return self._stage.cluster.below_min_isr(self._strict)
        except KafkaException:
            return False

    async def half_cut(self) -> None:
        """Delete all records of half; the owners of the shards write again what is pending, from memory.

        Only they have it. So the shards have settled, and no other fault hits a coordinator or a broker, until the
        cursors show that everything pending is behind the cut.
        """
        stage = self._stage
        async with stage.brokers_free, stage.coordinators_free:
            if not await self._settled() or stage.is_over.is_set():
                return
            async with stage.holding():
                since, lost_before = stage.now(), await self._missing()
                ends = await asyncio.to_thread(stage.cluster.ends, self._half)
                await asyncio.to_thread(stage.follower.look)  # it must have read what is deleted
                watch = await asyncio.to_thread(_Watch, stage)
                await asyncio.to_thread(stage.cluster.cut, self._half, ends)
                self._history.write(LogLost(kind="half", since=since))
                is_mended = await self._within(_RESTORED_S, lambda: asyncio.to_thread(self._is_behind, ends))
                detail = await self._restored(watch, since, is_mended, lost_before)
            stage.note("half_cut", self._half, since=since, **detail)

    async def _settled(self) -> bool:
        """Wait until every shard has one owner, every instance has shards, and none has moved for a while."""
        stage, clock = self._stage, time.monotonic
        until = clock() + _SETTLES_WITHIN_S
        before, since = None, clock()
        while clock() < until:
            owned = [await asyncio.to_thread(one.served) for one in stage.instances]
            whole = all(owned) and sum(map(len, owned)) == SHARDS == len(set().union(*owned)) and not stage.away()
            if not whole or owned != before:
                before, since = owned if whole else None, clock()
            elif clock() - since >= _SETTLED_S:
                return True
            await asyncio.sleep(5 * LOOK_AGAIN_S)
        return False

    async def _restored(
        self,
        watch: _Watch,
        since: int,
        is_mended: bool,
        lost_before: int,
        ends: Mapping[str, dict[int, int]] | None = None,
    ) -> dict[str, Any]:
        """Record the shards that have moved by themselves, with what only their owners had; return the details."""
        moved = await asyncio.to_thread(watch.moved)
        if moved:
            self._history.write(LostInMemory(shards=tuple(sorted(moved)), since=since, ends=dict(ends or {})))
        written_again = await self._missing() - lost_before
        return {
            "counts": written_again > 0,
            "written_again": written_again,
            "is_mended": is_mended,
            "moved": sorted(moved),
        }

    async def _within(self, seconds: float, is_done: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until something is done; if that takes too long the verdict will say why."""
        until = time.monotonic() + seconds
        while not await is_done():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(10 * LOOK_AGAIN_S)
        return True

    async def op_made_again(self) -> None:
        """Delete op and create it again; the owners of the shards write the outcomes again, from memory.

        Only they have them. So the shards have settled, and no other fault hits a coordinator or a broker, until
        nothing is in memory only.
        """
        stage, op = self._stage, self._op
        async with stage.brokers_free, stage.coordinators_free:
            if not await self._settled() or stage.is_over.is_set():
                return
            lost_before, watch = await self._missing(), await asyncio.to_thread(_Watch, stage)

            def made_again() -> None:
                with stage.follower.away(op):
                    since = stage.now()
                    stage.cluster.make_again(op)
                    self._history.write(LogLost(kind="op", since=since))

            since = stage.now()
            await asyncio.to_thread(made_again)
            is_mended = await self._within(_RESTORED_S, lambda: self._is_restored(watch))
            stage.note("op_made_again", op, since=since, **await self._restored(watch, since, is_mended, lost_before))

    async def _is_restored(self, watch: _Watch) -> bool:
        """Return whether the shards have settled since their owners noticed the loss, and nothing is in memory only."""
        return len(await asyncio.to_thread(watch.acquired)) == SHARDS and await self._is_written_again()

    async def end_lost(self) -> None:
        """Let half, op or both lose their ends; the owners of the shards write again what they know, from memory.

        Only they have it. So the shards have settled, and no other fault hits a coordinator or a broker, until they
        have looked at the ends and nothing is in memory only.
        """
        stage = self._stage
        kinds = stage.chance.choice((("half",), ("op",), ("half", "op")))
        topics = [stage.instances[0].topic(kind) for kind in kinds]
        async with stage.brokers_free, stage.coordinators_free:
            if not await self._settled() or stage.is_over.is_set():
                return
            async with stage.holding():
                since, lost_before, watch = stage.now(), await self._missing(), await asyncio.to_thread(_Watch, stage)
                by_topic = await asyncio.to_thread(self._lose_ends, topics)
                ends = {kind: by_topic[topic] for kind, topic in zip(kinds, topics, strict=True)}
                for kind in kinds:
                    self._history.write(LogLost(kind=kind, since=since, ends=ends[kind]))
                await asyncio.to_thread(stage.cluster.wait_until_ready)
                await asyncio.sleep(_NOTICED_S)
                is_mended = await self._within(_RESTORED_S, self._is_written_again)
                detail = await self._restored(watch, since, is_mended, lost_before, ends)
            stage.note("end_lost", ", ".join(topics), since=since, **detail)

    def _lose_ends(self, topics: Sequence[str]) -> dict[str, dict[int, int]]:
        """Return the new ends, by topic and partition."""
        with self._stage.follower.shortened() as ends:
            for (topic, number), end in self._stage.cluster.lose_ends(topics, self._stage.chance).items():
                ends[topic][number] = end
        return ends

    async def _is_written_again(self) -> bool:
        """Return whether the shards have settled, and nothing is in memory only."""
        if not await self._settled():
            return False
        unwritten = await asyncio.gather(*(asyncio.to_thread(one.unwritten) for one in self._stage.instances))
        return not any(unwritten) and None not in unwritten

    def _is_behind(self, ends: Mapping[int, int]) -> bool:
        cursors = self._stage.cluster.committed(self._cursors, self._half)
        return all(cursors.get(number, 0) >= end for number, end in ends.items())

    async def _missing(self) -> int:
        """Return how many transactions the coordinators have missed in the log so far."""
        return sum(await asyncio.gather(*(asyncio.to_thread(one.missed) for one in self._stage.instances)))

    async def shards_idle(self) -> None:
        """Begin no transaction for a while, so that faults hit shards without writes."""
        stage, since = self._stage, self._stage.now()
        for_s = stage.between(5, 12)
        stage.lull_until = asyncio.get_running_loop().time() + for_s
        await stage.wait(for_s)
        stage.note("shards_idle", "producers", counts=True, since=since, stops_ms=0, seconds=for_s)

    def _refused(self, code: str = "topic_unavailable") -> int:
        return sum(times for what, times in self._stage.caller.answers.items() if what.endswith(code))


TOPIC_FAULTS: Final[Mapping[str, int]] = {
    "topic_deleted": 3,
    "topic_grown": 2,
    "topic_denied": 3,
    "topic_below_min_isr": 3,
    "half_cut": 1,
    "op_made_again": 1,
    "end_lost": 1,
    "shards_idle": 2,
    "internal_denied": 2,
    "quota": 1,
}
