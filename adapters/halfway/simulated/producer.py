"""A producer as librdkafka's: queues, batches, sequences, transactions, delivery reports and fatal errors."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.protocol.ids import partition_for_key
from halfway.simulated.client import Client, Host, failure
from halfway.simulated.cluster import MAX_TRANSACTION_TIMEOUT_MS
from halfway.simulated.log import APPEND_TIME, CREATE_TIME, Batch, Headers, NewRecord, Place, RefusedError

Report = Callable[[KafkaError | None, Message], None]
State = Literal["new", "ready", "begun", "failed", "ending"]

_RETRY_S: Final = 0.02
_BATCH_RECORDS: Final = 10_000
_SEQUENCES: Final = 2**31
_ANY: Final = -1
_RETRIABLE: Final = frozenset(
    {
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_LEADER_FOR_PARTITION,
    }
)
_FENCED: Final = frozenset({KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
_FATAL: Final = frozenset(
    {
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)


@dataclass(slots=True, kw_only=True)
class _Queued:
    """A record that waits to be sent; its place is known only once its topic is."""

    topic: str
    partition: int
    record: NewRecord
    report: Report | None
    until: float
    unknown_until: float
    """Until when its topic may be unknown."""
    sent: int | None = None
    """The first sequence of the batch that it may have been appended with: the answer was lost."""


class SimulatedProducer(Client):
    """The methods of `confluent_kafka.Producer` that halfway and its tests use, with the same errors."""

    def __init__(self, host: Host, properties: Mapping[str, Any]) -> None:
        """Connect; a producer without a transactional id gets its producer id at once."""
        super().__init__(host, properties)
        self._id: str | None = properties.get("transactional.id")
        self._timeout_s = self._number("message.timeout.ms", 60_000 if self._id else 300_000) / 1000
        self._linger_s = self._number("linger.ms", 5) / 1000
        self._most_bytes = self._number("batch.size", 1_000_000)
        self._queue: dict[Place, deque[_Queued]] = {}
        self._homeless: deque[_Queued] = deque()
        """Records of topics that this client has not seen."""
        self._count = 0
        self._events: deque[Callable[[], None]] = deque()
        self._shown: dict[str, int] = {}
        self._sequences: dict[Place, int] = {}
        self._state: State = "new"
        self._added: set[Place] = set()
        self._fatal: KafkaError | None = None
        self._abortable: KafkaError | None = None
        self._is_pumping_later = False
        self._in_flight: set[Place] = set()
        """Partitions with a batch on the way: the next one waits for its answer."""
        self._needs_epoch = False
        """Sequences have a gap: nothing can be sent with this epoch any more."""
        with self._schedule:
            self._producer, self._epoch = (-1, -1) if self._id else self._cluster.transactions.new_producer()

    def __len__(self) -> int:
        """Return the records that wait and the events that were not served."""
        return self._count + len(self._events)

    def __bool__(self) -> bool:
        return True

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return metadata, and remember the numbers of partitions."""
        found = super().list_topics(topic, timeout)
        self._shown |= {name: len(one.partitions) for name, one in found.topics.items() if one.error is None}
        return found

    # --- records

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = _ANY,
        callback: Report | None = None,
        on_delivery: Report | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Queue a record, and send it at once unless it lingers."""
        with self._schedule:
            self._demand_that_it_may_produce()
            record = NewRecord(_bytes(key), _bytes(value), _pairs(headers), timestamp or self._schedule.clock.now_ms())
            if record.size > self._number("message.max.bytes", 1_000_000):
                raise failure(
                    KafkaError.MSG_SIZE_TOO_LARGE, "Unable to produce message: Broker: Message size too large"
                )
            if self._count >= self._number("queue.buffering.max.messages", 100_000):
                raise BufferError("Local: Queue full")
            now = self._schedule.clock.monotonic()
            unknown_s = self._number("topic.metadata.propagation.max.ms", 30_000) / 1000
            queued = _Queued(
                topic=topic,
                partition=partition,
                record=record,
                report=callback or on_delivery,
                until=now + self._timeout_s,
                unknown_until=now + min(unknown_s, self._timeout_s),
            )
            if topic in self._shown and partition >= self._shown[topic]:
                raise failure(KafkaError._UNKNOWN_PARTITION, "Unable to produce message: Local: Unknown partition")
            self._count += 1
            if topic in self._shown:
                self._place(queued)
            else:
                self._homeless.append(queued)
            if self._linger_s:
                self._pump_later(self._linger_s)
            else:
                self._start_pumping()

    def _demand_that_it_may_produce(self) -> None:
        if self._fatal is not None:
            raise failure(KafkaError._FATAL, "Unable to produce message: Local: Fatal error")
        if self._id is not None and self._state != "begun":
            raise failure(KafkaError._STATE, "Unable to produce message: Local: Erroneous state")

    def _place(self, queued: _Queued) -> None:
        number, key = queued.partition, queued.record.key
        if number == _ANY:
            partitions = self._shown[queued.topic]
            murmur = self._properties.get("partitioner") == "murmur2_random"
            if key is None or (not key and not murmur):
                number = self._cluster.random.randrange(partitions)
            else:
                number = partition_for_key(key, partitions) if murmur else zlib.crc32(key) % partitions
        self._queue.setdefault((queued.topic, number), deque()).append(queued)

    # --- sending, with the lock

    def wake(self) -> None:
        self._pump()
        super().wake()

    def _pump_later(self, seconds: float) -> None:
        if not self._is_pumping_later:
            self._is_pumping_later = True
            self._schedule.after(seconds, self._pump_now)

    def _start_pumping(self) -> None:
        """Send at once, or as late as the network says."""
        latency_s = self._cluster.latency()
        if latency_s:
            self._schedule.after(latency_s, self._pump)
        else:
            self._pump()

    def _pump_now(self) -> None:
        self._is_pumping_later = False
        self._pump()

    def _pump(self) -> None:
        """Send what can be sent now, and try the rest again soon."""
        now = self._schedule.clock.monotonic()
        self._house(now)
        for place, queue in list(self._queue.items()):
            while (
                queue
                and place not in self._in_flight
                and self._may_send(place, queue[0])
                and self._send_batch(place, queue)
            ):
                pass
            while queue and queue[0].until <= now:
                self._fail(self._take_batch(queue), KafkaError(KafkaError._MSG_TIMED_OUT))
            if not queue:
                self._queue.pop(place, None)
        if self._fatal is not None:
            self._drop_all(KafkaError._PURGE_QUEUE if self._id else KafkaError._FATAL)
        elif self._count:
            self._pump_later(_RETRY_S)

    def _may_send(self, place: Place, first: _Queued) -> bool:
        """Return whether a record can be sent; after a gap that is with another epoch, once no other is in doubt."""
        if self._fatal is not None or self._host.loses_requests or place in self._in_flight:
            return False
        if not self._needs_epoch or first.sent is not None:
            return True
        if self._id is not None or any(queue and queue[0].sent is not None for queue in self._queue.values()):
            return False
        self._producer, self._epoch = self._cluster.transactions.new_producer()
        self._sequences.clear()
        self._needs_epoch = False
        return True

    def _house(self, now: float) -> None:
        """Find the partitions of records whose topics are known by now."""
        waiting, self._homeless = self._homeless, deque()
        for queued in waiting:
            topic = self._cluster.topics.get(queued.topic)
            if topic is not None:
                self._shown[queued.topic] = len(topic.partitions)
            if topic is not None and queued.partition >= len(topic.partitions):
                self._fail([queued], KafkaError(KafkaError._UNKNOWN_PARTITION))
            elif topic is not None:
                self._place(queued)
            elif now >= queued.unknown_until:
                self._fail([queued], KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            else:
                self._homeless.append(queued)

    def _send_batch(self, place: Place, queue: deque[_Queued]) -> bool:
        """Send the first records of a partition together; return whether they are done with."""
        size, sent = 0.0, list[_Queued]()
        for queued in queue:
            size += queued.record.size
            if len(sent) == _BATCH_RECORDS or (sent and size > self._most_bytes) or queued.sent != queue[0].sent:
                break
            sent.append(queued)
        batch = Batch(
            records=[queued.record for queued in sent],
            producer=self._producer,
            epoch=self._epoch,
            sequence=self._sequences.get(place, 0),
            transactional=self._id is not None,
        )
        try:
            if self._id is not None and place not in self._added:
                self._cluster.led(place, "Write")
                self._cluster.transactions.add(self._id, self._producer, self._epoch, place)
                self._added.add(place)
            base = self._cluster.append(place, batch, self._id)
        except RefusedError as refused:
            for queued in sent if refused.in_doubt else ():
                queued.sent = batch.sequence
            return not self._host.loses_answers and self._take_refusal(refused.code, queue, sent)
        for queued in sent:
            queued.sent = batch.sequence
        latency_s = self._cluster.latency()
        if not latency_s:
            return self._acknowledge(place, sent, base)
        self._in_flight.add(place)
        self._schedule.after(latency_s, partial(self._take_answer, place, sent, base))
        return False

    def _take_answer(self, place: Place, sent: list[_Queued], base: int) -> None:
        self._in_flight.discard(place)
        self._acknowledge(place, sent, base)
        self._pump()

    def _acknowledge(self, place: Place, sent: list[_Queued], base: int) -> bool:
        """Report the records of a batch, unless the answer is lost, or they were given up before it came."""
        queue = self._queue.get(place)
        if self._host.loses_answers or not queue or queue[0] is not sent[0]:
            return False
        self._sequences[place] = ((sent[0].sent or 0) + len(sent)) % _SEQUENCES
        for number, queued in enumerate(sent):
            queue.popleft()
            self._report(queued, None, base + number, place[1])
        return True

    @staticmethod
    def _take_batch(queue: deque[_Queued]) -> list[_Queued]:
        """Take the first record, and those that it may have been appended with."""
        taken = [queue.popleft()]
        while queue and queue[0].sent is not None and queue[0].sent == taken[0].sent:
            taken.append(queue.popleft())
        return taken

    def _take_refusal(self, code: int, queue: deque[_Queued], sent: list[_Queued]) -> bool:
        now = self._schedule.clock.monotonic()
        if code in _RETRIABLE or (code == KafkaError.UNKNOWN_TOPIC_OR_PART and now < sent[0].unknown_until):
            return False
        if code in _FENCED:
            self._set_fatal(KafkaError._FENCED if self._id else code)
            return False
        if code in _FATAL:
            self._set_fatal(code)
            return False
        for _ in sent:
            queue.popleft()
        self._fail(sent, KafkaError(code))
        if self._id is not None:
            self._abortable = KafkaError(code, "current transaction must be aborted", False, False, True)
            self._state = "failed"
        return True

    def _report(self, queued: _Queued, error: KafkaError | None, offset: int | None, partition: int) -> None:
        self._count -= 1
        if queued.report is not None:
            record = queued.record
            topic = self._cluster.topics.get(queued.topic)
            appended = topic is not None and topic.settings["message.timestamp.type"] == "LogAppendTime"
            at = (APPEND_TIME if appended else CREATE_TIME, record.timestamp)
            told = {"error": error, "timestamp": (0, -1)} if error is not None else {"offset": offset, "timestamp": at}
            message = Message(topic=queued.topic, partition=partition, key=record.key, value=record.value, **told)
            self._events.append(partial(queued.report, error, message))
        self._condition.notify_all()

    def _fail(self, records: list[_Queued], error: KafkaError) -> None:
        for queued in records:
            self._needs_epoch = self._needs_epoch or queued.sent is not None
            self._report(queued, error, None, queued.partition)
        if self._id is not None and self._state == "begun" and self._abortable is None:
            reason = f"{len(records)} message(s) failed delivery (see individual delivery reports)"
            self._abortable = KafkaError(KafkaError._INCONSISTENT, reason, False, False, True)

    def _set_fatal(self, code: int) -> None:
        if self._fatal is None:
            self._fatal = error = KafkaError(code, None, True, False, False)
            self._events.append(partial(_raise, error))
            self._condition.notify_all()

    def _drop_all(self, code: int) -> None:
        dropped = [*self._homeless, *(queued for queue in self._queue.values() for queued in queue)]
        self._homeless.clear()
        self._queue.clear()
        for queued in dropped:
            self._needs_epoch = self._needs_epoch or queued.sent is not None
            self._report(queued, KafkaError(code), None, queued.partition)

    # --- events

    def poll(self, timeout: float = -1) -> int:
        """Serve events for up to `timeout` seconds; an exception of a report, or a fatal error, is raised."""
        with self._schedule:
            self._schedule.wait(self._condition, timeout, lambda: self._events or None)
        return self._serve()

    def _serve(self) -> int:
        served = 0
        while self._events:
            try:
                event = self._events.popleft()
            except IndexError:  # another thread polls too
                break
            event()
            served += 1
        return served

    def flush(self, timeout: float = -1) -> int:
        """Send everything, serve events, and return how much is left."""
        with self._schedule:
            self._start_pumping()
            self._schedule.wait(self._condition, timeout, lambda: True if self._count == 0 else None)
        self._serve()
        return len(self)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Fail what is queued: nothing is ever in flight."""
        with self._schedule:
            self._drop_all(KafkaError._PURGE_QUEUE)

    def close(self) -> bool:
        """Abort an open transaction, and end."""
        if self._id is not None and self._state in ("begun", "failed") and self._fatal is None:
            self.abort_transaction(1)
        self.purge()
        self._serve()
        return True

    # --- transactions

    def _demand_state(self, *states: State) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if self._state not in states:
            raise failure(KafkaError._STATE, f"Operation not valid in state {self._state}")

    def _repeat(self, request: Callable[[], None], timeout: float) -> None:
        """Repeat a request of the transaction coordinator while it is busy; raise KafkaException if it is refused."""
        code = KafkaError._TIMED_OUT
        wait_until = self._look_later(self._cluster.latency())
        is_done = False

        def attempt() -> bool | None:
            nonlocal code, wait_until, is_done
            if self._schedule.clock.monotonic() < wait_until or (self._host.loses_requests and not is_done):
                return None
            if is_done and not self._host.loses_answers:
                return True
            try:
                request()
            except RefusedError as refused:
                code = refused.code
                if code == KafkaError.CONCURRENT_TRANSACTIONS:
                    wait_until = self._look_later(_RETRY_S)
                    return None
                self._set_fatal(KafkaError._FENCED if code in _FENCED else code)
            is_done = True
            wait_until = self._look_later(self._cluster.latency())
            return None if self._host.loses_answers or self._schedule.clock.monotonic() < wait_until else True

        if self._schedule.wait(self._condition, timeout, attempt) is None:
            raise failure(code, retriable=True)
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    def _look_later(self, seconds: float) -> float:
        """Return a time, and look again then."""
        if seconds:
            self._schedule.after(seconds, self._condition.notify_all)
        return self._schedule.clock.monotonic() + seconds

    def init_transactions(self, timeout: float = -1) -> None:
        """Fence the id's former users, and begin with the next epoch."""
        with self._schedule:
            self._demand_state("new")
            self._repeat(self._initialise, timeout)
            self._state = "ready"

    def _initialise(self) -> None:
        name = self._id or ""
        self._cluster.require_transactional_id(name)
        timeout_ms = round(self._number("transaction.timeout.ms", 60_000))
        if timeout_ms > MAX_TRANSACTION_TIMEOUT_MS:
            raise RefusedError(KafkaError.INVALID_TRANSACTION_TIMEOUT)
        self._producer, self._epoch = self._cluster.transactions.initialise(name, timeout_ms)
        self._sequences.clear()
        self._needs_epoch = False

    def begin_transaction(self) -> None:
        """Begin locally; the coordinator learns of it with the first record."""
        with self._schedule:
            self._demand_state("ready")
            self._state, self._abortable, self._added = "begun", None, set()

    def commit_transaction(self, timeout: float = -1) -> None:
        """Flush, then decide the transaction; the markers follow. After a time-out it may be called again."""
        until = self._schedule.clock.monotonic() + timeout
        with self._schedule:
            self._demand_state("begun", "failed", "ending")
        left = self.flush(timeout)
        with self._schedule:
            if self._fatal is not None:
                raise KafkaException(self._fatal)
            if self._abortable is not None:
                self._state = "failed"
                raise KafkaException(self._abortable)
            if left:
                raise failure(KafkaError._TIMED_OUT, retriable=True)
            self._end(commit=True, timeout=until - self._schedule.clock.monotonic() if timeout >= 0 else -1)

    def abort_transaction(self, timeout: float = -1) -> None:
        """Drop what is queued, and decide to abort."""
        with self._schedule:
            self._demand_state("begun", "failed")
            self._drop_all(KafkaError._PURGE_QUEUE)
            self._end(commit=False, timeout=timeout)
        self._serve()

    def _end(self, *, commit: bool, timeout: float) -> None:
        name = self._id or ""
        if self._added:
            self._state = "ending"

            def end() -> None:
                self._cluster.transactions.end(name, self._producer, self._epoch, commit=commit)

            self._repeat(end, timeout)
        if self._needs_epoch:
            self._repeat(self._initialise, timeout)
        self._state, self._abortable = "ready", None


def _raise(error: KafkaError) -> None:
    raise KafkaException(error)


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _pairs(headers: Any) -> Headers:
    return [(name, _bytes(value)) for name, value in (headers.items() if isinstance(headers, dict) else headers or ())]
