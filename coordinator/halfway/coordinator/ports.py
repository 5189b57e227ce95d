"""What the coordinator needs from outside, as Protocols: `kafka`, `checks` and `memory` have it.

All calls are made on the event loop's thread, and so are the calls back. A call that waits has a `deadline`: a time on
the loop's own clock (`loop.time()`), passed down unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import msgspec

from halfway.coordinator.records import PeerCall, Quarantined
from halfway.protocol.keys import Key, KeyTable
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import AuditEvent, Foreign, Group, Half, Message, Op, Parked
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Outcome, State


class Tombstone(Enum):
    """The value of a record that removes its key."""

    TOMBSTONE = "tombstone"


TOMBSTONE = Tombstone.TOMBSTONE


class LaneWrite(msgspec.Struct, frozen=True, kw_only=True, gc=False, eq=False):
    """One write of a resolution. It is done completely, in one Kafka transaction, or not at all.

    `half` and `parked` are a record, `TOMBSTONE`, or None for nothing to write. `messages` are the real messages of a
    commit, empty for anything else; `prepared_at` (ms) goes into their headers.
    """

    shard: int
    id: str
    group: str
    state: State
    """The resulting state, for the header `halfway-state` of every record of this write."""
    prepared_at: int
    messages: tuple[Message, ...] = ()
    half: Half | Tombstone | None = None
    op: Op | None = None
    parked: Parked | Tombstone | None = None
    size: int = 0
    """The bytes of the payload in `messages`, `half` or `parked`."""
    deadline: float
    """A time on the loop's clock. After it the write is not begun: `NotWrittenError`."""


