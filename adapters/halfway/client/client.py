"""The client of a producer: prepare, run the local transaction, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import quote, urlencode
from uuid import uuid4

from halfway.client.blocking import awaited
from halfway.client.coalescing import Coalescer
from halfway.client.errors import (
    AlreadyEndedError,
    ClientClosedError,
    EndUnconfirmedError,
    HalfwayError,
    PrepareUnconfirmedError,
    QueueFullError,
    UnavailableError,
    WrongEventLoopError,
    refused,
)
from halfway.client.messages import Message
from halfway.client.outcome import Outcome
from halfway.client.transaction import Transaction
from halfway.client.transport import NoAnswerError, Reply, Transport

if TYPE_CHECKING:
    from halfway.client.barrier import AsyncBarrier, Barrier

_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_CLOSE_S: Final = 5.0
_PAGE: Final = 100
_ANSWERED: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_REPEATED: Final = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""Answers after which the same call is sent again until its deadline; prepares and ends are idempotent."""


class Halfway:
    """A producer group's client.

    Open it once, in the event loop that uses it:

        async with Halfway("http://halfway:8080", group="shop") as halfway:
            async with halfway.transaction([Message(topic="orders", key="42", value={"total": 9.9})]) as transaction:
                ...  # the local transaction

    It may be shared by any number of tasks of that loop. After a fork, open a new one in the child.
    """

    def __init__(  # noqa: PLR0913 - settings by name
        self,
        urls: str | Sequence[str],
        group: str,
        *,
        barrier: Barrier | AsyncBarrier | None = None,
        credential: str | None = None,
        prepare_timeout_s: float = 10.0,
        end_timeout_s: float = 30.0,
        max_waiting: int = 10_000,
        max_in_background: int = 10_000,
        connections: int = 16,
    ) -> None:
        """Take the coordinators' URLs and the group's name; nothing is sent yet.

        `barrier` says how a transaction ends whose block raised an exception; `register` checks its retention.
        `max_waiting` bounds the prepares, and likewise the ends, that wait to be sent; `max_in_background` bounds the
        ends that are sent without being waited for. Raises InvalidUrlError.
        """
        self.group = group
        self.barrier = barrier
        self._transport = Transport(
            [urls] if isinstance(urls, str) else urls, credential=credential, connections=connections
        )
        self._prepares = Coalescer(self._transport, "prepare", max_waiting=max_waiting)
        self._ends = Coalescer(self._transport, "end", max_waiting=max_waiting)
        self._prepare_timeout_s = prepare_timeout_s
        self._end_timeout_s = end_timeout_s
        self._max_in_background = max_in_background
        self._background: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        """Open the client in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._transport.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    async def close(self) -> None:
        """Wait up to 5 s for ends in the background, then close; what was not confirmed is left to check-back."""
        if self._loop is None:
            return
        if self._background:
            await asyncio.wait(self._background, timeout=_CLOSE_S)
        self._loop = None
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._prepares.close()
        await self._ends.close()
        await self._transport.close()

    async def register(
        self,
        *,
        topics: Iterable[str],
        check_urls: Sequence[str] = (),
        policy: Mapping[str, object] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[str, Any]:
        """Register the group, or change it; the same again changes nothing. Return the group with its policy.

        Without `check_urls` the group fetches its checks (`CheckWorker`). Call it whenever the service starts. Raises
        InvalidRetentionError if the client's barrier would forget what halfway may still ask about.
        """
        check = {"urls": list(check_urls)} if check_urls else {"mode": "pull"}
        body = {"check": check, "topics": list(topics), "policy": dict(policy or {})}
        path = f"/v1/groups/{quote(self.group, safe='')}"
        group = await self._call("PUT", path, body, timeout_s=timeout_s)
        if self.barrier is not None:
            self.barrier.check_policy(group["policy"])
        return group

    def transaction(
        self,
        messages: Iterable[Message],
        *,
        id: str | None = None,  # noqa: A002 - what REST calls it
        check_after_s: float | None = None,
        confirm: bool = True,
    ) -> Transaction:
        """Return a transaction to be entered with `async with`: its body runs only after a durable prepare.

        Leaving the body commits, an exception rolls back, and what cannot be known is left to check-back: see
        `Transaction`. With `confirm=False` the end is sent in the background.
        """
        return Transaction(self, tuple(messages), id=id or uuid4().hex, check_after_s=check_after_s, confirm=confirm)

    async def prepare(
        self,
        messages: Iterable[Message],
        *,
        id: str,  # noqa: A002 - as above
        check_after_s: float | None = None,
    ) -> None:
        """Store messages out of sight under an id; return once they are durable.

        A lost answer is asked for again with the same id until the deadline. Raises PrepareUnconfirmedError then,
        AlreadyEndedError if the id has ended, and RefusedError. When it is not known whether the messages are stored, a
        cancellation included, a rollback is sent in the background.
        """
        body: dict[str, Any] = {"group": self.group, "id": id, "messages": [one.as_json() for one in messages]}
        if check_after_s is not None:
            body["check_after_s"] = check_after_s
        try:
            prepared = await self._until_known(
                self._prepares, body, self._prepare_timeout_s, PrepareUnconfirmedError, f"the prepare of {id}"
            )
        except (PrepareUnconfirmedError, asyncio.CancelledError):
            if self._loop is not None:
                self._in_background(self._end_quietly(id, "rollback", "the prepare was not confirmed"))
            raise
        if prepared.get("state") != "prepared":
            state = prepared.get("state")
            raise AlreadyEndedError(
                {"error_code": "already_ended", "detail": f"the transaction {id} is {state}", "state": state}
            )

    async def end(
        self,
        id: str,  # noqa: A002 - as above
        outcome: Outcome,
        *,
        remark: str | None = None,
        check_id: str | None = None,
        confirm: bool = True,
    ) -> None:
        """End a transaction; return once the outcome stands for ever.

        A lost answer is asked for again until the deadline, which raises EndUnconfirmedError. Raises AlreadyEndedError
        if the opposite stands, UnknownTransactionError, OutcomeExpiredError. With `confirm=False` it returns at once.
        """
        if not confirm:
            self._in_background(self._end_quietly(id, outcome, remark, check_id))
            return
        body = {"id": id, "outcome": outcome}
        if remark is not None:
            body["remark"] = remark
        if check_id is not None:
            body["check_id"] = check_id
        await self._until_known(self._ends, body, self._end_timeout_s, EndUnconfirmedError, f"the {outcome} of {id}")

    def settle(self, transaction_id: str, outcome: Outcome, *, remark: str | None = None) -> None:
        """End in the background a transaction whose block raised an exception: as the barrier says, if there is one.

        Without a barrier it ends with `outcome`.
        """
        self._in_background(self._settle(transaction_id, outcome, remark))

    async def show(self, id: str) -> Mapping[str, Any]:  # noqa: A002 - as above
        """Return a transaction as `GET /v1/transactions/{id}` shows it; raises UnknownTransactionError."""
        return await self._call(
            "GET", f"/v1/transactions/{quote(id, safe='')}", None, timeout_s=self._prepare_timeout_s
        )

    async def show_group(self) -> Mapping[str, Any]:
        """Return the group with its policy; raises UnknownGroupError."""
        return await self._call(
            "GET", f"/v1/groups/{quote(self.group, safe='')}", None, timeout_s=self._prepare_timeout_s
        )

    async def list_ids(self, *, state: Literal["prepared", "parked"], older_than_s: float = 0) -> AsyncIterator[str]:
        """Yield the ids of the group's transactions in this state, the oldest first."""
        cursor: str | None = ""
        while cursor is not None:
            query = {"group": self.group, "state": state, "limit": _PAGE} | ({"cursor": cursor} if cursor else {})
            path = f"/v1/transactions?{urlencode(query)}"
            page = await self._call("GET", path, None, timeout_s=self._prepare_timeout_s)
            for one in page["transactions"]:
                age = datetime.now(UTC) - datetime.fromisoformat(one["prepared_at"])
                if age.total_seconds() < older_than_s:
                    return
                yield one["id"]
            cursor = page["next"]

    async def fetch_checks(self, *, wait_s: float, max_checks: int) -> list[Mapping[str, Any]]:
        """Return checks of a group that fetches them, after at most `wait_s`; end each with its `check_id`."""
        path = f"/v1/groups/{quote(self.group, safe='')}/checks?wait_s={wait_s:g}&max={max_checks}"
        answer = await self._call("GET", path, None, timeout_s=wait_s + self._prepare_timeout_s)
        return list(answer.get("checks", ()))

    def check_usable(self) -> None:
        """Raise ClientClosedError or WrongEventLoopError if this client cannot be used here."""
        if self._loop is None:
            raise ClientClosedError("this client is not open: use it inside `async with Halfway(...)`")
        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoopError("this client was opened in another event loop: open one client for each loop")

    async def _call(self, method: str, path: str, body: object, *, timeout_s: float) -> Mapping[str, Any]:
        self.check_usable()
        encoded = None if body is None else _encoded(body)
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def once() -> Reply:
            self.check_usable()
            return await self._transport.send(method, path, encoded, deadline=deadline)

        return await _repeated(once, deadline, UnavailableError, f"{method} {path}")

    async def _until_known(
        self, coalescer: Coalescer, body: object, timeout_s: float, unconfirmed: type[UnavailableError], what: str
    ) -> Mapping[str, Any]:
        self.check_usable()
        encoded = _encoded(body)
        deadline = asyncio.get_running_loop().time() + timeout_s

        async def once() -> Reply:
            self.check_usable()  # it may have been closed since the attempt before
            return await coalescer.submit(encoded, deadline=deadline)

        return await _repeated(once, deadline, unconfirmed, what)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self.check_usable()
        if len(self._background) >= self._max_in_background:
            work.close()  # check-back resolves it
            return
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _settle(self, transaction_id: str, outcome: Outcome, remark: str | None) -> None:
        if self.barrier is not None:
            outcome = await awaited(self.barrier.settle, transaction_id)
        await self._end_quietly(transaction_id, outcome, remark)

    async def _end_quietly(
        self, transaction_id: str, outcome: Outcome, remark: str | None, check_id: str | None = None
    ) -> None:
        """Send an end that nobody waits for; if it fails, check-back resolves the transaction."""
        with contextlib.suppress(HalfwayError):
            await self.end(transaction_id, outcome, remark=remark, check_id=check_id)


def _encoded(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


async def _repeated(
    once: Callable[[], Awaitable[Reply]], deadline: float, unanswered: type[UnavailableError], what: str
) -> Mapping[str, Any]:
    """Send a call until it has a final answer or its deadline passes, with full jitter between the attempts."""
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    sent = False
    while True:
        try:
            reply = await once()
        except QueueFullError as error:
            if not sent:
                raise
            failure, asked_for_s = str(error), 0.0
        except NoAnswerError as error:
            failure, asked_for_s = str(error), 0.0
        else:
            if reply.status in _ANSWERED:
                return reply.body
            if reply.status not in _REPEATED:
                raise refused({"status": reply.status, **reply.body})
            failure = f"{reply.status} {reply.body.get('error_code', '')}: {reply.body.get('detail', '')}"
            asked_for_s = reply.retry_after_s or 0.0
        sent = True
        wait_s = asked_for_s + random.uniform(0, pause_s)  # noqa: S311 - jitter
        if loop.time() + wait_s >= deadline:
            raise unanswered(f"{what} has no final answer; the last attempt: {failure}")
        await asyncio.sleep(wait_s)
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
