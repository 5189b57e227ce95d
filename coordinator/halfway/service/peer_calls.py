"""What one instance asks of another, and what comes back: plain records, whose names are those on the wire.

Instances of two releases run side by side during an upgrade. Whoever reads ignores fields that it does not know, and a
field that is added has a default: then the version stays. `VERSION` is raised where that is not enough, one release
after the higher version is understood.
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
"""The incarnation that is asked; any other refuses, whoever has its address now."""


class PrepareCall(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """A prepare: the owner of its id is asked, any owner where it brings none."""

    request: Prepare


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """An end."""

    request: End


class GetCall(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Show one transaction."""

    id: str


class CheckCall(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Ask the group about a transaction now."""

    id: str


class ResumeCall(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Take a parked transaction back."""

    id: str


class ListCall(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """List what these shards hold; refused where one of them is not served."""

    query: ListQuery
    shards: tuple[int, ...]


class CountCall(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Count a group's transactions in these shards, and take no prepare of it for so many seconds (below 0: take)."""

    group: str
    shards: tuple[int, ...]
    hold_s: float = 0.0


class DueCall(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """Say whether checks of a group wait to be fetched, once there are any or the time has passed."""

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
"""What answers which call."""
