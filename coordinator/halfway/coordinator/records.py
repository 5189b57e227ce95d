"""What instances tell each other: calls, statistics and histories, with the field names of the wire format.

Callers get the same records: a field that has a default here is in every answer to a caller.

Instances of two releases run side by side during an upgrade. A reader ignores unknown fields, and an added field has a
default, so the version need not change. `VERSION` is raised only if that is not enough, one release after the release
that first supports the higher version. Durations are in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halfway.coordinator.requests import (
    End,
    EndResult,
    LeasedCheck,
    ListQuery,
    Moment,
    Prepare,
    Prepared,
    TransactionView,
)
from halfway.protocol.transactions import State


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that these figures do not include, and why."""

    shard: int | None = None
    """None for an instance that did not answer."""
    instance: str | None
    """The instance that should serve it; null if none does."""
    detail: str


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """A count of outcomes by outcome and cause, or of checks by verdict: since the start, and per second."""

    names: tuple[str, ...]
    total: int
    per_s: float


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last answer of a check endpoint."""

    host: str
    well: bool
    """Whether the answer was a verdict."""
    status: int | None
    """None if there was no answer."""
    detail: str | None
    at: Moment
    duration_s: float


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One group, over all instances."""

    group: str
    pending: int
    parked: int
    prepares_per_s: float
    ends_per_s: float
    checks_in_flight: int
    checks_due: int
    breaker: str = "closed"
    """`open` while no endpoint can be reached, otherwise `closed`. Set when all instances are added up."""
    breaker_until: Moment | None
    endpoints: tuple[Endpoint, ...]


class LaneFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an incarnation ended."""

    at: Moment
    reason: str


class LaneFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lane."""

    commits_per_s: float
    """Kafka transactions per second."""
    ends_per_s: float
    commit_s: float
    """The mean duration of a Kafka transaction."""
    failures: int
    last_failure: LaneFailure | None


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one shard."""

    shard: int
    pending: int
    parked: int
    remembered: int
    oldest_pending_s: float
    half_lag: int
    op_lag: int
    due: int
    strays: int


class FailingTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to which a write failed, until a write to it succeeds."""

    topic: str
    error_code: str
    detail: str
    refused: int
    first_at: Moment
    last_at: Moment
    retry_at: Moment | None
    first_error_code: str = ""
    first_detail: str = ""
    """The reason of the first refusal. Later ones may only say that it was tried again in vain."""


class RefusedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction whose end could not be written, until it is written; the transaction is still pending."""

    id: str
    topic: str | None
    error_code: str
    detail: str
    last_at: Moment
    retry_at: Moment


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction or a topic in quarantine: a Kafka transaction with it failed, so the lane writes it separately."""

    instance: str = ""
    """The instance of the lane. Set when the figures of all instances are gathered."""
    topic: str | None
    """The topic itself; for a transaction, the topic that caused the failure, if it is known."""
    id: str | None
    """The id of the transaction; null for a topic."""
    state: Annotated[str, Meta(extra_json_schema={"enum": ["alone", "refused", "suspected", "watched"]})]
    """`suspected`: tried separately; `alone`: tried without any other write; `refused`: refused until `until`;
    `watched`: messages of at least `min_bytes` are tried separately until `until`."""
    since: Moment
    until: Moment | None = None
    min_bytes: int | None = None
    error_code: str | None = None
    detail: str | None = None
    """The failure when it was tried separately; null if it has not been tried yet."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Unusable records of an internal topic."""

    topic: str
    reason: str
    count: int
    last_at: Moment


