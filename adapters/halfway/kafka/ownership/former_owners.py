"""Finds and fences the former owner of a shard (docs/protocol.md#ownership, steps 2 and 3).

The last record of owners[s] names the former owner. Records that halfway cannot have written are skipped. If
compaction removes a record, it also removes the earlier ones of the same key, so the last readable record is the last
one that halfway wrote.

If no record can be read, compaction may have removed halfway's records: owners[s] contains a foreign record, or
contained one with a null value, which leaves no trace. Or they were deleted: then owners[s] begins past 0. A record
with halfway's headers may also be of a later release; then it hides the records before it. Each claim also wrote a
barrier to parked[s] and half[s] in the same Kafka transaction, and the last barrier there names the last claimant. If
owners[s] contains a foreign record or has lost all, and none of the three names the former owner, the former owner is
unknown and the shard is not served.

An incarnation fences a former owner once, even if it acquires several of its shards.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from confluent_kafka import OFFSET_BEGINNING, Message

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Place, Reader, ends, refresh_leaders
from halfway.kafka.clients.seam import Admin
from halfway.kafka.clients.transactional_producer import fence, lane_ids
from halfway.kafka.lane.suspect_lane import end_rehearsal
from halfway.kafka.records.codec import BARRIER_KEY, UndecodableError
from halfway.kafka.records.lane_records import (
    Count,
    barrier_in,
    has_halfway_headers,
    is_layout,
    note_skipped,
    owner_in,
    owner_key,
    released_by,
)
from halfway.protocol.records import Owner

_KINDS: Final = ("half", "op", "parked", "owners")


def stuck_remedy(config: KafkaConfig, shard: int) -> str:
    """Return what an operator can do if a shard cannot be acquired, and the error has no remedy of its own."""
    bootstrap = config.for_tools
    topics = "|".join(config.topic(kind).replace(".", "[.]") for kind in _KINDS)
    minutes = math.ceil(config.transaction_timeout_s / 60)  # without it none is found that began within 15 minutes
    hanging = "; ".join(
        f"kafka-transactions.sh --bootstrap-server {bootstrap} find-hanging --topic {config.topic(kind)} "
        f"--partition {shard} --max-transaction-timeout {minutes}"
        for kind in _KINDS
    )
    return (
        f"see whether partition {shard} has a leader and enough replicas in sync in each of the topics: "
        f"kafka-topics.sh --bootstrap-server {bootstrap} --describe --topic '{topics}'; then look for a hanging Kafka "
        f"transaction: {hanging}; and end it: kafka-transactions.sh --bootstrap-server {bootstrap} abort --topic TOPIC "
        f"--partition {shard} --start-offset OFFSET, with the topic and the offset that were printed"
    )


CLOCK: Final = (
    "set the clock of this instance or of the brokers right, or raise message.timestamp.after.max.ms and "
    "message.timestamp.before.max.ms of the internal topics"
)


class AcquireError(Exception):
    """An acquisition failed; the shard may be tried again.

    `fenced`: another instance is acquiring the shard. `outdated`: only a newer release can read some record of the log.
    `remedy`: what the operator can do if the error persists; None for `stuck_remedy`.
    """

    def __init__(
        self, step: str, detail: str, *, remedy: str | None = None, fenced: bool = False, outdated: bool = False
    ) -> None:
        super().__init__(f"{step}: {detail}")
        self.remedy = remedy
        self.fenced = fenced
        self.outdated = outdated


@dataclass(frozen=True, kw_only=True)
class AcquisitionDeadline:
    """The deadline of one acquisition, which is extended while its reader makes progress.

    Reading a long log may take its time: without an owner record all of half is read.
    """

    until: float
    """On `time.monotonic()`, like every time here."""
    stall_s: float
    """How long reading may make no progress."""
    reader: Reader
    cancelled: Callable[[], bool]

    @property
    def deadline(self) -> float:
        """The deadline as of now; the reader's progress extends it."""
        return max(self.until, self.reader.moved_at + self.stall_s)

    def is_stalled(self, since: float) -> bool:
        """Return whether the reader has made no progress for too long, counted from `since` at the earliest."""
        return self.reader.stands_still(self.stall_s, since)

    def check(self, step: str) -> None:
        """Raise AcquireError if the shard is no longer wanted, or the deadline has passed."""
        self.check_wanted(step)
        if time.monotonic() >= self.deadline:
            raise AcquireError(step, "out of time")

    def check_wanted(self, step: str) -> None:
        """Raise AcquireError if the shard is no longer wanted."""
        if self.cancelled():
            raise AcquireError(step, "the shard is no longer wanted")


