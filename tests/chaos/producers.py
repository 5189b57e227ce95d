"""Producers that commit, roll back, go silent, repeat, contradict themselves and disappear."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count, islice
from typing import Final

from checker.history import Outcome
from halfway.client import transaction_id
from tests.chaos.answer import Answer
from tests.chaos.brokers import TopicKind
from tests.chaos.caller import Caller, Message, Way
from tests.chaos.decisions import Decisions

FLEETING: Final = TopicKind(name="fleeting")
"""Deleted, created again, grown and denied during writes."""
STRICT: Final = TopicKind(name="strict", in_sync=3)
"""Below its min.insync.replicas as soon as one broker is gone."""
_SHARES: Final[Mapping[TopicKind, int]] = {
    TopicKind(name="orders"): 34,
    TopicKind(name="points"): 24,
    TopicKind(name="carts", in_sync=1): 20,
    STRICT: 12,
    FLEETING: 10,
}
TOPICS: Final = {kind.name: kind for kind in _SHARES}
PUSHED, PULLED, PARKING, DROPPING, LEAVING = "pushed", "pulled", "parking", "dropping", "leaving"
"""Groups: checks over HTTP; fetched checks; parked soon; rolled back by policy soon; fetched and rolled back."""
GROUPS: Final[Mapping[str, int]] = {PUSHED: 50, PULLED: 17, PARKING: 11, DROPPING: 11, LEAVING: 11}
WAYS: Final[Mapping[Way, int]] = {"batch": 55, "stream": 35, "single": 10}
"""The percentages of transactions in batches, on streams, and in separate requests."""
LATER_S: Final = (2, 40)
"""When an outcome is requested again: within the horizon."""
AFTERWARDS: Final = 32
"""Producers that continue when there are enough transactions but not enough faults."""
_LATE: Final = 0.2
"""The share of plain transactions whose id is prepared again past the horizon."""
HELD: Final = 12
"""Transactions that a fault keeps pending; checks that say unknown are repeated for long in their groups."""
_STORED: Final = (200, 201)
_OK: Final = 200
_GONE: Final = 410

Behaviour = Callable[["Producers", "Plan"], Awaitable[None]]


def born_now(name: str) -> str:
    """Return an id for the transaction of this name."""
    return transaction_id(name, time.time_ns() // 1_000_000)


class Plan:
    """The random plan of one transaction: the same for the same seed and number, except for its id."""

    def __init__(self, seed: int, number: int, ref: str | None = None, id_of: Callable[[str], str] = born_now) -> None:
        """Decide everything; `ref`, which identifies its messages, depends on the number too."""
        self.ref = ref or f"t{number}"
        self.chance = random.Random(f"{seed}/{self.ref}")
        self.behaviour = self.chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        self.group = self.chance.choices(list(GROUPS), list(GROUPS.values()))[0]
        self.outcome: Outcome = "commit" if self.chance.random() < 0.75 else "rollback"
        self.own_id = id_of(f"{seed}-{self.ref}")
        self.id = self.own_id if self.chance.random() < 0.5 else None
        self.messages = self._messages()
        self.way = self.chance.choices(list(WAYS), list(WAYS.values()))[0]
        self.stored = False

    def _messages(self) -> list[Message]:
        messages = [self._message(n) for n in range(self.chance.choices((1, 2, 3, 4), (55, 25, 15, 5))[0])]
        if self.chance.random() < 0.1:
            messages.append(messages[0])  # two equal messages of one transaction are two messages
        return messages

    def _message(self, number: int) -> Message:
        key = f"{self.ref}.{number}".encode()
        kind = self.chance.random()
        value: bytes | None
        if kind < 0.05:
            value = None
        elif kind < 0.2:
            value = self.chance.randbytes(self.chance.randrange(1, 400))
        else:
            value = (f"{self.ref}.{number} " + "x" * self.chance.randrange(400)).encode()
        headers = (("trace", self.ref.encode()),) if self.chance.random() < 0.3 else ()
        topic = self.chance.choices(list(_SHARES), list(_SHARES.values()))[0].name
        return Message(topic=topic, key=key, value=value, headers=headers)


class Producers:
    """Producers that work through the plans concurrently."""

    def __init__(self, caller: Caller, decisions: Decisions, seed: int, late_after_s: float | None) -> None:
        """Keep the parts; ids that have ended are prepared again after this time, None for never."""
        self._caller = caller
        self._decisions = decisions
        self._seed = seed
        self._late_after_s = late_after_s
        self._late: deque[tuple[float, Plan]] = deque()
        self._held = count()
        self.id_of: Callable[[str], str] = born_now
        """Makes the ids of clients."""
        self.refused_late = 0
        """Prepares with the id of an ended transaction, past the horizon, that were refused as they must be."""
        self.begun: Counter[str] = Counter()
        self.stored = 0
        """Transactions whose prepare was acknowledged."""
        self.undecided: set[str] = set()
        """Transactions whose local transaction still runs: their checks are answered with unknown."""

    async def run(
        self,
        transactions: int,
        broken_enough: Callable[[], bool],
        *,
        side_by_side: int,
        a_second: float,
        lull_until: Callable[[], float],
    ) -> None:
        """Store this many transactions, and continue with few producers until there were enough faults."""
        numbers = count()
        due = 0.0

        async def turn() -> None:
            """Wait until the next transaction may begin; missed ones are not made up for."""
            nonlocal due
            now = asyncio.get_running_loop().time()
            due = max(due, now, lull_until()) + 1 / a_second
            await asyncio.sleep(due - now)

        async def work(worker: int) -> None:
            while self.stored < transactions or (worker < AFTERWARDS and not broken_enough()):
                await turn()
                if self._late and self._late[0][0] <= asyncio.get_running_loop().time():
                    await self._prepare_late(self._late.popleft()[1])
                    continue
                number = next(numbers)
                plan = Plan(self._seed, number, id_of=self.id_of)
                self.begun[plan.behaviour.__name__] += 1
                await plan.behaviour(self, plan)

        async with asyncio.TaskGroup() as workers:
            for worker in range(side_by_side):
                workers.create_task(work(worker))

    async def _prepare_late(self, plan: Plan) -> None:
        """Prepare an ended id whose outcome is forgotten, with its content or another one, as a client that retries."""
        answer = await self._caller.prepare(plan.ref, plan.group, plan.messages, plan.id)
        self.refused_late += answer.status == _GONE

    async def prepare(self, plan: Plan) -> str | None:
        """Prepare, and return the id if it was acknowledged as pending."""
        return await self._prepare(plan, plan.ref)

    async def _end(self, plan: Plan, transaction: str, outcome: Outcome) -> Answer:
        return await self._caller.end(transaction, outcome, group=plan.group, way=plan.way)

    def decide(self, transaction: str, outcome: Outcome) -> Outcome:
        return self._decisions.decide(transaction, outcome)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Keep some transactions pending meanwhile: their producers decide and end them afterwards."""
        plans = [Plan(self._seed, number, f"h{number}") for number in islice(self._held, HELD)]
        for plan in plans:
            plan.id, plan.group = None, plan.chance.choice((PUSHED, PULLED))
        answers = await asyncio.gather(*map(self.prepare, plans))
        prepared = [(plan, name) for plan, name in zip(plans, answers, strict=True) if name is not None]
        names = {name for _, name in prepared}
        self.undecided |= names
        try:
            yield
        finally:
            self.undecided -= names
        await asyncio.gather(*(self._end(plan, name, self.decide(name, plan.outcome)) for plan, name in prepared))

    async def plain(self, plan: Plan) -> None:
        """Prepare, decide, end; sometimes look up or end again, at once or when others may own the shard."""
        transaction = await self.prepare(plan)
        if transaction is None:
            return
        ended = await self._end(plan, transaction, self.decide(transaction, plan.outcome))
        if plan.chance.random() < 0.1:
            await self._caller.look(transaction, group=plan.group)
        elif plan.chance.random() < 0.1:
            await asyncio.sleep(plan.chance.uniform(*LATER_S))
            await self._caller.look(transaction, group=plan.group)
            if plan.chance.random() < 0.5:
                await self._end(plan, transaction, self.decide(transaction, plan.outcome))
            return
        if self._late_after_s is not None and ended.status == _OK and plan.chance.random() < _LATE:
            late = plan if plan.chance.random() < 0.5 else Plan(self._seed, int(plan.ref[1:]), f"u{plan.ref[1:]}")
            late.ref, late.id, late.group = f"{plan.ref}z", transaction, plan.group
            self._late.append((asyncio.get_running_loop().time() + self._late_after_s, late))

    async def silent(self, plan: Plan) -> None:
        """Decide, but do not end: the check does."""
        transaction = await self.prepare(plan)
        if transaction is not None and plan.chance.random() < 0.7:
            self.decide(transaction, plan.outcome)

    async def slow(self, plan: Plan) -> None:
        """Take long: checks come before the end."""
        transaction = await self.prepare(plan)
        if transaction is None:
            return
        self.undecided.add(transaction)
        try:
            await asyncio.sleep(plan.chance.uniform(0.5, 6))
        finally:
            self.undecided.discard(transaction)
        await self._end(plan, transaction, self.decide(transaction, plan.outcome))

    async def repeat(self, plan: Plan) -> None:
        """Do everything several times, also at the same moment."""
        plan.id = plan.own_id
        prepared = await asyncio.gather(*(self._prepare(plan, ref) for ref in (plan.ref, f"{plan.ref}b")))
        transaction = next((one for one in prepared if one is not None), None)
        if transaction is None:
            return
        outcome = self.decide(transaction, plan.outcome)
        await asyncio.gather(*(self._end(plan, transaction, outcome) for _ in range(plan.chance.choice((2, 3)))))
        await self._prepare(plan, f"{plan.ref}c")
        await self._end(plan, transaction, outcome)

    async def _prepare(self, plan: Plan, ref: str) -> str | None:
        answer = await self._caller.prepare(ref, plan.group, plan.messages, plan.id, way=plan.way)
        transaction = _id_of(answer)
        if transaction is not None and not plan.stored:
            plan.stored = True
            self.stored += 1
        return transaction

    async def contradict(self, plan: Plan) -> None:
        """Send both outcomes: at the same moment, or one after the other. halfway keeps one."""
        transaction = await self.prepare(plan)
        if transaction is None:
            return
        first = self.decide(transaction, plan.outcome)
        second: Outcome = "rollback" if first == "commit" else "commit"
        if plan.chance.random() < 0.5:
            await asyncio.gather(self._end(plan, transaction, first), self._end(plan, transaction, second))
        else:
            await self._end(plan, transaction, first)
            await self._end(plan, transaction, second)
        await self._caller.look(transaction, group=plan.group)

    async def reuse(self, plan: Plan) -> None:
        """Prepare another content with the same id, at the same moment or later."""
        plan.id = plan.own_id
        other = Plan(self._seed, -1 - int(plan.ref[1:]))
        other.ref, other.id, other.group, other.stored = f"{plan.ref}b", plan.id, plan.group, True
        if plan.chance.random() < 0.5:
            found = await asyncio.gather(*(self.prepare(one) for one in (plan, other)))
            transaction = next((one for one in found if one is not None), None)
        else:
            transaction = await self.prepare(plan)
            await self.prepare(other)
        if transaction is not None:
            await self._end(plan, transaction, self.decide(transaction, plan.outcome))

    async def change(self, plan: Plan) -> None:
        """Give up a prepare whose answer does not come at once, and retry with other content; end what is stored."""
        plan.id = plan.own_id
        other = Plan(self._seed, -1 - int(plan.ref[1:]))
        other.ref, other.id, other.group, other.way = f"{plan.ref}b", plan.id, plan.group, plan.way
        await _broken_off(self.prepare(plan), plan.chance)
        transaction = await self.prepare(other)
        if transaction is None:  # perhaps because the first one was stored
            transaction = await self._prepare(plan, f"{plan.ref}c")
        if transaction is not None:
            await self._end(plan, transaction, self.decide(transaction, plan.outcome))

    async def disappear(self, plan: Plan) -> None:
        """Break the connection in the middle of the prepare, or of the end."""
        if plan.chance.random() < 0.4:
            await _broken_off(self.prepare(plan), plan.chance)
            return
        transaction = await self.prepare(plan)
        if transaction is not None:
            outcome = self.decide(transaction, plan.outcome)
            await _broken_off(self._end(plan, transaction, outcome), plan.chance)


async def _broken_off(call: Awaitable[object], chance: random.Random) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=chance.uniform(0, 0.05))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _id_of(answer: Answer) -> str | None:
    return answer.text("id") if answer.status in _STORED and answer.state == "prepared" else None


BEHAVIOURS: Final[Mapping[Behaviour, int]] = {
    Producers.plain: 53,
    Producers.silent: 8,
    Producers.slow: 6,
    Producers.repeat: 8,
    Producers.contradict: 8,
    Producers.reuse: 4,
    Producers.change: 5,
    Producers.disappear: 8,
}
"""The behaviours of producers, with their percentages."""
