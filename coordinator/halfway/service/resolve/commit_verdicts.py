"""Keeps commit verdicts of checks until they are written, so that the policy never rolls such a transaction back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from halfway.domain.entries import ParkedEntry
from halfway.domain.errors import AlreadyEndedError, HalfwayError, OutcomeExpiredError, UnknownTransactionError
from halfway.domain.policy import COMMIT_SAID
from halfway.domain.transaction import Action, Cause
from halfway.service.resolve.changes import Act
from halfway.service.resolve.resolver import background_deadline
from halfway.service.shards.claims import CommitVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from halfway.domain.entries import Entry, Unresolved
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.shard_table import ShardTable

log = structlog.get_logger(__name__)

_CLEANUP_AT = 10_000
_ENDED = (AlreadyEndedError, OutcomeExpiredError, UnknownTransactionError)


class CommitVerdicts:
    """Keeps a commit verdict from its arrival until it is written, as the commit or as an op VERDICT."""

    def __init__(
        self,
        shards: ShardTable,
        resolver: Resolver,
        spawn: Callable[[Coroutine[object, object, None]], None],
        horizon_s: float,
    ) -> None:
        """Store the parts; `spawn` runs work in the background."""
        self._horizon_ms = round(horizon_s * 1000)
        self._shards = shards
        self._resolver = resolver
        self._spawn = spawn
        self._recording: set[str] = set()

    def keep(self, checked: Entry, number: int, checks: int) -> None:
        """Keep a new verdict. If there are many, drop those of shards that are no longer served here."""
        verdicts = self._shards.unwritten_commit_verdicts
        if len(verdicts) >= _CLEANUP_AT:
            for name in [name for name, verdict in verdicts.items() if self._shards.find(verdict.shard) is None]:
                del verdicts[name]
        verdicts[checked.id] = CommitVerdict(number, checks, checked.prepared_at, checked.fingerprint)

    def keeps(self, transaction_id: str) -> bool:
        """Return whether a commit verdict of this id is not written yet: the policy must not decide until then."""
        return transaction_id in self._shards.unwritten_commit_verdicts

    def is_of_another(self, checked: Entry | CommitVerdict, entry: Unresolved) -> bool:
        """Return whether a later transaction has the id now, which was not checked.

        A repeat of a prepare may change the time of the same transaction, by less than the outcome horizon.
        """
        later = entry.prepared_at >= checked.prepared_at + self._horizon_ms
        return later or entry.fingerprint != checked.fingerprint

    def take_commit_result(self, transaction_id: str, error: BaseException | None) -> None:
        """Handle the result of the commit. If it was not written, record the verdict instead."""
        if error is None or isinstance(error, _ENDED):
            self._shards.unwritten_commit_verdicts.pop(transaction_id, None)
        else:
            self._start_recording(transaction_id)

    def record(self, number: int) -> None:
        """Retry to record the verdicts of a shard that could not be written."""
        for transaction_id in [
            name for name, verdict in self._shards.unwritten_commit_verdicts.items() if verdict.shard == number
        ]:
            if transaction_id not in self._shards.claims:
                self._start_recording(transaction_id)

    def _start_recording(self, transaction_id: str) -> None:
        verdict = self._shards.unwritten_commit_verdicts.get(transaction_id)
        if verdict is not None and transaction_id not in self._recording:
            self._recording.add(transaction_id)
            self._spawn(self._record(transaction_id, verdict))

    async def _record(self, transaction_id: str, verdict: CommitVerdict) -> None:
        """Record a commit verdict. From then on the policy never rolls the transaction back."""
        try:
            shard = await self._shards.wait_until_served(verdict.shard, deadline=background_deadline())
            entry = shard.state.unresolved(transaction_id)
            if entry is not None and not entry.commit_verdict and not self.is_of_another(verdict, entry):
                await self._resolver.resolve(
                    transaction_id, _recording_act(entry, verdict), deadline=background_deadline()
                )
        except _ENDED:
            self._shards.unwritten_commit_verdicts.pop(transaction_id, None)
        except HalfwayError as error:
            log.warning("verdict_not_recorded", id=transaction_id, error=error.code)
        else:
            self._shards.unwritten_commit_verdicts.pop(transaction_id, None)
        finally:
            self._recording.discard(transaction_id)


def _recording_act(entry: Unresolved, verdict: CommitVerdict) -> Act:
    """Return the act that records a verdict: an op VERDICT if the transaction is prepared, else a new parked record.

    If the parked transaction is resumed in between, the act must not park it: the verdict is then recorded again.
    """
    parked = _is_parked(entry)
    return Act(
        action=Action.PARK if parked else Action.CHECK,
        cause=Cause.CHECK,
        remark=f"{entry.reason}; {COMMIT_SAID}" if isinstance(entry, ParkedEntry) else None,
        checks=max(entry.checks, verdict.checks),
        commit_verdict=True,
        still_decided=_is_parked if parked else None,
    )


def _is_parked(entry: Unresolved) -> bool:
    return isinstance(entry, ParkedEntry)
