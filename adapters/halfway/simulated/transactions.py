"""The transaction coordinator: producer ids and epochs, fencing, time-outs, and markers that are written late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Final

from confluent_kafka import KafkaError

from halfway.simulated.log import Partition, Place, RefusedError
from halfway.simulated.schedule import Schedule

_MARKER_RETRY_S: Final = 0.05
_FIRST_PRODUCER_ID: Final = 1_000
_MAX_EPOCH: Final = 32_766


class State(Enum):
    """A transactional id's state, as in Kafka's TransactionMetadata."""

    EMPTY = auto()
    ONGOING = auto()
    PREPARE_COMMIT = auto()
    PREPARE_ABORT = auto()
    COMPLETE_COMMIT = auto()
    COMPLETE_ABORT = auto()


_PREPARED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})


@dataclass(slots=True, kw_only=True, eq=False)
class _Transactional:
    """What the coordinator knows of one transactional id."""

    producer: int
    epoch: int
    timeout_ms: int
    state: State = State.EMPTY
    places: set[Place] = field(default_factory=set)
    number: int = 0
    """Which transaction of this id it is: a time-out belongs to one."""


class Transactions:
    """All transactional ids of the cluster. Call it with the schedule's lock."""

    def __init__(
        self,
        schedule: Schedule,
        partition: Callable[[Place], Partition | None],
        changed: Callable[[Place], None],
        *,
        markers_s: tuple[float, float],
        expiry_interval_s: float,
    ) -> None:
        """Start without ids; `changed` is called for each partition that got a marker."""
        self._schedule = schedule
        self._partition = partition
        self._changed = changed
        self._markers_s = markers_s
        self._expiry_interval_s = expiry_interval_s
        self._ids: dict[str, _Transactional] = {}
        self._producers = count(_FIRST_PRODUCER_ID)

    def new_producer(self) -> tuple[int, int]:
        """Return the id and epoch of a producer without a transactional id."""
        return next(self._producers), 0

    def initialise(self, name: str, timeout_ms: int) -> tuple[int, int]:
        """Fence the former users of an id, and return its producer id and next epoch.

        Raises:
            RefusedError: CONCURRENT_TRANSACTIONS, until what they left open has its markers.

        """
        known = self._ids.get(name)
        if known is None or known.epoch >= _MAX_EPOCH:
            producer, epoch = self.new_producer()
            self._ids[name] = _Transactional(producer=producer, epoch=epoch, timeout_ms=timeout_ms)
            return producer, epoch
        if known.state is State.ONGOING:
            known.epoch += 1
            self._prepare(known, State.PREPARE_ABORT)
        if known.state in _PREPARED:
            raise RefusedError(KafkaError.CONCURRENT_TRANSACTIONS)
        known.epoch += 1
        known.timeout_ms = timeout_ms
        known.state = State.EMPTY
        return known.producer, known.epoch

    def _of(self, name: str, producer: int, epoch: int) -> _Transactional:
        known = self._ids.get(name)
        if known is None or known.producer != producer:
            raise RefusedError(KafkaError.INVALID_PRODUCER_ID_MAPPING)
        if known.epoch != epoch:
            raise RefusedError(KafkaError.PRODUCER_FENCED)
        return known

    def add(self, name: str, producer: int, epoch: int, place: Place) -> None:
        """Add a partition to a producer's transaction, and begin it with the first one."""
        known = self._of(name, producer, epoch)
        if known.state in _PREPARED:
            raise RefusedError(KafkaError.CONCURRENT_TRANSACTIONS)
        if known.state is not State.ONGOING:
            known.state, known.places = State.ONGOING, set()
            known.number += 1
            number = known.number
            late_s = self._schedule.random.uniform(0, self._expiry_interval_s)
            self._schedule.after(known.timeout_ms / 1000 + late_s, partial(self._expire, known, number))
        known.places.add(place)

    def verify(self, name: str, producer: int, epoch: int, place: Place) -> None:
        """Raise RefusedError unless a partition is part of a producer's open transaction: its leader asks (KIP-890)."""
        known = self._ids.get(name)
        if known is None or known.producer != producer:
            raise RefusedError(KafkaError.INVALID_PRODUCER_ID_MAPPING)
        if known.epoch != epoch:
            raise RefusedError(KafkaError.INVALID_PRODUCER_EPOCH)
        if known.state in _PREPARED:
            raise RefusedError(KafkaError.CONCURRENT_TRANSACTIONS)
        if known.state is not State.ONGOING or place not in known.places:
            raise RefusedError(KafkaError.INVALID_TXN_STATE)

    def end(self, name: str, producer: int, epoch: int, *, commit: bool) -> None:
        """Decide a transaction; its markers follow. The same decision may be requested again."""
        known = self._of(name, producer, epoch)
        prepared, complete = (
            (State.PREPARE_COMMIT, State.COMPLETE_COMMIT) if commit else (State.PREPARE_ABORT, State.COMPLETE_ABORT)
        )
        if known.state is State.ONGOING:
            self._prepare(known, prepared)
        elif known.state is prepared:
            raise RefusedError(KafkaError.CONCURRENT_TRANSACTIONS)
        elif known.state is not complete:
            raise RefusedError(KafkaError.INVALID_TXN_STATE)

    def _expire(self, known: _Transactional, number: int) -> None:
        if known.state is State.ONGOING and known.number == number:
            known.epoch += 1
            self._prepare(known, State.PREPARE_ABORT)

    def _prepare(self, known: _Transactional, state: State) -> None:
        known.state = state
        for place in sorted(known.places):
            self._schedule.after(self._schedule.random.uniform(*self._markers_s), partial(self._mark, known, place))

    def _mark(self, known: _Transactional, place: Place) -> None:
        """Write one marker; a partition that takes none now is tried again, one that is gone is left out."""
        partition = self._partition(place)
        commit = known.state is State.PREPARE_COMMIT
        try:
            if partition is not None:
                partition.mark(known.producer, known.epoch, commit=commit, now=self._schedule.clock.now_ms())
                self._changed(place)
        except RefusedError:
            self._schedule.after(_MARKER_RETRY_S, partial(self._mark, known, place))
            return
        known.places.discard(place)
        if not known.places:
            known.state = State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT
