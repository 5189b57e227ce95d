"""Resolving a transaction: claim its id, write through the lane, apply what was written (DESIGN sections 2 and 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from halfway.domain.errors import (
    EndUnconfirmedError,
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    NotWrittenError,
    OutcomeExpiredError,
    RetryableError,
    UnknownTransactionError,
)
from halfway.domain.ids import server_made
from halfway.domain.records import Half, OpKind
from halfway.domain.shard import Ended, Entry, ParkedEntry, Pending
from halfway.domain.transaction import Action, Cause, State, transition
from halfway.service import writes
from halfway.service.ports import LaneWrite, Tombstone, Written
from halfway.service.requests import EndResult

if TYPE_CHECKING:
    from halfway.service.ports import Clock, HalfLog, Lane, Observer
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards import Shard, ShardTable

log = structlog.get_logger(__name__)

WRITE_LIMIT_S = 30.0
"""How long a resolution that nobody waits for (a verdict, a policy) may wait for its turn in the lane."""
_PAUSE_S = 0.02

Unresolved = Pending | ParkedEntry
Build = Callable[["Shard", Unresolved, Half | None, int], LaneWrite]


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do to a transaction; `checks` is the count to record, None for the one that stands."""

    action: Action
    cause: Cause
    remark: str | None = None
    checks: int | None = None
    checked_at: int | None = None
    commit_verdict: bool = False


