"""The lane: the one writer of what becomes of a transaction after its prepare (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from halfway.coordinator.ports import LaneAnswer, LaneAnswers, LaneWrite
from halfway.coordinator.records import Quarantined
from halfway.kafka.clients.threads import OwnedThread
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.lane.quarantine import Quarantine, Route
from halfway.kafka.lane.queue import BatchLimits, LaneQueue, Release
from halfway.kafka.lane.suspect_lane import SuspectLane
from halfway.kafka.lane.transaction import LaneContext, admit, largest_by_topic, still_wanted, write_transaction
from halfway.kafka.records.codec import HEADER_LANE, KIND_OWNER, record_headers
from halfway.kafka.records.lane_records import Encoded, owner_key
from halfway.protocol.errors import HalfwayError, KafkaUnavailableError, NotWrittenError

log = structlog.get_logger()

_IDLE_S: Final = 1.0
_METADATA_PAUSE_S: Final = 0.2

OnFailure = Callable[[ProducerFailedError, Sequence[LaneWrite]], None]
"""Ends the incarnation. It gets the error, and the writes whose outcome is unknown."""


class LaneThread(OwnedThread):
    """One incarnation's lane: a thread, a queue, and two producers that take turns strictly.

    It ends when the queue is closed, or with the first failure.
    """

    def __init__(
        self,
        context: LaneContext,
        producers: tuple[TransactionalProducer, TransactionalProducer],
        suspects: SuspectLane,
        on_failure: OnFailure,
    ) -> None:
        """Take over initialised producers."""
        super().__init__(self._run, "halfway-lane")
        config = context.config
        self._context = context
        self._producers = producers
        self._suspects = suspects
        self._on_failure = on_failure
        self._turn = 0
        self._busy_since: float | None = None
        self.under_way: Sequence[LaneWrite] = ()
        """The writes under way in the thread, for the caller that ends a lane that hangs."""
        self.queue = LaneQueue(
            config.lane_queue,
            config.lane_queue_bytes,
            BatchLimits(ends=config.lane_max_ends, payload_bytes=config.lane_max_bytes),
        )

    def busy_for(self) -> float:
        """Return for how many seconds the lane has been at one batch, 0 while it waits for work."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        try:
            while not self.queue.closed:
                taken = self.queue.take(_IDLE_S)
                self._busy_since = None if taken is None else time.monotonic()
                if taken is None:
                    for producer in self._producers:
                        producer.idle()
                elif isinstance(taken, Release):
                    self._release(taken)
                else:
                    self.under_way = taken
                    self.commit_batch(taken)
                self.under_way = ()
                self._busy_since = None
                for producer in self._producers:
                    producer.demand_unworn()
        except ProducerFailedError as error:
            self._on_failure(error, self.under_way)
        except Exception as error:
            log.exception("lane_thread_failed")
            self._on_failure(ProducerFailedError("lane", repr(error)), self.under_way)
        finally:
            self._busy_since = None
            for producer in self._producers:
                producer.abandon()

    def commit_batch(self, batch: Sequence[LaneWrite]) -> None:
        """Write all ends that were waiting as one Kafka transaction (the steps of docs/protocol.md#end-the-lane).

        Before it: suspects go to a lane of their own, writes that may no longer be written are dropped, those with a
        missing topic or too large a record are refused, and all is encoded, so that nothing below fails half way.

        1. begin, with the producer whose turn it is: the other one's markers may still be under way;
        2. for each commit, the real messages;
        3. the op marker to op[s];
        4. the tombstone (or record) to half[s] and to parked[s];
        5. commit, and only then answer the callers.

        Raises ProducerFailedError: at any step, for any reason. The incarnation ends, and the fold shows the outcome of
        the batch. Neither producer is used again.
        """
        refused: list[LaneAnswer] = []
        producer = self._producers[self._turn]
        admitted = self._admitted(producer, self._trusted(batch, refused), refused)
        if refused:
            self._context.loop.post(self._context.answer, refused)
        if not admitted:
            return
        self._turn ^= 1
        try:
            transaction = write_transaction(producer, self._context.config, admitted)
        except ProducerFailedError as failure:
            self._suspect(admitted, failure)
            raise
        if self._context.quarantine:  # a suspect that was to be rolled back needs no lane of its own
            self._context.quarantine.clear_ids(one.write.id for one in admitted if one.write.state.ended)
        transaction.answer(self._context)

    def _trusted(self, batch: Sequence[LaneWrite], answers: list[LaneAnswer]) -> Sequence[LaneWrite]:
        """Return the writes that are not suspect; suspects go to their own lane, or are refused during a back-off."""
        quarantine = self._context.quarantine
        if not quarantine:
            return batch
        now = time.monotonic()
        trusted: list[LaneWrite] = []
        for write in batch:
            route = quarantine.route(write.id, largest_by_topic(write), now)
            if route is Route.LANE:
                trusted.append(write)
            elif isinstance(route, HalfwayError):
                answers.append((write, route))
            else:
                self._suspects.put(write, answers)
        return trusted

    def _admitted(
        self, producer: TransactionalProducer, batch: Sequence[LaneWrite], answers: list[LaneAnswer]
    ) -> list[Encoded]:
        """Admit a batch; retry while Kafka returns no metadata, and drop the writes whose deadline passes meanwhile."""
        started = time.monotonic()
        while True:
            try:
                return admit(self._context, batch, answers, producer.shows)
            except KafkaUnavailableError as error:
                if self.queue.closed or time.monotonic() - started > self._context.config.lane_stall_s:
                    self._context.loop.post(self._context.answer, answers)
                    raise ProducerFailedError("metadata", str(error)) from error
                batch = still_wanted(self._context, batch, answers)
                if answers:
                    self._context.loop.post(self._context.answer, list(answers))
                    answers.clear()
                time.sleep(_METADATA_PAUSE_S)

    def _suspect(self, admitted: Sequence[Encoded], failure: ProducerFailedError) -> None:
        """Mark the topics and ids of a failed batch as suspect, unless the producer was fenced."""
        if failure.fenced:
            return
        writes = [encoded.write for encoded in admitted]
        topics = {message.topic for write in writes for message in write.messages}
        self._context.quarantine.suspect(topics, (write.id for write in writes), time.monotonic())

    def _release(self, release: Release) -> None:
        """Release shards: one Kafka transaction with the tombstones of their owner records and nothing else."""
        if not release.done.set_running_or_notify_cancel():
            return  # its time was over before it could begin
        if any(self._suspects.works_for(shard) for shard in release.shards):
            release.done.set_result(False)
            return
        producer = self._producers[self._turn]
        self._turn ^= 1
        try:
            producer.begin()
            self._produce_releases(producer, release.shards)
            producer.commit(self._context.config.lane_stall_s)
        except Exception as error:
            failure = error if isinstance(error, ProducerFailedError) else producer.failure("release", error)
            release.done.set_exception(failure)
            raise failure from error
        release.done.set_result(True)

    def _produce_releases(self, producer: TransactionalProducer, shards: Sequence[int]) -> None:
        topic = self._context.config.owners_topic
        headers = [*record_headers(KIND_OWNER, "", "released"), (HEADER_LANE, producer.transactional_id)]
        for shard in shards:
            producer.produce(topic, None, owner_key(shard), shard, headers=headers)


