"""Compares the log of the owned shards with what their owner knows of it: topic ids, log starts and log ends.

Kafka can lose what it has acknowledged: after an unclean leader election, or if somebody deletes a topic or its
records. Nothing else would notice it while the owner has everything in memory, until the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection

from halfway.coordinator.ports import KnownLog, LogLoss
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Place, offset_of, request_offsets
from halfway.kafka.clients.seam import Admin

log = structlog.get_logger()

_REQUEST_S: Final = 5.0


class LogWatch:
    """Looks at the log when it is asked to, with an admin client of its own. Used on the loop's thread."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._topics = [config.half_topic, config.op_topic, config.parked_topic, config.owners_topic]
        self._client: Admin | None = None
        self._ids: dict[str, str] = {}
        self._missing: set[str] = set()
        self._ends: dict[Place, int] = {}
        """The highest end that was seen of each partition."""
        self._starts: dict[Place, int] = {}
        """The log start that was reported last."""
        self._doubted: set[Place] = set()
        """Partitions that ended too early at the last look: a leader that was just elected may lag for a moment."""

    @property
    def doubts(self) -> bool:
        """Whether another look should follow soon."""
        return bool(self._doubted)

    async def look(self, known: Mapping[int, KnownLog]) -> list[tuple[int, LogLoss]]:
        """Return the losses, each with its shard; `known` is what is known of each shard that is served now.

        What Kafka does not answer is looked at the next time.
        """
        losses: dict[int, LogLoss] = {}
        for topic in await self._made_again():
            detail = f"topic {topic} was deleted and created again"
            losses |= {shard: LogLoss(topic=topic, detail=detail) for shard in known}
        if losses:
            return list(losses.items())
        return [*(await self._ends_lost(known)).items(), *await self._starts_lost(known)]

    def forget(self, shard: int) -> None:
        """Forget the ends of a shard that is not served any more: its log may have been found shorter."""
        for topic in self._topics:
            self._ends.pop((topic, shard), None)

    # --- topics

    async def _made_again(self) -> list[str]:
        """Return the topics that have another id than before, and log those that are missing."""
        requests = self._admin().describe_topics(TopicCollection(self._topics), request_timeout=_REQUEST_S)
        made_again: list[str] = []
        for topic, request in requests.items():
            try:
                name = str((await asyncio.wrap_future(request)).topic_id)
            except KafkaException as exception:
                if exception.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    self._note_missing(topic)
                continue
            self._missing.discard(topic)
            before = self._ids.get(topic)
            self._ids[topic] = name
            if before not in (None, name):
                made_again.append(topic)
                self._ends = {place: end for place, end in self._ends.items() if place[0] != topic}
                self._starts = {place: start for place, start in self._starts.items() if place[0] != topic}
        return made_again

    def _note_missing(self, topic: str) -> None:
        if topic not in self._missing:
            self._missing.add(topic)
            remedy = "run halfway topics create and keep this instance running: it writes again what it has in memory"
            log.error("topic_missing", topic=topic, remedy=remedy)

    # --- ends

    async def _ends_lost(self, known: Mapping[int, KnownLog]) -> dict[int, LogLoss]:
        losses: dict[int, LogLoss] = {}
        doubted: set[Place] = set()
        for place, end in (await self._offsets(known, earliest=False)).items():
            topic, shard = place
            least = max(_known_end(known[shard], topic, self._config), self._ends.get(place, 0))
            self._ends[place] = max(end, least)
            if end >= least:
                continue
            if place not in self._doubted:
                doubted.add(place)
                continue
            self._ends[place] = end
            detail = f"{topic}[{shard}] ends at {end}, but had records up to {least}"
            losses.setdefault(shard, LogLoss(topic=topic, detail=detail))
        self._doubted = doubted
        return losses

    # --- starts

    async def _starts_lost(self, known: Mapping[int, KnownLog]) -> list[tuple[int, LogLoss]]:
        """Return every loss, not one for each shard: the records of several topics may be deleted together."""
        half, op, parked, _ = self._topics
        losses: list[tuple[int, LogLoss]] = []
        for place, start in (await self._offsets(known, earliest=True)).items():
            topic, shard = place
            if start <= self._starts.get(place, 0):
                continue
            one = known[shard]
            outcomes = start if topic != op or one.op_recent is None else one.op_recent
            lowest = {half: one.half_needed, op: one.op_needed, parked: one.parked_needed}[topic]
            needed = outcomes if lowest is None else min(lowest, outcomes)
            self._starts[place] = start
            if start > needed:
                loss = LogLoss(
                    topic=topic,
                    detail=f"{topic}[{shard}] begins at {start}, but records from {needed} on are needed",
                    half_start=start if topic == half else None,
                    op_start=start if topic == op else None,
                    parked_start=start if topic == parked else None,
                    is_op_cut=start > outcomes,
                )
                losses.append((shard, loss))
        return losses

    async def _offsets(self, known: Mapping[int, KnownLog], *, earliest: bool) -> dict[Place, int]:
        """Return the earliest (not of owners) or latest offsets of the owned partitions, as far as Kafka answers."""
        places = [(topic, shard) for shard in known for topic in self._topics[: 3 if earliest else 4]]
        requests = request_offsets(self._admin(), places, _REQUEST_S, earliest=earliest)
        offsets: dict[Place, int] = {}
        for place, request in requests.items():
            try:
                offsets[place] = offset_of(await asyncio.wrap_future(request))
            except KafkaException as exception:
                log.debug("log_not_seen", topic=place[0], shard=place[1], error=exception.args[0].str())
        return offsets

    def _admin(self) -> Admin:
        if self._client is None:
            self._client = self._config.make_admin()
        self._client.poll(0)
        return self._client


def _known_end(known: KnownLog, topic: str, config: KafkaConfig) -> int:
    return {config.half_topic: known.half_end, config.op_topic: known.op_end}.get(topic, 0)