class Written(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The offsets of a lane write in each partition, None if it wrote nothing there."""

    half: int | None = None
    op: int | None = None
    parked: int | None = None


LaneAnswer = tuple[LaneWrite, Written | Exception]
"""A write with its offsets, or with one of the errors that `Lane.submit` lists."""
LaneAnswers = Sequence[LaneAnswer]


class Lane(Protocol):
    """The one writer of all changes of transactions after their prepare (docs/protocol.md#end-the-lane)."""

    def listen(self, answered: Callable[[LaneAnswers], None]) -> None:
        """Pass all answers to `answered`, on the loop's thread."""

    def submit(self, writes: Sequence[LaneWrite]) -> None:
        """Queue writes. Each is answered when its Kafka transaction has committed; they may be in different ones.

        Before each write the lane calls `ShardListener.may_still_be_written`: if it returns False, the answer is
        `NotWrittenError`. If the lane hung, a write may be answered twice: the first answer counts.

        Answers:
            LaneLostError: the incarnation ended in the meantime; the fold shows whether the write was done.
            NotWrittenError: it was certainly not written: past its deadline, refused as above, or the shard given up.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: this write cannot be done now.
            OverloadedError: the lane's queue is full.

        """

    def quarantined(self, most: int) -> Sequence[Quarantined]:
        """Return the quarantined topics and transactions: the latest `most` of each."""


T = TypeVar("T")
Appended = Callable[[Sequence[tuple[T, int | Exception]]], None]
"""Takes the results of appended records: the object that identifies each record, and its offset or an error."""


class HalfLog(Protocol):
    """Appends first prepares to half[s] and reads payloads back."""

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        """Append half records with acks=all, and pass their offsets or errors to `appended` by the deadline.

        Each half comes with an object that identifies it to the caller. No two halves have the same id. A half is
        answered once, perhaps before this returns. One call need not answer all of them.

        Errors:
            OutcomeUnknownError: it is not known whether the record was stored.
            OverloadedError: too much is in flight; the record was not stored.
            MessageTooLargeError: the record is larger than allowed; it was not stored.
            TopicUnavailableError: the topic takes no record of this size any more; it was not stored.

        """

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset, after verifying its key.

        Raises KafkaUnavailableError: it could not be read in time, or the offset does not hold that id.
        """

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset, after verifying its key; errors as for `read_half`."""

    async def half_end(self, shard: int, *, deadline: float) -> int:
        """Return the end offset of half[s] as `read_uncommitted` sees it."""


class LoggedOp(msgspec.Struct, frozen=True, kw_only=True):
    """An op marker in op[s]. `timestamp` is that of its Kafka transaction, ms since the epoch."""

    offset: int
    timestamp: int
    op: Op


class OpsRead(msgspec.Struct, frozen=True, kw_only=True):
    """The op markers of an id, by offset. `complete` is whether all records that may hold one were read."""

    ops: tuple[LoggedOp, ...]
    complete: bool


class PlacesRead(msgspec.Struct, frozen=True, kw_only=True):
    """(partition, offset) of messages by their numbers, from 1. `detail` is why some were not found."""

    places: Mapping[int, tuple[int, int]]
    detail: str | None = None


class History(Protocol):
    """Reads the records of one transaction from the log, within limits.

    Raises KafkaUnavailableError: they could not be read in time.
    """

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:
        """Read the op markers of an id, from the times `starts` (ms since the epoch) on, or from the end back."""

    async def places(self, transaction_id: str, topics: Sequence[str], *, at_ms: int, deadline: float) -> PlacesRead:
        """Find the messages of a commit at that time; `topics` has the topic of each message."""


class Cursors(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets from which a recovery of one shard reads."""

    half: int
    op: int
    ends: EndCounts | None = None
    """The ends that were counted up to a position of op that is not before `op`; None if none are stored."""


class CursorStore(Protocol):
    """Stores the cursors as the offsets of the consumer group `<prefix>cursors`."""

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors of shards, also if they are unchanged. A failure is logged, and the next scan retries."""


class GroupStore(Protocol):
    """The registered groups, as read back from `_halfway.groups`."""

    def get(self, name: str) -> Group | None:
        """Return a group by its name."""

    def all(self) -> Sequence[Group]:
        """Return every group, by name."""

    async def change(self, name: str, decide: Callable[[Group | None], Group | None], *, deadline: float) -> None:
        """Write the result of `decide`, and return when it is read back.

        `decide` gets the current group, None if there is none. No instance changes any group between the decision and
        its record. `decide` may be called several times. If it returns the group unchanged, nothing is written; its
        errors are raised. Raises KafkaUnavailableError: past the deadline; the change may have been written.
        """

    async def refresh(self, *, deadline: float) -> None:
        """Return when this instance has read everything that was written before this call.

        Raises KafkaUnavailableError: it was not read in time.
        """


class KeyStore(Protocol):
    """The keys. Every instance follows their topic: a revoked key is removed everywhere within a second."""

    @property
    def table(self) -> KeyTable:
        """The keys that were read from the log."""

    async def put(self, key: Key, *, deadline: float) -> None:
        """Write a key, and return when it is read back; KafkaUnavailableError past the deadline."""

    async def delete(self, key_id: str, *, deadline: float) -> None:
        """Remove a key, and return when the removal is read back; KafkaUnavailableError past the deadline."""

    async def refresh(self, *, deadline: float) -> None:
        """Return when every earlier write is read; KafkaUnavailableError past the deadline."""


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a real topic that the service needs."""

    partitions: int
    max_message_bytes: int
    compacted: bool


class Topics(Protocol):
    """Facts about real topics, cached for a short time."""

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name if all are in the cache; None otherwise."""

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, None for a topic that does not exist.

        Raises:
            KafkaUnavailableError: the broker did not answer in time.
            NotAuthorisedError: the broker does not let halfway see a topic.
        """


class OwnerHint(msgspec.Struct, frozen=True, kw_only=True):
    """Another instance that owns a shard, as far as this instance knows. It is only a hint."""

    incarnation: str
    url: str


class Owners(Protocol):
    """The owners of shards, as read from `_halfway.owners`."""

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if it is unknown, or if it is this instance."""


class Peers(Protocol):
    """Calls other instances of the cluster, which answer without a further hop."""

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner, and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: the owner could not be reached, or refused: nothing was done.
            PeerLostError: there was no answer: the call may have been done.
            OverloadedError: too many calls wait for other instances; nothing was done.
            HalfwayError: any other error that the owner answers with.
        """


class KnownLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of a shard knows of its log. A log that ends earlier, or begins later, has lost records."""

    half_end: int
    """The offset after the last known record of half[s]."""
    op_end: int
    """The offset after the last known record of op[s]."""
    half_needed: int
    """The lowest offset of a half that is still pending."""
    op_recent: int | None = None
    """The offset in op[s] of the first outcome within the horizon, or a lower one. None if it is not known yet."""
    op_needed: int | None = None
    """The lowest offset of an op that has a verdict, or checks, that are nowhere else. None if there is none."""
    parked_needed: int | None = None
    """The lowest offset of a record of a transaction that is still parked. None if there is none."""


class LogLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a shard that Kafka has lost, although it had acknowledged them."""

    topic: str
    detail: str
    half_start: int | None = None
    """The offset before which half[s] has no records any more. None if it is not known what is lost: then the shard is
    acquired again, and its fold compared with what its owner knew."""
    op_start: int | None = None
    """The same of op[s]."""
    parked_start: int | None = None
    """The same of parked[s]."""
    is_op_cut: bool = False
    """True if op[s] begins after outcomes that are within the horizon."""


class ShardListener(Protocol):
    """Gets the events of shards from the adapter; the service implements it."""

    def compare(self, shard: int, state: ShardState, *, suspect: bool) -> bool:
        """Find what this instance knew of a shard and what its new fold lacks; `acquired` follows with the same state.

        It is called only if no other instance has owned the shard since this one lost it. Without `suspect` outcomes
        are compared only if the last ones are missing. Return whether the log has lost records: then the shard must be
        folded from the beginning of its log first. Blocks; not called on the loop's thread.
        """

    def known_log(self, shard: int) -> KnownLog | None:
        """Return what is known of the log of a shard, None if the shard is not served."""

    def log_lost(self, shard: int, loss: LogLoss) -> None:
        """Report what Kafka has lost. What it has lost of half or op is written again, as far as it is in memory."""

    def forget(self, shard: int) -> None:
        """Forget what is known of a shard that is not served: another instance may own it by now."""

    def acquired(self, shard: int, state: ShardState) -> None:
        """Serve this shard from now on: `state` is the fold up to this owner's own barrier."""

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        """Apply records of half[s] that the tail has read, and the position that it has reached without a gap.

        Records that the shard has applied already may be omitted.
        """

    def has_applied(self, shard: int, offset: int, key: bytes | None) -> bool:
        """Return whether the half record at an offset, with this key, was written and applied here.

        Such a record need not be decoded. The tail's thread calls this, again for a record if it returned False. After
        True the record is forgotten.
        """

    def may_still_be_written(self, write: LaneWrite) -> bool:
        """Return whether the claim of its id still waits for a write. Called on the lane's thread; must only read."""

    async def revoked(self, shard: int) -> None:
        """Accept no more ends for this shard, and return when those in flight are finished."""

    def lost(self, shard: int) -> None:
        """Drop this shard at once. The fold of its next owner settles the writes in flight."""


class Clock(Protocol):
    """The wall clock."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""


class Authority(Protocol):
    """Authenticates callers and checks their permissions (`domain.principal.RULES`)."""

    def authenticate(
        self, token: str | None, certificate: Collection[str] = (), wanted: Permission | None = None
    ) -> Principal:
        """Return the owner of a key, or of a certificate with one of these names; `wanted` is the permission to use.

        Raises UnauthenticatedError: neither is valid here.
        """

    def require(self, principal: Principal, permission: Permission, group: str | None = None) -> None:
        """Return if the caller may do this, to this group if one is named.

        Raises:
            ForbiddenError: it may not.
            UnauthenticatedError: its key was revoked or has expired in the meantime.
        """

    def may(self, principal: Principal, permission: Permission, group: str | None = None) -> bool:
        """Return whether `require` would return."""


class AuditTrail(Protocol):
    """Stores the events of the audit trail."""

    def record(self, event: AuditEvent) -> bool:
        """Store an event; return False if it is not stored, which is counted. Never waits and never raises.

        The log gets an event that is lost afterwards.
        """


class Observer(Protocol):
    """Records counts and latencies, in seconds and bytes."""

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        """Count prepares by group and result: `prepared`, `repeated`, or an error code."""

    def ended(self, groups: Mapping[str, int], outcome: str, cause: str, result: str, seconds: float) -> None:
        """Count ends by group, outcome, cause and result (`changed`, `unchanged`, or an error code)."""

    def resolved_after(self, groups: Mapping[str, int], outcome: str, seconds: float) -> None:
        """Observe the time from prepare to outcome, for a number of transactions of each group."""

    def checked(self, group: str, verdict: str, *, sent: bool, seconds: float) -> None:
        """Count a check by its verdict."""

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        """Observe one Kafka transaction of the lane."""

    def lane_failed(self, reason: str) -> None:
        """Count the end of an incarnation."""

    def skipped_record(self, topic: str, reason: str) -> None:
        """Count a record of an internal topic that could not be used."""

    def forwarded(self, call: str, result: str, seconds: float) -> None:
        """Count a call to another instance by its kind and its result: `done`, or an error code."""

    def refused_caller(self, reason: str) -> None:
        """Count a call that was refused because of its caller, by the reason."""

    def shard_moved(self, seconds: float) -> None:
        """Observe how long a shard was unserved before this instance acquired it, as far as it is known."""

    def audited(self, result: str) -> None:
        """Count an event of the audit trail by its result: `written` or `lost`."""

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Count outcomes that were forgotten early because memory is bounded."""


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One check: a question to a producer group."""

    check_id: str
    id: str
    group: str
    prepared_at: int
    attempt: int
    messages: tuple[Message, ...]
    headers: dict[str, str] = {}
    """Headers of its HTTP requests beside its own: the context of its span."""


class CheckAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request of a check, and its result."""

    host: str
    """The endpoint's scheme, host and port; the rest of its URL may hold a secret."""
    sent: bool
    answered: bool
    """Whether a verdict was received."""
    status: int | None
    detail: str
    duration_s: float


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a check.

    `sent` is whether the request was sent on a connection, `answered` whether a verdict was received. `reachable` is
    False if the endpoint refused, hung or could not be found: the circuit breaker counts those.
    """

    outcome: Outcome
    sent: bool
    answered: bool
    reachable: bool
    detail: str
    remark: str | None = None
    attempts: tuple[CheckAttempt, ...] = ()
    """In the order in which they were made."""


class CheckCaller(Protocol):
    """Sends checks to a producer group over HTTP (docs/protocol.md#scan-and-check-back)."""

    def refusal(self, url: str) -> str | None:
        """Return why the operator does not allow an endpoint, None if it is allowed. The reason is shown to users."""

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Call the endpoints in the given order, the next one when one fails, within a bounded time. Never raises."""
