"""What the service needs of the world, as Protocols: `halfway.kafka` and `halfway.memory` provide them.

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
    """What one resolution writes, all of it in one Kafka transaction or none of it.

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
        """Bytes of the payload that it carries."""
        half = self.half.size if not isinstance(self.half, Tombstone) and self.half is not None else 0
        parked = self.parked.half.size if not isinstance(self.parked, Tombstone) and self.parked is not None else 0
        return half + parked + sum(message.size for message in self.messages)


class Written(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The offsets at which a lane write stands; None if it wrote nothing there."""

    half: int | None = None
    op: int | None = None
    parked: int | None = None


class Lane(Protocol):
    """The one writer of everything but a first prepare (docs/protocol.md#end-the-lane)."""

    def submit(self, write: LaneWrite) -> asyncio.Future[Written]:
        """Queue a write; the result comes once its Kafka transaction has committed.

        The lane asks `ShardListener.current` once more before it begins; where that says no: `NotWrittenError`.

        Raises (through the future):
            LaneLostError: the incarnation ended meanwhile; the fold tells what became of it.
            NotWrittenError: it was certainly not written: past its deadline, not current, or the shard was given up.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: this write cannot be done now.

        Raises (at once):
            OverloadedError: the lane's queue is full.

        """


class HalfLog(Protocol):
    """Appends first prepares to half[s] and reads payloads back."""

    def append(self, shard: int, half: Half, *, deadline: float) -> asyncio.Future[int]:
        """Append a half record with acks=all; its offset comes once it is stored, or an error by the deadline.

        A caller that cancels the future takes nothing back.

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
    """From where a recovery of one shard reads."""

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
        """Return once this instance has read whatever others had written when this was called.

        Raises:
            KafkaUnavailableError: not in time.

        """


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What matters of a real topic."""

    partitions: int
    max_message_bytes: int
    compacted: bool


class Topics(Protocol):
    """Facts about real topics, kept for a short time."""

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name where those of all are known without asking; None otherwise."""

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, None for a topic that does not exist.

        Raises:
            KafkaUnavailableError: the broker did not tell in time.
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
    """What came back: `sent` says whether the request was put on a connection, `answered` whether it was a verdict.

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
        """Tell why the operator does not allow an endpoint, None if it may be registered; shown to users."""

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Ask the endpoints in the order given, the next one when one fails, within a bounded time; never raises."""


class OwnerHint(msgspec.Struct, frozen=True, kw_only=True):
    """Another instance that owns a shard, as far as is known: only a hint where to ask."""

    incarnation: str
    url: str


class Owners(Protocol):
    """Who owns which shard, as read from `_halfway.owners`."""

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if none is known, or where it is this instance."""


class Peers(Protocol):
    """Asks other instances of the cluster, which answer for themselves and ask nobody else: one hop at most."""

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, credential: str | None) -> Any:
        """Have a call done by an owner, and return what `peer_calls.ANSWERS` says.

        Raises:
            ShardUnavailableError: it could not be asked, or refuses: nothing was done.
            PeerLostError: no answer came: it may have been done.
            OverloadedError: too many calls wait for other instances; nothing was done.
            HalfwayError: whatever else the owner answers.

        """


class ShardListener(Protocol):
    """What the adapter tells the service about shards; the service implements it."""

    def acquired(self, shard: int, state: ShardState) -> None:
        """Serve this shard from now on: `state` is the fold up to this owner's own barrier."""

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        """Apply what the tail has read of half[s], and the position that it has reached without a gap.

        Records that the shard holds already may be left out.
        """

    def holds(self, shard: int, offset: int, transaction_id: str) -> bool:
        """Whether a transaction is pending by the half record at an offset: then the tail need not decode that.

        Called on the tail's thread; must only read.
        """

    def current(self, write: LaneWrite) -> bool:
        """Whether the id of a write is still claimed and unresolved. Called on the lane's thread; must only read."""

    async def revoked(self, shard: int) -> None:
        """Stop taking ends of this shard and return once those in flight are finished."""

    def lost(self, shard: int) -> None:
        """Drop this shard at once: whatever is in flight is settled by the fold of its next owner."""


class Membership(Protocol):
    """Life of this instance in the cluster: it acquires and tails shards (docs/protocol.md#ownership-and-fencing)."""

    async def start(self, listener: ShardListener) -> None:
        """Join, and acquire what is assigned; returns as soon as that is under way."""

    async def stop(self, *, deadline: float) -> None:
        """Release every shard and leave; what is not finished by the deadline is dropped."""


class Clock(Protocol):
    """Wall time."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""


class Authority(Protocol):
    """Who may act for a group; the default lets everybody, access control brings another."""

    def require(self, credential: str | None, group: Group | None, *, action: str) -> None:
        """Raise ForbiddenError if the caller may not do this."""


class Observer(Protocol):
    """Where counts and latencies go; seconds and bytes."""

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
        """Observe how long a shard that is served from now on was served by nobody, as far as is known."""

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Count outcomes that were forgotten before their time because memory is bounded."""
