"""Callers that load a coordinator, and the history of what they were answered, to be held against the topics."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from uuid import uuid4

import aiohttp

from tests.support.coordinator.rest_client import Answer, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.ids import new_id

_AGAIN_S = 0.1
ANSWERED_WITHIN_S = 60.0
"""Only a broken product takes so long: tests that count answers set a far shorter time for a request."""
_ROLLBACK_EVERY = 5


class History:
    """What callers did and were answered; `audit` compares it with what consumers see."""

    def __init__(self) -> None:
        self.committed: set[str] = set()
        self.rolled_back: set[str] = set()
        self.prepared: set[str] = set()
        self.open: dict[str, str] = {}
        """The outcome that was asked for, by transaction, and not acknowledged."""
        self.answers: Counter[tuple[str, int, str | None]] = Counter()
        """Answers by call, status and error code."""
        self.improper: list[str] = []
        """Answers that no caller should ever get, or not so late."""
        self.lost_prepares = 0
        """Prepares without an id of their own that were not acknowledged: they may be pending."""
        self.cut: list[BaseException] = []
        """Requests that ended without an answer."""

    def note(self, call: str, answer: Answer, seconds: float) -> None:
        """Count an answer, and judge it."""
        self.answers[call, answer.status, answer.error_code] += 1
        if answer.status == 503:
            if not answer.headers.get("Retry-After", "").isdigit():
                self.improper.append(f"{call}: 503 without Retry-After: {answer}")
        elif answer.status not in (200, 201):
            self.improper.append(f"{call}: {answer}")
        if seconds > ANSWERED_WITHIN_S:
            self.improper.append(f"{call}: answered after {seconds:.1f} s: {answer}")

    def refused(self, call: str) -> int:
        """Count the answers 503 to a call."""
        return sum(count for (name, status, _), count in self.answers.items() if (name, status) == (call, 503))

    async def audit(self, cluster: Cluster, topics: Sequence[str]) -> None:
        """Demand that each acknowledged commit stands once in each topic, and nothing else but unacknowledged ones."""
        assert not self.improper, self.improper
        asked = {name for name, outcome in self.open.items() if outcome == "commit"}
        for topic in topics:
            seen = Counter(record.transaction_id for record in await cluster.read(topic))
            doubled = {name: count for name, count in seen.items() if count > 1}
            assert not doubled, f"more than once in {topic}: {doubled}"
            missing = self.committed - seen.keys()
            assert not missing, f"acknowledged and not in {topic}: {missing}"
            strange = seen.keys() - self.committed - asked
            assert not strange, f"nobody asked for these in {topic}: {strange}"


class Callers:
    """`async with Callers(...) as history`: so many callers prepare and end one transaction after the other.

    Every fifth is rolled back; every second brings its own id. What is answered 503 or without an answer is tried
    again, until it is acknowledged, unless `patient` is False: then a caller ends with its connection.
    """

    def __init__(
        self, rest: Rest, group: str, topics: Sequence[str], *, callers: int = 8, patient: bool = True
    ) -> None:
        self.history = History()
        self.rest = rest
        self._group = group
        self.topics = topics
        self._callers = callers
        self._patient = patient
        self._enough = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(self._callers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def committed(self, more: int, within_s: float = 180.0) -> None:
        """Wait until so many more commits are acknowledged."""
        goal, deadline = len(self.history.committed) + more, time.monotonic() + within_s
        while len(self.history.committed) < goal:
            self._raise_failures()
            assert time.monotonic() < deadline, f"{len(self.history.committed)} of {goal}: {self.history.answers}"
            await asyncio.sleep(0.02)

    async def finish(self, within_s: float = 180.0) -> None:
        """Begin nothing new, and wait until all that was begun is acknowledged.

        Who is not patient goes on until nobody listens any more.
        """
        self._enough = self._patient
        done, left = await asyncio.wait(self._tasks, timeout=within_s)
        self._raise_failures()
        assert not left, f"not acknowledged: {self.history.open}, {self.history.answers}"
        assert len(done) == len(self._tasks)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _call(self, number: int) -> None:
        count = number
        while not self._enough:
            count += 1
            try:
                transaction = await self._prepared(own=count % 2 == 0)
                if transaction is not None:
                    await self._ended(transaction, "rollback" if count % _ROLLBACK_EVERY == 0 else "commit")
            except aiohttp.ClientConnectorError:
                return  # nobody listens any more, and this caller is not patient
            except aiohttp.ClientConnectionError as error:
                self.history.cut.append(error)
                return

    async def _prepared(self, *, own: bool) -> str | None:
        history = self.history
        name = new_id() if own else None
        body = {
            "group": self._group,
            "messages": [message(topic, key=f"k-{uuid4().hex[:4]}") for topic in self.topics],
            **({} if name is None else {"id": name}),
        }
        while True:
            answer = await self._asked("prepare", "/transactions", body)
            if answer is not None and answer.status in (200, 201):
                transaction = str(answer.body["id"])
                history.prepared.add(transaction)
                return transaction
            if answer is not None and answer.status != 503:
                return None
            if name is None:
                history.lost_prepares += 1
                return None
            if self._enough or not self._patient:
                history.lost_prepares += 1
                return None

    async def _ended(self, transaction: str, outcome: str) -> None:
        history = self.history
        history.open[transaction] = outcome
        while True:
            answer = await self._asked("end", f"/transactions/{transaction}/end", {"outcome": outcome})
            if answer is not None and answer.status == 200:
                del history.open[transaction]
                (history.committed if outcome == "commit" else history.rolled_back).add(transaction)
            if answer is not None and (answer.status != 503 or not self._patient):
                return

    async def _asked(self, call: str, path: str, body: object) -> Answer | None:
        """Ask once and note the answer; None if there was none and the caller is patient."""
        began = time.monotonic()
        try:
            answer = await self.rest.call("POST", path, body)
        except aiohttp.ClientConnectionError as error:
            if not self._patient:
                raise
            self.history.cut.append(error)
            await asyncio.sleep(_AGAIN_S)
            return None
        self.history.note(call, answer, time.monotonic() - began)
        if answer.status == 503:
            await asyncio.sleep(_AGAIN_S)
        return answer
