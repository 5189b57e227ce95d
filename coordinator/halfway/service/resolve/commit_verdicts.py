"""Commit verdicts of checks: kept until they are written, so that policy never rolls such a transaction back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from halfway.domain.errors import AlreadyEndedError, HalfwayError, OutcomeExpiredError, UnknownTransactionError
from halfway.domain.policy import COMMIT_SAID
from halfway.domain.shard import ParkedEntry
from halfway.domain.transaction import Action, Cause
from halfway.service.resolve.changes import Act
from halfway.service.resolve.resolver import limit
from halfway.service.shards.shard_table import CommitVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from halfway.domain.shard import Entry, Unresolved
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.shard_table import ShardTable

log = structlog.get_logger(__name__)

_MOST_KEPT = 10_000
_OVER = (AlreadyEndedError, OutcomeExpiredError, UnknownTransactionError)


class CommitVerdicts:
    """Keeps a commit verdict from the moment it comes until it is written: as the commit, or else as a note of it."""

    def __init__(
        self,
        shards: ShardTable,
        resolver: Resolver,
        spawn: Callable[[Coroutine[object, object, None]], None],
        horizon_s: float,
    ) -> None:
        """Keep the parts; `spawn` runs work that nobody waits for."""
        self._horizon_ms = round(horizon_s * 1000)
        self._shards = shards
        self._resolver = resolver
        self._spawn = spawn
        self._recording: set[str] = set()

    def keep(self, asked: Entry, number: int, checks: int) -> None:
        """Keep a verdict that has just come; with many kept, those of shards that went elsewhere go."""
        kept = self._shards.said_commit
        if len(kept) >= _MOST_KEPT:
            for name in [name for name, said in kept.items() if self._shards.find(said.shard) is None]:
                del kept[name]
        kept[asked.id] = CommitVerdict(number, checks, asked.prepared_at, asked.fingerprint)

    def keeps(self, transaction_id: str) -> bool:
        """Whether a check said commit, which is not written down yet: policy must not decide meanwhile."""
        return transaction_id in self._shards.said_commit

    def is_of_another(self, asked: Entry | CommitVerdict, entry: Unresolved) -> bool:
        """Whether a later transaction has the id now: nothing was asked about that one.

        A repeat of a prepare may change the time of the same transaction, by less than the outcome horizon.
        """
        later = entry.prepared_at >= asked.prepared_at + self._horizon_ms
        return later or entry.fingerprint != asked.fingerprint

    def take_commit_result(self, transaction_id: str, error: BaseException | None) -> None:
        """Take the result of the commit; if it was not written, record the verdict instead."""
        if error is None or isinstance(error, _OVER):
            self._shards.said_commit.pop(transaction_id, None)
        else:
            self._begin(transaction_id)

    def record(self, number: int) -> None:
        """Try once more to write down the verdicts of a shard that could not be written."""
        for transaction_id in [name for name, said in self._shards.said_commit.items() if said.shard == number]:
            if transaction_id not in self._shards.claims:
                self._begin(transaction_id)

    def _begin(self, transaction_id: str) -> None:
        said = self._shards.said_commit.get(transaction_id)
        if said is not None and transaction_id not in self._recording:
            self._recording.add(transaction_id)
            self._spawn(self._record(transaction_id, said))

    async def _record(self, transaction_id: str, said: CommitVerdict) -> None:
        """Write that a check said commit: policy never rolls it back from then on."""
        try:
            shard = await self._shards.serving(said.shard, deadline=limit())
            entry = shard.state.unresolved(transaction_id)
            if entry is not None and not entry.commit_verdict and not self.is_of_another(said, entry):
                await self._resolver.resolve(transaction_id, _note(entry, said), deadline=limit())
        except _OVER:
            self._shards.said_commit.pop(transaction_id, None)
        except HalfwayError as error:
            log.warning("verdict_not_recorded", id=transaction_id, error=error.code)
        else:
            self._shards.said_commit.pop(transaction_id, None)
        finally:
            self._recording.discard(transaction_id)


def _note(entry: Unresolved, said: CommitVerdict) -> Act:
    """Return the act that records the verdict: VERDICT if it is prepared, parked again if it is parked.

    A transaction that is resumed in between must not be parked by it: the verdict is then recorded again, as prepared.
    """
    parked = _is_parked(entry)
    return Act(
        action=Action.PARK if parked else Action.CHECK,
        cause=Cause.CHECK,
        remark=f"{entry.reason}; {COMMIT_SAID}" if isinstance(entry, ParkedEntry) else None,
        checks=max(entry.checks, said.checks),
        commit_verdict=True,
        still=_is_parked if parked else None,
    )


def _is_parked(entry: Unresolved) -> bool:
    return isinstance(entry, ParkedEntry)
