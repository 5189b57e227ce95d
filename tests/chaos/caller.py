"""Calls over REST as a producer sends them, each in the history before it is sent and after it is answered."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import aiohttp
import msgspec

from checker.content import Content, content_of
from checker.history import End, Ended, HistoryWriter, Looked, Prepare, Prepared, Said
from tests.chaos.answer import NOTHING, Answer
from tests.chaos.batches import Batches, Kind
from tests.chaos.coordinators import Instance
from tests.chaos.streams import Streams

TRY_S: Final = (8.0, 20.0, 20.0)
"""The time-out of one request; coordinators answer, if they can, within their own 15 s."""
PATIENCE_S: Final = 60.0
"""All tries of one request together; then the caller gives up, and the check decides."""
AT_ONCE: Final = 256
"""Requests that one coordinator may leave unanswered; a caller waits if every coordinator has that many."""
_BUSY: Final = (429, 503)
_LONGEST_WAIT_S: Final = 10.0
"""Thousands of retrying producers would leave no CPU for the coordinators that recover."""
ONE_WAY: Final = 0.2
"""How many ends on a stream are not confirmed."""
_JSON: Final = {"Content-Type": "application/json"}

Way = Literal["single", "batch", "stream"]
"""How an operation is sent."""
Send = Callable[[], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a prepare."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def content(self) -> Content:
        return content_of(self.topic, self.key, self.value, self.headers)

    @property
    def body(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "key": _data(self.key),
            "value": _data(self.value),
            "headers": [{"name": name, "value": _data(value)} for name, value in self.headers],
        }


class Caller:
    """Uses the coordinators in turn, and the next one if one cannot answer now."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        instances: Sequence[Instance],
        history: HistoryWriter,
        chance: random.Random,
    ) -> None:
        self._session = session
        self._instances = instances
        self._history = history
        self._chance = chance
        self._turn = 0
        self._encode = msgspec.json.Encoder().encode
        self.keys: dict[str | None, str] = {}
        """The key of each group, and that of an operator for calls without a group; none if it is empty."""
        self.streams_served = True
        """Whether the coordinators have streams; otherwise operations are sent as separate requests."""
        self._batches = Batches(self._post_batch, chance)
        self.streams = Streams(session, chance)
        self._free = asyncio.Semaphore(AT_ONCE * len(instances))
        self.resting: Instance | None = None
        """Gets no requests from producers, as if a load balancer had taken it out."""
        self.in_flight: Counter[int] = Counter()
        """The unanswered requests of each coordinator, by its number."""
        self.answers: Counter[str] = Counter()
        """The results of all tries of a request, and of an item of a batch."""

    @property
    def batches(self) -> int:
        """The number of sent batches."""
        return self._batches.sent

    @property
    def by_status(self) -> Counter[str]:
        """Return the results by status only."""
        counted: Counter[str] = Counter()
        for what, times in self.answers.items():
            counted["none" if what == "0" else what.partition(" ")[0]] += times
        return counted

    async def prepare(
        self, ref: str, group: str, messages: Sequence[Message], as_id: str | None, *, way: Way = "single"
    ) -> Answer:
        """Prepare; retry only if the client chose the id, or if nothing can be stored."""
        body: dict[str, object] = {"group": group, "messages": [message.body for message in messages]}
        if as_id is not None:
            body["id"] = as_id
        contents = tuple(message.content for message in messages)
        self._history.write(Prepare(ref=ref, group=group, contents=contents, id=as_id))
        sent_at = self._history.now()
        send = self._sender(way, group, "prepare", body) or self._single(group, "POST", "/transactions", body)
        answer = await self._persist(send, ambiguous=as_id is not None)
        self._history.write(
            Prepared(
                ref=ref,
                status=answer.status,
                sent_at=sent_at,
                id=answer.text("id"),
                state=answer.state,
                error_code=answer.text("error_code"),
            )
        )
        return answer

    async def end(
        self,
        transaction_id: str,
        outcome: Said,
        *,
        group: str | None,
        by: str = "producer",
        check_id: str | None = None,
        way: Way = "single",
    ) -> Answer:
        """End a transaction with its group's key, or with an operator's if no group is given."""
        body = {"outcome": outcome} | ({} if check_id is None else {"check_id": check_id})
        self._history.write(End(id=transaction_id, outcome=outcome, by=by))
        sent_at = self._history.now()
        item: dict[str, object] = {"id": transaction_id, **body}
        if way == "stream" and self._chance.random() < ONE_WAY:
            item["confirm"] = False
        path = f"/transactions/{transaction_id}/end"
        send = (self._sender(way, group, "end", item) if group else None) or self._single(group, "POST", path, body)
        answer = await self._persist(send)
        changed = answer.body.get("changed")
        self._history.write(
            Ended(
                id=transaction_id,
                outcome=outcome,
                status=answer.status,
                by=by,
                sent_at=sent_at,
                state=answer.state,
                changed=changed if isinstance(changed, bool) else None,
                error_code=answer.text("error_code"),
            )
        )
        return answer

    async def look(self, transaction_id: str, *, group: str) -> Answer:
        """Look up a transaction."""
        sent_at = self._history.now()
        answer = await self._persist(self._single(group, "GET", f"/transactions/{transaction_id}"))
        self._history.write(
            Looked(
                id=transaction_id,
                status=answer.status,
                sent_at=sent_at,
                state=answer.state,
                error_code=answer.text("error_code"),
            )
        )
        return answer

    async def persist(self, method: str, path: str, body: object = None, *, group: str | None = None) -> Answer:
        """Send a call that enters the history only when it is answered, with the key of a group if it is given."""
        return await self._persist(self._single(group, method, path, body))

    async def _persist(self, send: Send, *, ambiguous: bool = True) -> Answer:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        refused = tries = 0
        while True:
            tries += 1
            answer = replace(await send(), tries=tries)
            code = answer.text("error_code")
            self.answers[f"{answer.status} {code or ''}".strip()] += 1
            lost = answer.status == 0 or code == "outcome_unknown"
            if answer.status not in (0, *_BUSY) or (lost and not ambiguous):
                return answer
            if asyncio.get_running_loop().time() > deadline:
                return answer
            refused += 1
            if refused % len(self._instances) == 0:
                wait = min(_LONGEST_WAIT_S, 0.2 * 2.0 ** (refused // len(self._instances)))
                await asyncio.sleep(wait * self._chance.uniform(0.5, 1.5))

    def _sender(self, way: Way, group: str, kind: Kind, item: Mapping[str, object]) -> Send | None:
        """Return how to send an operation together with others of its group, None if it is sent alone."""
        match way:
            case "batch":
                return partial(self._batches.send, group, kind, item)
            case "stream" if self.streams_served:
                return partial(self._streamed, group, kind, item)
            case _:
                return None

    def _single(self, group: str | None, method: str, path: str, body: object = None) -> Send:
        return partial(self._somewhere, group, method, path, body)

    async def _post_batch(self, group: str, body: object) -> Answer:
        return await self._somewhere(group, "POST", "/batch", body)

    async def _streamed(self, group: str, kind: Kind, item: Mapping[str, object]) -> Answer:
        """Send an operation on the group's stream to the next coordinator that is not full."""
        async with self._at_next() as instance:
            stream = self.streams.send(
                instance, group, self._shown(group), kind, item, within_s=self._chance.choice(TRY_S)
            )
            return await stream

    async def _somewhere(self, group: str | None, method: str, path: str, body: object) -> Answer:
        """Send a call to the next coordinator that is not full."""
        async with self._at_next() as instance:
            return await self._once(instance, self._shown(group), method, path, body)

    @asynccontextmanager
    async def _at_next(self) -> AsyncIterator[Instance]:
        """Take a place at the next coordinator that is not full."""
        async with self._free:
            instance = self._next()
            self.in_flight[instance.number] += 1
            try:
                yield instance
            finally:
                self.in_flight[instance.number] -= 1

    def _next(self) -> Instance:
        for _ in self._instances:
            self._turn += 1
            instance = self._instances[self._turn % len(self._instances)]
            if instance is not self.resting and self.in_flight[instance.number] < AT_ONCE:
                return instance
        # All but the resting one are full: they share its places.
        working = [instance for instance in self._instances if instance is not self.resting]
        return min(working, key=lambda instance: self.in_flight[instance.number])

    async def ask(self, instance: Instance, path: str, *, shown: Mapping[str, str] | None = None) -> Answer:
        """Send one call to one coordinator, outside the limit of the producers; by default as an operator."""
        return await self._once(instance, self._shown(None) if shown is None else shown, "GET", path, None)

    def _shown(self, group: str | None) -> dict[str, str]:
        key = self.keys.get(group)
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    async def _once(self, instance: Instance, shown: Mapping[str, str], method: str, path: str, body: object) -> Answer:
        try:
            async with self._session.request(
                method,
                f"{instance.url}/v1{path}",
                data=None if body is None else self._encode(body),
                headers={**shown, **({} if body is None else _JSON)},
                timeout=aiohttp.ClientTimeout(total=self._chance.choice(TRY_S)),
                allow_redirects=False,
            ) as response:
                document: Any = msgspec.json.decode(await response.read())
                return Answer(status=response.status, body=document if isinstance(document, dict) else {})
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return NOTHING


def _data(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"type": "BINARY", "data": b64encode(data).decode("ascii")}