class HealthWarning(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is unsafe on an instance, although it may serve calls."""

    check: str
    detail: str


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one instance, of all groups or of one."""

    url: str
    since: Moment
    shards: tuple[ShardFigures, ...] = ()
    resolving: int = 0
    prepares_per_s: float = 0.0
    ends: tuple[Tally, ...] = ()
    checks: tuple[Tally, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    lane: LaneFigures | None = None
    topics: tuple[FailingTopic, ...] = ()
    writes: tuple[RefusedWrite, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[HealthWarning, ...] = ()


class ShardPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, the instance that serves it, and its figures; both are None while it is unavailable."""

    shard: int
    instance: str | None
    figures: ShardFigures | None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all instances that answered, and the shards that are unavailable."""

    at: Moment
    asked: str
    """The instance that received the call."""
    instances: tuple[InstanceFigures, ...]
    shards: tuple[ShardPlace, ...]
    away: tuple[Away, ...]
    groups: tuple[GroupFigures, ...]
    """Those with the most parked and pending transactions first."""
    groups_left_out: int
    ends: tuple[Tally, ...]
    checks: tuple[Tally, ...]


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event. A field that does not apply, or is not known, is null."""

    at: Moment
    event: str
    """`prepared`, `check`, `unknown`, `verdict_recorded`, `parked`, `resumed`, `reanchored`, `committed` or
    `rolled_back`.
    """
    attempt: int | None = None
    """The number of a check."""
    verdict: str | None = None
    """`commit`, `rollback`, `unknown`, or `none` if no verdict came."""
    sent: bool | None = None
    host: str | None = None
    status: int | None = None
    excerpt: str | None = None
    """The beginning of the answer; only callers that may read payloads see it."""
    duration_s: float | None = None
    detail: str | None = None
    cause: str | None = None
    by: str | None = None
    """The caller that did it manually, if its instance still knows it; the audit trail always has it."""
    remark: str | None = None


VERSION: Final = 1
SUPPORTED_VERSIONS: Final = frozenset({1})

PATH: Final = "/peer"
VERSION_HEADER: Final = "Halfway-Peer-Version"
CREDENTIAL_HEADER: Final = "Halfway-Peer-Credential"
TO_HEADER: Final = "Halfway-Peer-To"
"""The incarnation that the call is for; any other at this address refuses it."""


class PrepareCall(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Prepare a transaction: at the owner of its id, or at any owner if it has no id."""

    request: Prepare


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End a transaction."""

    request: End


class GetCall(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Return one transaction."""

    id: str


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Check a transaction now."""

    id: str


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Resume a parked transaction."""

    id: str
    remark: str | None = None


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List the transactions of these shards; an owner that does not serve all of them refuses."""

    query: ListQuery
    shards: tuple[int, ...]


class SearchCall(ListCall, frozen=True, kw_only=True, tag="search"):
    """A list with filters that an older release does not know: it refuses this call, where it would ignore them."""


class CountCall(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Count a group's transactions in these shards, and refuse its prepares for `hold_s` (below 0: accept them)."""

    group: str
    shards: tuple[int, ...]
    hold_s: float = 0.0


class DueCall(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """Wait until a group has checks to fetch, or until the time has passed; return whether it has any."""

    group: str
    wait_s: float


class LeaseCall(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Hand out up to `at_most` checks that are due now, and settle those of earlier calls."""

    group: str
    at_most: int
    settles: bool = False
    """Whether the caller settles the checks afterwards. If not (an older release), they are counted at once."""
    settled: tuple[str, ...] = ()
    """The ids of checks that earlier calls have leased."""
    taken: bool = False
    """Whether the poll has taken these: count them. If not, it was lost: they are due again."""


class FiguresCall(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Return figures: of everything, or of one group only."""

    group: str | None


InstanceCall = FiguresCall
"""Calls that each instance answers for itself, independent of the shards that it serves."""


class HistoryCall(msgspec.Struct, frozen=True, kw_only=True, tag="history"):
    """Return the history of a transaction."""

    id: str


ReadCall = GetCall | HistoryCall | ListCall | SearchCall | CountCall
"""Calls that change no transaction."""
ShardCall = PrepareCall | EndCall | CheckCall | ResumeCall | DueCall | LeaseCall | ReadCall
PeerCall = ShardCall | InstanceCall


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and its place in Kafka once it is committed."""

    message: int
    """The number of the message, from 1."""
    topic: str
    size: int | None = None
    partition: int | None = None
    offset: int | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a transaction."""

    id: str
    group: str
    state: State
    prepared_at: Moment
    complete: bool | UnsetType = UNSET
    """False if something is not known; `missing` says what. UNSET between instances."""
    missing: tuple[str, ...]
    events: tuple[HistoryEvent, ...]
    """Oldest first; at most the last 500."""
    messages: tuple[MessagePlace, ...]
    messages_detail: str | None
    """Why some places are null."""


class ListResult(msgspec.Struct, frozen=True, kw_only=True):
    """The first transactions of a list in its order, and whether there are more."""

    transactions: tuple[TransactionView, ...]
    more: bool
    count: int | None = None
    """How many match, from the cursor on. An older release does not say it."""


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a group's transactions."""

    pending: int
    parked: int


class DueResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether checks are due."""

    due: bool


class LeaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that were handed out."""

    checks: tuple[LeasedCheck, ...]


ANSWERS: Final[dict[type, Any]] = {
    PrepareCall: Prepared,
    EndCall: EndResult,
    GetCall: TransactionView,
    HistoryCall: HistoryView,
    CheckCall: TransactionView,
    ResumeCall: TransactionView,
    ListCall: ListResult,
    SearchCall: ListResult,
    FiguresCall: InstanceFigures,
    CountCall: GroupCounts,
    DueCall: DueResult,
    LeaseCall: LeaseResult,
}
"""The type of the answer to each call."""
