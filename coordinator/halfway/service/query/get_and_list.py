"""GET and lists: what is pending, parked and lately ended in the shards served here."""

from __future__ import annotations

import asyncio
import base64
import binascii
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.errors import InvalidRequestError, OverloadedError
from halfway.domain.principal import Permission, Principal
from halfway.domain.shard import Ended, Entry
from halfway.service.peer_calls import Found, Listed
from halfway.service.query.filters import Filter
from halfway.service.query.views import view
from halfway.service.requests import ListQuery, TransactionView
from halfway.service.shards.shard_table import not_served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from halfway.service.ports import Authority
    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import ShardTable

_SLICE = 5000


class Queries:
    """Reads; nothing here changes anything."""

    def __init__(self, authority: Authority, shards: ShardTable, groups: Groups, lookup: Lookup) -> None:
        """Keep the parts."""
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._lookup = lookup

    async def get(self, transaction_id: str, *, deadline: float, principal: Principal) -> TransactionView:
        """Show one transaction; while it is prepared or parked with its payload, if the caller may read it."""
        shard, entry = await self._lookup.locate(transaction_id, Permission.GET, principal=principal, deadline=deadline)
        if isinstance(entry, Ended) or not self._authority.may(principal, Permission.READ_PAYLOADS, entry.group):
            return view(self._groups, entry)
        half = await self._lookup.payload(shard, entry, deadline=deadline)
        return view(self._groups, shard.state.find(transaction_id) or entry, half.messages)

    async def find(
        self, query: ListQuery, shards: Sequence[int], *, most: int, deadline: float, principal: Principal
    ) -> Found:
        """Find the ids of what a query matches in these shards, the oldest `most`, and count all of it.

        Errors as for `list`.
        """
        query = self.narrowed(query, principal)
        found: set[str] = set()
        oldest: list[tuple[int, str]] = []
        async for chunk in self._slices(query, shards, deadline):
            fresh = {entry.id: (entry.prepared_at, entry.id) for entry in chunk if entry.id not in found}
            found.update(fresh)
            if fresh and most:
                # What is in order already costs little: one sort of all would hold up other requests.
                oldest = sorted([*oldest, *fresh.values()])[:most]
        return Found(count=len(found), places=tuple(oldest))

    async def _slices(self, query: ListQuery, shards: Sequence[int], deadline: float) -> AsyncIterator[list[Entry]]:
        """Give what these shards hold of a query, and let others have their turn after each slice, match or not."""
        matching = Filter(query, _decode(query.cursor))
        served = [self._shards.get(number) for number in shards]
        for shard in served:
            entries = matching.entries(shard.state)
            while chunk := list(islice(entries, _SLICE)):
                yield matching.matching(chunk)
                await asyncio.sleep(0)
                if asyncio.get_running_loop().time() > deadline:
                    raise OverloadedError("there is too much to look through in time: narrow the list by a filter")
        for shard in served:
            if self._shards.get(shard.number) is not shard:
                raise not_served(shard.number)

    async def list(self, query: ListQuery, shards: Sequence[int], *, deadline: float, principal: Principal) -> Listed:
        """List what these shards hold, oldest prepare first; NotServedError if one of them is not served here.

        The work is cut into slices so that other requests go on. What changes meanwhile is listed once, as it stood
        when it was last seen; what is there all the time is listed.
        """
        query = self.narrowed(query, principal)
        if query.group is not None:
            await self._groups.at_the_end_of_the_log(query.group, deadline=deadline)
        best: list[Entry] = []
        async for found in self._slices(query, shards, deadline):
            chunk = found
            if len(best) > query.limit:  # of many, nearly all come after this page
                last = order_of(best[-1])
                chunk = [entry for entry in found if entry.prepared_at <= last[0] and order_of(entry) <= last]
            if not chunk:
                continue
            # One that has ended since it was seen comes again, with its outcome, which is the later word.
            once = {entry.id: entry for entry in (*best, *chunk)}
            best = nsmallest(query.limit + 1, once.values(), key=order_of)
        return Listed(
            transactions=tuple(view(self._groups, entry) for entry in best[: query.limit]),
            more=len(best) > query.limit,
        )

    def narrowed(self, query: ListQuery, principal: Principal) -> ListQuery:
        """Return the part of a query that the caller may list: a group's principal lists its own transactions."""
        if query.group is None and principal.group is not None:
            query = msgspec.structs.replace(query, group=principal.group)
        self._authority.require(principal, Permission.LIST, query.group)
        if query.key is not None:  # whoever may search for a message key can guess it
            self._authority.require(principal, Permission.READ_PAYLOADS, query.group)
        return query


def order_of(one: Entry | TransactionView) -> tuple[int, str]:
    """Return a transaction's place in the one order of all lists."""
    return one.prepared_at, one.id


def encode_cursor(last: TransactionView) -> str:
    """Return the cursor of the page that comes after a transaction."""
    return base64.urlsafe_b64encode(msgspec.json.encode(order_of(last))).decode().rstrip("=")


def _decode(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=tuple[int, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidRequestError(
            f"cursor {cursor[:80]!r} is not one that a list answered: leave it out to start again", field="cursor"
        ) from None
