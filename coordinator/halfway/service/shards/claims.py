"""The claims of ids by changes in progress, and the commits that were said and are not written yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from halfway.domain.transaction import Cause
    from halfway.service.ports import LaneWrite


class Claim(msgspec.Struct, eq=False):
    """The claim of an id by a change in progress. Other changes may wait for its release."""

    shard: int
    mark: object
    """The mark of the shard when the change last read the entry."""
    write: LaneWrite | None = None
    """The write of the change that the lane has yet to answer."""
    waiter: asyncio.Future[None] | None = None
    """A future that is done when the id is free; None if nothing waits for that."""

    def released(self) -> asyncio.Future[None]:
        """Return a future that is done when the id is free. Shield it, because other changes may wait for it too."""
        if self.waiter is None:
            self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter


class CommitVerdict(msgspec.Struct, kw_only=True, eq=False):
    """A commit that was said and is not written yet, neither as the commit nor as a record of the verdict."""

    shard: int
    checks: int
    """The number of checks sent by then."""
    cause: Cause
    """Who said it."""
    prepared_at: int
    fingerprint: bytes
    recording: asyncio.Task[bool] | None = None
    """Writes a record of it; returns whether that is in the log."""
