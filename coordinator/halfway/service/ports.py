"""What the service needs from outside, as Protocols: `halfway.kafka` and `halfway.memory` provide them.

Everything here is called on the event loop's thread and calls back on it. A call that waits takes a `deadline`: a
time on the loop's own clock (`loop.time()`), passed down unchanged.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Mapping, Sequence

    from halfway.domain.records import Foreign, Group, Half, Message, Op, Parked
    from halfway.domain.shard import ShardState
    from halfway.domain.transaction import Outcome, State
    from halfway.service.peer_calls import PeerCall


class Tombstone(Enum):
    """The value of a record that removes its key."""

    TOMBSTONE = "tombstone"


TOMBSTONE = Tombstone.TOMBSTONE


class LaneWrite(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one resolution writes: all of it in one Kafka transaction, or nothing.

    `half` and `parked` are a record, `TOMBSTONE`, or None for nothing to write. `messages` are the real messages of a
    commit, empty for anything else; `prepared_at` (ms) goes into their headers.
    """

    shard: int
    id: str
    group: str
    state: State
    """For the header `halfway-state` of every record of this write: the state it leads to."""
    prepared_at: int
    messages: tuple[Message, ...] = ()
    half: Half | Tombstone | None = None
    op: Op | None = None
    parked: Parked | Tombstone | None = None
    deadline: float
    """Not begun after this time on the loop's clock: `NotWrittenError`."""

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        half = self.half.size if not isinstance(self.half, Tombstone) and self.half is not None else 0
        parked = self.parked.half.size if not isinstance(self.parked, Tombstone) and self.parked is not None else 0
        return half + parked + sum(message.size for message in self.messages)


