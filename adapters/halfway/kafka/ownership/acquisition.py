"""Acquires shards: fences their former owners and folds their log (docs/protocol.md#ownership)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message

from halfway.kafka.clients.config import KafkaConfig, explained
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.transactional_producer import (
    ProducerFailedError,
    TransactionalProducer,
    initialised,
    kafka_error,
    lane_ids,
)
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.ownership.former_owners import (
    CLOCK,
    AcquireError,
    AcquisitionDeadline,
    FencedOwners,
    FormerOwners,
    FormerOwnerUnknownError,
    LastClaim,
)
from halfway.kafka.records.codec import (
    BARRIER_KEY,
    KIND_BARRIER,
    KIND_OWNER,
    UndecodableError,
    encode_barrier,
    encode_owner,
    record_headers,
)
from halfway.kafka.records.lane_records import (
    NewerReleaseError,
    barrier_in,
    demand_no_newer,
    half_in,
    note_skipped,
    op_in,
    overwritten_id,
    owner_key,
    parked_in,
)
from halfway.protocol.errors import HalfwayError
from halfway.protocol.ids import BORN_AFTER_END_MS
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.records import FOREIGN, Barrier, Half, Owner
from halfway.protocol.shard import ShardState

log = structlog.get_logger()

_REQUEST_S: Final = 10.0
# A fetch that waits for the next record of one partition delays partitions that have just been added. And concurrent
# acquisitions together must not fetch more than one instance can hold.
_CONSUMER_OVERRIDES: Final = {"fetch.wait.max.ms": 20, "queued.max.messages.kbytes": 4_096}


@dataclass(frozen=True, kw_only=True)
class Acquired:
    """A shard that this incarnation owns, and its fold up to its barrier (at offset `barrier` of half[s])."""

    shard: int
    state: ShardState
    barrier: int
    released_at: int | None = None
    """When the former owner released it (ms since the epoch, by that owner's clock); None if it did not."""


@dataclass(kw_only=True)
class Acquisition:
    """One attempt to acquire a shard for one incarnation, on a thread of its own; `acquire` is called once.

    `claimed`: the owner record certainly names this incarnation, even if a later step fails. Then a shard that is not
    served must be released, or its next owner fences this incarnation. An uncertain claim must not be released: the
    tombstone could overwrite the owner record of another incarnation.
    """

    config: KafkaConfig
    incarnation: str
    lane_ids: tuple[str, ...]
    shard: int
    cursors: KafkaCursors
    fences: FencedOwners
    """The owners that this incarnation has fenced; shared by all of its acquisitions."""
    handling_lock: AbstractContextManager[object]
    """Held while records are handled: concurrent acquisitions take turns, which leaves time for the loop's thread."""
    deadline: float
    """For steps 1 to 4, on `time.monotonic()`; it is extended while reading makes progress."""
    stall_s: float
    """How long reading may make no progress."""
    cancelled: Callable[[], bool]
    skipped: Callable[[str, str], None]
    """Counts a record that cannot be decoded: topic, reason."""
    claimed: bool = False
    released: dict[int, int] = field(default_factory=dict)
    _acquisition_deadline: AcquisitionDeadline = field(init=False, repr=False)
    _former_owners: FormerOwners = field(init=False, repr=False)
    _last_claim: LastClaim = field(default_factory=LastClaim, init=False, repr=False)
    _claimants: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    """By topic: who wrote the last barrier before the one of this attempt."""
    _refusal: KafkaError | None = field(default=None, init=False, repr=False)
    """Why Kafka did not take a record of step 4."""

    @property
    def former(self) -> str | None:
        """The incarnation that owned the shard before, once step 3 is done; None if it was released or never owned."""
        return self._last_claim.last

    def acquire(self) -> Acquired:
        """Acquire the shard, or AcquireError.

        1. A producer with the transactional id `<prefix>owner.<s>` is initialised: any other acquirer is fenced.
        2. owners[s] is read under read_committed as far as it goes.
        3. If the last record is of another incarnation and not released, that one's lane ids are fenced, once for
           all of its shards. 2 and 3 are repeated until the end offset that read_uncommitted gives has been read.
        4. The producer of step 1 writes one Kafka transaction: the owner record, whose offset is the real end for 2 and
           3, then a barrier in half, op and parked; and commits it.
        5. half, op and parked are folded from their cursors under read_committed up to these barriers.
        6. The caller serves what is returned.

        Raises AcquireError: at any step; nothing is served then.
        """
        started = time.monotonic()
        producer: TransactionalProducer | None = None
        reader: Reader | None = None
        try:
            producer = self._fence_acquirers()
            reader = Reader(self.config, self.handling_lock, **_CONSUMER_OVERRIDES)
            self._acquisition_deadline = AcquisitionDeadline(
                until=self.deadline, stall_s=self.stall_s, reader=reader, cancelled=self.cancelled
            )
            self._acquisition_deadline.check("fencing other acquirers")
            self._fence_former_owners(reader)
            self._acquisition_deadline.check("fencing the former owner")
            barriers = self._claim(producer)
            # A fold can take long, and many can run at once, so release the producer first.
            producer.abandon()
            acquired = self._fold(reader, barriers)
        except FormerOwnerUnknownError as error:
            raise AcquireError("reading the owner records", str(error), remedy=error.remedy) from error
        except ProducerFailedError as error:
            raise AcquireError(error.step, str(error), remedy=self._remedy(error.code), fenced=error.fenced) from error
        except (KafkaException, HalfwayError, TimeoutError) as error:
            cause = kafka_error(error)
            remedy = self._remedy(None if cause is None else cause.code())
            raise AcquireError("reading", str(cause or error) or "no answer in time", remedy=remedy) from error
        finally:
            if producer is not None:
                producer.abandon()
            if reader is not None:
                reader.close()
        log.info(
            "shards_acquired", shards=[self.shard], seconds=round(time.monotonic() - started, 3), records=reader.records
        )
        return acquired

    def _remedy(self, code: int | None) -> str | None:
        return CLOCK if code == KafkaError.INVALID_TIMESTAMP else explained(code, self.config)

    # --- step 1

    def _fence_acquirers(self) -> TransactionalProducer:
        """Step 1: initialise the owner producer."""
        [producer] = initialised(
            self.config, [f"{self.config.prefix}owner.{self.shard}"], self.deadline, self.cancelled
        )
        return producer

    # --- steps 2 and 3

    def _fence_former_owners(self, reader: Reader) -> None:
        self._former_owners = FormerOwners(
            config=self.config,
            reader=reader,
            acquisition_deadline=self._acquisition_deadline,
            count=self.skipped,
            released=self.released,
            fences=self.fences,
        )
        self._last_claim = self._former_owners.fence_all([self.shard])[self.shard]

    # --- step 4

    def _claim(self, producer: TransactionalProducer) -> dict[str, int]:
        """Step 4: commit the owner record and the barriers; return the barriers' offsets by topic."""
        offsets: dict[str, int] = {}
        now = time.time_ns() // 1_000_000
        fenced = self.fences.names
        producer.begin()
        try:
            self._produce_claim(producer, now, offsets)
            self._fence_hidden(producer, offsets, fenced)
            self._produce_barriers(producer, now, offsets)
        except (KafkaException, BufferError) as error:
            raise producer.failure("claiming", error) from error
        producer.commit(max(1.0, min(self.stall_s, self._acquisition_deadline.deadline - time.monotonic())))
        barriers = {topic: offsets.get(topic, -1) for topic in self._folded_topics}
        if min(barriers.values()) < 0:
            raise ProducerFailedError("claiming", "the offsets of the barriers are not known")
        self.claimed = True
        return barriers

    def _fence_hidden(
        self, producer: TransactionalProducer, offsets: Mapping[str, int], fenced: Collection[str]
    ) -> None:
        """Fence an owner whose record steps 2 and 3 were not shown, now that the owner record has its place.

        Raises AcquireError: it was not among `fenced`, the owners fenced before that record was written. So its release
        may stand behind the record, and would hide it from the next owner: the next attempt writes a later one.
        """
        if not producer.flush(self._acquisition_deadline.deadline, self.cancelled):
            self._acquisition_deadline.check_wanted("claiming")
            raise ProducerFailedError("claiming", "the owner record was not taken in time")
        if self._refusal is not None:
            raise KafkaException(self._refusal)
        offset = offsets.get(self.config.owners_topic, -1)
        if offset < 0:
            raise ProducerFailedError("claiming", "the offset of the owner record is not known")
        hidden = self._former_owners.fence_before(self.shard, offset)
        if hidden.known:
            log.warning("former_owner_was_hidden", shard=self.shard, incarnation=hidden.last)
            self._last_claim = hidden
            if hidden.last is not None and hidden.last not in fenced:
                raise AcquireError("claiming", f"{hidden.last} owned the shard, and is fenced only now")

    def _produce_claim(self, producer: TransactionalProducer, now: int, offsets: dict[str, int]) -> None:
        """Produce the owner record; `offsets` gets its place on delivery."""
        shard, config = self.shard, self.config
        owner = Owner(
            shard=shard, incarnation=self.incarnation, lane_ids=self.lane_ids, url=config.instance_url, acquired_at=now
        )
        producer.produce(
            config.owners_topic,
            encode_owner(owner),
            owner_key(shard),
            shard,
            on_delivery=self._noted_in(offsets),
            timestamp=now,
            headers=record_headers(KIND_OWNER, "", "acquired"),
        )

    def _produce_barriers(self, producer: TransactionalProducer, now: int, offsets: dict[str, int]) -> None:
        """Produce the barriers; `offsets` gets the place of each on delivery."""
        barrier = encode_barrier(Barrier(incarnation=self.incarnation, at=now))
        headers, noted = record_headers(KIND_BARRIER, "", "acquired"), self._noted_in(offsets)
        for topic in self._folded_topics:
            producer.produce(topic, barrier, BARRIER_KEY, self.shard, on_delivery=noted, timestamp=now, headers=headers)

    def _noted_in(self, offsets: dict[str, int]) -> Callable[[Any, Any], None]:
        """Return a delivery callback that notes offsets by topic, and why a record was refused."""

        def report(error: Any, message: Any) -> None:
            if error is None:
                offsets[message.topic()] = message.offset()
            else:
                self._refusal = error

        return report

    # --- step 5

    def _fold(self, reader: Reader, barriers: Mapping[str, int]) -> Acquired:
        """Step 5: fold from the cursors up to the barriers: parked first, then half and op together."""
        config, shard = self.config, self.shard
        state = ShardState(shard, horizon_ms=round(config.outcome_horizon_s * 1000))
        state.acquired_at = time.time_ns() // 1_000_000
        handle = self._fold_into(state, barriers)
        horizon = state.acquired_at - round(config.outcome_horizon_s * 1000)
        starts, state.op_recent, state.ends = self._start_offsets(reader, barriers, horizon - BORN_AFTER_END_MS)
        state.op_start = max(0, starts[config.op_topic])
        # If a release before used the id of a parked transaction again, the fold must know first that the earlier use
        # has ended.
        for topics in ((config.parked_topic,), (config.half_topic, config.op_topic)):
            reader.add({(topic, shard): starts[topic] for topic in topics})
            self._read_up_to({(topic, shard): barriers[topic] + 1 for topic in topics}, reader, handle)
            self._demand_fenced()
        state.barrier = barriers[config.half_topic]
        state.half_tail = state.barrier + 1
        # If there was nothing to read in op, its cursor must not go back to the beginning.
        state.op_tail = max(state.op_tail, barriers[config.op_topic] + 1)
        state.complete_fold(horizon)
        return Acquired(
            shard=shard, state=state, barrier=barriers[config.half_topic], released_at=self.released.get(shard)
        )

    def _demand_fenced(self) -> None:
        """Fence who wrote the last barrier, if owners names somebody else: Kafka has lost the last owner record.

        Raises AcquireError: it is fenced only now, and may have written behind the barriers of this attempt.
        """
        known = self._last_claim.lane_ids  # none of a release of an earlier version: it may be anybody's
        for name in set(self._claimants.values()):
            ids = lane_ids(self.config.prefix, name)
            if known and name not in self.fences and set(known).isdisjoint(ids):
                self._former_owners.fence({name: ids})
                self._last_claim.record(name, ids)
                raise AcquireError("folding", f"Kafka has lost the owner record of {name}, which is fenced only now")

    def _read_up_to(
        self, targets: Mapping[Place, int], reader: Reader, handle: Callable[[Place, Message], None]
    ) -> None:
        """Read until the targets are reached; there is no time limit while reading makes progress."""
        started = time.monotonic()
        while not reader.read_until(targets, time.monotonic() + 1, handle):
            if self._acquisition_deadline.is_stalled(since=started):
                stuck = sorted(place for place, end in targets.items() if reader.positions[place] < end)
                names = ", ".join(f"{topic}-{number}" for topic, number in stuck)
                raise AcquireError(
                    "folding",
                    f"reading {names} makes no progress: Kafka does not answer, or a Kafka transaction hangs there",
                )
            self._acquisition_deadline.check_wanted("folding")

    def _start_offsets(
        self, reader: Reader, barriers: Mapping[str, int], since: int
    ) -> tuple[dict[str, int], int, EndCounts]:
        """Return where to start, where the horizon begins in op (at the time `since`), and the ends that were counted.

        half starts at its cursor, op at the lower of cursor and horizon, parked at the beginning.
        """
        config, shard = self.config, self.shard
        cursor = self.cursors.load([shard]).get(shard)
        op = config.op_topic, shard
        horizon = reader.first_since({op: since}, _REQUEST_S)[op]
        starts, ends = dict.fromkeys(self._folded_topics, OFFSET_BEGINNING), EndCounts()
        # From a cursor past the end nothing would be read.
        if cursor is not None and cursor.half <= barriers[config.half_topic] and cursor.op <= barriers[config.op_topic]:
            starts[config.half_topic] = cursor.half
            starts[config.op_topic] = min(cursor.op, horizon)
            ends = cursor.ends or ends
        elif cursor is not None:
            log.warning("cursors_skipped", shard=shard, half=cursor.half, op=cursor.op, reason="beyond the end")
            self.skipped(config.cursors_group, "beyond_end")
        return starts, horizon, ends

    def _demand_no_newer(self, message: Message, error: UndecodableError) -> None:
        try:
            demand_no_newer(message, error, self.config.skip_records)
        except NewerReleaseError as newer:
            raise AcquireError("folding", str(newer), remedy=newer.remedy, outdated=True) from newer

    @property
    def _folded_topics(self) -> tuple[str, str, str]:
        return self.config.half_topic, self.config.op_topic, self.config.parked_topic

    def _fold_into(self, state: ShardState, barriers: Mapping[str, int]) -> Callable[[Place, Message], None]:
        half, op, shards = self.config.half_topic, self.config.op_topic, self.config.shards
        payloads = _Payloads(state, self.config.payload_cache_bytes // shards)
        skip = self.config.skip_records

        def handle(place: Place, message: Message) -> None:
            offset = message.offset()
            if offset is None:
                return
            topic = place[0]
            try:
                if message.key() == BARRIER_KEY:
                    if offset < barriers[topic]:
                        self._claimants[topic] = barrier_in(message).incarnation
                elif topic == half:
                    key, record = half_in(message, shards)
                    state.apply_half(offset, key, record)
                    payloads.note(offset, key, record)
                elif topic == op:
                    state.apply_op(offset, op_in(message, shards))
                else:
                    state.apply_parked(offset, *parked_in(message, shards))
            except UndecodableError as error:
                self._demand_no_newer(message, error)
                note_skipped(message, error, self.skipped)
                if topic == half and (name := overwritten_id(message, shards, skip)) is not None:
                    state.apply_half(offset, name, FOREIGN)

        return handle


class _Payloads:
    """Keeps the halves that a fold has read and that are pending, up to a number of bytes.

    Without them they would have to be read again for their end, and could not be written again if Kafka lost them.
    """

    def __init__(self, state: ShardState, most: int) -> None:
        self._state = state
        self._left = most

    def note(self, offset: int, name: str, half: Half | None) -> None:
        """Take a record of half[s] after it was applied."""
        payloads = self._state.payloads
        if (before := payloads.pop(name, None)) is not None:
            self._left += before.size
        entry = self._state.halves.get(name)
        if half is not None and entry is not None and entry.offset == offset and entry.size <= self._left:
            payloads[name] = half
            self._left -= entry.size
