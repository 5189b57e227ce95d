"""Decides which entries a query matches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.entries import Ended, Entry, ParkedEntry, short_key_hash
from halfway.domain.transaction import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from halfway.domain.shard import ShardState
    from halfway.service.requests import ListQuery


class Filter:
    """The filters of a query, from a place in the order of lists on."""

    def __init__(self, query: ListQuery, after: tuple[int, str] | None = None) -> None:
        """Take a query; `after` is the last place (time of the prepare, id) of the previous page."""
        self._query = query
        self._tests = list(_tests(query, after))

    def apply(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries that match."""
        matches = list(entries)
        for test in self._tests:
            matches = [entry for entry in matches if test(entry)]
        return matches

    def candidates(self, state: ShardState) -> Iterator[Entry]:
        """Iterate over the entries of a shard whose state matches."""
        wanted = self._query.state
        # Both are taken at one moment: otherwise a transaction that is parked or resumed would be missed or come twice.
        unresolved: tuple[Iterator[Entry], ...] = (state.pending(), state.parked())
        if wanted in (None, State.PREPARED):
            yield from unresolved[0]
        if wanted in (None, State.PARKED):
            yield from unresolved[1]
        if (wanted is None or wanted.ended) and not self._query.unresolved:
            yield from (entry for entry in state.ended() if wanted in (None, entry.state))


def _tests(query: ListQuery, after: tuple[int, str] | None) -> Iterator[Callable[[Entry], bool]]:
    """Yield a test for each filter, the cheap ones first."""
    if after is not None:
        yield lambda entry: entry.prepared_at > after[0] or (entry.prepared_at, entry.id) > after
    if (group := query.group) is not None:
        yield lambda entry: entry.group == group
    if (since := query.prepared_from) is not None:
        yield lambda entry: entry.prepared_at >= since
    if (until := query.prepared_until) is not None:
        yield lambda entry: entry.prepared_at <= until
    if (start := query.id) is not None:
        yield lambda entry: entry.id.startswith(start)
    if (cause := query.cause) is not None:
        yield lambda entry: isinstance(entry, Ended) and entry.cause is cause
    if query.error is not None:
        part = query.error.casefold()
        yield lambda entry: part in (_error_of(entry) or "").casefold()
    topic, key = query.topic, short_key_hash(query.key)
    if topic is not None or key is not None:
        yield lambda entry: any(
            (topic is None or name == topic) and (key is None or hashed == key) for name, hashed in entry.index
        )


def _error_of(entry: Entry) -> str | None:
    """Return why a transaction has not ended yet, if it is known."""
    if isinstance(entry, Ended):
        return None
    return entry.reason if isinstance(entry, ParkedEntry) else entry.last_error
