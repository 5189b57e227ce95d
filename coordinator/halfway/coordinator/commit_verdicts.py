"""Keeps commits that were said until they are written, so that the policy never rolls such a transaction back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from halfway.coordinator.changes import Act
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.resolver import background_deadline
from halfway.coordinator.shards.shard_table import CommitVerdict
from halfway.protocol.entries import Ended, ParkedEntry
from halfway.protocol.errors import (
    AlreadyEndedError,
    HalfwayError,
    IdReplacedError,
    OutcomeExpiredError,
    OverloadedError,
    UnknownTransactionError,
)
from halfway.protocol.policy import COMMIT_SAID
from halfway.protocol.transactions import Action

if TYPE_CHECKING:
    from halfway.coordinator.resolver import Resolver
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.protocol.entries import Entry, Unresolved
    from halfway.protocol.transactions import Cause


log = structlog.get_logger(__name__)

_CLEANUP_AT = 10_000
_ENDED = (AlreadyEndedError, OutcomeExpiredError, UnknownTransactionError)


def leaves_nothing_to_keep(error: BaseException) -> bool:
    """Return whether an error of a commit means that its transaction has ended, or is another one now."""
    return isinstance(error, (*_ENDED, IdReplacedError))


class CommitVerdicts:
    """Keeps a commit verdict from its arrival until it is written, as the commit or as an op VERDICT.

    A commit verdict is a commit that a caller, an operator or the answer to a check has said.
    """

    def __init__(self, shards: ShardTable, resolver: Resolver, horizon_s: float) -> None:
        """Store the parts."""
        self._horizon_ms = round(horizon_s * 1000)
        self._shards = shards
        self._resolver = resolver
        self._not_recorded = LogSummary(log, "warning", "verdict_not_recorded")
        self._cleanup_at = _CLEANUP_AT
        """How many verdicts are kept when those of shards that are not served here are dropped next."""
        self._tasks: set[asyncio.Task[bool]] = set()
        """The recordings in progress. A shard is not released before they are done."""
        shards.record_verdicts = self.record

    def keep(self, entry: Entry, checks: int, cause: Cause) -> None:
        """Keep a new verdict. If there are many, drop those of shards that are no longer served here."""
        if isinstance(entry, Ended):
            return
        verdicts = self._shards.unwritten_commit_verdicts
        if len(verdicts) >= self._cleanup_at:
            for name in [name for name, verdict in verdicts.items() if self._shards.find(verdict.shard) is None]:
                del verdicts[name]
            # If nearly all are of shards that are served, the next look comes when there are twice as many.
            self._cleanup_at = max(_CLEANUP_AT, 2 * len(verdicts))
        kept = verdicts.get(entry.id)
        if kept is not None and not self.is_of_another(kept, entry):
            kept.checks = max(kept.checks, checks)
            return
        verdicts[entry.id] = CommitVerdict(
            shard=self._shards.number_of(entry.id),
            checks=checks,
            cause=cause,
            prepared_at=entry.prepared_at,
            fingerprint=entry.fingerprint,
        )

    def keeps(self, transaction_id: str) -> bool:
        """Return whether a commit verdict of this id is not written yet: the policy must not decide until then."""
        return transaction_id in self._shards.unwritten_commit_verdicts

    def is_of_another(self, verdict: Entry | CommitVerdict, entry: Unresolved) -> bool:
        """Return whether a later transaction has the id now, which the verdict does not concern.

        A repeat of a prepare may change the time of the same transaction, by less than the outcome horizon.
        """
        later = entry.prepared_at >= verdict.prepared_at + self._horizon_ms
        return later or entry.fingerprint != verdict.fingerprint

    def take_commit_result(self, transaction_id: str, error: BaseException | None) -> asyncio.Task[bool] | None:
        """Handle the result of the commit. If it was not written, record the verdict instead.

        Return the recording, or None if there is none: the verdict is recorded already, or the lane is full, and the
        scan records it later.
        """
        if error is None or isinstance(error, _ENDED):
            self._shards.unwritten_commit_verdicts.pop(transaction_id, None)
            return None
        return None if isinstance(error, OverloadedError) else self._start_recording(transaction_id)

    def record(self, number: int) -> None:
        """Retry to record the verdicts of a shard that could not be written."""
        for transaction_id in [
            name for name, verdict in self._shards.unwritten_commit_verdicts.items() if verdict.shard == number
        ]:
            if transaction_id not in self._shards.claims:
                self._start_recording(transaction_id)

    def _start_recording(self, transaction_id: str) -> asyncio.Task[bool] | None:
        verdict = self._shards.unwritten_commit_verdicts.get(transaction_id)
        if verdict is None:
            return None
        if verdict.recording is None:
            shard = self._shards.find(verdict.shard)
            entry = None if shard is None else shard.state.unresolved(transaction_id)
            if entry is not None and entry.commit_verdict and not self.is_of_another(verdict, entry):
                del self._shards.unwritten_commit_verdicts[transaction_id]
                return None
            verdict.recording = asyncio.create_task(self._record(transaction_id, verdict))
            self._tasks.add(verdict.recording)
            verdict.recording.add_done_callback(self._tasks.discard)
        return verdict.recording

    async def _record(self, transaction_id: str, verdict: CommitVerdict) -> bool:
        """Record a commit verdict, and return whether it is in the log, or the transaction has ended.

        From then on the policy never rolls the transaction back.
        """
        try:
            await self._resolver.resolve_open(
                verdict.shard, transaction_id, partial(self._recording_act, verdict), deadline=background_deadline()
            )
        except HalfwayError as error:
            if not isinstance(error, OverloadedError):
                self._not_recorded.note({"error": error.code}, id=transaction_id)
            return False
        except Exception:
            log.exception("verdict_not_recorded", id=transaction_id)
            return False
        finally:
            verdict.recording = None
        if self._shards.unwritten_commit_verdicts.get(transaction_id) is verdict:
            del self._shards.unwritten_commit_verdicts[transaction_id]
        return True

    def _recording_act(self, verdict: CommitVerdict, entry: Unresolved) -> Act | None:
        """Return the act that records a verdict: an op VERDICT if the transaction is prepared, else a parked record.

        If a parked transaction is resumed in between, the act must not park it: `resolve_open` asks for another act.
        """
        if entry.commit_verdict or self.is_of_another(verdict, entry):
            return None
        parked = _is_parked(entry)
        return Act(
            action=Action.PARK if parked else Action.CHECK,
            cause=verdict.cause,
            remark=f"{entry.reason}; {COMMIT_SAID}" if isinstance(entry, ParkedEntry) else None,
            checks=max(entry.checks, verdict.checks),
            commit_verdict=True,
            still_decided=_is_parked if parked else None,
        )


def _is_parked(entry: Unresolved) -> bool:
    return isinstance(entry, ParkedEntry)