class Written(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The offsets of a lane write; None if it wrote nothing there."""

    half: int | None = None
    op: int | None = None
    parked: int | None = None


class Lane(Protocol):
    """The one writer of everything but a first prepare (docs/protocol.md#end-the-lane)."""

    def submit(self, write: LaneWrite) -> asyncio.Future[Written]:
        """Queue a write; the result comes once its Kafka transaction has committed.

        The lane calls `ShardListener.current` before it begins; if that returns False: `NotWrittenError`.

        Raises (through the future):
            LaneLostError: the incarnation ended meanwhile; the fold shows whether the write stands.
            NotWrittenError: it was certainly not written: past its deadline, not current, or the shard was given up.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: this write cannot be done now.

        Raises (at once):
            OverloadedError: the lane's queue is full.

        """


class HalfLog(Protocol):
    """Appends first prepares to half[s] and reads payloads back."""

    def append(self, shard: int, half: Half, *, deadline: float) -> asyncio.Future[int]:
        """Append a half record with acks=all; the result is its offset once it is stored, or an error by the deadline.

        Cancelling the future does not undo the append.

        Raises (through the future):
            OutcomeUnknownError: it is not known whether it was stored.
            MessageTooLargeError: the broker refuses its size; nothing was stored.

        Raises (at once):
            OverloadedError: too much is in flight; nothing was stored.
            MessageTooLargeError: as above.

        """

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset, after verifying its key.

        Raises:
            KafkaUnavailableError: it could not be read in time, or the offset does not hold that id.

        """

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset, after verifying its key; errors as for `read_half`."""

    async def half_end(self, shard: int, *, deadline: float) -> int:
        """Return the end offset of half[s] as `read_uncommitted` sees it."""


class Cursors(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets from which a recovery of one shard reads."""

    half: int
    op: int


class CursorStore(Protocol):
    """Keeps the cursors as the offsets of the consumer group `<prefix>cursors`."""

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors of shards, also when unchanged; a failure is logged and tried again at the next scan."""


class GroupStore(Protocol):
    """The registered groups, as read back from `_halfway.groups`."""

    def get(self, name: str) -> Group | None:
        """Return a group by its name."""

    def all(self) -> Sequence[Group]:
        """Return every group, by name."""

    async def put(self, group: Group, *, deadline: float) -> None:
        """Write a group and return once this instance has read it back; KafkaUnavailableError past the deadline."""

    async def delete(self, name: str, *, deadline: float) -> None:
        """Remove a group and return once this instance has read that back."""

    async def refresh(self, *, deadline: float) -> None:
        """Return once this instance has read everything that was written before this call.

        Raises:
            KafkaUnavailableError: not in time.

        """


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a real topic that the service needs."""

    partitions: int
    max_message_bytes: int
    compacted: bool


class Topics(Protocol):
    """Facts about real topics, cached for a short time."""

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name if all are cached; None otherwise."""

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, None for a topic that does not exist.

        Raises:
            KafkaUnavailableError: the broker did not answer in time.
            NotAuthorisedError: the broker does not let halfway see a topic.

        """


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a producer group."""

    check_id: str
    id: str
    group: str
    prepared_at: int
    attempt: int
    messages: tuple[Message, ...]


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a check: `sent` is whether the request was sent on a connection, `answered` whether a verdict came.

    `reachable` is False if the endpoint refused, hung or could not be found: the circuit breaker counts those.
    """

    outcome: Outcome
    sent: bool
    answered: bool
    reachable: bool
    detail: str
    remark: str | None = None


class CheckCaller(Protocol):
    """Asks a producer group over HTTP (docs/protocol.md#scan-and-check-back)."""

    def refusal(self, url: str) -> str | None:
        """Return why the operator does not allow an endpoint, None if it may be registered; shown to users."""

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Ask the endpoints in the order given, the next one when one fails, within a bounded time; never raises."""


class OwnerHint(msgspec.Struct, frozen=True, kw_only=True):
    """Another instance that owns a shard, as far as is known: only a hint."""

    incarnation: str
    url: str


class Owners(Protocol):
    """Who owns which shard, as read from `_halfway.owners`."""

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if none is known, or if it is this instance."""


class Peers(Protocol):
    """Asks other instances of the cluster, which answer themselves: one hop at most."""

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, credential: str | None) -> Any:
        """Have a call done by an owner, and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: the owner could not be asked, or refuses: nothing was done.
            PeerLostError: no answer came: the call may have been done.
            OverloadedError: too many calls wait for other instances; nothing was done.
            HalfwayError: whatever else the owner answers.

        """


class ShardListener(Protocol):
    """What the adapter tells the service about shards; the service implements it."""

    def acquired(self, shard: int, state: ShardState) -> None:
        """Serve this shard from now on: `state` is the fold up to this owner's own barrier."""

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        """Apply the records that the tail has read of half[s], and the position that it has reached without a gap.

        Records that the shard holds already may be left out.
        """

    def holds(self, shard: int, offset: int, transaction_id: str) -> bool:
        """Whether a transaction is pending by the half record at an offset: then the tail need not decode the record.

        Called on the tail's thread; must only read.
        """

    def current(self, write: LaneWrite) -> bool:
        """Whether the id of a write is still claimed and unresolved. Called on the lane's thread; must only read."""

    async def revoked(self, shard: int) -> None:
        """Stop taking ends of this shard and return once those in flight are finished."""

    def lost(self, shard: int) -> None:
        """Drop this shard at once: the fold of its next owner settles what is in flight."""


class Membership(Protocol):
    """This instance as a member of the cluster: acquires shards (docs/protocol.md#ownership-and-fencing)."""

    async def start(self, listener: ShardListener) -> None:
        """Join, and acquire the assigned shards; return once that is under way."""

    async def stop(self, *, deadline: float) -> None:
        """Release every shard and leave; work that is not finished by the deadline is dropped."""


class Clock(Protocol):
    """Wall time."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""


class Authority(Protocol):
    """Decides who may act for a group; the default allows everybody."""

    def require(self, credential: str | None, group: Group | None, *, action: str) -> None:
        """Raise ForbiddenError if the caller may not do this."""


class Observer(Protocol):
    """Records counts and latencies; seconds and bytes."""

    def prepared(self, group: str, result: str, seconds: float) -> None:
        """Count a prepare by its result: `prepared`, `repeated`, or an error code."""

    def ended(self, group: str, outcome: str, cause: str, result: str, seconds: float) -> None:
        """Count an end by outcome, cause and result (`changed`, `unchanged`, or an error code)."""

    def resolved_after(self, group: str, outcome: str, seconds: float) -> None:
        """Observe the time from prepare to outcome."""

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

    def shard_moved(self, seconds: float) -> None:
        """Observe how long a shard was unserved before this instance took it, as far as is known."""

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Count outcomes that were forgotten early because memory is bounded."""
