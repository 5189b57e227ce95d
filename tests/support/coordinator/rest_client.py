"""The REST calls of docs/api.md, each a thin function, as any client in any language would make them."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from tests.support.canary import MARKED, PAYLOAD, refuse_leaks
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.waiting import eventually

Json = dict[str, Any]
NEVER_S = 3600.0
"""A time of first check that no test lives to see."""
QUIET: Mapping[str, object] = {"first_check_after_s": NEVER_S}
"""A policy under which no check is sent by itself."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back; `body` is the parsed JSON, None if there was none.

    No problem in it, of the whole or of an item of a batch, holds a payload or a secret.
    """

    status: int
    body: Any
    headers: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        problems = _problems(self.body, self.status)
        if problems:
            refuse_leaks(json.dumps(problems).encode())

    def expect(self, *statuses: int) -> Json:
        """Return the body if the status is one of `statuses`; AssertionError with the whole answer otherwise."""
        assert self.status in statuses, f"expected {statuses}, got {self}"
        return self.body if isinstance(self.body, dict) else {}

    @property
    def error_code(self) -> str | None:
        return self.body.get("error_code") if isinstance(self.body, dict) else None

    def refused(self, status: int, error_code: str) -> Json:
        """Give the problem document of an expected refusal."""
        problem = self.expect(status)
        assert self.headers.get("Content-Type", "").startswith("application/problem+json"), self.headers
        assert problem["error_code"] == error_code, problem
        return problem


class Rest:
    """A client of one coordinator."""

    def __init__(self, session: aiohttp.ClientSession, url: str, health_url: str) -> None:
        self.session = session
        self.url = url
        self.health_url = health_url

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        retry: bool = False,
    ) -> Answer:
        """Make one call; with `retry`, again after each 503 and each lost connection, as a client should.

        If the answer is lost, whatever aiohttp.ClientError or TimeoutError says so is raised.
        """
        params = {name: str(value) for name, value in (query or {}).items() if value is not None}
        while True:
            try:
                async with self.session.request(
                    method, f"{self.url}/v1{path}", json=body, params=params, allow_redirects=False
                ) as response:
                    is_json = response.content_type.endswith("json")
                    answer = Answer(
                        status=response.status,
                        body=await response.json(content_type=None) if is_json else await response.text(),
                        headers=response.headers.copy(),
                    )
            except aiohttp.ClientConnectionError:
                if not retry:
                    raise
            else:
                if not retry or answer.status != 503:
                    return answer
            await asyncio.sleep(0.1)

    async def put_group(
        self,
        name: str,
        *,
        topics: Sequence[str],
        urls: Sequence[str] | None = None,
        policy: Mapping[str, object] | None = None,
    ) -> Answer:
        """Register a group; without `urls` it is one that fetches its checks."""
        check: Json = {"mode": "pull"} if urls is None else {"urls": list(urls)}
        return await self.call(
            "PUT", f"/groups/{name}", {"check": check, "topics": list(topics), "policy": dict(policy or {})}, retry=True
        )

    async def prepare(
        self,
        group: str,
        messages: Sequence[Mapping[str, object]],
        *,
        as_id: str | None = None,
        check_after_s: float | None = None,
        retry: bool = False,
    ) -> Answer:
        """Prepare, with an id of the client's own where `as_id` has one."""
        return await self.call(
            "POST", "/transactions", preparation(group, messages, as_id=as_id, check_after_s=check_after_s), retry=retry
        )

    async def prepared(
        self,
        group: str,
        messages: Sequence[Mapping[str, object]],
        *,
        as_id: str | None = None,
        check_after_s: float | None = None,
        retry: bool = False,
    ) -> str:
        """Prepare, and give the id once it is acknowledged; with `retry` it needs an id of the client's own."""
        assert as_id is not None or not retry
        answer = await self.prepare(group, messages, as_id=as_id, check_after_s=check_after_s, retry=retry)
        return str(answer.expect(200, 201)["id"] if retry else answer.expect(201)["id"])

    async def end(
        self,
        transaction_id: str,
        outcome: str,
        *,
        remark: str | None = None,
        check_id: str | None = None,
        retry: bool = False,
    ) -> Answer:
        body = {"outcome": outcome, "remark": remark, "check_id": check_id}
        told = {name: value for name, value in body.items() if value is not None}
        return await self.call("POST", f"/transactions/{transaction_id}/end", told, retry=retry)

    async def commit(self, transaction_id: str, *, retry: bool = False) -> Json:
        return (await self.end(transaction_id, "commit", retry=retry)).expect(200)

    async def rollback(self, transaction_id: str) -> Json:
        return (await self.end(transaction_id, "rollback")).expect(200)

    async def get(self, transaction_id: str, *, retry: bool = False) -> Answer:
        return await self.call("GET", f"/transactions/{transaction_id}", retry=retry)

    async def show(self, transaction_id: str, *, retry: bool = False) -> Json:
        """Give all that is known of a transaction that is known."""
        return (await self.get(transaction_id, retry=retry)).expect(200)

    async def until(self, transaction_id: str, *states: str) -> Json:
        """Wait until a transaction is in one of the states, and give all that is known of it then."""
        return await eventually(lambda: self.show(transaction_id), lambda shown: shown["state"] in states)

    async def until_checked(self, transaction_id: str, times: int) -> Json:
        """Wait until so many checks of a transaction are written down, and give all that is known of it then."""
        return await eventually(lambda: self.show(transaction_id), lambda shown: shown["checks"] >= times)

    async def page(self, **query: object) -> Json:
        """Give one page of the list of transactions."""
        return (await self.call("GET", "/transactions", query=query)).expect(200)

    async def check(self, transaction_id: str) -> Answer:
        return await self.call("POST", f"/transactions/{transaction_id}/check")

    async def resume(self, transaction_id: str) -> Answer:
        return await self.call("POST", f"/transactions/{transaction_id}/resume")

    async def lease(self, group: str, *, wait_s: float = 0, at_most: int | None = None) -> list[Json]:
        """Fetch checks of a group in pull mode."""
        answer = await self.call("GET", f"/groups/{group}/checks", query={"wait_s": wait_s, "max": at_most})
        checks: list[Json] = answer.expect(200)["checks"]
        return checks

    async def batch(
        self, *, prepare: Sequence[Mapping[str, object]] = (), end: Sequence[Mapping[str, object]] = ()
    ) -> Answer:
        return await self.call("POST", "/batch", {"prepare": list(prepare), "end": list(end)})

    async def health(self, path: str) -> tuple[int, str]:
        """Ask the second port: `/health/live`, `/health/ready` or `/metrics`."""
        async with self.session.get(self.health_url + path) as response:
            return response.status, await response.text()


Connect = Callable[[CoordinatorProcess], Rest]


def preparation(
    group: str,
    messages: Sequence[Mapping[str, object]],
    *,
    as_id: str | None = None,
    check_after_s: float | None = None,
) -> Json:
    """Give the body of a prepare."""
    body = {"group": group, "id": as_id, "check_after_s": check_after_s, "messages": list(messages)}
    return {name: value for name, value in body.items() if value is not None}


def message(topic: str, value: object = PAYLOAD, **fields: object) -> Json:
    """Give one message of a prepare, marked unless `headers` are given; other `fields` are `key` and `partition`."""
    return {"topic": topic, "value": value, "headers": MARKED, **fields}


def _problems(body: object, status: int) -> list[object]:
    if status >= HTTPStatus.BAD_REQUEST:
        return [body]
    if not isinstance(body, dict):
        return []
    lists = [items for items in body.values() if isinstance(items, list)]
    return [item["problem"] for items in lists for item in items if isinstance(item, dict) and "problem" in item]
