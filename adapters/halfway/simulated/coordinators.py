"""The group and the transaction coordinator.

A group has committed offsets, and members among which partitions move one by one. A transactional id has a producer id
and epochs, fencing, time-outs, and markers that are written late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Final, Literal, NamedTuple

from confluent_kafka import KafkaError

from halfway.simulated.log import Partition, Place, RefusedError
from halfway.simulated.schedule import Schedule

Kind = Literal["assign", "revoke", "lost"]


class Step(NamedTuple):
    """What a member has to do next."""

    kind: Kind
    places: frozenset[Place]


@dataclass(kw_only=True, eq=False)
class Member:
    """A subscribed consumer. `owned` it uses, `target` it is to use once the others have given it up."""

    id: str
    client: str
    topics: tuple[str, ...]
    condition: threading.Condition
    owned: set[Place] = field(default_factory=set)
    target: set[Place] = field(default_factory=set)
    generation: int = -1
    expelled: bool = False
    """Its session has ended, and it does not know it yet."""
    leaving: bool = False


class Group:
    """One consumer group. Call it with the schedule's lock."""

    def __init__(self, places: Callable[[Iterable[str]], list[Place]]) -> None:
        """Start empty; `places` returns the partitions of topics."""
        self._places = places
        self._generation = 0
        self.members: list[Member] = []
        self.offsets: dict[Place, tuple[int, str]] = {}
        """Committed offsets with their metadata."""

    def join(self, member: Member) -> None:
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Member) -> None:
        """Remove a member; what it owned is free."""
        if member in self.members:
            self.members.remove(member)
        member.owned.clear()
        self.rebalance()

    def expel(self, member: Member) -> None:
        """End a member's session: others get its partitions before it knows."""
        self.members.remove(member)
        member.expelled = True
        member.condition.notify_all()
        self.rebalance()

    def rebalance(self) -> None:
        """Share the partitions: each member keeps what it has up to its part."""
        self._generation += 1
        if not self.members:
            return
        members = sorted(self.members, key=lambda one: -len(one.owned))  # stable: the first come first
        free = self._places({topic for member in members for topic in member.topics})
        part, more = divmod(len(free), len(members))
        for place, member in enumerate(members):
            kept = [owned for owned in sorted(member.owned) if owned in free][: part + (place < more)]
            member.target = set(kept)
            free = [one for one in free if one not in member.target]
        for place, member in enumerate(members):
            missing = part + (place < more) - len(member.target)
            member.target.update(free[:missing])
            free = free[missing:]
        self._notify()

    def step(self, member: Member) -> Step | None:
        """Return what a member has to do now; None if nothing."""
        if member.expelled or member.leaving:
            return Step("lost" if member.expelled else "revoke", frozenset(member.owned))
        surplus = member.owned - member.target
        if surplus:
            return Step("revoke", frozenset(surplus))
        taken = set[Place]().union(*(other.owned for other in self.members if other is not member))
        free = member.target - member.owned - taken
        if free or member.generation != self._generation:
            member.generation = self._generation
            member.owned |= free
            return Step("assign", frozenset(free))
        return None

    def released(self, member: Member, places: Iterable[Place]) -> None:
        member.owned.difference_update(places)
        self._notify()

    def forget(self, topic: str) -> None:
        self.offsets = {place: entry for place, entry in self.offsets.items() if place[0] != topic}
        self.rebalance()

    def _notify(self) -> None:
        for member in self.members:
            member.condition.notify_all()


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

        Raises RefusedError: CONCURRENT_TRANSACTIONS, until what they left open has its markers.
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
