"""A served shard: its fold, the next looks at its pending transactions, the waiting calls, and figures for metrics.

Also what Kafka has lost of the shards of this instance and what is written again from memory
(docs/verification.md#the-internal-topics), and from where a recovery must read op to know the outcomes that its former
owner remembered.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Final

import msgspec
import structlog

from halfway.coordinator.ports import TOMBSTONE, LaneWrite, Tombstone, Written
from halfway.coordinator.records import ShardFigures
from halfway.coordinator.requests import moment
from halfway.protocol.entries import Agenda, Ended, ParkedEntry, Pending
from halfway.protocol.errors import KafkaUnavailableError, NotServedError
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.records import Group, Half
from halfway.protocol.shard import ShardState

_MAX_OWN: Final = 100_000
"""Own records of one shard that the tail has not passed yet."""


class Shard:
    """A served shard: its fold, the next looks at its pending transactions, and the waiting calls."""

    def __init__(self, number: int, state: ShardState, horizon_s: float = math.inf) -> None:
        """Take the fold of an acquisition. The first scan looks at every pending transaction."""
        self.number = number
        self.state = state
        self.mark = object()
        """Identifies this fold, and does not keep it in memory."""
        self.agenda = Agenda(state.halves)
        self.outcomes = OutcomeWindow(state, horizon_s)
        self.planned_by: dict[str, Group | None] = {}
        """The groups, by name, as they were when the looks at their pending transactions were planned."""
        self.leaving = False
        self.half_start = self.parked_start = 0
        """The offsets before which half[s] and parked[s] are known to have no records any more."""
        self.unwritten: dict[str, Half | None] = {}
        """Transactions that the log has lost, each with its half if its write needs one."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._own: dict[int, str] = {}
        """The ids of own records by offset, from their application until the tail passes them."""

    def apply_own_half(self, offset: int, transaction_id: str, half: Half | None) -> None:
        """Apply a record of half[s] that this instance has written, so that the tail need not decode it."""
        self.state.apply_half(offset, transaction_id, half)
        if offset >= self.state.half_tail and len(self._own) < _MAX_OWN:  # else the tail reads it
            self._own[offset] = transaction_id

    def apply_own_write(self, write: LaneWrite, written: Written) -> Pending | None:
        """Apply a write of the lane as a recovery would, so that a repeat by the tail changes nothing.

        Return the entry if the transaction is still prepared.
        """
        state, op, offset, tombstone = self.state, write.op, written.op, written.half
        if op is not None and offset is not None and tombstone is not None and write.half is TOMBSTONE:
            ended = state.apply_end(offset, op, tombstone)
            if tombstone >= state.half_tail and len(self._own) < _MAX_OWN:
                self._own[tombstone] = op.id
        else:
            ended = False
            if op is not None and offset is not None:
                state.apply_op(offset, op)
            if write.half is not None and written.half is not None:
                half = None if isinstance(write.half, Tombstone) else write.half
                self.apply_own_half(written.half, write.id, half)
        if write.parked is not None and written.parked is not None:
            state.apply_parked(written.parked, write.id, None if isinstance(write.parked, Tombstone) else write.parked)
        entry = None if ended else state.unresolved(write.id)
        if isinstance(entry, Pending):
            if isinstance(write.half, Half):
                self.agenda.put(write.id, 0)
            return entry
        return None

    def has_applied(self, offset: int, key: bytes | None) -> bool:
        """Return whether the record of half[s] at an offset was written and applied here.

        The tail's thread calls this, again for a record if it returned False. After True the record is forgotten.
        """
        own = self._own.pop(offset, None)
        return own is not None and key == own.encode()

    def forget_own(self, offset: int) -> None:
        """Forget an own record that the tail has read, perhaps before it was applied here."""
        self._own.pop(offset, None)

    def advance(self, position: int) -> None:
        """Set the position of the tail, and wake the calls that wait for it."""
        self.state.half_tail = max(self.state.half_tail, position)
        while self._waiting and self._waiting[0][0] <= self.state.half_tail:
            waiter = heappop(self._waiting)[2]
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_tail(self, position: int, *, deadline: float) -> None:
        """Return when the tail has reached `position`: all records before it have been applied."""
        if self.state.half_tail >= position:
            return
        waiter = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (position, next(self._order), waiter))
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            self._waiting = [waiting for waiting in self._waiting if waiting[2] is not waiter]
            heapify(self._waiting)
            raise KafkaUnavailableError(
                f"shard {self.number} was not read up to offset {position} in time: try again"
            ) from None

    def close(self) -> None:
        """Fail the waiting calls, because this shard is no longer served here."""
        for _, _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(not_served(self.number))
        self._waiting.clear()


