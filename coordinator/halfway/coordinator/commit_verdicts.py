"""Keeps commits that were said until they are written, so that the policy never rolls such a transaction back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from halfway.coordinator.changes import Change
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.requests import EndResult
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
_ENDED: Final = (AlreadyEndedError, OutcomeExpiredError, UnknownTransactionError)
"""The errors of a commit that mean that its transaction has ended: nothing is left to keep."""


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

    def keep_of(self, change: Change) -> None:
        """Keep the commit of a change until it is written: a write of the policy that has not begun gives way."""
        if change.meant is not None:
            self.keep(change.meant, change.meant.checks, change.cause)
            change.is_commit_kept = True

    def settle(self, change: Change, result: EndResult | BaseException) -> Change | None:
        """Keep the commit of a change no longer if it was written; otherwise return what records it, if anything does.

        None also if the verdict is recorded already, or if the lane is full: then the scan records it later.
        """
        if isinstance(result, EndResult):
            if change.is_commit_kept:
                self._shards.unwritten_commit_verdicts.pop(change.id, None)
            return None
        if not change.is_commit_kept and change.meant is None:
            return None
        if isinstance(result, _ENDED):
            self._shards.unwritten_commit_verdicts.pop(change.id, None)
            return None
        self.keep_of(change)
        return None if isinstance(result, OverloadedError) else self._start_recording(change.id)

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
        return not isinstance(result, Exception) or isinstance(result, _ENDED)
