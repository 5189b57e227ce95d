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
from halfway.domain.shard import Ended, Entry, key_index
from halfway.domain.transaction import State
from halfway.service.peer_calls import Listed
from halfway.service.query.views import view
from halfway.service.requests import ListQuery, TransactionView
from halfway.service.shards.shard_table import not_served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfway.service.query.lookup import Lookup
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

_SLICE = 5000


class Queries:
    """Reads; nothing here changes anything."""

    def __init__(self, shards: ShardTable, groups: Groups, lookup: Lookup) -> None:
        """Keep the parts."""
        self._shards = shards
        self._groups = groups
        self._lookup = lookup

    async def get(self, transaction_id: str, *, deadline: float, credential: str | None) -> TransactionView:
        """Show one transaction, with its payload while it is prepared or parked."""
        shard, entry = await self._lookup.locate(transaction_id, deadline=deadline)
        self._groups.allow(entry.group, credential=credential, action="get")
        if isinstance(entry, Ended):
            return view(self._groups, entry)
        half = await self._lookup.payload(shard, entry, deadline=deadline)
        return view(self._groups, shard.state.find(transaction_id) or entry, half.messages)

    async def list(self, query: ListQuery, shards: Sequence[int], *, deadline: float, credential: str | None) -> Listed:
        """List what these shards hold, oldest prepare first; NotServedError if one of them is not served here.

        The work is cut into slices so that other requests go on. What changes meanwhile is listed once, as it stood
        when it was last seen; what is there all the time is listed.
        """
        if query.group is not None:
            await self._groups.required(query.group, credential=credential, action="list", deadline=deadline)
        after = _decode(query.cursor)
        best: list[Entry] = []
        served = [self._shards.get(number) for number in shards]
        for shard in served:
            found = self._matching(shard, query, after)
            while chunk := list(islice(found, _SLICE)):
                # One that has ended since it was seen comes again, with its outcome, which is the later word.
                once = {entry.id: entry for entry in (*best, *chunk)}
                best = nsmallest(query.limit + 1, once.values(), key=order_of)
                await asyncio.sleep(0)
                if asyncio.get_running_loop().time() > deadline:
                    raise OverloadedError("there is too much to look through in time: narrow the list by a filter")
        for shard in served:
            if self._shards.get(shard.number) is not shard:
                raise not_served(shard.number)
        return Listed(
            transactions=tuple(view(self._groups, entry) for entry in best[: query.limit]),
            more=len(best) > query.limit,
        )

    @staticmethod
    def _matching(shard: Shard, query: ListQuery, after: tuple[int, str] | None) -> Iterator[Entry]:
        key = key_index(query.key)
        for entry in _entries(shard, query.state):
            if after is not None and order_of(entry) <= after:
                continue
            if query.group is not None and entry.group != query.group:
                continue
            if (query.topic is not None or key is not None) and not any(
                (query.topic is None or topic == query.topic) and (key is None or hashed == key)
                for topic, hashed in entry.index
            ):
                continue
            yield entry


def _entries(shard: Shard, state: State | None) -> Iterator[Entry]:
    # Both at one moment: one that is parked or resumed while the first are read would be missed, or come twice.
    unresolved: tuple[Iterator[Entry], ...] = (shard.state.pending(), shard.state.parked())
    if state in (None, State.PREPARED):
        yield from unresolved[0]
    if state in (None, State.PARKED):
        yield from unresolved[1]
    if state is None or state.ended:
        yield from (entry for entry in shard.state.ended() if state in (None, entry.state))


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
