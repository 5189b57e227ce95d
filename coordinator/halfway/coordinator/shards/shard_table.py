"""The shards that this instance serves: their states, payloads in memory, claims of ids, and figures for metrics."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Final

import msgspec
import structlog

from halfway.coordinator.changes import Change
from halfway.coordinator.ports import Clock, KnownLog, LaneWrite, LogLoss, Tombstone, Written
from halfway.coordinator.records import ShardFigures
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard import Losses, Missing, Shard, figures_of, lacks_end, missing, not_served
from halfway.protocol.entries import Ended, Pending, Unresolved
from halfway.protocol.errors import NotServedError, ShardUnavailableError, UnknownTransactionError
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Foreign, Half
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause


class CommitVerdict(msgspec.Struct, kw_only=True, eq=False):
    """A commit that was said and is not written yet, neither as the commit nor as a record of the verdict."""

    shard: int
    checks: int
    """The number of checks sent by then."""
    cause: Cause
    """Who said it."""
    recording: Change | None = None
    """What writes a record of it."""


SLICE_S: Final = 0.05
SLICE_IDS: Final = 1000


class ShardRotation:
    """Assigns ids that are made at about the same time to one shard.

    They are mostly ended at about the same time too, so the Kafka transaction that ends them touches few partitions. A
    broker's work for a Kafka transaction grows with its partitions, and hardly with its records. A turn ends after
    `SLICE_S` or `SLICE_IDS` ids, so each of up to 20 shards has its share of every second.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._left = 0
        self._until = 0.0

    def choose(self, shards: Sequence[int]) -> int:
        """Return the shard whose turn it is, and count one id of the turn."""
        now = monotonic()
        if not self._left or now >= self._until:
            self._turn += 1
            self._left, self._until = SLICE_IDS, now + SLICE_S
        self._left -= 1
        return shards[self._turn % len(shards)]


log = structlog.get_logger(__name__)

_PAUSE_S: Final = 0.05
"""How long a shard that is given up waits before it looks again at what has to be written first."""
_OVERHEAD_BYTES: Final = 512
"""The memory that a payload takes in addition to its own bytes."""


