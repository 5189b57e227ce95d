"""Keeps commits that were said until they are written, so that the policy never rolls such a transaction back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from halfway.coordinator.changes import Change
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.shards.shard_table import CommitVerdict, ShardTable
from halfway.protocol.entries import Ended, Entry
from halfway.protocol.errors import (
    AlreadyEndedError,
    HalfwayError,
    OutcomeExpiredError,
    OverloadedError,
    UnknownTransactionError,
)
from halfway.protocol.transactions import Cause

log = structlog.get_logger(__name__)

_CLEANUP_AT = 10_000
_ENDED = (AlreadyEndedError, OutcomeExpiredError, UnknownTransactionError)


def leaves_nothing_to_keep(error: BaseException) -> bool:
    """Return whether an error of a commit means that its transaction has ended."""
    return isinstance(error, _ENDED)


class CommitVerdicts:
    """Keeps a commit verdict from its arrival until it is written, as the commit or as an op VERDICT.

    A commit verdict is a commit that a caller, an operator or the answer to a check has said.
    """

    def __init__(self, shards: ShardTable, record: Callable[[str, CommitVerdict], Change]) -> None:
        self._shards = shards
        self._record = record
        self._not_recorded = LogSummary(log, "warning", "verdict_not_recorded")
        self._cleanup_at = _CLEANUP_AT
        """How many verdicts are kept when those of shards that are not served here are dropped next."""
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
        if kept is not None:
            kept.checks = max(kept.checks, checks)
            return
        verdicts[entry.id] = CommitVerdict(shard=self._shards.number_of(entry.id), checks=checks, cause=cause)

    def keeps(self, transaction_id: str) -> bool:
        """Return whether a commit verdict of this id is not written yet: the policy must not decide until then."""
        return transaction_id in self._shards.unwritten_commit_verdicts

    def take_commit_result(self, transaction_id: str, error: BaseException | None) -> Change | None:
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

    def _start_recording(self, transaction_id: str) -> Change | None:
        verdict = self._shards.unwritten_commit_verdicts.get(transaction_id)
        if verdict is None:
            return None
        if verdict.recording is None:
            shard = self._shards.find(verdict.shard)
            entry = None if shard is None else shard.state.unresolved(transaction_id)
            if entry is not None and entry.commit_verdict:
                del self._shards.unwritten_commit_verdicts[transaction_id]
                return None
            verdict.recording = self._record(transaction_id, verdict)
            verdict.recording.add_done_callback(partial(self._recorded, transaction_id, verdict))
        return verdict.recording

    def _recorded(self, transaction_id: str, verdict: CommitVerdict, recording: Change) -> None:
        """Keep a verdict no longer that is in the log: the policy never rolls the transaction back."""
        verdict.recording = None
        if self.is_settled(recording):
            if self._shards.unwritten_commit_verdicts.get(transaction_id) is verdict:
                del self._shards.unwritten_commit_verdicts[transaction_id]
            return
        error = recording.result
        if not isinstance(error, HalfwayError):
            log.error("verdict_not_recorded", id=transaction_id, exc_info=error)
        elif not isinstance(error, OverloadedError):
            self._not_recorded.note({"error": error.code}, id=transaction_id)

    @staticmethod
    def is_settled(recording: Change) -> bool:
        """Return whether a commit verdict is in the log, or its transaction has ended."""
        result = recording.result
        return not isinstance(result, Exception) or leaves_nothing_to_keep(result)