def figures_of(shard: Shard, now: int) -> ShardFigures:
    """Return the figures of a shard; `now` is in ms since the epoch."""
    state = shard.state
    pending, parked, ended = state.counts
    oldest = state.oldest()
    return ShardFigures(
        shard=shard.number,
        pending=pending,
        parked=parked,
        remembered=ended,
        oldest_pending_s=0.0 if oldest is None else max(0, now - min(oldest.prepared_at, oldest.since)) / 1000,
        half_lag=state.half_tail - state.half_cursor,
        op_lag=state.op_tail - state.op_cursor,
        due=pending,
        strays=len(state.strays()),
        committed=state.ends.committed,
        rolled_back=state.ends.rolled_back,
        counted_since=moment(state.ends.since),
    )


def not_served(number: int) -> NotServedError:
    return NotServedError(f"shard {number} is being recovered or moved: try again", shard=number)


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


def lacks_end(former: ShardState, state: ShardState, *, since: int) -> bool:
    """Return whether the log of a shard, when it was acquired again, lacked the last records that a former fold knows.

    It can be longer nevertheless: others may have been written since. Outcomes from before `since` may be forgotten.
    """
    if state.half_tail - 1 < former.half_end or state.op_tail - 1 < former.op_tail:
        return True
    last = former.find(former.last_ended)
    return isinstance(last, Ended) and last.at >= since and not isinstance(state.find(last.id), Ended)


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

    And the ends that were counted up to there, or to the acquisition: no marker before it can come any more.

    A recovery that reads from there knows each outcome that this owner remembered last, however long the outage
    lasted: a late half of it may be in the log already, and would be taken for a new transaction.
    """

    def __init__(self, state: ShardState, horizon_s: float) -> None:
        """Start where the fold of the acquisition has started."""
        self._state = state
        self._horizon_s = horizon_s
        self._start = state.op_start
        self.ends = state.ends.at(state.op_tail)
        """Those of an acquisition are complete: nobody else can write before its barrier."""
        self._samples: deque[tuple[float, EndCounts]] = deque(maxlen=2 * _SAMPLES)
        """Times on the monotonic clock, with how far op[s] was known then, and the ends up to there."""

    @property
    def recent(self) -> int | None:
        """The position of one horizon ago, or an earlier one; None before the first scan."""
        return self._samples[0][1].position if self._samples else None

    def start(self, now: float) -> int:
        """Return the offset. It stays while there are strays, whose outcomes must be known until they are corrected."""
        state, samples = self._state, self._samples
        if not samples:
            samples.append((now - self._horizon_s, EndCounts(position=state.op_recent)))
        late, state.late_ends = state.late_ends, []
        for offset, op in late:
            for _, sample in samples:
                if offset < sample.position:
                    sample.add(op)
        if now >= samples[-1][0] + self._horizon_s / _SAMPLES:
            samples.append((now, state.ends.at(state.op_tail)))
        if not state.has_strays:
            while len(samples) > 1 and samples[0][0] <= now - self._horizon_s:
                sample = samples.popleft()[1]
                self._start = max(self._start, sample.position)
                if sample.position > self.ends.position:
                    self.ends = sample
        return self._start
