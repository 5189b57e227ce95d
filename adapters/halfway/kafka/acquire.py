"""Acquiring shards: fencing whoever owned them, and folding their log (DESIGN section 5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaException, Message

from halfway.domain.errors import HalfwayError
from halfway.domain.records import FOREIGN, Barrier, Owner
from halfway.domain.shard import ShardState
from halfway.kafka.codec import (
    BARRIER_KEY,
    KIND_BARRIER,
    KIND_OWNER,
    UndecodableError,
    encode_barrier,
    encode_owner,
    record_headers,
)
from halfway.kafka.config import KafkaConfig
from halfway.kafka.former_owners import FormerOwners, FormerOwnerUnknownError
from halfway.kafka.intake import (
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
from halfway.kafka.lane_producer import ProducerFailedError, TransactionalProducer, initialised
from halfway.kafka.partitions import PartitionReader, Place
from halfway.kafka.patience import AcquireError, Patience
from halfway.service.ports import Cursors

log = structlog.get_logger()

_ASK_S: Final = 10.0
_LOOK_S: Final = 0.5
_SKEW_MS: Final = 60_000
"""How far the clocks of instances may differ: op is read from that much before the horizon."""
_PARALLEL: Final = 8
# A fetch that waits for one partition's next record holds up partitions that have just been added.
_QUICK: Final = {"fetch.wait.max.ms": 20}


class CursorLoader(Protocol):
    """Where the cursors are kept."""

    def load(self, shards: Sequence[int]) -> Mapping[int, Cursors]:
        """Return the committed cursors of shards, none for a shard that never had any; blocks."""


@dataclass(frozen=True, kw_only=True)
class Acquired:
    """A shard that this incarnation owns, and its fold up to the barrier at `barrier` (an offset in half[s])."""

    shard: int
    state: ShardState
    barrier: int
    released_at: int | None = None
    """When its former owner gave it back (ms since the epoch, by that one's clock); None where it did not."""


@dataclass(kw_only=True)
class Acquisition:
    """One attempt to acquire shards for one incarnation, on a thread of its own; `acquire` is called once.

    `claimed` grows with each shard whose owner record certainly names this incarnation, whatever happens afterwards:
    one that is not served must be released, or its next owner fences this incarnation. A claim that is not certain must
    not be released: the tombstone could stand over another's owner record.
    """

    config: KafkaConfig
    incarnation: str
    lane_ids: tuple[str, ...]
    shards: Sequence[int]
    cursors: CursorLoader
    deadline: float
    """For steps 1 to 4, on `time.monotonic()`; it moves on as long as reading moves."""
    cancelled: Callable[[], bool]
    skipped: Callable[[str, str], None]
    """Counts a record that cannot be decoded: topic, reason."""
    claimed: set[int] = field(default_factory=set)
    released: dict[int, int] = field(default_factory=dict)
    _patience: Patience = field(init=False, repr=False)

    def acquire(self) -> list[Acquired]:
        """Acquire the shards, side by side; all of them or AcquireError.

        1. For each shard a producer with the transactional id `<prefix>owner.<s>` is initialised: whoever is acquiring
           it is fenced.
        2. owners[s] is read under read_committed as far as it goes.
        3. Where the last record is of another incarnation and not released, that one's lane ids are fenced. 2 and 3 are
           repeated until the end offset that read_uncommitted gives has been read.
        4. Each producer of step 1 commits one Kafka transaction: the owner record, and a barrier in half, op, parked.
        5. half, op and parked are folded from their cursors under read_committed up to these barriers.
        6. The caller serves what is returned.

        Several shards share the fences of step 3 (an incarnation's lane ids are the same for all its shards) and the
        consumers; for each shard the order of the steps is the one above.

        Raises:
            AcquireError: at any step; nothing is served then.

        """
        started = time.monotonic()
        producers: list[TransactionalProducer] = []
        reader: PartitionReader | None = None
        try:
            producers = self._fence_acquirers()
            reader = PartitionReader(self.config, **_QUICK)
            self._patience = Patience(
                until=self.deadline, stall_s=self.config.lane_stall_s, reader=reader, cancelled=self.cancelled
            )
            self._patience.check("fencing other acquirers")
            self._settle_former_owners(reader)
            self._patience.check("fencing the former owner")
            barriers = self._claim(producers)
            acquired = self._fold(reader, barriers)
        except FormerOwnerUnknownError as error:
            raise AcquireError("reading the owner records", str(error)) from error
        except ProducerFailedError as error:
            raise AcquireError(error.step, str(error), fenced=error.fenced) from error
        except (KafkaException, HalfwayError, TimeoutError) as error:
            raise AcquireError("reading", str(error) or "no answer in time") from error
        finally:
            for producer in producers:
                producer.abandon()
            if reader is not None:
                reader.close()
        log.info(
            "shards_acquired",
            shards=list(self.shards),
            seconds=round(time.monotonic() - started, 3),
            records=reader.records,
        )
        return acquired

    # --- step 1

    def _fence_acquirers(self) -> list[TransactionalProducer]:
        """Step 1: initialise the owner producers, one for each shard."""
        ids = [f"{self.config.prefix}owner.{shard}" for shard in self.shards]
        return initialised(self.config, ids, self.deadline, self.cancelled)

    # --- steps 2 and 3

    def _settle_former_owners(self, reader: PartitionReader) -> None:
        FormerOwners(
            config=self.config,
            incarnation=self.incarnation,
            reader=reader,
            patience=self._patience,
            count=self.skipped,
            released=self.released,
        ).settle(self.shards)

    # --- step 4

    def _claim(self, producers: Sequence[TransactionalProducer]) -> dict[Place, int]:
        """Step 4: commit owner records and barriers; return where the barriers stand."""
        barriers: dict[Place, int] = {}
        with ThreadPoolExecutor(_PARALLEL, "halfway-claim") as pool:
            for found in pool.map(self._claim_one, self.shards, producers):
                barriers.update(found)
        return barriers

    def _claim_one(self, shard: int, producer: TransactionalProducer) -> dict[Place, int]:
        barriers: dict[Place, int] = {}
        producer.begin()
        try:
            topics = self._produce_claim(shard, producer, barriers)
        except (KafkaException, BufferError) as error:
            raise ProducerFailedError.of("claiming", error) from error
        producer.commit(max(1.0, min(self.config.lane_stall_s, self._patience.deadline - time.monotonic())))
        if len(barriers) != len(topics) or min(barriers.values()) < 0:
            raise ProducerFailedError("claiming", "the offsets of the barriers are not known")
        self.claimed.add(shard)
        return barriers

    def _produce_claim(
        self, shard: int, producer: TransactionalProducer, barriers: dict[Place, int]
    ) -> tuple[str, ...]:
        """Produce the owner record and a barrier to each of the topics returned; reports put them into `barriers`."""
        config, now = self.config, time.time_ns() // 1_000_000
        owner = Owner(
            shard=shard,
            incarnation=self.incarnation,
            lane_ids=self.lane_ids,
            url=config.instance_url,
            acquired_at=now,
        )
        barrier = encode_barrier(Barrier(incarnation=self.incarnation, at=now))
        headers = record_headers(KIND_BARRIER, "", "acquired")

        def report(error: Any, message: Any) -> None:
            if error is None:
                barriers[message.topic(), shard] = message.offset()

        producer.produce(
            config.owners_topic,
            encode_owner(owner),
            owner_key(shard),
            shard,
            timestamp=now,
            headers=record_headers(KIND_OWNER, "", "acquired"),
        )
        topics = self._folded
        for topic in topics:
            producer.produce(topic, barrier, BARRIER_KEY, shard, on_delivery=report, timestamp=now, headers=headers)
        return topics

    # --- step 5

    def _fold(self, reader: PartitionReader, barriers: Mapping[Place, int]) -> list[Acquired]:
        """Step 5: fold from the cursors up to the barriers: parked first, then half and op side by side."""
        horizon_ms = round(self.config.outcome_horizon_s * 1000)
        states = {shard: ShardState(shard, horizon_ms=horizon_ms) for shard in self.shards}
        handle = self._fold_into(states)
        starts = self._starts(reader, barriers)
        # What was parked in an earlier life of an id must be known to be over before its later life is read.
        for topics in ((self.config.parked_topic,), (self.config.half_topic, self.config.op_topic)):
            reader.add({place: offset for place, offset in starts.items() if place[0] in topics})
            self._read_up_to({place: at + 1 for place, at in barriers.items() if place[0] in topics}, reader, handle)
        acquired: list[Acquired] = []
        for shard, state in states.items():
            barrier = barriers[self.config.half_topic, shard]
            state.advance_tail(barrier + 1)
            # Where op had nothing to read, its cursor must not go back to the beginning.
            state.op_tail = max(state.op_tail, barriers[self.config.op_topic, shard] + 1)
            state.settle()
            acquired.append(Acquired(shard=shard, state=state, barrier=barrier, released_at=self.released.get(shard)))
        return acquired

    def _read_up_to(
        self, targets: Mapping[Place, int], reader: PartitionReader, handle: Callable[[Place, Message], None]
    ) -> None:
        """Read on until the targets are reached; a long log may take its time, as long as it moves."""
        began = time.monotonic()
        while not reader.read_until(targets, time.monotonic() + 1, handle):
            if self._patience.is_stalled(since=began):
                short = sorted(place for place, end in targets.items() if reader.positions[place] < end)
                held = ", ".join(f"{topic}-{number}" for topic, number in short)
                raise AcquireError(
                    "folding",
                    f"nothing more can be read of {held}: Kafka does not answer, or a Kafka transaction is open there "
                    "that nobody ends (kafka-transactions.sh find-hanging tells which)",
                )
            self._patience.check_wanted("folding")

    def _starts(self, reader: PartitionReader, barriers: Mapping[Place, int]) -> dict[Place, int]:
        """Tell from where to read: half at its cursor, op at the lower of its cursor and the horizon, all of parked."""
        config = self.config
        cursors = self.cursors.load(self.shards)
        since = time.time_ns() // 1_000_000 - round(config.outcome_horizon_s * 1000) - _SKEW_MS
        horizon = reader.first_since({(config.op_topic, shard): since for shard in self.shards}, _ASK_S)
        starts: dict[Place, int] = {}
        for shard in self.shards:
            at_half, at_op, at_parked = ((topic, shard) for topic in self._folded)
            cursor = cursors.get(shard)
            starts |= dict.fromkeys((at_half, at_op, at_parked), OFFSET_BEGINNING)
            # A cursor past the end would have nothing read at all.
            if cursor is not None and cursor.half <= barriers[at_half] and cursor.op <= barriers[at_op]:
                starts[at_half] = cursor.half
                starts[at_op] = min(cursor.op, horizon[at_op])
            elif cursor is not None:
                log.warning("cursors_skipped", shard=shard, half=cursor.half, op=cursor.op, reason="beyond the end")
                self.skipped(config.cursors_group, "beyond_end")
        return starts

    def _demand_no_newer(self, message: Message, error: UndecodableError) -> None:
        try:
            demand_no_newer(message, error)
        except NewerReleaseError as newer:
            raise AcquireError("folding", str(newer), outdated=True) from newer

    @property
    def _folded(self) -> tuple[str, str, str]:
        return self.config.half_topic, self.config.op_topic, self.config.parked_topic

    def _fold_into(self, states: Mapping[int, ShardState]) -> Callable[[Place, Message], None]:
        half, op, shards = self.config.half_topic, self.config.op_topic, self.config.shards

        def handle(place: Place, message: Message) -> None:
            offset = message.offset()
            if offset is None:
                return
            topic, state = place[0], states[place[1]]
            try:
                if message.key() == BARRIER_KEY:
                    barrier_in(message)
                elif topic == half:
                    state.apply_half(offset, *half_in(message, shards))
                elif topic == op:
                    state.apply_op(offset, op_in(message, shards))
                else:
                    state.apply_parked(offset, *parked_in(message, shards))
            except UndecodableError as error:
                self._demand_no_newer(message, error)
                note_skipped(message, error, self.skipped)
                if topic == half and (name := overwritten_id(message, shards)) is not None:
                    state.apply_half(offset, name, FOREIGN)

        return handle