_CHECK_S: Final = 0.25


class FencedOwners:
    """The fenced owners of one incarnation. A fenced owner stays fenced: it initialises its lane ids only once."""

    def __init__(self, own: str) -> None:
        """Start with the incarnation itself, which must not be fenced."""
        self._lock = threading.Lock()
        self._fenced = {own}
        self._under_way: dict[str, Future[None]] = {}

    def __contains__(self, incarnation: str) -> bool:
        """Return whether an incarnation is fenced, or is this one."""
        return incarnation in self._fenced

    @property
    def names(self) -> frozenset[str]:
        """Those that are fenced by now, and this incarnation."""
        with self._lock:
            return frozenset(self._fenced)

    def once(self, incarnation: str, fence: Callable[[], None], check: Callable[[], None]) -> None:
        """Fence an incarnation by calling `fence`, or wait while another thread does so for another shard.

        While it waits it calls `check`, which raises to stop the wait. An error of the other thread's `fence` is raised
        here too; the next call tries again.
        """
        with self._lock:
            if incarnation in self._fenced:
                return
            running = self._under_way.get(incarnation)
            outcome: Future[None] = Future()
            if running is None:
                self._under_way[incarnation] = outcome
        if running is None:
            self._fence(incarnation, fence, outcome)
        else:
            _wait(running, check)

    def _fence(self, incarnation: str, fence: Callable[[], None], outcome: Future[None]) -> None:
        try:
            fence()
        except BaseException as error:
            with self._lock:
                del self._under_way[incarnation]
            outcome.set_exception(error)
            raise
        with self._lock:
            del self._under_way[incarnation]
            self._fenced.add(incarnation)
        outcome.set_result(None)


def _wait(running: Future[None], check: Callable[[], None]) -> None:
    while True:
        try:
            running.result(_CHECK_S)
        except TimeoutError:
            if running.done():
                raise
            check()
        else:
            return


log = structlog.get_logger()

_REQUEST_S: Final = 10.0
_LOOK_S: Final = 0.5


