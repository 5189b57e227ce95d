"""Gets and lists pending, parked and recently ended transactions of the shards served here."""

from __future__ import annotations

import asyncio
import base64
import binascii
from heapq import nsmallest
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.entries import Ended, Entry
from halfway.domain.errors import InvalidRequestError, OverloadedError
from halfway.domain.principal import Permission, Principal
from halfway.service.query.filters import Filter
from halfway.service.query.views import view
from halfway.service.records.peer_calls import FindResult, ListResult
from halfway.service.requests import ListQuery, TransactionView
from halfway.service.shards.shard_table import not_served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from halfway.service.fairness import Turns
    from halfway.service.ports import Authority
    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import ShardTable

_SLICE = 1000
_SHOWN_AT_ONCE = 250


class Queries:
    """Reads transactions. It changes nothing."""

    def __init__(self, authority: Authority, shards: ShardTable, groups: Groups, lookup: Lookup, turns: Turns) -> None:
        """Store the parts."""
        self._turns = turns
        self._authority = authority
        self._shards = shards
        self._groups = groups
        self._lookup = lookup

    async def get(self, transaction_id: str, *, deadline: float, principal: Principal) -> TransactionView:
        """Return one transaction, with the payload if it is prepared or parked and the caller may read payloads."""
        shard, entry = await self._lookup.locate(transaction_id, Permission.GET, principal=principal, deadline=deadline)
        if isinstance(entry, Ended) or not self._authority.may(principal, Permission.READ_PAYLOADS, entry.group):
            return view(self._groups, entry)
        half = await self._lookup.payload(shard, entry, deadline=deadline)
        return view(self._groups, shard.state.find(transaction_id) or entry, half.messages)

    async def find(
        self, query: ListQuery, shards: Sequence[int], *, most: int, deadline: float, principal: Principal
    ) -> FindResult:
        """Find the ids of the oldest `most` matches of a query in these shards, and count all matches.

        Errors as for `list`.
        """
        query = self.restrict(query, principal)
        seen: set[str] = set()
        oldest: list[tuple[int, str]] = []
        async for chunk in self._slices(query, shards, deadline, principal.group):
            fresh = {entry.id: (entry.prepared_at, entry.id) for entry in chunk if entry.id not in seen}
            seen.update(fresh)
            if fresh and most:
                # Sorting a mostly sorted list is cheap. A single sort of all matches would block other requests.
                oldest = sorted([*oldest, *fresh.values()])[:most]
        return FindResult(count=len(seen), places=tuple(oldest))

    async def _slices(
        self, query: ListQuery, shards: Sequence[int], deadline: float, caller: str | None
    ) -> AsyncIterator[list[Entry]]:
        """Yield the matches in these shards slice by slice, each in the caller's turn."""
        query_filter = Filter(query, _decode_cursor(query.cursor))
        served = [self._shards.get(number) for number in shards]
        entries = chain.from_iterable(query_filter.candidates(shard.state) for shard in served)
        at_end = False
        while not at_end:
            await self._turns.next(caller)
            examined = list(islice(entries, _SLICE))
            at_end = len(examined) < _SLICE
            yield query_filter.apply(examined)
            if asyncio.get_running_loop().time() > deadline:
                raise OverloadedError(
                    "there are too many transactions to search in time: narrow the list with a filter"
                )
        for shard in served:
            if self._shards.get(shard.number) is not shard:
                raise not_served(shard.number)

    async def list(
        self, query: ListQuery, shards: Sequence[int], *, deadline: float, principal: Principal
    ) -> ListResult:
        """List the transactions of these shards, oldest prepare first; NotServedError if one is not served here.

        The work is done in slices, so that other requests continue. A transaction that changes in the meantime is
        listed once, in its latest seen state. One that exists all the time is always listed.
        """
        query = self.restrict(query, principal)
        if query.group is not None:
            await self._groups.get_latest(query.group, deadline=deadline)
        best: list[Entry] = []
        async for matches in self._slices(query, shards, deadline, principal.group):
            chunk = matches
            if len(best) > query.limit:  # drop the entries after this page early: mostly nearly all of them
                last = sort_key(best[-1])
                chunk = [entry for entry in matches if entry.prepared_at <= last[0] and sort_key(entry) <= last]
            if not chunk:
                continue
            # A transaction that has ended since it was seen comes again with its outcome, which replaces the first.
            latest = {entry.id: entry for entry in (*best, *chunk)}
            best = nsmallest(query.limit + 1, latest.values(), key=sort_key)
        shown: list[TransactionView] = []
        for first in range(0, min(len(best), query.limit), _SHOWN_AT_ONCE):
            if first:
                await self._turns.next(principal.group)
            last_one = min(first + _SHOWN_AT_ONCE, query.limit)
            shown += [view(self._groups, entry) for entry in best[first:last_one]]
        return ListResult(transactions=tuple(shown), more=len(best) > query.limit)

    def restrict(self, query: ListQuery, principal: Principal) -> ListQuery:
        """Return the part of a query that the caller may list: a group's principal lists its own transactions."""
        if query.group is None and principal.group is not None:
            query = msgspec.structs.replace(query, group=principal.group)
        self._authority.require(principal, Permission.LIST, query.group)
        if query.key is not None:  # a search for a message key can be used to guess it
            self._authority.require(principal, Permission.READ_PAYLOADS, query.group)
        return query


def sort_key(transaction: Entry | TransactionView) -> tuple[int, str]:
    """Return a transaction's place in the order of all lists."""
    return transaction.prepared_at, transaction.id


def encode_cursor(last: TransactionView) -> str:
    """Return the cursor of the page after a transaction."""
    return base64.urlsafe_b64encode(msgspec.json.encode(sort_key(last))).decode().rstrip("=")


def _decode_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=tuple[int, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidRequestError(
            f"cursor {cursor[:80]!r} does not come from a list: leave it out to start from the beginning",
            field="cursor",
        ) from None
