"""Finds and fences the former owner of a shard (docs/protocol.md#ownership-and-fencing, steps 2 and 3).

The last record of owners[s] names it. Records that halfway cannot have written are skipped: compaction never removes a
record of a key and leaves an earlier one of it, so the last one that can be read is the last that halfway wrote.

If none can be read, compaction may have removed what halfway wrote: something foreign stands there, or stood there
if it was a null value, which leaves no trace. And what has halfway's headers may be the record of a later release,
which hides what stands before it. Each claim also wrote a barrier into parked[s] and half[s], in the same Kafka
transaction: there the last barrier names the last claimant. If something foreign stands in owners[s] and none of the
three names the former owner, it is not known, and the shard is not served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, KafkaException, Message
from confluent_kafka.admin import AdminClient

from halfway.domain.records import Owner
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_ids import lane_ids
from halfway.kafka.clients.transactional_producer import fence
from halfway.kafka.lane.rehearsal import end_rehearsal
from halfway.kafka.log.end_offsets import ASK_AGAIN_S, request_ends
from halfway.kafka.log.partition_reader import LEADER_MOVES, PartitionReader, Place, meet
from halfway.kafka.ownership.acquisition_deadline import AcquisitionDeadline
from halfway.kafka.ownership.fenced_owners import FencedOwners
from halfway.kafka.records.codec import BARRIER_KEY, UndecodableError
from halfway.kafka.records.validation import Count, barrier_in, is_layout, marked, note_skipped, owner_in, owner_key

log = structlog.get_logger()

_ASK_S: Final = 10.0
_LOOK_S: Final = 0.5


class FormerOwnerUnknownError(Exception):
    """Nothing in the log names the last owner of these shards: to serve them would not be safe."""

    def __init__(self, detail: str, remedy: str) -> None:
        """Say what is not known, and what the operator can do."""
        super().__init__(detail)
        self.remedy = remedy


@dataclass(kw_only=True)
class _Trail:
    """The last claim of a shard, as one partition records it."""

    last: str | None = None
    """The incarnation; None if it was released, or nobody claimed it."""
    lane_ids: tuple[str, ...] = ()
    known: bool = False
    foreign: bool = False
    """Something that halfway did not write stands there under the key."""

    def take(self, incarnation: str | None, lane_ids: tuple[str, ...]) -> None:
        """Note what stands last for now."""
        self.last, self.lane_ids, self.known = incarnation, lane_ids, True


@dataclass(kw_only=True)
class FormerOwners:
    """The search of one acquisition, bounded by the acquisition's deadline."""

    config: KafkaConfig
    reader: PartitionReader
    acquisition_deadline: AcquisitionDeadline
    count: Count
    released: dict[int, int]
    """When each shard was released, in ms, if its last owner record says so."""
    fences: FencedOwners

    def fence_all(self, shards: Sequence[int]) -> None:
        """Return once nobody can write for these shards any more; FormerOwnerUnknownError if that is not certain."""
        config = self.config
        admin = AdminClient(config.admin())
        trails = self._follow(admin, config.owners_topic, shards)
        in_doubt = {shard for shard, trail in trails.items() if trail.foreign}
        for topic in (config.parked_topic, config.half_topic):
            unknown = [shard for shard, trail in trails.items() if not trail.known]
            if doubtful := sorted(in_doubt.intersection(unknown)):
                log.error("former_owner_in_doubt", shards=doubtful, asked_next=topic)
            if not unknown:
                return
            trails = self._follow(admin, topic, unknown)
        lost = sorted(shard for shard, trail in trails.items() if shard in in_doubt and not trail.known)
        if lost:
            raise FormerOwnerUnknownError(
                f"who owned shards {lost} last is overwritten in {config.owners_topic}, {config.parked_topic} and "
                f"{config.half_topic}",
                f"make sure that no instance runs, delete the topic {config.owners_topic}, and start again",
            )

    def _follow(self, admin: AdminClient, topic: str, shards: Iterable[int]) -> dict[int, _Trail]:
        """Read a topic to its real end and fence the last owners on the way; return the trail of each shard."""
        meet(admin, topic, _LOOK_S)  # a request before the client is connected waits for up to 1 s
        found = {shard: _Trail() for shard in shards}
        # Nobody else can claim a shard now: if no record was ever there, there is nothing to wait for.
        ends = self._ends(admin, topic, found)
        trails = {place: found[place[1]] for place, end in ends.items() if end}
        if not trails:
            return found
        self.reader.add(dict.fromkeys(trails, OFFSET_BEGINNING))
        while True:
            reached = self._read(self._ends(admin, topic, (shard for _, shard in trails)), trails)
            former = {trail.last: trail.lane_ids for trail in trails.values() if trail.last is not None}
            unfenced = {name: ids for name, ids in former.items() if name not in self.fences}
            if unfenced:
                self._fence(unfenced)
            elif reached:
                break
            self.acquisition_deadline.check(f"reading {', '.join(f'{topic}-{shard}' for _, shard in trails)}")
        self.reader.remove(list(trails))
        return found

    def _read(self, ends: Mapping[Place, int], trails: Mapping[Place, _Trail]) -> bool:
        """Step 2: read as far as committed reads go; return whether that is the real end.

        Not for long: an open transaction may hold the end back until its owner is fenced.
        """
        return self.reader.read_until(ends, time.monotonic() + _LOOK_S, self._into(trails))

    def _fence(self, owners: Mapping[str, tuple[str, ...]]) -> None:
        """Step 3: take their lane ids away from former owners."""
        for incarnation, ids in owners.items():
            self.fences.once(incarnation, partial(self._take_ids, incarnation, ids), self._still_wait)

    def _take_ids(self, incarnation: str, ids: Sequence[str]) -> None:
        log.info("fencing_former_owner", incarnations=[incarnation])
        end_rehearsal(self.config, incarnation)
        fence(self.config, ids, self.acquisition_deadline.deadline, self.acquisition_deadline.cancelled)

    def _still_wait(self) -> None:
        self.acquisition_deadline.check("waiting for the fence of the former owner")

    def _into(self, trails: Mapping[Place, _Trail]) -> Callable[[Place, Message], None]:
        owners = self.config.owners_topic

        def handle(place: Place, message: Message) -> None:
            trail, of_owners = trails[place], place[0] == owners
            own_key = owner_key(place[1]) if of_owners else BARRIER_KEY
            try:
                if not of_owners:
                    if message.key() == own_key:
                        name = barrier_in(message).incarnation
                        trail.take(name, lane_ids(self.config.prefix, name))
                elif not is_layout(message):
                    self._take(trail, message, owner_in(message))
            except UndecodableError as error:
                if message.key() == own_key:
                    trail.foreign, trail.known = True, trail.known and not marked(message)
                note_skipped(message, error, self.count)

        return handle

    def _take(self, trail: _Trail, message: Message, owner: Owner | None) -> None:
        shard = message.partition() or 0
        if owner is None:
            self.released[shard] = message.timestamp()[1]
            trail.take(None, ())
        else:
            self.released.pop(shard, None)
            trail.take(owner.incarnation, owner.lane_ids)

    def _ends(self, admin: AdminClient, topic: str, shards: Iterable[int]) -> dict[Place, int]:
        """Return the end offsets under read_uncommitted."""
        places = [(topic, shard) for shard in shards]
        while True:
            futures = request_ends(admin, places, IsolationLevel.READ_UNCOMMITTED, _ASK_S)
            while wait(futures.values(), _LOOK_S).not_done:
                self.acquisition_deadline.check("asking for the end offsets")
            try:
                return {place: future.result().offset for place, future in futures.items()}
            except KafkaException as error:
                if error.args[0].code() not in LEADER_MOVES:
                    raise
            self.acquisition_deadline.check("asking for the end offsets")
            time.sleep(ASK_AGAIN_S)
            meet(admin, topic, _LOOK_S)
