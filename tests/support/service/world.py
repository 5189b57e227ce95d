"""A coordinator on a simulated broker, and a clock that a test advances."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.requests import End, EndResult, GroupSpec, Prepare, Prepared, ServiceLimits, TransactionView
from halfway.protocol.records import CheckMode, LimitOverrides, Message, OnExhausted, PolicyOverrides
from halfway.protocol.transactions import Outcome, State
from tests.support.service.begun import Begun
from tests.support.service.broker import Memory, topic
from tests.support.waiting import GENEROUS_S

SHARDS = 2
LIMITS = ServiceLimits(shards=SHARDS, outcome_horizon_s=60)
QUICK = PolicyOverrides(first_check_after_s=5, check_interval_s=10, max_interval_s=40, max_checks=3, max_age_s=1000)


@dataclass
class World:
    """One instance: its ports in `memory`, the service in `coordinator`."""

    memory: Memory
    coordinator: Coordinator

    @classmethod
    async def start(cls, memory: Memory | None = None, limits: ServiceLimits = LIMITS) -> "World":
        memory = memory or Memory(
            shards=SHARDS,
            topics={"orders": 3, "points": 1, "compacted": topic(1, compacted=True)},
            outcome_horizon_s=limits.outcome_horizon_s,
        )
        await memory.open()
        coordinator = Coordinator(limits=limits, **memory.ports)
        memory.peers.serve(coordinator.peer_handler)
        await memory.start(coordinator.shards)
        return cls(memory, coordinator)

    async def restart(self, limits: ServiceLimits = LIMITS) -> "World":
        """Kill this instance and start the next one over the same log."""
        memory = self.memory.restarted()
        return await World.start(memory, limits)

    async def stop(self) -> None:
        if self.memory.is_dead:
            return
        await self.coordinator.drain()
        await self.memory.stop(deadline=self.deadline())

    @staticmethod
    def deadline(seconds: float = 30) -> float:
        return asyncio.get_running_loop().time() + seconds

    async def until(self, condition: object, within_s: float = GENEROUS_S) -> None:
        """Wait until a condition becomes true."""
        assert callable(condition)
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)

    async def group(
        self,
        name: str = "shop",
        *,
        policy: PolicyOverrides = QUICK,
        mode: CheckMode = CheckMode.PUSH,
        urls: tuple[str, ...] = ("http://a/", "http://b/"),
        limits: LimitOverrides | None = None,
        reject_prepares: bool | None = None,
    ) -> None:
        spec = GroupSpec(
            name=name,
            mode=mode,
            urls=urls if mode is CheckMode.PUSH else (),
            topics=("orders", "points", "compacted", "missing"),
            policy=policy,
            limits=limits,
            reject_prepares=reject_prepares,
        )
        await self.coordinator.put_group(spec, deadline=self.deadline())

    async def prepare(
        self,
        *messages: Message,
        transaction_id: str | None = None,
        check_after_ms: int | None = None,
        group: str = "shop",
    ) -> Prepared:
        return await self.coordinator.prepare(
            Prepare(
                group=group,
                messages=messages or (Message(topic="orders", key=b"k", value=b"v"),),
                id=transaction_id,
                check_after_ms=check_after_ms,
            ),
            deadline=self.deadline(),
        )

    async def end(
        self, transaction_id: str, outcome: Outcome, *, remark: str | None = None, check_id: str | None = None
    ) -> EndResult:
        return await self.coordinator.end(
            End(id=transaction_id, outcome=outcome, remark=remark, check_id=check_id), deadline=self.deadline()
        )

    def begin_ends(self, ends: Sequence[End], *, deadline: float) -> Begun[EndResult]:
        return Begun([self.coordinator.end(one, deadline=deadline) for one in ends])

    def begin_prepares(self, prepares: Sequence[Prepare], *, deadline: float) -> Begun[Prepared]:
        return Begun([self.coordinator.prepare(one, deadline=deadline) for one in prepares])

    async def get(self, transaction_id: str) -> TransactionView:
        return await self.coordinator.get(transaction_id, deadline=self.deadline())

    async def state(self, transaction_id: str) -> State:
        return (await self.get(transaction_id)).state

    async def until_state(self, transaction_id: str, state: State, within_s: float = GENEROUS_S) -> None:
        """Wait until the coordinator returns `state`: the log has the record a moment earlier."""
        async with asyncio.timeout(within_s):
            while await self.state(transaction_id) is not state:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Wait until the tail has read what stands."""
        ends = [shard.half.end for shard in self.memory.log.shards]
        shards = self.coordinator.shards
        await self.until(lambda: all(shards.get(number).state.half_tail >= end for number, end in enumerate(ends)))

    async def scan(self, *, after_s: float = 0) -> None:
        """Advance the clock, scan every shard as the scheduler does, and let the replies to its checks arrive."""
        self.memory.clock.advance(after_s)
        for shard in self.coordinator.shards.served:
            await self.coordinator.scan(shard, self.memory.clock.now_ms())
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)


ROLLBACK_AT_LAST = PolicyOverrides(
    first_check_after_s=5,
    check_interval_s=10,
    max_interval_s=40,
    max_checks=2,
    max_age_s=1000,
    on_exhausted=OnExhausted.ROLLBACK,
)
