"""Stopping and killing the coordinator under load loses nothing and does nothing twice."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics

CALLERS = 12
ROUNDS = ("kill", "stop", "kill", "kill")
LOST = (aiohttp.ClientError, TimeoutError, ConnectionError)
STATES = {"commit": "committed", "rollback": "rolled_back"}


@dataclass
class Ledger:
    """The answers that the callers got."""

    prepared: set[str] = field(default_factory=set)
    """Acknowledged prepares."""
    perhaps: dict[str, str] = field(default_factory=dict)
    """Unanswered prepares under ids of the callers, and their values."""
    ended: dict[str, str] = field(default_factory=dict)
    """Acknowledged ends, with their state."""
    attempted: dict[str, str] = field(default_factory=dict)
    """Ends that were sent, with their outcome, answered or not."""


@dataclass
class Load:
    """Callers that prepare, end most of their transactions, and record the answers."""

    rest: Rest
    group: str
    topic: str
    rng: random.Random
    ledger: Ledger = field(default_factory=Ledger)
    stopping: bool = False
    _count: int = 0

    async def caller(self) -> None:
        while not self.stopping:
            self._count += 1
            own = f"{self.group}.{self._count}" if self.rng.random() < 0.5 else None
            plan = self.rng.choice(["commit", "commit", "commit", "rollback", "leave"])
            try:
                await self._transaction(own, plan)
            except LOST:
                await asyncio.sleep(0.05)

    async def _transaction(self, own: str | None, plan: str) -> None:
        messages = [message(self.topic, own or "server's")] * 2
        if own is not None:
            self.ledger.perhaps[own] = own
        answer = await self.rest.prepare(self.group, messages, as_id=own)
        if answer.status == 503:
            return
        transaction = str(answer.expect(201)["id"])
        self.ledger.perhaps.pop(transaction, None)
        self.ledger.prepared.add(transaction)
        if plan == "leave":
            return
        self.ledger.attempted[transaction] = plan
        ended = await self.rest.end(transaction, plan)
        if ended.status != 503:
            self.ledger.ended[transaction] = ended.expect(200)["state"]
            assert ended.body["state"] == STATES[plan]
            assert ended.body["changed"] is True

    async def interrupted(self, coordinator: CoordinatorProcess, how: str) -> None:
        """Run until some work is done, then stop or kill the coordinator in the middle of it, and start it again."""
        self.stopping = False
        callers = [asyncio.create_task(self.caller()) for _ in range(CALLERS)]
        enough = len(self.ledger.ended) + 60
        deadline = time.monotonic() + 180
        while len(self.ledger.ended) < enough and time.monotonic() < deadline and not any(map(_failed, callers)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.rng.random() * 0.2)
        if how == "kill":
            coordinator.kill()
        else:
            coordinator.terminate()
            assert await coordinator.exited() == 0
        self.stopping = True
        await asyncio.gather(*callers)
        assert len(self.ledger.ended) >= enough
        coordinator.launch()
        await asyncio.to_thread(coordinator.wait_until_ready)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and task.exception() is not None


async def test_restarts_under_load_lose_nothing_and_do_nothing_twice(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """Repeated kill -9 and orderly stops under load.

    Every acknowledged prepare is there; every acknowledged end stands, its messages exactly once; transactions without
    an end are pending; and a repeat gives the result of an unanswered call.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201  shown with a failure
    coordinator = new_coordinator()
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    load = Load(rest, group, topic, random.Random(seed))
    for how in ROUNDS:
        await load.interrupted(coordinator, how)
    ledger = load.ledger
    print(f"{len(ledger.prepared)} prepared, {len(ledger.ended)} ended, {len(ledger.perhaps)} prepares unanswered")  # noqa: T201  shown with a failure

    shown = await _all_states(rest, ledger.prepared)
    assert set(shown) == ledger.prepared, "an acknowledged prepare is gone"
    for transaction, state in shown.items():
        if transaction in ledger.ended:
            assert state == ledger.ended[transaction], transaction
        elif transaction in ledger.attempted:
            assert state in {"prepared", STATES[ledger.attempted[transaction]]}, transaction
        else:
            assert state == "prepared", transaction

    internal = InternalTopics(cluster, coordinator.prefix)
    await _exactly_what_was_committed(cluster, internal, topic, shown)

    # Callers without an answer repeat the call and get the result.
    for transaction in ledger.perhaps:
        again = await rest.prepare(group, [message(topic, transaction)] * 2, as_id=transaction, retry=True)
        assert again.expect(200, 201)["state"] == "prepared"
    unanswered = {name: plan for name, plan in ledger.attempted.items() if name not in ledger.ended}
    for transaction, outcome in unanswered.items():
        ended = (await rest.end(transaction, outcome, retry=True)).expect(200)
        assert ended["state"] == STATES[outcome]
        assert ended["changed"] is (shown[transaction] == "prepared")
    print(f"{len(unanswered)} ends unanswered, {sum(shown[name] != 'prepared' for name in unanswered)} of them stand")  # noqa: T201  shown with a failure
    await _exactly_what_was_committed(cluster, internal, topic, await _all_states(rest, ledger.prepared))