class FormerOwnerUnknownError(Exception):
    """The log does not name the last owner of these shards: serving them would not be safe."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


@dataclass(kw_only=True)
class LastClaim:
    """The last claim of a shard according to one partition."""

    last: str | None = None
    """The incarnation; None if the shard was released or never claimed."""
    lane_ids: tuple[str, ...] = ()
    """Those of its lane; of a release, the one that wrote it."""
    known: bool = False
    foreign: bool = False
    """The partition contains a record with the key that halfway did not write."""

    def record(self, incarnation: str | None, lane_ids: tuple[str, ...]) -> None:
        """Record the last claim read so far."""
        self.last, self.lane_ids, self.known = incarnation, lane_ids, True


@dataclass(kw_only=True)
class FormerOwners:
    """Finds and fences former owners for one acquisition, until the acquisition's deadline."""

    config: KafkaConfig
    reader: Reader
    acquisition_deadline: AcquisitionDeadline
    count: Count
    released: dict[int, int]
    """When each shard was released, in ms; only shards whose last owner record is a release."""
    fences: FencedOwners
    _read_up_to: dict[Place, int] = field(default_factory=dict, init=False)

    def fence_all(self, shards: Sequence[int]) -> dict[int, LastClaim]:
        """Return the last claims once no other incarnation can write for these shards.

        Raises FormerOwnerUnknownError: that is uncertain.
        """
        config = self.config
        admin = config.make_admin()
        claims = self._follow(admin, config.owners_topic, shards)
        last = dict(claims)
        in_doubt = {shard for shard, claim in claims.items() if claim.foreign or self._has_lost_all(shard, claim)}
        for topic in (config.parked_topic, config.half_topic):
            unknown = [shard for shard, claim in claims.items() if not claim.known]
            if in_doubt_here := sorted(in_doubt.intersection(unknown)):
                log.error("former_owner_in_doubt", shards=in_doubt_here, asked_next=topic)
            if not unknown:
                return last
            claims = self._follow(admin, topic, unknown)
            last |= claims
        lost = sorted(shard for shard, claim in claims.items() if shard in in_doubt and not claim.known)
        if lost:
            raise FormerOwnerUnknownError(
                f"the record of who last owned shards {lost} is overwritten or deleted in {config.owners_topic}, "
                f"{config.parked_topic} and {config.half_topic}",
                f"make sure that no instance runs, delete the topic {config.owners_topic}, and start again",
            )
        return last

    def _has_lost_all(self, shard: int, claim: LastClaim) -> bool:
        """Return whether records of owners[s] were deleted, and it names nobody: compaction does not move its start."""
        place = (self.config.owners_topic, shard)
        return not claim.known and place in self._read_up_to and self.reader.span(place, _REQUEST_S)[0] > 0

    def fence_before(self, shard: int, offset: int) -> LastClaim:
        """Read owners[s] on to a record of the caller's open transaction, and fence the last owner there.

        The ends that `fence_all` gets may be too early: a broker that is cut off from the controllers answers as the
        leader that it was, for as long as that lasts. But the leader itself has given this offset.
        """
        place, claim = (self.config.owners_topic, shard), LastClaim()
        if self._read_up_to.get(place, 0) < offset:
            self._fence_last({place: claim}, lambda: {place: offset})
        return claim

    def _follow(self, admin: Admin, topic: str, shards: Iterable[int]) -> dict[int, LastClaim]:
        """Read a topic to its end, and fence the last owners on the way; return the last claim of each shard."""
        refresh_leaders(admin, topic, _LOOK_S)  # a request of a client without a connection waits for up to 1 s
        by_shard = {shard: LastClaim() for shard in shards}
        # No other instance can claim a shard now, so there is nothing to wait for in a partition without records.
        found = ends(admin, [(topic, shard) for shard in by_shard], self._check_ends)
        claims = {place: by_shard[place[1]] for place, end in found.items() if end}
        if claims:
            self._fence_last(claims, lambda: ends(admin, claims, self._check_ends))
        return by_shard

    def _fence_last(self, claims: Mapping[Place, LastClaim], targets: Callable[[], Mapping[Place, int]]) -> None:
        """Read on up to the targets, and fence who is named last, until both are done."""
        self.reader.add({place: self._read_up_to.get(place, OFFSET_BEGINNING) for place in claims})
        while True:
            reached = self._read(targets(), claims)
            former = {claim.last: claim.lane_ids for claim in claims.values() if claim.last is not None}
            unfenced = {name: ids for name, ids in former.items() if name not in self.fences}
            if unfenced:
                self.fence(unfenced)
            elif reached:
                break
            self.acquisition_deadline.check(f"reading {', '.join(f'{topic}-{shard}' for topic, shard in claims)}")
        self._read_up_to |= {place: self.reader.positions[place] for place in claims}
        self.reader.remove(list(claims))

    def _read(self, targets: Mapping[Place, int], claims: Mapping[Place, LastClaim]) -> bool:
        """Step 2: read up to the LSO; return whether that is the real end.

        It does not wait for long: an open transaction may hold the LSO back until its owner is fenced.
        """
        return self.reader.read_until(targets, time.monotonic() + _LOOK_S, self._handler(claims))

    def fence(self, owners: Mapping[str, tuple[str, ...]]) -> None:
        """Step 3: fence the lane ids of former owners."""
        for incarnation, ids in owners.items():
            check = partial(self.acquisition_deadline.check, "waiting for the fence of the former owner")
            self.fences.once(incarnation, partial(self._fence_owner, incarnation, ids), check)

    def _fence_owner(self, incarnation: str, ids: Sequence[str]) -> None:
        log.info("fencing_former_owner", incarnations=[incarnation])
        end_rehearsal(self.config, incarnation)
        fence(self.config, ids, self.acquisition_deadline.deadline, self.acquisition_deadline.cancelled)

    def _check_ends(self) -> None:
        self.acquisition_deadline.check("requesting the end offsets")

    def _handler(self, claims: Mapping[Place, LastClaim]) -> Callable[[Place, Message], None]:
        owners = self.config.owners_topic

        def handle(place: Place, message: Message) -> None:
            claim, of_owners = claims[place], place[0] == owners
            own_key = owner_key(place[1]) if of_owners else BARRIER_KEY
            try:
                if not of_owners:
                    if message.key() == own_key:
                        name = barrier_in(message).incarnation
                        claim.record(name, lane_ids(self.config.prefix, name))
                elif not is_layout(message):
                    self._record_owner(claim, message, owner_in(message))
            except UndecodableError as error:
                if message.key() == own_key:
                    claim.foreign, claim.known = True, claim.known and not has_halfway_headers(message)
                note_skipped(message, error, self.count)

        return handle

    def _record_owner(self, claim: LastClaim, message: Message, owner: Owner | None) -> None:
        shard = message.partition() or 0
        if owner is None:
            self.released[shard] = message.timestamp()[1]
            claim.record(None, released_by(message))
        else:
            self.released.pop(shard, None)
            claim.record(owner.incarnation, owner.lane_ids)