class PayloadCache:
    """A cache of the payloads of pending transactions, limited in bytes.

    It has halves by id and evicts the least recently used first. Other payloads are read from Kafka by offset.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._halves: OrderedDict[str, tuple[Half, int]] = OrderedDict()
        """Each half with the bytes that it takes."""
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        """The number of payloads that were read from Kafka."""

    def __len__(self) -> int:
        return len(self._halves)

    def put(self, half: Half, payload_bytes: int) -> None:
        """Store a half with its size, in place of the former one of its id."""
        if half.id in self._halves:
            self.drop(half.id)
        size = payload_bytes + _OVERHEAD_BYTES
        if size > self._max_bytes:
            return
        self._halves[half.id] = half, size
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, (_, freed) = self._halves.popitem(last=False)
            self.bytes -= freed

    def put_if_room(self, half: Half, payload_bytes: int) -> None:
        """Store a half that is not there yet, if no other one has to go for it."""
        if half.id not in self._halves and self.bytes + payload_bytes + _OVERHEAD_BYTES <= self._max_bytes:
            self.put(half, payload_bytes)

    def get(self, transaction_id: str) -> Half | None:
        """Return the cached half of an id. Its fingerprint differs if the id was prepared again elsewhere."""
        cached = self._halves.get(transaction_id)
        if cached is None:
            return None
        self._halves.move_to_end(transaction_id)
        self.hits += 1
        return cached[0]

    def drop(self, transaction_id: str) -> None:
        cached = self._halves.pop(transaction_id, None)
        if cached is not None:
            self.bytes -= cached[1]


class ShardTable:
    """The served shards by number. It is the `ShardListener` of the membership."""

    def __init__(self, limits: ServiceLimits, clock: Clock) -> None:
        self.payloads = PayloadCache(limits.payload_cache_bytes)
        self.claims: dict[str, Change] = {}
        """By id: the change that may write. Others of the id wait for it."""
        self.unwritten_commit_verdicts: dict[str, CommitVerdict] = {}
        """By id. The policy resolves none of these transactions."""
        self.record_verdicts: Callable[[int], None] = lambda _: None
        """Starts to record the commit verdicts of a shard; set by `CommitVerdicts`."""
        self.on_served: Callable[[int], None] = lambda _: None
        """Called when a shard is served from now on; the scheduler scans it then, until it is leaving or lost."""
        self.on_leaving: Callable[[int], None] = lambda _: None
        self._limits = limits
        self._clock = clock
        self._served: dict[int, Shard] = {}
        self._accepting: list[int] = []
        """The numbers of the served shards that are not being given up."""
        self.preparing: dict[str, int] = defaultdict(int)
        """The number of prepares on their way to the log, by group."""
        self.losses = Losses()
        self._former: dict[int, tuple[ShardState, int, bool]] = {}
        """Shards that were lost with an incarnation: the fold, the horizon then, and whether the log lacked some."""
        self._missing: dict[int, Missing] = {}
        self._change = asyncio.Event()
        self._rotation = ShardRotation()

    # --- looking up

    @property
    def served(self) -> Sequence[int]:
        return sorted(self._served)

    @property
    def accepting(self) -> list[int]:
        """The served shards that are not being given up."""
        return sorted(self._accepting)

    @property
    def count(self) -> int:
        return self._limits.shards

    def number_of(self, transaction_id: str) -> int:
        """Return the number of the shard of an id; raise UnknownTransactionError if there is no such shard."""
        number = shard_of(transaction_id, self._limits.shards)
        if number is None:
            raise UnknownTransactionError(transaction_id)
        return number

    def of(self, transaction_id: str) -> Shard:
        number = self.number_of(transaction_id)
        shard = self._served.get(number)
        if shard is None or shard.leaving:
            raise not_served(number)
        return shard

    def get(self, number: int) -> Shard:
        """Return a shard that is served and not being given up; raise NotServedError otherwise."""
        shard = self._served.get(number)
        if shard is None or shard.leaving:
            raise not_served(number)
        return shard

    def serves(self, number: int) -> bool:
        """Return whether a shard is served and not being given up."""
        shard = self._served.get(number)
        return shard is not None and not shard.leaving

    def find(self, number: int) -> Shard | None:
        """Return a shard that is served, None otherwise."""
        return self._served.get(number)

    def all(self) -> list[Shard]:
        return [self._served[number] for number in self.served]

    def choose(self) -> Shard:
        """Return one of the shards served here for a new transaction, in turn."""
        if not self._accepting:
            raise NotServedError("this instance serves no shard now: try again")
        return self._served[self._rotation.choose(self._accepting)]

    async def wait_until_served(self, number: int, *, deadline: float) -> Shard:
        """Wait until a shard is served here; raise ShardUnavailableError past the deadline."""
        while (shard := self._served.get(number)) is None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._change.wait()
            except TimeoutError:
                raise ShardUnavailableError(str(not_served(number)), shard=number) from None
        return shard

    @property
    def unresolved(self) -> int:
        """The number of transactions that are pending or parked in the shards served here."""
        return sum([shard.state.unresolved_count for shard in self._served.values()])

    def figures(self) -> list[ShardFigures]:
        """Return the figures of every shard served."""
        now = self._clock.now_ms()
        return [figures_of(shard, now) for shard in self.all()]

    def group_counts(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of pending and parked transactions by group, over the shards served here."""
        totals: dict[str, tuple[int, int]] = {}
        for shard in self._served.values():
            for group, (pending, parked) in shard.state.group_counts.items():
                before = totals.get(group, (0, 0))
                totals[group] = (before[0] + pending, before[1] + parked)
        return totals

    def counts_here(self, group: str, number: int) -> tuple[int, int]:
        """Return the numbers of pending and parked transactions of a group in a shard; 0 if it is not served here."""
        shard = self._served.get(number)
        return (0, 0) if shard is None else shard.state.group_counts.get(group, (0, 0))

    def counts_of(self, group: str, numbers: Collection[int]) -> tuple[int, int]:
        """Return a group's counts of pending (also on their way) and parked in served shards; else NotServedError."""
        pending, parked = self.preparing.get(group, 0), 0
        for number in numbers:
            found = self.get(number).state.group_counts.get(group, (0, 0))
            pending += found[0]
            parked += found[1]
        return pending, parked

    def apply(self, write: LaneWrite, written: Written) -> None:
        """Apply a write of the lane.

        The shard may have been given up and acquired again since the write was made: the current shard gets it.
        """
        shard = self._served.get(write.shard)
        if shard is None:
            return
        if write.half is not None or write.parked is not None:
            self.payloads.drop(write.id)
        entry = shard.apply_own_write(write, written)
        if entry is not None and isinstance(write.half, Half):
            self.payloads.put(write.half, entry.size)
        if write.id in shard.unwritten and (write.half is not None or write.parked is not None):
            del shard.unwritten[write.id]
            self.losses.written_again += 1
            if not shard.unwritten:
                log.warning("log_restored", shard=shard.number)

    @property
    def unwritten(self) -> int:
        """The number of transactions that the log has lost, and that are not written again yet."""
        return sum([len(shard.unwritten) for shard in self._served.values()])

    # --- ShardListener

    def compare(self, shard: int, state: ShardState, *, suspect: bool) -> bool:
        """Find what the former fold of a shard has and its new one lacks. Blocks; called on another thread."""
        former, since, had_unwritten = self._former.get(shard, (None, 0, False))
        if former is None:
            return False
        # To compare outcomes takes long. The rest is always compared: records may have been deleted just before.
        is_shorter = lacks_end(former, state, since=since)
        compares_outcomes = suspect or had_unwritten or is_shorter
        found = self._missing[shard] = missing(former, state, since=since if compares_outcomes else None)
        return is_shorter or bool(found.unresolved)

    def known_log(self, shard: int) -> KnownLog | None:
        """Return what is known of the log of a shard, None if the shard is not served."""
        served = self._served.get(shard)
        if served is None:
            return None
        state = served.state
        op_needed = state.op_cursor if state.op_cursor < state.op_tail else None
        return KnownLog(
            half_end=state.half_end,
            op_end=state.op_tail,
            half_needed=state.half_cursor,
            op_recent=served.outcomes.recent,
            op_needed=op_needed,
            parked_needed=state.oldest_parked_offset,
        )

    def log_lost(self, shard: int, loss: LogLoss) -> None:
        """Record what Kafka has lost, and write it again if it is known what that is."""
        self.losses.note_found(shard, loss.topic, loss.detail)
        served = self._served.get(shard)
        if served is None:
            return
        state, before = served.state, served.half_start
        cut = served.half_start = max(before, loss.half_start or 0)
        lost: list[Unresolved] = [entry for entry in state.halves.values() if before <= entry.offset < cut]
        before = served.parked_start
        served.parked_start = max(before, loss.parked_start or 0)
        lost += [entry for entry in state.parked() if before <= entry.offset < served.parked_start]
        # If a half is lost too, and not in memory, nothing can be written again.
        in_op = state.in_op_before(loss.op_start or 0)
        outdated = [entry for entry in in_op if entry.offset >= cut or self._remembered(entry) is not None]
        self._write_again(served, lost, [*outdated, *(state.ended() if loss.is_op_cut else ())])

    def _write_again(self, shard: Shard, unresolved: Sequence[Unresolved], others: Sequence[Pending | Ended]) -> None:
        """Let the scan write transactions again that the log has lost; it can read the halves of the others."""
        restored: list[str] = []
        lost: list[str] = []
        for entry in unresolved:
            if entry.id in shard.unwritten:
                continue
            half = self._remembered(entry)
            if half is None:
                lost.append(entry.id)
            else:
                shard.unwritten[entry.id] = half
                restored.append(entry.id)
        for other in others:
            if other.id not in shard.unwritten:
                shard.unwritten[other.id] = None
                restored.append(other.id)
        if restored or lost:
            self.losses.note_missing(shard.number, restored, lost)

    def _take_payloads(self, state: ShardState) -> None:
        """Take what the fold has read of the pending transactions, as far as there is room."""
        payloads, state.payloads = state.payloads, {}
        for half in payloads.values():
            entry = state.halves.get(half.id)
            if entry is not None and entry.fingerprint == half.fingerprint:
                self.payloads.put_if_room(half, entry.size)

    def _remembered(self, entry: Unresolved) -> Half | None:
        half = self.payloads.get(entry.id)
        return half if half is not None and half.fingerprint == entry.fingerprint else None

    def forget(self, shard: int) -> None:
        """Forget what is known of a shard that is not served: another instance may own it by now."""
        self._former.pop(shard, None)
        self._missing.pop(shard, None)

    def acquired(self, shard: int, state: ShardState) -> None:
        self._former.pop(shard, None)
        found = self._missing.pop(shard, Missing())
        for outcome in found.ended:
            state.restore_outcome(outcome)
        self._take_payloads(state)
        for entry in found.unresolved:
            if self._remembered(entry) is None:
                continue
            if isinstance(entry, Pending):
                state.restore_pending(entry)
            else:
                state.restore_parked(entry)
        for outdated in found.outdated:
            state.restore_totals(outdated)
        served = self._served[shard] = Shard(shard, state, self._limits.outcome_horizon_s)
        self._write_again(served, found.unresolved, [*found.outdated, *found.ended])
        self._update_accepting()
        pending, parked, ended = state.counts
        log.info("shard_acquired", shard=shard, pending=pending, parked=parked, ended=ended)
        change, self._change = self._change, asyncio.Event()
        change.set()
        self.on_served(shard)

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        """Apply records of half[s] that the tail has read."""
        served = self._served.get(shard)
        if served is None:
            return
        state = served.state
        for offset, transaction_id, half in records:
            served.forget_own(offset)
            if half is None and transaction_id in self.claims:
                # The tail does not read op, and may come before the lane's answer. Until the change that has claimed
                # the id applies both, the id stays known: it must never be taken for unknown.
                continue
            known = state.unresolved(transaction_id) is not None
            state.apply_half(offset, transaction_id, half)
            if half is not None and not known and state.unresolved(transaction_id) is not None:
                served.agenda.put(transaction_id, 0)
        served.advance(position)

    def has_applied(self, shard: int, offset: int, key: bytes | None) -> bool:
        """Return whether this instance wrote and applied the half record at an offset."""
        served = self._served.get(shard)
        return served is not None and served.has_applied(offset, key)

    def may_still_be_written(self, write: LaneWrite) -> bool:
        """Return whether a write is the one that the claim of its id waits for, in the shard that is served now.

        If the write resolves the id, it is pending or parked: within one fold, only the write of its claim ends it.
        An act of the policy may not be written after commit was said. A tombstone alone corrects a stray: it
        may not be written after the id is prepared again, because it would remove the new transaction.
        """
        served, claim = self._served.get(write.shard), self.claims.get(write.id)
        if served is None or claim is None or claim.write is not write or claim.mark is not served.mark:
            return False
        if write.op is not None:
            return write.op.cause is not Cause.POLICY or write.id not in self.unwritten_commit_verdicts
        return not (isinstance(write.half, Tombstone) and isinstance(served.state.unresolved(write.id), Pending))

    async def revoked(self, shard: int) -> None:
        """Accept no more ends for a shard, wait until those in flight are finished, and drop it.

        What the log has lost is written again first, and every commit that was said is recorded, because the next owner
        would not know it. The caller limits the time.
        """
        served = self._served.get(shard)
        if served is None:
            return
        while served.unwritten and self._served.get(shard) is served:  # noqa: ASYNC110 - tables set no event
            await asyncio.sleep(_PAUSE_S)  # the scan, which writes it, skips a shard that is leaving
        self.on_leaving(shard)
        served.leaving = True
        self._update_accepting()
        while True:
            if self._served.get(shard) is served:
                self.record_verdicts(shard)
            claims = [claim.released() for claim in self.claims.values() if claim.shard == shard]
            verdicts = [one for one in self.unwritten_commit_verdicts.values() if one.shard == shard]
            recordings = [one.recording for one in verdicts if one.recording is not None]
            if not claims and not recordings:
                break
            await asyncio.wait([*claims, *(one.waiter() for one in recordings)])
            if any(isinstance(one.result, Exception) for one in recordings):
                await asyncio.sleep(_PAUSE_S)  # a record failed, for example because the lane is full
        if self._served.get(shard) is served:
            self.lost(shard)
            self.forget(shard)

    def lost(self, shard: int) -> None:
        self.on_leaving(shard)
        served = self._served.pop(shard, None)
        self._update_accepting()
        if served is not None:
            since = self._clock.now_ms() - round(self._limits.outcome_horizon_s * 1000)
            self._former[shard] = served.state, since, bool(served.unwritten)
            served.close()
            log.info("shard_dropped", shard=shard)

    def _update_accepting(self) -> None:
        self._accepting = [number for number, shard in self._served.items() if not shard.leaving]
