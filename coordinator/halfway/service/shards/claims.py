"""The claims of ids by changes in progress, and the commit verdicts that are not written yet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
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


class CommitVerdict(msgspec.Struct, frozen=True, gc=False):
    """A commit verdict of a check that is not written yet: its shard, and the number of checks sent by then."""

    shard: int
    checks: int
    prepared_at: int
    fingerprint: bytes