async def _all_states(rest: Rest, transactions: set[str]) -> dict[str, str]:
    async def state(transaction: str) -> tuple[str, str]:
        answer = await rest.get(transaction, retry=True)
        return transaction, str(answer.expect(200)["state"])

    return dict(await asyncio.gather(*map(state, transactions)))


async def _exactly_what_was_committed(
    cluster: Cluster, internal: InternalTopics, topic: str, states: dict[str, str]
) -> None:
    """Compare the topic and the op markers with the states."""
    committed = [transaction for transaction, state in states.items() if state == "committed"]
    records = await cluster.read(topic)
    found = Counter((record.transaction_id, record.header("halfway-message")) for record in records)
    assert found == Counter((transaction, number) for transaction in committed for number in (b"1/2", b"2/2"))
    finals = Counter((op.id, op.kind.value.lower()) for op in await internal.ops() if op.kind.final and op.id in states)
    assert finals == Counter((name, state) for name, state in states.items() if state != "prepared")


async def test_what_was_pending_parked_and_registered_is_so_after_a_crash(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """With payload, remark, reason and policy; and a pending one can be ended as before."""
    coordinator = new_coordinator({"HALFWAY_LEASE_S": "0.2"})
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    pending = await rest.prepared(group, [message(topic, "pending", key="k", partition=1)])
    (await rest.end(pending, "unknown", remark="database was slow")).expect(200)
    hasty = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}
    other = f"{group}-hasty"
    (await rest.put_group(other, topics=[topic], policy=hasty)).expect(201)
    parked = await rest.prepared(other, [message(topic, "parked")])
    assert await rest.lease(other, wait_s=30)
    await rest.until(parked, "parked")
    known = {name: (await rest.call("GET", f"/groups/{name}")).expect(200) for name in (group, other)}
    before = {name: await rest.show(name) for name in (pending, parked)}

    for how in ("kill", "stop"):
        if how == "kill":
            coordinator.kill()
        else:
            assert coordinator.stop() == 0
        coordinator.start()

        assert {name: (await rest.call("GET", f"/groups/{name}")).expect(200) for name in known} == known
        assert {name: await rest.show(name) for name in before} == before

    assert (await rest.commit(pending))["changed"] is True
    assert (await rest.commit(parked))["changed"] is True
    assert {record.value for record in await cluster.read(topic)} == {b"pending", b"parked"}


async def test_payloads_beyond_the_cache_are_read_back(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str, topic: str
) -> None:
    """A cache too small for any payload, and a restart: the messages come from Kafka, byte for byte."""
    coordinator = new_coordinator({"HALFWAY_PAYLOAD_CACHE_BYTES": "1"})
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    values = [f"{number}-" + "x" * 10_000 for number in range(30)]
    transactions = [await rest.prepared(group, [message(topic, value)]) for value in values]
    await asyncio.gather(*(rest.commit(transaction) for transaction in transactions[:15]))
    coordinator.kill()
    coordinator.start()
    assert (await rest.show(transactions[20]))["messages"][0]["value"] == values[20]
    await asyncio.gather(*(rest.commit(transaction) for transaction in transactions[15:]))

    assert Counter(record.value for record in await cluster.read(topic)) == Counter(map(str.encode, values))
