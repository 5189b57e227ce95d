"""The calls between instances and their answers: plain records, whose names are those on the wire.

Instances of two releases run side by side during an upgrade. A reader ignores unknown fields, and an added field has a
default: then the version stays. `VERSION` is raised only if that is not enough, one release after the higher version
is understood.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from halfway.domain.transaction import State
from halfway.service.figures import InstanceFigures
from halfway.service.job_records import ItemResult, JobList, JobPage, JobSpec, JobView
from halfway.service.journal_records import HistoryEvent
from halfway.service.requests import End, EndResult, LeasedCheck, ListQuery, Prepare, Prepared, TransactionView

VERSION: Final = 1
UNDERSTOOD: Final = frozenset({1})

PATH: Final = "/peer"
VERSION_HEADER: Final = "Halfway-Peer-Version"
CREDENTIAL_HEADER: Final = "Halfway-Peer-Credential"
TO_HEADER: Final = "Halfway-Peer-To"
"""The incarnation that is asked; any other at this address refuses."""


class PrepareCall(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """A prepare: for the owner of its id, or for any owner if it has none."""

    request: Prepare


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """An end."""

    request: End


class GetCall(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Show one transaction."""

    id: str


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Check a transaction now."""

    id: str
    prepared_at: int | None = None
    """Of the transaction that is meant; None for the one that has the id now."""


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Take a parked transaction back."""

    id: str
    remark: str | None = None
    prepared_at: int | None = None


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List the transactions of these shards; refused if one of them is not served."""

    query: ListQuery
    shards: tuple[int, ...]


class SearchCall(ListCall, frozen=True, kw_only=True, tag="search"):
    """The same with filters that an older release would leave out: it refuses this call."""


class FindCall(msgspec.Struct, frozen=True, kw_only=True, tag="find"):
    """Count what a query matches in these shards, and give the ids of the oldest `most`."""

    query: ListQuery
    shards: tuple[int, ...]
    most: int


class CountCall(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Count a group's transactions in these shards, and refuse its prepares for `hold_s` (below 0: take them)."""

    group: str
    shards: tuple[int, ...]
    hold_s: float = 0.0


class DueCall(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """Return whether checks of a group wait to be fetched, once there are any or the time has passed."""

    group: str
    wait_s: float


class LeaseCall(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Hand out checks that are due now."""

    group: str
    at_most: int


class KnownJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="known_job"):
    """Show the job of this id, if it is there and was asked for in the same way."""

    spec: JobSpec


class StartJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="start_job"):
    """Accept a job, as the owner of the shard that its id hashes to."""

    spec: JobSpec


class JobCall(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Show a job, and at most `limit` of its items from number `start` on, those with a result if one is named."""

    id: str
    result: ItemResult | None
    start: int
    limit: int


class JobsCall(msgspec.Struct, frozen=True, kw_only=True, tag="jobs"):
    """Show all jobs."""


class StopJobCall(msgspec.Struct, frozen=True, kw_only=True, tag="stop_job"):
    """Stop a job."""

    id: str


class FiguresCall(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Show figures: of all groups, or of one and of nothing else."""

    group: str | None


OnJobs = KnownJobCall | StartJobCall | JobCall | JobsCall | StopJobCall
Overview = FiguresCall | OnJobs
"""Calls that each instance answers for itself, whatever shards it serves."""


class HistoryCall(msgspec.Struct, frozen=True, kw_only=True, tag="history"):
    """Show the history of a transaction."""

    id: str


Look = GetCall | HistoryCall | ListCall | SearchCall | FindCall | CountCall
"""Calls that change no transaction."""
Core = PrepareCall | EndCall | CheckCall | ResumeCall | DueCall | LeaseCall | Look
PeerCall = Core | Overview


class MessagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """One message, and where it stands; `size` in bytes; None for what is not known."""

    message: int
    """Its number, from 1."""
    topic: str
    size: int | None = None
    partition: int | None = None
    offset: int | None = None


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a transaction, the oldest first; `missing` says what is not known, and why."""

    id: str
    group: str
    state: State
    prepared_at: int
    events: tuple[HistoryEvent, ...]
    missing: tuple[str, ...]
    messages: tuple[MessagePlace, ...]
    messages_detail: str | None


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list: the first ones in its order, and whether there are more."""

    transactions: tuple[TransactionView, ...]
    more: bool


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """How many match, and (time of the prepare in ms since the epoch, id) of the oldest of them."""

    count: int
    places: tuple[tuple[int, str], ...]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A group's transactions."""

    pending: int
    parked: int


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """Whether checks wait."""

    due: bool


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that were handed out."""

    checks: tuple[LeasedCheck, ...]


ANSWERS: Final[dict[type, Any]] = {
    PrepareCall: Prepared,
    EndCall: EndResult,
    GetCall: TransactionView,
    HistoryCall: HistoryView,
    CheckCall: TransactionView,
    ResumeCall: TransactionView,
    ListCall: Listed,
    SearchCall: Listed,
    FindCall: Found,
    FiguresCall: InstanceFigures,
    KnownJobCall: JobView,
    StartJobCall: JobView,
    JobCall: JobPage,
    JobsCall: JobList,
    StopJobCall: JobView,
    CountCall: Counted,
    DueCall: Due,
    LeaseCall: Leased,
}
"""The type of the answer to each call."""
