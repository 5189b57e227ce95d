"""The state of one shard: a fold over its half, op and parked records.

See docs/protocol.md#state-is-a-fold-over-the-log.

In each partition the last record of an id wins. So the result does not depend on how the three are interleaved, and a
record that is applied twice changes nothing. One exception keeps outcomes safe: a half record of a *first prepare*
whose id is already known is never applied. It is a stray, which the owner corrects through the lane. But of two
prepares of a pending id with different content, the one whose writer acquired the shard later counts, in whatever order
they are in the log: the owner may have acknowledged it before it read the other one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import msgspec

from halfway.protocol.entries import Ended, Entry, IndexedHeap, OffsetOrder, OpTotals, ParkedEntry, Pending
from halfway.protocol.ids import AHEAD_MS, BORN_AFTER_END_MS, ID, birth_of
from halfway.protocol.outcomes import EndCounts, Outcomes
from halfway.protocol.records import FOREIGN, NO_BARRIER, Foreign, Half, MessageDigest, Op, Origin, Parked


class ShardState:
    """The fold of one shard. All times are milliseconds since the epoch."""

    def __init__(self, shard: int, *, horizon_ms: int | None = None) -> None:
        """Start empty. `horizon_ms` is the outcome horizon: see `_is_older_use`."""
        self.shard = shard
        self._horizon_ms = horizon_ms
        self._halves: dict[str, Pending] = {}
        self._parked: dict[str, ParkedEntry] = {}
        self._ended = Outcomes()
        self.ends = EndCounts()
        """All ends. Its position is that of the former owner: what is before it was counted there."""
        self.late_ends: list[tuple[int, Op]] = []
        """Op markers, with their offsets, that were applied after later ones, until they are taken."""
        self._op_totals: dict[str, OpTotals] = {}
        self._strays: dict[str, int] = {}
        self._left: dict[str, int] = {}
        """Halves that the fold has read, of ids with an outcome, whose tombstone it has not read yet."""
        self._tombstones: dict[str, int] = {}
        """Tombstones in half[s] of ids without an outcome; an outcome has its own."""
        self._parked_tombstones: dict[str, int] = {}
        self._half_offsets = OffsetOrder(self._halves)
        self._parked_offsets = OffsetOrder(self._parked)
        self._op_offsets = IndexedHeap()
        self.group_counts: dict[str, tuple[int, int]] = {}
        """The numbers of pending and parked transactions by group, for groups that have any."""
        self.payloads: dict[str, Half] = {}
        """Halves that the fold has read and that are pending, as far as its reader keeps them, until they are taken."""
        self._complete = False
        self.barrier = NO_BARRIER
        """The offset of the owner's barrier record in half[s]."""
        self.half_end = 0
        """The offset after the last known record of half[s]."""
        self.half_tail = 0
        """The offset up to which half[s] has been read without a gap. The reader sets it, and never decreases it."""
        self.op_tail = 0
        """The offset after the last known op."""
        self.op_start = 0
        """The offset from which the acquisition has read op[s]."""
        self.op_recent = 0
        """The offset of the first op that was within the horizon at the acquisition."""
        self.acquired_at = 0
        """The time of the acquisition, which has not read outcomes that were past the horizon then."""
        self.complete_from = 0
        """Every outcome of an id that was born at this time or later is known here."""
        self.last_ended = ""
        """The id of the last known outcome in op[s]."""
        self._newest_op = 0
        """The time of the newest op that the acquisition has read."""

    # --- reading

    def find(self, transaction_id: str) -> Entry | None:
        """Return the entry of an id: its outcome, else its parked entry, else its pending entry, else None."""
        return self._parked.get(transaction_id) or self._halves.get(transaction_id) or self._ended.get(transaction_id)

    def unresolved(self, transaction_id: str) -> Pending | ParkedEntry | None:
        """Return the entry of a pending or parked id, None for any other. Any thread may call this."""
        return self._parked.get(transaction_id) or self._halves.get(transaction_id)

    @property
    def halves(self) -> Mapping[str, Pending]:
        """A live view of the halves by id: those of pending transactions, and perhaps of parked ones."""
        return self._halves

    def pending(self) -> Iterator[Pending]:
        """Iterate over the pending transactions, oldest half first except for re-anchored ones."""
        parked = frozenset(self._parked)
        return (entry for entry in list(self._halves.values()) if entry.id not in parked)

    def parked(self) -> Iterator[ParkedEntry]:
        """Iterate over the parked transactions."""
        return iter(list(self._parked.values()))

    def ended(self) -> Iterator[Ended]:
        """Iterate over the remembered outcomes."""
        return iter(self._ended)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of pending, parked and remembered ended transactions."""
        return len(self._halves), len(self._parked), len(self._ended)

    @property
    def unresolved_count(self) -> int:
        """The number of pending and parked transactions."""
        return len(self._halves) + len(self._parked)

    def oldest(self) -> Pending | None:
        """Return the pending transaction with the lowest half offset, None if nothing is pending."""
        first = self._half_offsets.first()
        return None if first is None else self._halves.get(first[1])

    def oldest_first(self, at_most: int) -> list[Pending]:
        """Return the pending transactions with the lowest half offsets."""
        return [self._halves[key] for key in self._half_offsets.lowest(at_most)]

    @property
    def has_strays(self) -> bool:
        return bool(self._strays)

    def strays(self) -> list[tuple[str, int]]:
        """Return (id, offset) of half records that must not stay last: repeats of a known id, and foreign records."""
        return list(self._strays.items())

    @property
    def half_cursor(self) -> int:
        """The offset from which half[s] must be read to find all pending transactions."""
        first = self._half_offsets.first()
        lowest = min(self._strays.values(), default=self.half_tail)
        return min(self.half_tail, lowest, self.half_tail if first is None else first[0])

    @property
    def op_cursor(self) -> int:
        """The offset from which op[s] must be read to find the checks of all pending transactions."""
        first = self._op_offsets.first()
        return self.op_tail if first is None else min(first[0], self.op_tail)

    def in_op_before(self, offset: int) -> Iterator[Pending]:
        """Iterate over the pending transactions whose verdict, or checks, only an op before an offset has."""
        halves, op_offset = self._halves, self._op_offsets.get
        return (halves[key] for key in list(halves) if (at := op_offset(key)) is not None and at < offset)

    @property
    def oldest_parked_offset(self) -> int | None:
        """The lowest offset of a record of a parked transaction, None if parked[s] has none."""
        first = self._parked_offsets.first()
        return None if first is None else first[0]

    # --- applying records

    def apply_half(self, offset: int, transaction_id: str, half: Half | Foreign | None) -> None:
        """Apply a record of half[s], a tombstone if `half` is None.

        A foreign record changes no state. But compaction keeps the last record of an id, so it must not stay the last.
        """
        if offset >= self.half_end:
            self.half_end = offset + 1
        if half is None:
            self._half_tombstone(offset, transaction_id)
            return
        if half is FOREIGN:
            self._foreign_half(offset, transaction_id)
            return
        held = self._halves.get(transaction_id)
        ended = None if held is not None else self._ended.positions(transaction_id)
        if offset <= self._tombstone(transaction_id, ended):
            return
        if ended is not None and self._is_used_again(transaction_id, half.prepared_at):
            ended = None
        if ended is not None:
            if half.origin is Origin.PREPARE and offset != ended[0]:
                self._stray(transaction_id, offset)
            elif not self._complete:
                self._left[transaction_id] = max(offset, self._left.get(transaction_id, -1))
        elif half.origin is Origin.LANE:
            self._half_of_lane(offset, half, held)
        else:
            self._half_of_prepare(offset, half, held)

    def _foreign_half(self, offset: int, transaction_id: str) -> None:
        held = self._halves.get(transaction_id)
        # Until all three are read to one point, op or parked may still have the state of this id: see `complete_fold`.
        known = not self._complete or self._knows(transaction_id)
        if known and (held is None or held.offset < offset):
            self._stray(transaction_id, offset)

    def _tombstone(self, transaction_id: str, ended: tuple[int, int | None] | None) -> int:
        """Return the offset of the last tombstone of an id in half[s], -1 if none is known."""
        if ended is None:
            return self._tombstones.get(transaction_id, -1)
        return -1 if ended[1] is None else ended[1]

    def _half_tombstone(self, offset: int, transaction_id: str) -> None:
        if not self._ended.note_tombstone(transaction_id, offset) and offset > self._tombstones.get(transaction_id, -1):
            self._tombstones[transaction_id] = offset
        if self._left.get(transaction_id, offset) < offset:
            del self._left[transaction_id]
        held = self._halves.get(transaction_id)
        if held is not None and held.offset < offset:
            self._drop_half(transaction_id)
        self._clear_stray(transaction_id, offset)

    def _half_of_lane(self, offset: int, half: Half, held: Pending | None) -> None:
        if held is not None and offset <= held.offset and held.origin is Origin.LANE:
            return
        if held is not None and held.origin is Origin.PREPARE and held.offset > offset:
            self._strays[half.id] = max(held.offset, self._strays.get(half.id, -1))
        self._hold(Pending.of(offset, half), held)

    def _half_of_prepare(self, offset: int, half: Half, held: Pending | None) -> None:
        if half.id in self._parked:
            self._stray(half.id, offset)
        elif held is None:
            self._hold(Pending.of(offset, half), None)
        elif offset == held.offset:
            return
        elif self._repeats(held, offset, half):
            if offset > held.offset:
                held.offset = offset
                self._half_offsets.note(held.id, offset)
            held.prepared_at = min(held.prepared_at, half.prepared_at)
            held.since = min(held.since, half.since)
            held.barrier = max(held.barrier, half.barrier)
        elif held.origin is Origin.PREPARE and half.barrier != held.barrier:
            self._half_of_two_owners(offset, half, held)
        elif held.origin is Origin.PREPARE or offset > held.offset:
            self._stray(half.id, max(offset, held.offset))

    def _half_of_two_owners(self, offset: int, half: Half, held: Pending) -> None:
        """Hold the prepare of the later owner. If it is the earlier record, the other one is a stray."""
        later, last = half.barrier > held.barrier, max(offset, held.offset)
        if later:
            self._hold(Pending.of(offset, half), held)
        if last != self._halves[half.id].offset:
            self._stray(half.id, last)

    def _repeats(self, held: Pending, offset: int, half: Half) -> bool:
        """Return whether a recovery may start at the later of two prepares of an id, and so see only that one.

        It may not if the later one was prepared earlier, if a record with other content is between the two, or if the
        later record is of an earlier owner, whose content counts less.
        """
        if held.origin is not Origin.PREPARE or held.fingerprint != half.fingerprint or half.id in self._strays:
            return False
        if half.barrier < held.barrier if offset > held.offset else half.barrier > held.barrier:
            return False
        earlier, later = sorted((half.prepared_at, held.prepared_at))
        if self._is_older_use(half.id, earlier, later):
            return False
        return offset < held.offset or half.prepared_at >= held.prepared_at

    def apply_op(self, offset: int, op: Op) -> None:
        self._note_op(offset, op)
        held = self._halves.get(op.id) or self._parked.get(op.id)
        if held is None:
            if self._ended.positions(op.id) is not None and not self._is_used_again(op.id, op.prepared_at):
                return
        elif self._is_older_use(op.id, op.at, held.prepared_at):
            return
        totals = self._op_totals.get(op.id)
        # Op may have been made again meanwhile. The outcome of a transaction is its last marker, wherever it stands,
        # and a commit that was said stays said.
        is_its_own = held is not None and held.prepared_at == op.prepared_at
        if totals is not None and offset <= totals.offset and not (op.kind.final and is_its_own):
            if op.commit_verdict and is_its_own and op.id in self._halves:
                self._halves[op.id].commit_verdict = True
            return
        if op.kind.final:
            if offset >= self.ends.position:
                self.ends.add(op)
            if offset + 1 < self.op_tail:
                self.late_ends.append((offset, op))
            self._end(op)
            return
        half = self._halves.get(op.id)
        totals = self._op_totals[op.id if half is None else half.id] = OpTotals.of(offset, op)
        if half is not None:
            self._apply_totals(half, totals)

    def _note_op(self, offset: int, op: Op) -> None:
        if offset >= self.op_tail:
            self.op_tail = offset + 1
            self.last_ended = op.id if op.kind.final else self.last_ended
        if not self._complete:
            self._newest_op = max(self._newest_op, op.at)

    def apply_end(self, offset: int, op: Op, tombstone: int) -> bool:
        """Apply an op and the tombstone of its half, of one Kafka transaction, as `apply_op` and `apply_half` would.

        The tombstone is known first, so an outcome is stored together with it. Return whether the id is no longer
        pending.
        """
        held = op.id in self._halves
        if held:
            self._tombstones[op.id] = max(tombstone, self._tombstones.get(op.id, -1))
        self.apply_op(offset, op)
        if not held or op.id in self._halves:
            self.apply_half(tombstone, op.id, None)
        elif op.id in self._strays:
            self._clear_stray(op.id, tombstone)
        return op.id not in self._halves

    def apply_parked(self, offset: int, transaction_id: str, parked: Parked | None) -> None:
        """Apply a record of parked[s], a tombstone if `parked` is None."""
        held = self._parked.get(transaction_id)
        if offset <= max(self._parked_tombstones.get(transaction_id, -1), -1 if held is None else held.offset):
            return
        if parked is None:
            self._parked_tombstones[transaction_id] = offset
            self._drop_parked(transaction_id)
            return
        ended = self._ended.positions(transaction_id)
        if ended is not None and not self._is_used_again(transaction_id, parked.half.prepared_at):
            return
        if held is None:
            self._count(parked.half.group, 0, 1)
        self._parked[transaction_id] = ParkedEntry.of(offset, parked)
        self._parked_offsets.note(transaction_id, offset)
        shadow = self._halves.get(transaction_id)
        if shadow is not None and shadow.origin is Origin.PREPARE:
            self._drop_half(transaction_id)
            self._stray(transaction_id, shadow.offset)

    def _end(self, op: Op) -> None:
        tombstone = self._tombstones.pop(op.id, None)
        self._op_totals.pop(op.id, None)
        if self._parked:
            self._drop_parked(op.id)
        held = self._halves.get(op.id)
        if held is not None:
            self._drop_half(op.id)
            if not self._complete:
                self._left[op.id] = held.offset
        self._ended.put(op, tombstone)
        if held is None or held.origin is not Origin.PREPARE or held.offset == op.half_offset:
            return
        if held.offset > (-1 if tombstone is None else tombstone):
            self._stray(op.id, held.offset)

    # --- ids of releases before

    def _is_used_again(self, transaction_id: str, prepared_at: int) -> bool:
        """Forget an outcome if it is that of an older use of an id; return whether it was."""
        ended = self._ended.get(transaction_id)
        if ended is None or not self._is_older_use(transaction_id, ended.at, prepared_at):
            return False
        self._ended.discard(transaction_id)
        if ended.tombstone is not None:
            self._tombstones[transaction_id] = ended.tombstone
        self._strays.pop(transaction_id, None)
        return True

    def _is_older_use(self, transaction_id: str, at: int, prepared_at: int) -> bool:
        """Return whether a release before took an id of an old form again: what was written `at` is of an older use.

        A client could prepare such an id again a horizon after its outcome. No id is used twice any more.
        """
        is_later = self._horizon_ms is not None and prepared_at >= at + self._horizon_ms
        return is_later and ID.match(transaction_id) is None

    # --- what the log has lost

    def restore_pending(self, entry: Pending) -> None:
        """Take over a pending transaction that is missing from the log, until the lane has written its half again."""
        again = msgspec.structs.replace(entry, offset=max(0, self.half_tail - 1), origin=Origin.LANE, op_offset=None)
        again.barrier = NO_BARRIER
        self._hold(again, self._halves.get(entry.id))

    def restore_totals(self, entry: Pending) -> None:
        """Take over what the checks of a pending transaction brought, until the lane has written it again."""
        held = self._halves[entry.id]
        held.checks, held.checked_at = max(held.checks, entry.checks), entry.checked_at or held.checked_at
        held.attempts = max(held.attempts, entry.attempts)
        held.commit_verdict = held.commit_verdict or entry.commit_verdict
        held.remark = entry.remark or held.remark

    def restore_parked(self, entry: ParkedEntry) -> None:
        """Take over a parked transaction that is missing from the log, until the lane has written it again."""
        if entry.id not in self._parked:
            self._count(entry.group, 0, 1)
        self._parked[entry.id] = msgspec.structs.replace(entry, offset=-1)

    def restore_outcome(self, ended: Ended) -> None:
        """Take over an outcome that is missing from the log, until the lane has written its op marker again."""
        self._op_totals.pop(ended.id, None)
        digests = [MessageDigest(topic=topic, key_hash=key, value_hash=None, size=0) for topic, key in ended.index]
        op = msgspec.structs.replace(ended.op, messages=tuple(digests))
        self.apply_op(max(0, self.op_tail - 1), op)

    # --- positions and forgetting

    def complete_fold(self, since: int = 0) -> None:
        """Forget the data that is needed only while the three partitions are read at different speeds.

        Outcomes of ids that were born before `since` may not have been read. If the clock was ahead, `since` is too:
        but none of these is of an id that was born more than a minute after the newest op that was read.
        Call it when all three have been read to one point, such as the barrier of an acquisition. If the tombstone of
        an outcome was not read by then, it is before the half cursor: it is written together with the outcome, or
        earlier, when the transaction is parked. If its half was read, Kafka has lost the tombstone.
        """
        self._complete = True
        left, self._left = self._left, {}
        for key, offset in left.items():
            if self._ended.positions(key) is not None:
                self._stray(key, offset)
        if self.op_start:
            self.complete_from = min(since, self._newest_op + AHEAD_MS) if self._newest_op else since
        # New tables, because the old ones keep the memory of their largest size.
        self._op_totals = {key: totals for key, totals in self._op_totals.items() if self._knows(key)}
        self._tombstones = {key: offset for key, offset in self._tombstones.items() if self._knows(key)}
        self._parked_tombstones = {key: offset for key, offset in self._parked_tombstones.items() if self._knows(key)}
        self._strays = {key: offset for key, offset in self._strays.items() if self._knows(key)}

    def _knows(self, transaction_id: str) -> bool:
        return self.unresolved(transaction_id) is not None or self._ended.positions(transaction_id) is not None

    def forget(
        self, before: int, *, at_most: int | None = None, limit: int | None = None, claimed: Container[str] = ()
    ) -> int:
        """Forget outcomes that ended, and whose ids were born, before `before`; return how many.

        If more than `at_most` are remembered, forget the oldest of them too, at any age. One call forgets at most
        `limit`, none whose tombstone the tail has not passed, and none that is `claimed`: it is being corrected.

        The time of an end may be far before the birth of its id, if a clock was set back: then the outcome stays until
        its id is old. A surplus goes all the same, and moves `complete_from` only as far as clocks may differ: a birth
        by a clock that was hours ahead would have all new ids of clients refused for hours.
        """
        surplus = 0 if at_most is None else len(self._ended) - at_most
        gone: list[str] = []
        for looked, (transaction_id, at, tombstone) in enumerate(self._ended.ages()):
            is_surplus = len(gone) < surplus
            if limit in {looked, len(gone)} or (at >= before and not is_surplus):
                break
            born = birth_of(transaction_id) or 0
            if born >= before and not is_surplus:
                continue
            # An unknown tombstone is before the start of this fold: see `complete_fold`.
            passed = self._complete if tombstone is None else tombstone < self.half_tail
            if passed and transaction_id not in self._strays and transaction_id not in claimed:
                gone.append(transaction_id)
                known = min(born, at + BORN_AFTER_END_MS) if is_surplus else born
                self.complete_from = max(self.complete_from, known + 1)
        for transaction_id in gone:
            self._ended.discard(transaction_id)
            self._parked_tombstones.pop(transaction_id, None)
        if self._ended.positions(self.last_ended) is None:
            self.last_ended = ""
        return len(gone)

    # --- keeping the indexes

    def _hold(self, entry: Pending, before: Pending | None) -> None:
        """Store an entry in place of the former one, if there is one."""
        if before is None:
            self._count(entry.group, 1, 0)
        else:
            self._op_offsets.discard(entry.id)
            entry.attempts, entry.last_error = max(before.attempts, entry.attempts), before.last_error
            entry.leased_check, entry.leased_until = before.leased_check, before.leased_until
            entry.checked_here = before.checked_here
            entry.offered_at, entry.offered_since = before.offered_at, before.offered_since
            entry.look_at = before.look_at
        self._halves[entry.id] = entry
        self._half_offsets.note(entry.id, entry.offset)
        if (totals := self._op_totals.get(entry.id)) is not None:
            self._apply_totals(entry, totals)
        if self._strays:
            self._clear_stray(entry.id, entry.offset)

    def _apply_totals(self, entry: Pending, totals: OpTotals) -> None:
        if self._is_older_use(entry.id, totals.at, entry.prepared_at):
            return
        # A half that the lane wrote has the totals of its time. A recovery does not need an op that adds nothing to
        # them, unless it replaces one that a recovery needs.
        carried = (
            entry.origin is Origin.LANE
            and self._op_offsets.get(entry.id) is None
            and totals.checks <= entry.checks
            and totals.commit_verdict <= entry.commit_verdict
            and totals.remark in (None, entry.remark)
        )
        if totals.resumed and entry.since <= totals.at:
            entry.checks, entry.checked_at, entry.attempts = totals.checks, totals.checked_at, totals.checks
        elif totals.checks >= entry.checks:
            entry.checks, entry.checked_at = totals.checks, totals.checked_at or entry.checked_at
            entry.attempts = max(entry.attempts, totals.checks)
        entry.commit_verdict = entry.commit_verdict or totals.commit_verdict
        entry.op_offset = totals.offset
        entry.remark = totals.remark or entry.remark
        if not carried:
            self._op_offsets.put(entry.id, totals.offset)

    def _drop_half(self, transaction_id: str) -> None:
        dropped = self._halves.pop(transaction_id)
        self._count(dropped.group, -1, 0)
        if dropped.op_offset is not None:
            self._op_offsets.discard(transaction_id)

    def _drop_parked(self, transaction_id: str) -> None:
        dropped = self._parked.pop(transaction_id, None)
        if dropped is not None:
            self._count(dropped.group, 0, -1)

    def _count(self, group: str, pending: int, parked: int) -> None:
        before = self.group_counts.get(group, (0, 0))
        after = (before[0] + pending, before[1] + parked)
        if after[0] or after[1]:
            self.group_counts[group] = after
        else:
            self.group_counts.pop(group, None)

    def _stray(self, transaction_id: str, offset: int) -> None:
        if offset > self._tombstone(transaction_id, self._ended.positions(transaction_id)):
            self._strays[transaction_id] = max(offset, self._strays.get(transaction_id, -1))

    def _clear_stray(self, transaction_id: str, offset: int) -> None:
        if self._strays.get(transaction_id, offset) < offset:
            del self._strays[transaction_id]
