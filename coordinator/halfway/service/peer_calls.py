"""The calls between instances and their answers: plain records, whose names are those on the wire.

Instances of two releases run side by side during an upgrade. A reader ignores unknown fields, and an added field has a
default: then the version stays. `VERSION` is raised only if that is not enough, one release after the higher version
is understood.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

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


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Take a parked transaction back."""

    id: str


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List the transactions of these shards; refused if one of them is not served."""

    query: ListQuery
    shards: tuple[int, ...]


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


PeerCall = PrepareCall | EndCall | GetCall | CheckCall | ResumeCall | ListCall | CountCall | DueCall | LeaseCall


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list: the first ones in its order, and whether there are more."""

    transactions: tuple[TransactionView, ...]
    more: bool


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
    CheckCall: TransactionView,
    ResumeCall: TransactionView,
    ListCall: Listed,
    CountCall: Counted,
    DueCall: Due,
    LeaseCall: Leased,
}
"""The type of the answer to each call."""
