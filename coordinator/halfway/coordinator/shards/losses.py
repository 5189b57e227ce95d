"""What Kafka has lost of the shards of this instance, and what is written again from memory.

Also from where a recovery must read op to know the outcomes that its former owner remembered. See
docs/verification.md#the-internal-topics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Final

import msgspec
import structlog

from halfway.protocol.entries import Ended, ParkedEntry, Pending
from halfway.protocol.shard import ShardState

log = structlog.get_logger(__name__)

_SAMPLE: Final = 20
"""The most ids that one log line names."""


class Missing(msgspec.Struct, kw_only=True):
    """What a former fold of a shard has and a later one lacks, although no other instance has owned the shard."""

    unresolved: list[Pending | ParkedEntry] = []
    outdated: list[Pending] = []
    """Pending ones that are there, without what their checks brought: that is in op."""
    ended: list[Ended] = []


def missing(former: ShardState, state: ShardState, *, since: int | None) -> Missing:
    """Compare two folds of a shard; outcomes from before `since` (ms since the epoch) may be forgotten. Blocks.

    An outcome that is known wins over a fold in which the transaction is still pending: its op marker is lost. Without
    `since` outcomes are not compared.
    """
    found = Missing()
    unresolved: Iterable[Pending | ParkedEntry] = chain(former.pending(), former.parked())
    for entry in unresolved:
        now = state.find(entry.id)
        if now is None:
            found.unresolved.append(entry)
        elif isinstance(now, Pending) and isinstance(entry, Pending) and _is_behind(now, entry):
            found.outdated.append(entry)
    if since is None:
        return found
    for ended in former.ended():
        now = state.find(ended.id)
        if ended.at >= since and not isinstance(now, Ended):
            found.ended.append(ended)
    return found


def _is_behind(now: Pending, entry: Pending) -> bool:
    same = now.fingerprint == entry.fingerprint and now.since == entry.since
    return same and (now.checks < entry.checks or now.commit_verdict < entry.commit_verdict)


def ends_before(former: ShardState, state: ShardState) -> bool:
    """Return whether the log of a shard ended before a record that a former fold knows, when it was acquired again."""
    return state.half_tail - 1 < former.half_end or state.op_tail - 1 < former.op_tail


class Losses:
    """Counts of what was lost, and the reasons that are shown."""

    def __init__(self) -> None:
        self.found = 0
        """How often records were found to be lost."""
        self.written_again = 0
        """Transactions that were missing from the log, and that were written again."""
        self.lost = 0
        """Transactions that are lost: their payload was not in memory any more."""
        self._last: dict[int, str] = {}

    def note_found(self, shard: int, topic: str, detail: str) -> None:
        """Record that Kafka has lost records of a shard."""
        self.found += 1
        self._last[shard] = detail
        log.error(
            "log_lost",
            shard=shard,
            topic=topic,
            detail=detail,
            remedy="do not restart halfway: it writes again what it has in memory. Find out why Kafka lost it",
        )

    def note_missing(self, shard: int, restored: list[str], lost: list[str]) -> None:
        """Record which transactions are missing from the log of a shard; `lost` are those that cannot be restored."""
        if shard not in self._last:
            self.found += 1
            self._last[shard] = "its log lacks what this instance knew"
        self.lost += len(lost)
        log.error(
            "transactions_missing",
            shard=shard,
            written_again=len(restored),
            lost=len(lost),
            ids=restored[:_SAMPLE],
            lost_ids=lost[:_SAMPLE],
        )

    def warnings(self, unwritten: int) -> list[str]:
        """Return what is unsafe, for health; `unwritten` transactions are in memory only."""
        if not self._last:
            return []
        shard, detail = next(reversed(self._last.items()))
        lost = f"Kafka has lost records of {len(self._last)} shards, last of shard {shard} ({detail})"
        known = f"{unwritten} transactions are in memory only (do not restart), {self.written_again} were written again"
        return [f"{lost}: {known}, {self.lost} are lost"]


_SAMPLES: Final = 60
"""The number of samples in one horizon."""


class OutcomeWindow:
    """The position that op[s] had one outcome horizon ago. It goes by the monotonic clock, while the shard is served.

    A recovery that reads from there knows each outcome that this owner remembered last, however long the outage
    lasted: a late half of it may be in the log already, and would be taken for a new transaction.
    """

    def __init__(self, state: ShardState, horizon_s: float) -> None:
        """Start where the fold of the acquisition has started."""
        self._state = state
        self._horizon_s = horizon_s
        self._start = state.op_start
        self._samples: deque[tuple[float, int]] = deque(maxlen=2 * _SAMPLES)
        """Times on the monotonic clock, and how far op[s] was known then."""

    def start(self, now: float) -> int:
        """Return the offset. It stays while there are strays, whose outcomes must be known until they are corrected."""
        if not self._samples:
            self._samples.append((now - self._horizon_s, self._state.op_recent))
        if now >= self._samples[-1][0] + self._horizon_s / _SAMPLES:
            self._samples.append((now, self._state.op_tail))
        if not self._state.has_strays:
            while len(self._samples) > 1 and self._samples[0][0] <= now - self._horizon_s:
                self._start = max(self._start, self._samples.popleft()[1])
        return self._start