class Ending:
    """The one way by which the state of a transaction changes after its prepare."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        lane: Lane,
        half_log: HalfLog,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._lane = lane
        self._half_log = half_log
        self._clock = clock
        self._observer = observer
        self._tasks: set[asyncio.Task[EndResult]] = set()

    async def locate(self, transaction_id: str, *, deadline: float) -> tuple[Shard, Entry]:
        """Find an id in the shard that owns it.

        An id that is not known is looked for once more after a read barrier: the tail has then reached the end of
        half[s] as it was when this was called (DESIGN section 5).

        Raises:
            UnknownTransactionError, OutcomeExpiredError: it is certainly not pending; neither means "rolled back".
            ShardUnavailableError: its shard is not served here now.

        """
        shard = self._shards.get(self._shards.number_of(transaction_id))
        entry = shard.state.find(transaction_id)
        if entry is not None:
            return shard, entry
        end = await self._half_log.half_end(shard.number, deadline=deadline)
        await shard.tailed(end, deadline=deadline)
        shard = self._shards.get(shard.number)
        entry = shard.state.find(transaction_id)
        if entry is not None:
            return shard, entry
        made = server_made(transaction_id)
        horizon_s = self._limits.outcome_horizon_s
        if made is not None and made[1] < self._clock.now_ms() - horizon_s * 1000:
            raise OutcomeExpiredError(transaction_id, horizon_s=horizon_s)
        raise UnknownTransactionError(transaction_id)

    async def payload(self, shard: Shard, entry: Unresolved, *, deadline: float) -> Half:
        """Return the half of a prepared or parked transaction, read back by offset where it is not held in memory."""
        half = self._shards.payloads.get(entry.id, entry.fingerprint)
        if half is not None:
            return half
        if isinstance(entry, ParkedEntry):
            record = await self._half_log.read_parked(shard.number, entry.offset, entry.id, deadline=deadline)
            half = record.half
        else:
            half = await self._half_log.read_half(shard.number, entry.offset, entry.id, deadline=deadline)
        self._shards.payloads.put(half)
        return half

    async def act(self, transaction_id: str, act: Act, *, deadline: float) -> EndResult:
        """Do one thing to a transaction; whoever comes second waits for the first and gets its answer by the result.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.
            EndUnconfirmedError: not confirmed in time; the same call again tells, and never does it twice.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: it cannot be written; it is still pending.

        """
        while True:
            shard, entry = await self.locate(transaction_id, deadline=deadline)
            claim = self._shards.claims.get(transaction_id)
            if claim is not None:
                await _released(claim, transaction_id, deadline=deadline)
                continue
            state = entry.state
            target = transition(transaction_id, state, act.action)
            if target is state and not _leaves_note(act, entry):
                return EndResult(id=transaction_id, state=state, changed=False)

            def build(shard: Shard, entry: Unresolved, half: Half | None, at: int) -> LaneWrite:
                return _write(shard.number, entry, half, act, at=at, deadline=deadline)

            return await self._claimed(transaction_id, shard.number, build, target=target, act=act, deadline=deadline)

    async def write_again(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail (re-anchor)."""
        shard, entry = await self.locate(transaction_id, deadline=deadline)
        if transaction_id in self._shards.claims or not isinstance(entry, Pending):
            return

        def build(shard: Shard, entry: Unresolved, half: Half | None, _: int) -> LaneWrite:
            if half is None or not isinstance(entry, Pending):
                raise NotWrittenError
            return writes.written_again(shard.number, entry, half, deadline=deadline)

        await self._claimed(transaction_id, shard.number, build, target=State.PREPARED, act=None, deadline=deadline)

    async def correct(self, transaction_id: str, *, deadline: float) -> None:
        """Put right a stray half: the first content again where pending, a tombstone where parked or ended."""
        shard, entry = await self.locate(transaction_id, deadline=deadline)
        if isinstance(entry, Pending):
            await self.write_again(transaction_id, deadline=deadline)
            return
        if transaction_id in self._shards.claims:
            return
        write = writes.buried(shard.number, entry.id, entry.group, entry.state, entry.prepared_at, deadline=deadline)
        claim = self._claim(transaction_id)
        try:
            self._apply(write, await self._lane.submit(write))
        finally:
            self._release(transaction_id, claim)

    async def _needed_payload(
        self, shard: Shard, entry: Unresolved, act: Act | None, *, deadline: float
    ) -> Half | None:
        """Return the half where the write needs it.

        A rollback takes it for the audit's hashes only: one that cannot be read any more must not keep it from ending.
        """
        if act is not None and act.action in (Action.CHECK, Action.UNKNOWN):
            return None
        try:
            return await self.payload(shard, entry, deadline=deadline)
        except KafkaUnavailableError:
            if act is None or act.action is not Action.ROLLBACK:
                raise
            log.warning("rolled_back_without_its_payload", id=entry.id, group=entry.group)
            return None

    # --- the claimed part

    def _claim(self, transaction_id: str) -> asyncio.Future[None]:
        claim = asyncio.get_running_loop().create_future()
        self._shards.claims[transaction_id] = claim
        return claim

    def _release(self, transaction_id: str, claim: asyncio.Future[None]) -> None:
        if self._shards.claims.get(transaction_id) is claim:
            del self._shards.claims[transaction_id]
        if not claim.done():
            claim.set_result(None)

    async def _claimed(
        self,
        transaction_id: str,
        number: int,
        build: Build,
        *,
        target: State,
        act: Act | None,
        deadline: float,
    ) -> EndResult:
        """Claim the id and carry the write out in a task of its own, which a caller that goes away does not end."""
        claim = self._claim(transaction_id)
        task = asyncio.create_task(self._carry_out(transaction_id, number, build, target, act, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._release(transaction_id, claim))
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not done:
            task.add_done_callback(_take_exception)
            raise _unconfirmed(transaction_id)
        return task.result()

    async def _carry_out(
        self,
        transaction_id: str,
        number: int,
        build: Build,
        target: State,
        act: Act | None,
        deadline: float,
    ) -> EndResult:
        """Write until it stands, the state forbids it, or the deadline has passed.

        After a lane was lost the fold tells what became of the write: an outcome that carries this write's own time
        and cause is its own (DESIGN section 4).
        """
        tried: list[int] = []
        while True:
            shard = await self._shards.serving(number, deadline=deadline)
            entry = shard.state.find(transaction_id)
            if entry is None or isinstance(entry, Ended):
                return _own(transaction_id, entry, target, act, tried)
            if act is not None:
                target = transition(transaction_id, entry.state, act.action)
                if entry.state is target and not _leaves_note(act, entry):
                    return EndResult(id=transaction_id, state=target, changed=bool(tried))
            half = await self._needed_payload(shard, entry, act, deadline=deadline)
            # One Kafka transaction may follow another within a millisecond; the time must still tell them apart.
            at = max(self._clock.now_ms(), tried[-1] + 1 if tried else 0)
            try:
                write = build(shard, entry, half, at)
                written = await self._lane.submit(write)
            except LaneLostError:
                tried.append(at)
                await asyncio.sleep(_PAUSE_S)
                continue
            except NotWrittenError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise _unconfirmed(transaction_id) from None
                await asyncio.sleep(_PAUSE_S)
                continue
            except HalfwayError as error:
                if isinstance(entry, Pending):
                    entry.last_error = f"{error.code}: {error.detail}"
                raise
            self._apply(write, written)
            self._observe(entry, act, at)
            return EndResult(id=transaction_id, state=target, changed=True)

    def _apply(self, write: LaneWrite, written: Written) -> None:
        """Apply an own write as a recovery would, so that a repeat by the tail changes nothing.

        The shard may have been given up and taken back since the write was made: it goes to what is served now.
        """
        shard = self._shards.find(write.shard)
        if shard is None:
            return
        state, payloads = shard.state, self._shards.payloads
        if write.op is not None and written.op is not None:
            state.apply_op(written.op, write.op)
        if write.half is not None and written.half is not None:
            state.apply_half(written.half, write.id, None if isinstance(write.half, Tombstone) else write.half)
        if write.parked is not None and written.parked is not None:
            state.apply_parked(written.parked, write.id, None if isinstance(write.parked, Tombstone) else write.parked)
        entry = state.find(write.id)
        if isinstance(entry, Pending):
            if isinstance(write.half, Half):
                payloads.put(write.half)
                shard.agenda.put(write.id, 0)
        else:
            payloads.drop(write.id)
            shard.agenda.discard(write.id)

    def _observe(self, entry: Unresolved, act: Act | None, at: int) -> None:
        if act is not None and act.action in (Action.COMMIT, Action.ROLLBACK):
            self._observer.resolved_after(entry.group, act.action.value, max(0, at - entry.prepared_at) / 1000)


def _leaves_note(act: Act, entry: Entry) -> bool:
    """Whether an action that leaves the state as it is writes an op marker all the same."""
    if not isinstance(entry, Pending):
        return False
    return act.action is Action.CHECK or (act.action is Action.UNKNOWN and bool(act.remark))


def _write(shard: int, entry: Unresolved, half: Half | None, act: Act, *, at: int, deadline: float) -> LaneWrite:
    """Choose what an action writes from the state that stands."""
    told = writes.Told(
        cause=act.cause,
        at=at,
        deadline=deadline,
        checks=entry.checks if act.checks is None else act.checks,
        checked_at=act.checked_at if act.checked_at is not None else getattr(entry, "checked_at", None),
        remark=act.remark,
        commit_verdict=act.commit_verdict,
    )
    if act.action is Action.ROLLBACK:
        return writes.rolled_back(shard, entry, half, told)
    if half is None:
        if isinstance(entry, ParkedEntry):
            raise NotWrittenError
        return writes.noted(shard, entry, told, OpKind.VERDICT if act.commit_verdict else OpKind.CHECKED)
    if act.action is Action.COMMIT:
        return writes.committed(shard, entry, half, told)
    if isinstance(entry, Pending):
        return writes.parked(shard, entry, half, told)
    return writes.resumed(shard, entry, half, msgspec.structs.replace(told, checks=0, checked_at=None))


def _own(transaction_id: str, entry: Ended | None, target: State, act: Act | None, tried: Sequence[int]) -> EndResult:
    """Judge what the fold says after a lane was lost."""
    if entry is None:
        raise _unconfirmed(transaction_id)
    if act is not None:
        transition(transaction_id, entry.state, act.action)
        own = entry.at in tried and entry.cause is act.cause
        return EndResult(id=transaction_id, state=entry.state, changed=own and entry.state is target)
    return EndResult(id=transaction_id, state=entry.state, changed=False)


async def _released(claim: asyncio.Future[None], transaction_id: str, *, deadline: float) -> None:
    """Wait until whoever resolves an id now is done."""
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(claim)
    except TimeoutError:
        raise _unconfirmed(transaction_id) from None


def _unconfirmed(transaction_id: str) -> RetryableError:
    return EndUnconfirmedError(
        f"the end of {transaction_id!r} was not confirmed in time: send the same end again, it is never done twice",
        id=transaction_id,
    )


def _take_exception(task: asyncio.Task[EndResult]) -> None:
    """Read the result of a task that nobody waits for any more; what matters of it stands in the log."""
    if not task.cancelled() and task.exception() is not None:
        log.info("late_end_failed", error=str(task.exception()))
