"""What stands before a coordinator is killed, what its callers were told, and what must stand after the next start.

A `Lineage` is one coordinator with its topics, killed and started again for cell after cell of the matrix; a `Scene` is
one cell's transactions. A cell that fails takes its lineage with it, so that no other cell fails for its sake.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import aiohttp

from halfway.kafka.records import codec
from tests.faults.plan import Fault
from tests.support.coordinator.faulty import FaultyCoordinator
from tests.support.coordinator.rest_client import QUIET, Answer, Connect, Json, Rest, message
from tests.support.coordinator.stream_client import StreamClient, StreamLostError
from tests.support.coordinator.topics import Cluster, Record

STATES = {"commit": "committed", "rollback": "rolled_back"}
OPPOSITE = {"commit": "rollback", "rollback": "commit"}
_OUTCOMES = ("commit", "rollback", "commit", "commit")
_OPENER = Fault(point="lane.admit.after", action="pause")
_QUEUED = Fault(point="lane.submit.after", action="note", times=0)
HASTY: Mapping[str, object] = {
    "first_check_after_s": 0.1,
    "check_interval_s": 0.1,
    "max_interval_s": 0.1,
    "max_age_s": 0.3,
}


class Lineage:
    """One coordinator after another over the same topics; it runs whenever a scene begins."""

    def __init__(self, bootstrap_servers: str, directory: Path) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._directory = directory
        self._count = 0
        self.coordinator: FaultyCoordinator | None = None
        self.topics: tuple[str, ...] = ()
        self.group = ""
        self.parked = ""

    async def running(self, connect: Connect, cluster: Cluster) -> tuple[FaultyCoordinator, Rest]:
        """Give a coordinator that runs, with three real topics, a quiet group and a parked transaction."""
        if self.coordinator is not None:
            if not self.coordinator.running:
                await asyncio.to_thread(self.coordinator.start)
            return self.coordinator, connect(self.coordinator)
        self._count += 1
        coordinator = FaultyCoordinator(self._bootstrap_servers, self._directory / str(self._count))
        self.coordinator = coordinator
        await asyncio.to_thread(coordinator.start)
        rest = connect(coordinator)
        self.topics = await cluster.make_topics("coupon", "shipping", "points", partitions=2)
        self.group = f"group-{uuid4().hex[:10]}"
        (await rest.put_group(self.group, topics=self.topics, policy=QUIET)).expect(201)
        hasty = f"{self.group}-hasty"
        (await rest.put_group(hasty, topics=self.topics, policy=HASTY)).expect(201)
        self.parked = await rest.prepared(hasty, [message(topic, "parked") for topic in self.topics])
        await rest.until(self.parked, "parked")
        return coordinator, rest

    def discard(self) -> None:
        """End it; the next scene begins with a new one."""
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None


@dataclass(kw_only=True)
class Attempt:
    """An end that was sent; `answer` is None if it was lost."""

    outcome: str
    answer: Answer | None = None

    @property
    def acknowledged(self) -> bool:
        return self.answer is not None and self.answer.status == 200


@dataclass(kw_only=True)
class Scene:
    """The transactions of one cell, and what their callers know of them."""

    lineage: Lineage
    coordinator: FaultyCoordinator
    rest: Rest
    cluster: Cluster
    messages: dict[str, list[Json]] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    victims: list[str] = field(default_factory=list)
    """Those that are ended together while the coordinator is killed."""
    stood: bool = False
    """Whether everything was found right at the end."""

    # --- before

    async def prepare(self, topics: Sequence[str] | None = None, *, group: str | None = None) -> str:
        """Prepare a message for each of the three topics, or for those given."""
        wanted = self.lineage.topics if topics is None else topics
        made = [message(topic, uuid4().hex, key=uuid4().hex) for topic in wanted]
        transaction = await self.rest.prepared(group or self.lineage.group, made)
        self.messages[transaction] = made
        return transaction

    async def end(self, transaction: str, outcome: str) -> None:
        """End a transaction, and note what came back."""
        attempt = self.attempts[transaction] = Attempt(outcome=outcome)
        try:
            attempt.answer = await self.rest.end(transaction, outcome)
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return
        assert attempt.answer.status in {200, 503}, attempt.answer

    async def set(self) -> None:
        """Have ends that are acknowledged, transactions that stay pending, and victims to be ended."""
        one = self.lineage.topics[:1]
        done, undone, small, *rest = await asyncio.gather(
            self.prepare(), self.prepare(), self.prepare(one), self.prepare(), self.prepare(one),
            *(self.prepare() for _ in range(2)), self.prepare(one), self.prepare(),
        )  # fmt: skip
        await asyncio.gather(self.end(done, "commit"), self.end(undone, "rollback"), self.end(small, "commit"))
        assert all(self.attempts[name].acknowledged for name in (done, undone, small))
        self.victims = rest[-len(_OUTCOMES) :]

    async def end_victims(self, *faults: Fault) -> None:
        """End the victims in the second Kafka transaction of the lane from now on; the first waits until all are there.

        It returns when each has been answered, or its answer was lost.
        """
        opener = await self.prepare(self.lineage.topics[:1])
        points = self.coordinator.faults
        points.plan(_OPENER, _QUEUED, *faults)
        ends = [asyncio.create_task(self.end(opener, "commit"))]
        await asyncio.to_thread(points.until_reached, _OPENER.point)
        for name, how in zip(self.victims, _OUTCOMES, strict=True):
            ends.append(asyncio.create_task(self.end(name, how)))
            # One after the other: ends that arrive together are queued as one list.
            await asyncio.to_thread(points.until_reached, _QUEUED.point, times=len(ends))
        points.release()
        await asyncio.gather(*ends)

    async def end_victims_on_a_stream(self, fault: Fault, *, confirm: bool = True) -> None:
        """End the victims in one frame of a stream; return when each has been answered, or the stream was lost."""
        self.coordinator.faults.plan(fault)
        async with aiohttp.ClientSession() as session:
            stream = await StreamClient.connect(session, self.coordinator.url)
            ends = [stream.end(name, how, confirm=confirm) for name, how in zip(self.victims, _OUTCOMES, strict=True)]
            answers = await asyncio.gather(*ends, return_exceptions=True)
            await stream.abort()
        for name, how, answer in zip(self.victims, _OUTCOMES, answers, strict=True):
            self.attempts[name] = attempt = Attempt(outcome=how)
            if isinstance(answer, StreamLostError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            attempt.answer = Answer(status=answer.status, body=answer.document, headers={})

    # --- after

    async def restart(self) -> None:
        """Start the next coordinator, without faults."""
        assert self.coordinator.faults.planned == ()
        await asyncio.to_thread(self.coordinator.start)

    async def stands(self, *, victims: str = "either") -> None:
        """Find everything right after a start, end again what was not answered, do new work, and find it right again.

        `victims` is `pending` or `resolved` where only one of them can be.
        """
        states = await self.states()
        for name, state in states.items():
            self._expect(name, state, victims)
        assert (await self.rest.show(self.lineage.parked))["state"] == "parked"
        await self.exactly(states)

        for name, attempt in self.attempts.items():
            again = (await self.rest.end(name, attempt.outcome)).expect(200)
            assert again["changed"] is (states[name] == "prepared")
            (await self.rest.end(name, OPPOSITE[attempt.outcome])).refused(409, "already_ended")
        new = await self.prepare()
        await self.end(new, "commit")
        assert self.attempts[new].acknowledged

        states = await self.states()
        for name, state in states.items():
            assert state == (STATES[self.attempts[name].outcome] if name in self.attempts else "prepared"), name
        await self.exactly(states)
        self.stood = True

    def _expect(self, name: str, state: str, victims: str) -> None:
        attempt = self.attempts.get(name)
        if attempt is None:
            assert state == "prepared", f"{name}, which nobody ended, is {state}"
            return
        final = STATES[attempt.outcome]
        if attempt.acknowledged:
            assert state == final, f"{name} was acknowledged as {final}, and is {state}"
        elif name in self.victims and victims != "either":
            assert state == ("prepared" if victims == "pending" else final), f"{name} is {state}, not {victims}"
        else:
            assert state in {"prepared", final}, f"{name} is {state}"

    async def states(self) -> dict[str, str]:
        shown = await asyncio.gather(*(self.rest.show(name) for name in self.messages))
        return {one["id"]: one["state"] for one in shown}

    async def exactly(self, states: dict[str, str]) -> None:
        """Find in the real topics what is committed, whole and once, and one final op marker for each end."""
        op_topic = self.coordinator.topic("op")
        records = await self.cluster.read(*self.lineage.topics, op_topic)
        real = [record for record in records if record.topic != op_topic]
        parked = [record for record in real if record.transaction_id == self.lineage.parked]
        assert parked == []
        for name, state in states.items():
            found = Counter(_seen(record) for record in real if record.transaction_id == name)
            wanted = self.messages[name] if state == "committed" else []
            assert found == Counter(
                (one["topic"], one["key"], one["value"], f"{number}/{len(wanted)}")
                for number, one in enumerate(wanted, 1)
            ), f"{name} is {state}"
        ops = [codec.decode_op(record.value) for record in records if record.topic == op_topic and _is_op(record)]
        finals = Counter((op.id, op.kind.value.lower()) for op in ops if op.kind.final and op.id in states)
        assert finals == Counter((name, state) for name, state in states.items() if state in STATES.values())


def _seen(record: Record) -> tuple[str, str, str, str]:
    number = record.header("halfway-message") or b""
    return record.topic, (record.key or b"").decode(), (record.value or b"").decode(), number.decode()


def _is_op(record: Record) -> bool:
    return record.value is not None and record.header("halfway-kind") != b"barrier"
