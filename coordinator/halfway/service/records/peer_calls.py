"""The calls between instances and their answers: plain records, with the field names of the wire format.

Instances of two releases run side by side during an upgrade. A reader ignores unknown fields, and an added field has a
default, so the version need not change. `VERSION` is raised only if that is not enough, one release after the release
that first supports the higher version.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from halfway.domain.transaction import State
from halfway.service.records.job_records import ItemResult, JobList, JobPage, JobSpec, JobView
from halfway.service.records.journal_records import HistoryEvent
from halfway.service.records.statistics_records import InstanceFigures
from halfway.service.requests import End, EndResult, LeasedCheck, ListQuery, Prepare, Prepared, TransactionView

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
    prepared_at: int | None = None
    """The prepare time of the transaction to check; None for the one that has the id now."""


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Resume a parked transaction."""

    id: str
    remark: str | None = None
    prepared_at: int | None = None


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List the transactions of these shards; an owner that does not serve all of them refuses."""

    query: ListQuery
    shards: tuple[int, ...]


class SearchCall(ListCall, frozen=True, kw_only=True, tag="search"):
    """A list with filters that an older release does not know: it refuses this call, where it would ignore them."""


class FindCall(msgspec.Struct, frozen=True, kw_only=True, tag="find"):
    """Count the matches of a query in these shards, and return the ids of the oldest `most`."""

    query: ListQuery
    shards: tuple[int, ...]
    most: int


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
    """Hand out up to `at_most` checks that are due now."""

    group: str
    at_most: int


class KnownJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="known_job"):
    """Return the job of this id, if this instance has it with the same request."""

    spec: JobSpec


class StartJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="start_job"):
    """Start a job at the owner of the shard that its id hashes to."""

    spec: JobSpec


class JobCall(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Return a job, and up to `limit` of its items from number `start` on; only those with `result` if it is given."""

    id: str
    result: ItemResult | None
    start: int
    limit: int


class JobsCall(msgspec.Struct, frozen=True, kw_only=True, tag="jobs"):
    """Return all jobs."""


class StopJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="stop_job"):
    """Stop a job."""

    id: str


class FiguresCall(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Return figures: of everything, or of one group only."""

    group: str | None


AnyJobCall = KnownJobCall | StartJobCall | JobCall | JobsCall | StopJobCall
InstanceCall = FiguresCall | AnyJobCall
"""Calls that each instance answers for itself, independent of the shards that it serves."""


class HistoryCall(msgspec.Struct, frozen=True, kw_only=True, tag="history"):
    """Return the history of a transaction."""

    id: str


ReadCall = GetCall | HistoryCall | ListCall | SearchCall | FindCall | CountCall
"""Calls that change no transaction."""
ShardCall = PrepareCall | EndCall | CheckCall | ResumeCall | DueCall | LeaseCall | ReadCall
PeerCall = ShardCall | InstanceCall


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """One message and its place in the topic. `size` is in bytes; unknown fields are None."""

    message: int
    """The number of the message, from 1."""
    topic: str
    size: int | None = None
    partition: int | None = None
    offset: int | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The events of a transaction, the oldest first. `missing` says which ones are unknown, and why."""

    id: str
    group: str
    state: State
    prepared_at: int
    events: tuple[HistoryEvent, ...]
    missing: tuple[str, ...]
    messages: tuple[MessagePlace, ...]
    messages_detail: str | None


class ListResult(msgspec.Struct, frozen=True, kw_only=True):
    """The first transactions of a list in its order, and whether there are more."""

    transactions: tuple[TransactionView, ...]
    more: bool


class FindResult(msgspec.Struct, frozen=True, kw_only=True):
    """The number of matches, and (time of the prepare in ms since the epoch, id) of the oldest of them."""

    count: int
    places: tuple[tuple[int, str], ...]


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
    FindCall: FindResult,
    FiguresCall: InstanceFigures,
    KnownJobCall: JobView,
    StartJobCall: JobView,
    JobCall: JobPage,
    JobsCall: JobList,
    StopJobCall: JobView,
    CountCall: GroupCounts,
    DueCall: DueResult,
    LeaseCall: LeaseResult,
}
"""The type of the answer to each call."""
