"""Producers that commit, roll back, go silent, repeat, contradict themselves and disappear."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count, islice
from typing import Final

from checker.history import LIFE, Outcome, wire_id
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
HELD: Final = 12
"""Transactions that a fault keeps pending; checks that say unknown are repeated for long in their groups."""
_STORED: Final = (200, 201)
_OK: Final = 200

Behaviour = Callable[["Producers", "Plan"], Awaitable[None]]


class Plan:
    """The random plan of one transaction: the same for the same seed and number."""

    def __init__(self, seed: int, number: int, ref: str | None = None) -> None:
        """Decide everything; `ref`, which identifies its messages, depends on the number too."""
        self.ref = ref or f"t{number}"
        self.chance = random.Random(f"{seed}/{self.ref}")
        self.tries = 0
        """How often its prepare was tried."""
        self.behaviour = self.chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        self.group = self.chance.choices(list(GROUPS), list(GROUPS.values()))[0]
        self.outcome: Outcome = "commit" if self.chance.random() < 0.75 else "rollback"
        self.id = f"{seed}-{number}" if self.chance.random() < 0.5 else None
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

    def __init__(
        self, caller: Caller, decisions: Decisions, seed: int, horizon_s: float, used_again_after_s: float | None
    ) -> None:
        """Keep the parts; ids are used again after this time, None for never."""
        self._caller = caller
        self._decisions = decisions
        self._seed = seed
        self._repeated_within_s = horizon_s / 2
        self._used_again_after_s = used_again_after_s
        self._again: deque[tuple[float, Plan]] = deque()
        self._names: dict[str, tuple[str | None, str]] = {}
        """For reused ids: the key of the first message, and the history's name of that use."""
        self._held = count()
        self.used_again = 0
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
                if self._again and self._again[0][0] <= asyncio.get_running_loop().time():
                    await self._use_again(self._again.popleft()[1])
                    continue
                number = next(numbers)
                plan = Plan(self._seed, number)
                self.begun[plan.behaviour.__name__] += 1
                await plan.behaviour(self, plan)

        async with asyncio.TaskGroup() as workers:
            for worker in range(side_by_side):
                workers.create_task(work(worker))

    def name_of(self, transaction: str, first_key: str | None) -> str:
        """Return the history's name of the use of an id whose first message has this key."""
        key, name = self._names.get(transaction, (None, transaction))
        return name if key == first_key else transaction

    def name_now(self, transaction: str) -> str:
        """Return the history's name of the last use of an id so far."""
        return self._names.get(transaction, (None, transaction))[1]

    async def _use_again(self, plan: Plan) -> None:
        """Prepare another content with an id whose outcome is forgotten, and end it."""
        assert plan.id is not None
        key = plan.messages[0].key
        self._names[wire_id(plan.id)] = (None if key is None else key.decode(), plan.id)
        answer = await self._caller.prepare(plan.ref, plan.group, plan.messages, plan.id)
        if _id_of(answer) is not None:
            self.used_again += 1
            await self._caller.end(plan.id, self.decide(plan.id, plan.outcome), group=plan.group)

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
        # After a single try no request is in flight that could reach the next use of its id.
        at_once = ended.status == _OK and ended.tries == 1 and plan.tries == 1
        if self._used_again_after_s is not None and plan.id is not None and at_once and plan.group == PUSHED:
            repeated_plan = Plan(self._seed, int(plan.ref[1:]), f"u{plan.ref[1:]}")
            repeated_plan.id, repeated_plan.group = f"{plan.id}{LIFE}1", PUSHED
            self._again.append((asyncio.get_running_loop().time() + self._used_again_after_s, repeated_plan))

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
        if plan.id is None:
            plan.id = f"{self._seed}-{plan.ref}"
        until = self._repeated_until()
        prepared = await asyncio.gather(
            *(_in_time(self._prepare(plan, ref), until) for ref in (plan.ref, f"{plan.ref}b"))
        )
        transaction = next((one for one in prepared if one is not None), None)
        if transaction is None:
            return
        outcome = self.decide(transaction, plan.outcome)
        await asyncio.gather(*(self._end(plan, transaction, outcome) for _ in range(plan.chance.choice((2, 3)))))
        await _in_time(self._prepare(plan, f"{plan.ref}c"), until)
        await self._end(plan, transaction, outcome)

    async def _prepare(self, plan: Plan, ref: str) -> str | None:
        answer = await self._caller.prepare(ref, plan.group, plan.messages, plan.id, way=plan.way)
        transaction = _id_of(answer)
        plan.tries += answer.tries
        if transaction is not None and not plan.stored:
            plan.stored = True
            self.stored += 1
        return transaction

    def _repeated_until(self) -> float:
        """Return when an id must not be prepared again: past the horizon that would be another use of it.

        Half of it is left for clocks that are a minute ahead, and for requests that are still in flight.
        """
        return asyncio.get_running_loop().time() + self._repeated_within_s

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
        if plan.id is None:
            plan.id = f"{self._seed}-{plan.ref}"
        other = Plan(self._seed, -1 - int(plan.ref[1:]))
        other.ref, other.id, other.group, other.stored = f"{plan.ref}b", plan.id, plan.group, True
        until = self._repeated_until()
        if plan.chance.random() < 0.5:
            found = await asyncio.gather(*(_in_time(self.prepare(one), until) for one in (plan, other)))
            transaction = next((one for one in found if one is not None), None)
        else:
            transaction = await _in_time(self.prepare(plan), until)
            await _in_time(self.prepare(other), until)
        if transaction is not None:
            await self._end(plan, transaction, self.decide(transaction, plan.outcome))

    async def change(self, plan: Plan) -> None:
        """Give up a prepare whose answer does not come at once, and retry with other content; end what is stored."""
        if plan.id is None:
            plan.id = f"{self._seed}-{plan.ref}"
        other = Plan(self._seed, -1 - int(plan.ref[1:]))
        other.ref, other.id, other.group, other.way = f"{plan.ref}b", plan.id, plan.group, plan.way
        until = self._repeated_until()
        await _broken_off(self.prepare(plan), plan.chance)
        transaction = await _in_time(self.prepare(other), until)
        if transaction is None:  # perhaps because the first one was stored
            transaction = await _in_time(self._prepare(plan, f"{plan.ref}c"), until)
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


async def _in_time(prepared: Awaitable[str | None], until: float) -> str | None:
    try:
        async with asyncio.timeout_at(until):
            return await prepared
    except TimeoutError:
        return None


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
