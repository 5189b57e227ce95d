"""Resolving a transaction: claim its id, write through the lane, apply what was written.

See docs/protocol.md#end-the-lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from halfway.domain.errors import (
    HalfwayError,
    KafkaUnavailableError,
    LaneLostError,
    NotWrittenError,
    OvertakenError,
)
from halfway.domain.records import Half
from halfway.domain.shard import Ended, Entry, Pending, Unresolved
from halfway.domain.transaction import Action, State, transition
from halfway.service.ports import LaneWrite, Tombstone, Written
from halfway.service.requests import EndResult
from halfway.service.resolve import lane_writes
from halfway.service.resolve.deadlines import Deadlines
from halfway.service.resolve.effects import (
    Act,
    Build,
    builder,
    leaves_note,
    needs_payload,
    note_error,
    own,
    unconfirmed,
    write_of,
)

if TYPE_CHECKING:
    from halfway.service.ports import Clock, Lane, Observer
    from halfway.service.query.lookup import Finding
    from halfway.service.shards.shard_table import Shard, ShardTable

log = structlog.get_logger(__name__)

WRITE_LIMIT_S = 30.0
"""How long a resolution that nobody waits for (a verdict, a policy) may wait for its turn in the lane."""
_PAUSE_S = 0.02


class _Attempt(msgspec.Struct, frozen=True, gc=False):
    """A first attempt that the lane has, and who waits for it."""

    shard: int
    entry: Unresolved
    act: Act
    target: State
    at: int
    deadline: float
    answer: asyncio.Future[EndResult]


class Ending:
    """The one way by which the state of a transaction changes after its prepare."""

    def __init__(self, shards: ShardTable, finding: Finding, lane: Lane, clock: Clock, observer: Observer) -> None:
        """Keep the parts; nothing is started."""
        self._shards = shards
        self._finding = finding
        self._lane = lane
        self._clock = clock
        self._observer = observer
        self._tasks: set[asyncio.Task[EndResult]] = set()
        self._deadlines = Deadlines()

    async def act(self, transaction_id: str, act: Act, *, deadline: float) -> EndResult:
        """Do one thing to a transaction; whoever comes second waits for the first and gets its answer by the result.

        Raises:
            AlreadyEndedError, NotPendingError: the state does not allow it.
            EndUnconfirmedError: not confirmed in time; the same call again tells, and never does it twice.
            TopicUnavailableError, MessageTooLargeError, NotAuthorisedError: it cannot be written; it is still pending.
            OvertakenError: policy decided it, and no longer does.

        """
        while True:
            shard, entry = await self._finding.locate(transaction_id, deadline=deadline)
            claim = self._shards.claims.get(transaction_id)
            if claim is not None:
                await _released(claim, transaction_id, deadline=deadline)
                continue
            answer = self.begun_at_once(shard, entry, act, deadline=deadline)
            if answer is not None:
                return await answer
            target = transition(transaction_id, entry.state, act.action)
            build = builder(act, deadline)
            return await self._claimed(transaction_id, shard.number, build, target=target, act=act, deadline=deadline)

    def begun_at_once(
        self, shard: Shard, entry: Entry, act: Act, *, deadline: float
    ) -> asyncio.Future[EndResult] | None:
        """Do what `act` does where only the lane has to be waited for; None where something else has to be.

        Whoever goes away may cancel the future: what was handed to the lane is finished all the same.
        """
        if entry.id in self._shards.claims:
            return None
        target = transition(entry.id, entry.state, act.action)
        answer: asyncio.Future[EndResult] = asyncio.get_running_loop().create_future()
        if isinstance(entry, Ended) or (target is entry.state and not leaves_note(act, entry)):
            answer.set_result(EndResult(id=entry.id, state=target, changed=False))
            return answer
        half = self._shards.payloads.get(entry.id, entry.fingerprint) if needs_payload(act) else None
        if half is None and needs_payload(act):
            return None
        at = self._at(entry)
        attempt = _Attempt(shard.number, entry, act, target, at, deadline, answer)
        write = write_of(shard.number, entry, half, act, at=at, deadline=deadline)
        claim = self._claim(entry.id)  # first, as the lane's thread asks for it
        try:
            written = self._lane.submit(write)
        except BaseException as error:
            self._release(entry.id, claim)
            if isinstance(error, HalfwayError):
                note_error(entry, error)
            raise
        self._deadlines.watch(answer, deadline, partial(unconfirmed, entry.id))
        written.add_done_callback(partial(self._attempted, attempt, write, claim))
        return answer

    def _attempted(
        self, attempt: _Attempt, write: LaneWrite, claim: asyncio.Future[None], written: asyncio.Future[Written]
    ) -> None:
        """Apply what the lane wrote and answer; what it lost or dropped is tried again by a task."""
        entry, act, answer = attempt.entry, attempt.act, attempt.answer
        error = NotWrittenError() if written.cancelled() else written.exception()
        if isinstance(error, LaneLostError | NotWrittenError):
            tried = [attempt.at] if isinstance(error, LaneLostError) else []
            self._try_again(attempt, claim, tried)
            return
        self._deadlines.forget(answer, attempt.deadline)
        try:
            if error is None:
                self._apply(write, written.result())
                self._observe(entry, act, attempt.at)
            elif isinstance(error, HalfwayError):
                note_error(entry, error)
        except Exception as broken:  # noqa: BLE001 - whoever waits hears of it, whatever it is
            error = broken
        self._release(entry.id, claim)
        if answer.done():
            return
        if error is None:
            answer.set_result(EndResult(id=entry.id, state=attempt.target, changed=True))
        else:
            answer.set_exception(error)

    def _try_again(self, attempt: _Attempt, claim: asyncio.Future[None], tried: list[int]) -> None:
        entry, act, answer, deadline = attempt.entry, attempt.act, attempt.answer, attempt.deadline

        def done(task: asyncio.Task[EndResult]) -> None:
            self._deadlines.forget(answer, deadline)
            self._release(entry.id, claim)
            error = None if task.cancelled() else task.exception()
            if answer.done():
                _take_exception(task)
            elif task.cancelled():
                answer.cancel()
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        async def again() -> EndResult:
            if not tried and asyncio.get_running_loop().time() >= deadline:
                raise unconfirmed(entry.id)
            await asyncio.sleep(_PAUSE_S)
            build = builder(act, deadline)
            return await self._carry_out(entry.id, attempt.shard, build, attempt.target, act, deadline, tried)

        self._begin(again(), done)

    def _begin(
        self, work: Coroutine[object, object, EndResult], done: Callable[[asyncio.Task[EndResult]], None]
    ) -> asyncio.Task[EndResult]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(done)
        return task

    async def write_again(self, transaction_id: str, *, deadline: float) -> None:
        """Write the half of a prepared transaction again at the tail (re-anchor)."""
        shard, entry = await self._finding.locate(transaction_id, deadline=deadline)
        if transaction_id in self._shards.claims or not isinstance(entry, Pending):
            return

        def build(shard: Shard, entry: Unresolved, half: Half | None, _: int) -> LaneWrite:
            if half is None or not isinstance(entry, Pending):
                raise NotWrittenError
            return lane_writes.written_again(shard.number, entry, half, deadline=deadline)

        await self._claimed(transaction_id, shard.number, build, target=State.PREPARED, act=None, deadline=deadline)

    async def correct(self, transaction_id: str, *, deadline: float) -> None:
        """Put right a stray half: the first content again where pending, a tombstone where parked or ended."""
        shard, entry = await self._finding.locate(transaction_id, deadline=deadline)
        if isinstance(entry, Pending):
            await self.write_again(transaction_id, deadline=deadline)
            return
        if transaction_id in self._shards.claims:
            return
        write = lane_writes.buried(
            shard.number, entry.id, entry.group, entry.state, entry.prepared_at, deadline=deadline
        )
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
        if act is not None and not needs_payload(act):
            return None
        try:
            return await self._finding.payload(shard, entry, deadline=deadline)
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
        work = self._carry_out(transaction_id, number, build, target, act, deadline, [])
        task = self._begin(work, lambda _: self._release(transaction_id, claim))
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        except asyncio.CancelledError:
            task.add_done_callback(_take_exception)
            raise
        if not done:
            task.add_done_callback(_take_exception)
            raise unconfirmed(transaction_id)
        return task.result()

    async def _carry_out(
        self,
        transaction_id: str,
        number: int,
        build: Build,
        target: State,
        act: Act | None,
        deadline: float,
        tried: list[int],
    ) -> EndResult:
        """Write until it stands, the state forbids it, or the deadline has passed.

        After a lane was lost the fold tells what became of the write: an outcome that carries the time of one that was
        `tried`, and its cause, is its own (docs/protocol.md#end-the-lane).
        """
        while True:
            shard = await self._shards.serving(number, deadline=deadline)
            entry = shard.state.find(transaction_id)
            if entry is None or isinstance(entry, Ended):
                return own(transaction_id, entry, target, act, tried)
            if act is not None:
                target = transition(transaction_id, entry.state, act.action)
                if entry.state is target and not leaves_note(act, entry):
                    return EndResult(id=transaction_id, state=target, changed=bool(tried))
            half = await self._needed_payload(shard, entry, act, deadline=deadline)
            # One Kafka transaction may follow another within a millisecond; the time must still tell them apart.
            at = max(self._at(entry), tried[-1] + 1 if tried else 0)
            try:
                write = build(shard, entry, half, at)
                written = await self._lane.submit(write)
            except LaneLostError:
                tried.append(at)
                await asyncio.sleep(_PAUSE_S)
                continue
            except NotWrittenError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise unconfirmed(transaction_id) from None
                await asyncio.sleep(_PAUSE_S)
                continue
            except OvertakenError:
                raise
            except HalfwayError as error:
                note_error(entry, error)
                raise
            self._apply(write, written)
            self._observe(entry, act, at)
            return EndResult(id=transaction_id, state=target, changed=True)

    def _at(self, entry: Unresolved) -> int:
        """Return the time of a write; a clock that was set back lets no outcome seem older than its prepare."""
        return max(self._clock.now_ms(), entry.prepared_at)

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
        if isinstance(state.unresolved(write.id), Pending):
            if isinstance(write.half, Half):
                payloads.put(write.half)
                shard.agenda.put(write.id, 0)
        else:
            payloads.drop(write.id)
            shard.agenda.discard(write.id)

    def _observe(self, entry: Unresolved, act: Act | None, at: int) -> None:
        if act is not None and act.action in (Action.COMMIT, Action.ROLLBACK):
            self._observer.resolved_after(entry.group, act.action.value, max(0, at - entry.prepared_at) / 1000)


def limit() -> float:
    """Return the deadline of a resolution that nobody waits for."""
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S


async def _released(claim: asyncio.Future[None], transaction_id: str, *, deadline: float) -> None:
    """Wait until whoever resolves an id now is done."""
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(claim)
    except TimeoutError:
        raise unconfirmed(transaction_id) from None


def _take_exception(task: asyncio.Task[EndResult]) -> None:
    """Read the result of a task that nobody waits for any more; what matters of it stands in the log."""
    if not task.cancelled() and task.exception() is not None:
        log.info("late_end_failed", error=str(task.exception()))
