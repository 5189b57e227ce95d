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
from halfway.service.requests import ListQuery, Page, TransactionView
from halfway.service.views import view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfway.service.ending import Ending
    from halfway.service.groups import Groups
    from halfway.service.shards import Shard, ShardTable

_SLICE = 5000


class Queries:
    """Reads; nothing here changes anything."""

    def __init__(self, shards: ShardTable, groups: Groups, ending: Ending) -> None:
        """Keep the parts."""
        self._shards = shards
        self._groups = groups
        self._ending = ending

    async def get(self, transaction_id: str, *, deadline: float, credential: str | None) -> TransactionView:
        """Show one transaction, with its payload while it is prepared or parked."""
        shard, entry = await self._ending.locate(transaction_id, deadline=deadline)
        self._groups.allow(entry.group, credential=credential, action="get")
        if isinstance(entry, Ended):
            return view(self._groups, entry)
        half = await self._ending.payload(shard, entry, deadline=deadline)
        return view(self._groups, shard.state.find(transaction_id) or entry, half.messages)

    async def list(self, query: ListQuery, *, deadline: float, credential: str | None) -> Page:
        """List transactions, oldest prepare first; the work is cut into slices so that other requests go on."""
        self._shards.require_all()
        if query.group is not None:
            self._groups.require(query.group, credential=credential, action="list")
        after = _decode(query.cursor)
        best: list[Entry] = []
        for shard in self._shards.all():
            found = self._matching(shard, query, after)
            while chunk := list(islice(found, _SLICE)):
                best = nsmallest(query.limit + 1, best + chunk, key=_order)
                await asyncio.sleep(0)
                if asyncio.get_running_loop().time() > deadline:
                    raise OverloadedError("there is too much to look through in time: narrow the list by a filter")
        shown = best[: query.limit]
        more = len(best) > query.limit
        return Page(
            transactions=tuple(view(self._groups, entry) for entry in shown),
            next=_encode(_order(shown[-1])) if more else None,
        )

    @staticmethod
    def _matching(shard: Shard, query: ListQuery, after: tuple[int, str] | None) -> Iterator[Entry]:
        key = key_index(query.key)
        for entry in _entries(shard, query.state):
            if after is not None and _order(entry) <= after:
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
    if state in (None, State.PREPARED):
        yield from shard.state.pending()
    if state in (None, State.PARKED):
        yield from shard.state.parked()
    if state is None or state.ended:
        yield from (entry for entry in shard.state.ended() if state in (None, entry.state))


def _order(entry: Entry) -> tuple[int, str]:
    return entry.prepared_at, entry.id


def _encode(place: tuple[int, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


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