class KafkaLane:
    """The port `service.ports.Lane`: the same object over all incarnations."""

    def __init__(self) -> None:
        """Start without an incarnation: nothing can be written yet."""
        self.quarantine = Quarantine()
        """What incarnations have learnt of suspects."""
        self._thread: LaneThread | None = None
        self._shards: set[int] = set()
        self._answered: Callable[[LaneAnswers], None] = lambda _: None

    def attach(self, thread: LaneThread, shards: set[int]) -> None:
        """Send writes to this incarnation's lane from now on."""
        self._thread, self._shards = thread, shards

    def detach(self) -> None:
        """Have no incarnation: every write is refused."""
        self._thread, self._shards = None, set()

    def quarantined(self, most: int) -> Sequence[Quarantined]:
        """Return what is kept apart; see `service.ports.Lane.quarantined`."""
        return self.quarantine.shown(time.monotonic(), time.time(), most)

    def listen(self, answered: Callable[[LaneAnswers], None]) -> None:
        self._answered = answered

    def answer(self, answers: LaneAnswers) -> None:
        self._answered(answers)

    def submit(self, writes: Sequence[LaneWrite]) -> None:
        """Queue writes for the next Kafka transaction; see `service.ports.Lane.submit`."""
        thread, shards = self._thread, self._shards
        owned = [write for write in writes if write.shard in shards]
        refused: list[LaneAnswer] = []
        if len(owned) < len(writes):
            refused += [
                (write, NotWrittenError(f"{write.id}: shard {write.shard} is not owned here", id=write.id))
                for write in writes
                if write.shard not in shards
            ]
        if thread is not None and owned:
            refused += thread.queue.put_all(owned)
        if refused:
            self._answered(refused)
