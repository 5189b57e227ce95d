"""Calls over REST as a producer makes them, each in the history before it is sent and after it is answered."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from checker.content import Content, content_of
from checker.history import End, Ended, HistoryWriter, Looked, Prepare, Prepared, Said
from tests.chaos.coordinators import Instance

TRY_S: Final = 20.0
"""One request; the coordinators answer, if they can, within their own 15 s."""
PATIENCE_S: Final = 60.0
"""All tries of one request together; then its caller gives up, and the check has to find out."""
_BUSY: Final = (429, 503)
_LONGEST_WAIT_S: Final = 2.0


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back; status 0 where nothing did."""

    status: int
    body: Mapping[str, Any]

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        return value if isinstance(value, str) else None

    @property
    def state(self) -> str | None:
        return self.text("state")


NOTHING: Final = Answer(status=0, body={})


class Caller:
    """Goes round-robin over the coordinators, and on to the next where one cannot answer now."""

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
        self.in_flight: Counter[int] = Counter()
        """Requests that each coordinator has been sent and has not answered, by its number."""
        self.answers: Counter[str] = Counter()

    async def prepare(
        self,
        ref: str,
        group: str,
        messages: Sequence[Message],
        as_id: str | None,
        *,
        check_after_s: float | None = None,
    ) -> Answer:
        """Prepare; sent again only where the client has brought an id, or where nothing can have been stored."""
        body: dict[str, object] = {"group": group, "messages": [message.body for message in messages]}
        if as_id is not None:
            body["id"] = as_id
        if check_after_s is not None:
            body["check_after_s"] = check_after_s
        contents = tuple(message.content for message in messages)
        self._history.write(Prepare(ref=ref, group=group, contents=contents, id=as_id))
        sent_at = self._history.now()
        answer = await self._persist("POST", "/transactions", body, ambiguous=as_id is not None)
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
        self, transaction_id: str, outcome: Said, *, by: str = "producer", check_id: str | None = None
    ) -> Answer:
        """End a transaction."""
        body = {"outcome": outcome} | ({} if check_id is None else {"check_id": check_id})
        self._history.write(End(id=transaction_id, outcome=outcome, by=by))
        sent_at = self._history.now()
        answer = await self._persist("POST", f"/transactions/{transaction_id}/end", body)
        changed = answer.body.get("changed")
        self._history.write(
            Ended(
                id=transaction_id,
                outcome=outcome,
                status=answer.status,
                sent_at=sent_at,
                state=answer.state,
                changed=changed if isinstance(changed, bool) else None,
                error_code=answer.text("error_code"),
            )
        )
        return answer

    async def look(self, transaction_id: str) -> Answer:
        """Ask what became of a transaction."""
        sent_at = self._history.now()
        answer = await self._persist("GET", f"/transactions/{transaction_id}")
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

    async def persist(self, method: str, path: str, body: object = None) -> Answer:
        """Make a call that is no part of the history until it is answered."""
        return await self._persist(method, path, body)

    async def _persist(self, method: str, path: str, body: object = None, *, ambiguous: bool = True) -> Answer:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        refused = 0
        while True:
            answer = await self.once(self._next(), method, path, body)
            lost = answer.status == 0 or answer.text("error_code") == "outcome_unknown"
            if answer.status not in (0, *_BUSY) or (lost and not ambiguous):
                return answer
            if asyncio.get_running_loop().time() > deadline:
                return answer
            refused += 1
            if refused % len(self._instances) == 0:
                wait = min(_LONGEST_WAIT_S, 0.1 * refused / len(self._instances))
                await asyncio.sleep(wait * self._chance.uniform(0.5, 1.5))

    def _next(self) -> Instance:
        self._turn += 1
        return self._instances[self._turn % len(self._instances)]

    async def once(self, instance: Instance, method: str, path: str, body: object = None) -> Answer:
        """Make one call of one coordinator."""
        self.in_flight[instance.number] += 1
        try:
            async with self._session.request(
                method,
                f"{instance.url}/v1{path}",
                json=body,
                timeout=aiohttp.ClientTimeout(total=TRY_S),
                allow_redirects=False,
            ) as response:
                told = await response.json(content_type=None)
                answer = Answer(status=response.status, body=told if isinstance(told, dict) else {})
        except (aiohttp.ClientError, TimeoutError, ValueError):
            answer = NOTHING
        finally:
            self.in_flight[instance.number] -= 1
        self.answers[f"{answer.status} {answer.text('error_code') or ''}".strip()] += 1
        return answer


def _data(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"type": "BINARY", "data": b64encode(data).decode("ascii")}
