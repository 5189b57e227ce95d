"""The policy and verdicts in many orders: after a caller or a check said commit, the policy never rolls back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random

import pytest

from halfway.client import transaction_id
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.coordinator.requests import End, EndResult, LeasedCheck, ServiceLimits
from halfway.protocol.errors import HalfwayError, NotServedError
from halfway.protocol.records import CheckMode, OnExhausted, Op, OpKind, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome
from tests.support.service.begun import Begun
from tests.support.service.world import SHARDS, World
from tests.support.surroundings import no_verdict, unreachable, verdict

IMPATIENT = PolicyOverrides(
    first_check_after_s=1,
    check_interval_s=1,
    max_interval_s=2,
    max_checks=2,
    max_age_s=8,
    on_exhausted=OnExhausted.ROLLBACK,
)
LIMITS = ServiceLimits(shards=SHARDS, outcome_horizon_s=100_000, lease_s=2, breaker_failures=1000)
STEPS = 250


class Run:
    """One seeded run: the next event is drawn, and the answer of every check is recorded."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = Random(seed)
        self.said_commit: set[str] = set()
        self.prepared: list[str] = []
        self._asked: list[tuple[str, asyncio.Future[CheckReply]]] = []
        self._leased: list[LeasedCheck] = []
        self._calls: set[Begun[EndResult]] = set()
        world.memory.caller.answer = self._answer_later

    async def _answer_later(self, request: CheckRequest) -> CheckReply:
        reply: asyncio.Future[CheckReply] = asyncio.get_running_loop().create_future()
        self._asked.append((request.id, reply))
        return await reply

    def _says_commit(self, transaction_id: str) -> None:
        """Record a verdict, unless the transaction had its outcome when the verdict came."""
        if not any(op.kind.final for op in self.ops(transaction_id)):
            self.said_commit.add(transaction_id)

    def ops(self, transaction_id: str) -> list[Op]:
        return [
            record.value
            for shard in self.world.memory.log.shards
            for record in shard.op.records
            if isinstance(record.value, Op) and record.key == transaction_id
        ]

    # --- events

    async def prepare(self) -> None:
        """Prepare while the topic can be written to, so that the prepare is accepted."""
        group, denied = self.random.choice(("pushed", "pulled")), self.world.memory.faults.denied_topics
        before = set(denied)
        denied.clear()
        with suppress(HalfwayError):  # no shard is served at this moment
            name = transaction_id(f"t{len(self.prepared)}", self.world.memory.clock.now_ms())
            self.prepared.append((await self.world.prepare(group=group, transaction_id=name)).id)
        denied |= before

    async def scan(self) -> None:
        for shard in self.world.coordinator.shards.served:
            await self.world.coordinator.scan(shard, self.world.memory.clock.now_ms())

    async def advance_time(self) -> None:
        self.world.memory.clock.advance(self.random.choice((0.1, 0.5, 1, 1, 2, 4)))
        if self.random.random() < 0.05:
            self.world.memory.clock.advance(self.random.choice((-30, 60)))
            self.world.coordinator.clock_was_set()

    async def reply(self) -> None:
        """Answer a check in flight."""
        if not self._asked:
            return
        transaction_id, reply = self._asked.pop(self.random.randrange(len(self._asked)))
        answer = self.random.choice((verdict(Outcome.COMMIT), verdict(Outcome.UNKNOWN), no_verdict(), unreachable()))
        if reply.done():
            return
        if answer.outcome is Outcome.COMMIT:
            self._says_commit(transaction_id)
        reply.set_result(answer)

    async def lease(self) -> None:
        with suppress(HalfwayError):
            self._leased += await self.world.coordinator.lease_checks("pulled", at_most=5, wait_s=0)

    async def answer_lease(self) -> None:
        """Answer a fetched check, during or after its lease; the caller may disconnect."""
        if not self._leased:
            return
        check = self.random.choice(self._leased)
        if self.random.random() < 0.5:
            self._leased.remove(check)
            return
        await self._commit(End(id=check.id, outcome=Outcome.COMMIT, check_id=check.check_id))

    async def commit(self) -> None:
        """Commit as a producer or an operator, sometimes with little time; the caller may disconnect."""
        if self.prepared:
            cause = self.random.choice((Cause.PRODUCER, Cause.PRODUCER, Cause.OPERATOR))
            await self._commit(End(id=self.random.choice(self.prepared), outcome=Outcome.COMMIT, cause=cause))

    async def _commit(self, end: End) -> None:
        known = end.id in self.said_commit
        within_s = self.random.choice((0.001, 30, 30))
        call = self.world.begin_ends([end], deadline=self.world.deadline(within_s))
        await asyncio.sleep(0)  # it comes with its turn: until then the policy may write
        self._says_commit(end.id)
        self._calls.add(call)
        call.operations[0].add_done_callback(partial(self._called, end.id, known, call))
        if self.random.random() < 0.2:
            self._calls.discard(call)
            call.abandon()

    def _called(self, transaction_id: str, known: bool, call: Begun[EndResult], _: object) -> None:
        self._calls.discard(call)
        # The shard was not served, or the caller went away while its owner was looked for: nobody took it.
        if isinstance(call.results[0], NotServedError | ConnectionAbortedError) and not known:
            self.said_commit.discard(transaction_id)

    async def deny_topic(self) -> None:
        denied = self.world.memory.faults.denied_topics
        if self.random.random() < 0.85:
            denied.add("orders")
        else:
            denied.clear()

    async def lose_lane(self) -> None:
        self.world.memory.faults.lose_next_batch(written=self.random.random() < 0.5)

    async def hold_lane(self) -> None:
        with self.world.memory.faults.lane_held():
            for _ in range(self.random.randrange(1, 5)):
                await self.random.choice((self.scan, self.reply, self.answer_lease, self.commit, self.advance_time))()

    async def run_turns(self) -> None:
        for _ in range(self.random.randrange(1, 8)):
            await asyncio.sleep(0)

    async def step(self) -> None:
        happens: tuple[tuple[Callable[[], object], int], ...] = (
            (self.prepare, 6),
            (self.scan, 12),
            (self.advance_time, 10),
            (self.reply, 10),
            (self.lease, 6),
            (self.answer_lease, 6),
            (self.commit, 3),
            (self.deny_topic, 2),
            (self.lose_lane, 1),
            (self.hold_lane, 4),
            (self.run_turns, 8),
        )
        (chosen,) = self.random.choices([one for one, _ in happens], [weight for _, weight in happens])
        await chosen()  # type: ignore[misc]

    async def finish(self) -> None:
        """Answer or give up every check, and let the policy decide on all remaining transactions."""
        for _ in range(12):
            while self._asked:
                await self.reply()
            await self.world.scan(after_s=3)
        await self.world.until(lambda: not self._calls)
        await self.world.scan(after_s=3)


@asynccontextmanager
async def running(seed: int) -> AsyncIterator[Run]:
    world = await World.start(limits=LIMITS)
    await world.group("pushed", policy=IMPATIENT)
    await world.group("pulled", policy=IMPATIENT, mode=CheckMode.PULL)
    run = Run(world, seed)
    run.world.memory.faults.denied_topics.add("orders")
    try:
        yield run
    finally:
        await world.stop()


@pytest.mark.parametrize("seed", range(12))
async def test_after_commit_was_said_policy_never_rolls_back(seed: int) -> None:
    """Pushed and fetched checks, callers, late answers, refused commits, lost lanes, clocks that are set, in any order.

    And the policy rolls back only transactions that were checked.
    """
    async with running(seed) as run:
        for _ in range(STEPS):
            await run.step()
        await run.finish()
        ended = {name: [op for op in run.ops(name) if op.kind.final] for name in run.prepared}
        by_policy = {name for name, ops in ended.items() if ops and ops[0].cause is Cause.POLICY}
        assert not by_policy & run.said_commit
        assert all(len(ops) <= 1 for ops in ended.values())
        assert all(ended[name][0].checks > 0 and ended[name][0].kind is OpKind.ROLLED_BACK for name in by_policy)
        assert run.prepared
