"""The calls of a producer group: prepares, ends and questions, each repeated until it has a final answer."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import quote, urlencode

from halfway.client.calls.shared import SharedCalls
from halfway.client.calls.stream import Kind
from halfway.client.calls.transport import DeadlinePassedError, Key, NoAnswerError, Reply, Transport
from halfway.client.checks.answers import CheckVerifier
from halfway.client.errors import (
    AWAY,
    AlreadyEndedError,
    ClientClosedError,
    EndUnconfirmedError,
    HalfwayError,
    PrepareUnconfirmedError,
    QueueFullError,
    RefusedError,
    UnavailableError,
    UnknownTransactionError,
    WrongEventLoopError,
    demand,
    demand_positive,
    error_of,
    matches,
)
from halfway.client.ids import require_id
from halfway.client.messages import Message, Outcome, require_messages
from halfway.client.threads import call_async

if TYPE_CHECKING:
    from halfway.client.barrier.barrier import AsyncBarrier, Barrier

log = logging.getLogger(__name__)

_UnderWay = Sequence[asyncio.Future[None]]

_GROUP: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,100}")
_CLOSE_S: Final = 5.0
_CONFIRM_S: Final = 1.0
"""How long the answer to a check may wait for halfway to confirm it."""
_PAGE: Final = 100
ATTEMPT_S: Final = 3.0
"""How long the first attempt of a call waits for its answer: its connection may have died silently."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_SUCCESS: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_RETRIABLE: Final = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""Answers after which the same call is sent again until its deadline. Prepares and ends are idempotent."""
_NOT_CARRIED_OUT: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS})


@dataclass
class ClientFigures:
    """What a client has done since it was opened, for metrics."""

    prepares: int = 0
    """Those that halfway has confirmed."""
    ends: int = 0
    refused: int = 0
    """Prepares and ends that halfway refused."""
    unconfirmed: int = 0
    """Those without a final answer before their deadline."""
    seconds: float = 0.0
    """How long all of these took together."""


class GroupCalls:
    """The calls that a `Halfway` makes for its transactions and background tasks."""

    def __init__(  # noqa: PLR0913 - settings by name
        self,
        urls: str | Sequence[str],
        group: str,
        *,
        barrier: Barrier | AsyncBarrier | None = None,
        key: str | Key | None = None,
        tls: ssl.SSLContext | None = None,
        prepare_timeout_s: float = 20.0,
        end_timeout_s: float = 30.0,
        max_waiting: int = 10_000,
        max_in_background: int = 10_000,
        connections: int = 16,
        stream: bool = False,
    ) -> None:
        """Configure the client with the coordinators' URLs and the group's name. Nothing is sent yet.

        `key` is the group's key; the default is HALFWAY_CLIENT_KEY of the environment, or what the file in
        HALFWAY_CLIENT_KEY_FILE contains. `tls` is needed for a private authority or a client certificate. `barrier`
        decides how a transaction ends if its block raised an exception; `register` checks its retention.
        `max_waiting` limits the prepares that wait to be sent, and also the ends.
        `max_in_background` limits the ends that are sent in the background. `connections` limits those for requests.
        With `stream` prepares and ends go over one WebSocket; otherwise those that wait at once share a request.
        Raises InvalidSettingError, InvalidUrlError and InvalidKeyError.
        """
        demand(matches(_GROUP, group), "group", group, "1 to 100 letters, digits and . _ -")
        demand_positive(prepare_timeout_s=prepare_timeout_s, end_timeout_s=end_timeout_s)
        demand_positive(1, max_waiting=max_waiting, connections=connections)
        self.group = group
        self.barrier = barrier
        self._path = f"/v1/groups/{quote(group, safe='')}"
        key = Key.resolve(key)
        self.has_key = key is not None
        self._transport = Transport(
            [urls] if isinstance(urls, str) else urls, key=key, tls=tls, connections=connections
        )
        self._share = partial(SharedCalls, self._transport, max_waiting=max_waiting, stream=stream)
        self._shared = self._share()
        self._prepare_timeout_s = prepare_timeout_s
        self.end_timeout_s = end_timeout_s
        self._max_in_background = max_in_background
        self.figures = ClientFigures()
        self._background: set[asyncio.Task[None]] = set()
        self._services: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Timeout] = set()
        """The time-outs of calls that wait for an answer. Each expires when the client is closed."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        """Open the client in the running event loop."""
        await self.open()
        if self.barrier is not None:
            self.barrier.join(self.group, self)
        return self

    async def open(self) -> None:
        """Open the connections in the running event loop. In a fork's child, nothing of the parent's is used."""
        self._loop = asyncio.get_running_loop()
        self._transport.open()
        self._shared = self._share()
        self._background, self._services, self._calls = set(), set(), set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait up to 5 s for ends in the background, then close. Unconfirmed ends are left to check-back.

        Calls of other tasks end with ClientClosedError.
        """
        if self._loop is None:
            return
        await _cancel(self._services)
        if self._background:
            await asyncio.wait(self._background, timeout=_CLOSE_S)
        self._loop = None
        await _cancel(self._background)
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)
        await self._shared.close()
        await self._transport.close()

    def new_id(self) -> str:
        """Return an id for a new transaction, born now by the coordinator's clock."""
        return self._transport.ids.new_id()

    async def prepare(
        self,
        messages: Iterable[Message],
        *,
        id: str,
        check_after_s: float | None = None,
        new_id: bool = False,
        keep: bool = False,
    ) -> None:
        """Store messages under an id, invisible to consumers; return once they are durable.

        The id is a UUIDv7: that of `new_id()`, or one that `transaction_id(key, at)` derives; InvalidIdError otherwise.
        If an answer is lost, the request is repeated with the same id until the deadline. Raises
        PrepareUnconfirmedError then, AlreadyEndedError if the id has ended, and RefusedError. If it is not known
        whether the messages are stored, also after a cancellation, the transaction is ended in the background: with
        `new_id`, which promises that nobody else prepares under this id, it is rolled back; otherwise see `settle`.
        With `keep` it is left as it is if halfway is away, for a later prepare with the same messages.
        """
        own = require_id(id)
        documents = [message.as_json() for message in require_messages(messages)]
        body: dict[str, Any] = {"group": self.group, "id": own, "messages": documents}
        if check_after_s is not None:
            body["check_after_s"] = check_after_s
        try:
            prepared = await self._until_known(
                "prepare", own, body, self._prepare_timeout_s, PrepareUnconfirmedError, f"the prepare of {id}"
            )
        except (PrepareUnconfirmedError, RefusedError, asyncio.CancelledError) as error:
            is_kept = keep and isinstance(error, AWAY)
            if not is_kept and (not isinstance(error, RefusedError) or error.in_doubt):
                self.abandon(id, new_id=new_id)
            raise
        if (state := prepared.get("state")) != "prepared":
            raise AlreadyEndedError(
                {"error_code": "already_ended", "detail": f"the transaction {id} is {state}", "state": state}
            )

    async def end(
        self, id: str, outcome: Outcome, *, remark: str | None = None, check_id: str | None = None, confirm: bool = True
    ) -> None:
        """End a transaction; return once the outcome is final.

        If an answer is lost, the request is repeated until the deadline, which raises EndUnconfirmedError. Raises
        AlreadyEndedError if the transaction has the opposite outcome, UnknownTransactionError, OutcomeExpiredError.
        With `confirm=False` it returns at once. If it is cancelled, the end is sent in the background.
        """
        if not confirm:
            self.begin_end(id, outcome, remark=remark, check_id=check_id)
            return
        try:
            await self._end(id, outcome, remark, check_id)
        except asyncio.CancelledError:
            if self._loop is not None:
                self.begin_end(id, outcome, remark=remark, check_id=check_id)
            raise

    def begin_end(
        self, id: str, outcome: Outcome, *, remark: str | None = None, check_id: str | None = None
    ) -> asyncio.Task[None] | None:
        """Send an end in the background; return the task, which is done when the outcome is final or given up.

        The task raises no errors: they are logged, and check-back resolves the transaction. Return None if the limit of
        ends in the background is reached.
        """
        return self._in_background(self._end_quietly(id, outcome, remark, check_id))

    async def _end(self, id: str, outcome: Outcome, remark: str | None, check_id: str | None) -> None:
        body = {"id": id, "outcome": outcome}
        if remark is not None:
            body["remark"] = remark
        if check_id is not None:
            body["check_id"] = check_id
        await self._until_known("end", id, body, self.end_timeout_s, EndUnconfirmedError, f"the {outcome} of {id}")

    def settle(self, transaction_id: str, outcome: Outcome, *, remark: str | None = None) -> None:
        """End a transaction in the background after its block raised an exception.

        The barrier decides the outcome. Without a barrier it is `outcome`.
        """
        self._in_background(self._settle(transaction_id, outcome, remark))

    def abandon(self, id: str, *, new_id: bool) -> None:
        """End an unconfirmed prepare in the background: see `prepare`."""
        if self._loop is None:  # the client is closed, so check-back resolves it
            return
        remark, prepares = "the prepare was not confirmed", self._shared.under_way(id.lower())
        if new_id:
            self._in_background(self._end_quietly(id, "rollback", remark, may_overtake=prepares))
        else:
            self._in_background(self._settle(id, "unknown", remark, may_overtake=prepares))

    async def show(self, id: str) -> Mapping[str, Any]:
        """Return the answer of `GET /v1/transactions/{id}`; raises UnknownTransactionError."""
        return await self._get(_path_of(id))

    async def is_pending(self, id: str, group: str) -> bool:
        """Return whether halfway has this transaction of the group as pending, and so may send checks of it.

        Return True if this client cannot be asked, because it is not open here.
        """
        try:
            shown = await self._call("GET", _path_of(id), None, timeout_s=_CONFIRM_S)
        except (ClientClosedError, WrongEventLoopError):
            return True
        except HalfwayError as error:
            log.info("a check of %s was not decided, because halfway did not confirm it: %s", id, error)
            return False
        return bool(shown["group"] == group and shown["state"] == "prepared")

    def is_pending_sync(self, id: str, group: str) -> bool:
        """Return the same, in another thread than that of the client's event loop."""
        loop = self._loop
        if loop is None or _running_loop() is loop:
            return True
        future = asyncio.run_coroutine_threadsafe(self.is_pending(id, group), loop)
        try:
            return future.result(2 * _CONFIRM_S)
        except TimeoutError:
            future.cancel()
            return False

    async def show_group(self) -> Mapping[str, Any]:
        """Return the group with its policy; raises UnknownGroupError."""
        return await self._get(self._path)

    async def list_ids(self, *, state: Literal["prepared", "parked"], older_than_s: float = 0) -> AsyncIterator[str]:
        """Yield the ids of the group's transactions in this state, oldest first."""
        cursor: str | None = ""
        while cursor is not None:
            query = {"group": self.group, "state": state, "limit": _PAGE} | ({"cursor": cursor} if cursor else {})
            page = await self._get(f"/v1/transactions?{urlencode(query)}")
            for transaction in page["transactions"]:
                age = datetime.now(UTC) - datetime.fromisoformat(transaction["prepared_at"])
                if older_than_s and age.total_seconds() < older_than_s:
                    return
                yield transaction["id"]
            cursor = page["next"]

    async def check_secrets(self) -> list[str]:
        """Return the secrets of the group's checks for a CheckVerifier; empty if halfway does not sign them."""
        answer = await self._get(f"{self._path}/check-secrets")
        return [str(secret) for secret in answer["secrets"]]

    async def check_verifier(self) -> CheckVerifier | None:
        """Return a verifier of the group's checks; None if this client has no key, or halfway does not sign them."""
        secrets = await self.check_secrets() if self.has_key else []
        return CheckVerifier(*secrets) if secrets else None

    async def fetch_checks(self, *, wait_s: float, max_checks: int) -> list[Mapping[str, Any]]:
        """Fetch checks of a group in pull mode, waiting at most `wait_s`; end each transaction with its `check_id`."""
        path = f"{self._path}/checks?max={max_checks}"
        answer = await self._call("GET", path, None, timeout_s=wait_s + self._prepare_timeout_s, waits_s=wait_s)
        return list(answer.get("checks", ()))

    def check_usable(self) -> None:
        """Raise ClientClosedError or WrongEventLoopError if this client cannot be used here."""
        if self._loop is None:
            raise ClientClosedError("this client is not open: use it inside `async with Halfway(...)`")
        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoopError(
                "this client was opened in another event loop, or before a fork: open one client per loop"
            )

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._call("GET", path, None, timeout_s=self._prepare_timeout_s)

    async def _call(
        self, method: str, path: str, body: object, *, timeout_s: float, waits_s: float = 0.0
    ) -> Mapping[str, Any]:
        """Make a call. `waits_s` is how long the coordinator may wait before it answers; it is added to the query."""
        self.check_usable()
        encoded = None if body is None else _encoded(body)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        to_answer_s = min(ATTEMPT_S, timeout_s - waits_s)

        async def send(attempt_s: float) -> Reply:
            self.check_usable()
            asked = path
            if waits_s:
                share_s = (deadline - loop.time()) / self._transport.url_count
                asked += f"&wait_s={max(0.0, min(waits_s, share_s - to_answer_s)):.3f}"
            return await self._transport.send(method, asked, encoded, deadline=deadline, attempt_s=attempt_s)

        what, attempt_s = f"{method} {path}", ATTEMPT_S + waits_s
        call = send_until_final(send, deadline, UnavailableError, what, demand_halfway=False, attempt_s=attempt_s)
        return await self._until_closed(call)

    async def _until_known(
        self, kind: Kind, id: str, body: object, timeout_s: float, unconfirmed: type[UnavailableError], what: str
    ) -> Mapping[str, Any]:
        self.check_usable()
        loop, figures = asyncio.get_running_loop(), self.figures
        began = loop.time()
        deadline = began + timeout_s
        try:
            known = await send_until_final(
                partial(self._shared.submit, kind, id, _encoded(body), deadline),
                deadline,
                unconfirmed,
                what,
                demand_halfway=kind == "end",
                attempt_s=ATTEMPT_S,
                pause=self._shared.pause,
            )
        except RefusedError:
            figures.refused += 1
            raise
        except UnavailableError:
            figures.unconfirmed += 1
            raise
        finally:
            figures.seconds += loop.time() - began
        figures.prepares += kind == "prepare"
        figures.ends += kind == "end"
        return known

    async def _until_closed(self, call: Coroutine[Any, Any, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the result of a call; raise ClientClosedError as soon as the client is closed."""
        closed = asyncio.timeout(None)
        self._calls.add(closed)
        try:
            async with closed:
                return await call
        except TimeoutError:
            if not closed.expired():
                raise
            raise ClientClosedError(
                "this client was closed during the call: check-back resolves its transaction"
            ) from None
        finally:
            self._calls.discard(closed)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        try:
            self.check_usable()
        except HalfwayError:
            work.close()
            raise
        if len(self._background) >= self._max_in_background:
            work.close()
            log.warning(
                "%s ends are being sent in the background: this one is left to check-back", len(self._background)
            )
            return None
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _settle(
        self, transaction_id: str, outcome: Outcome, remark: str | None, *, may_overtake: _UnderWay | None = None
    ) -> None:
        if self.barrier is not None:
            outcome = await call_async(self.barrier.settle, transaction_id)
        await self._end_quietly(transaction_id, outcome, remark, may_overtake=may_overtake)

    async def _end_quietly(
        self,
        transaction_id: str,
        outcome: Outcome,
        remark: str | None,
        check_id: str | None = None,
        *,
        may_overtake: _UnderWay | None = None,
    ) -> None:
        """Send an end in the background; if it fails, check-back resolves the transaction.

        With `may_overtake` it is not known whether the transaction is prepared. If halfway does not know the id, the
        end is sent again after these prepares are answered or lost.
        """
        try:
            try:
                await self._end(transaction_id, outcome, remark, check_id)
            except UnknownTransactionError:
                if not may_overtake:
                    raise
                await asyncio.wait(may_overtake)
                await self._end(transaction_id, outcome, remark, check_id)
        except AlreadyEndedError:
            if outcome != "unknown":
                log.exception("transaction %s did not end with %s", transaction_id, outcome)
        except HalfwayError as error:
            if may_overtake is not None and isinstance(error, UnknownTransactionError):
                log.debug("transaction %s was not prepared, so there is nothing to end", transaction_id)
            else:
                log.warning("the %s of transaction %s is left to check-back: %s", outcome, transaction_id, error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _path_of(id: str) -> str:
    return f"/v1/transactions/{quote(id, safe='')}"


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _encoded(body: object) -> bytes:
    return _ENCODER.encode(body).encode()


async def send_until_final(
    send: Callable[[float], Awaitable[Reply]],
    deadline: float,
    unconfirmed: type[UnavailableError],
    call: str,
    *,
    demand_halfway: bool,
    attempt_s: float,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Mapping[str, Any]:
    """Send a call until it has a final answer or its deadline passes, with full jitter between the attempts.

    The first attempt gets `attempt_s`. Each attempt without an answer doubles the time of the next one, because the
    coordinator may be slow.
    With `demand_halfway`, only a refusal by halfway itself is final: a proxy in front of it, for example during a
    change of its configuration, may answer differently later. Raises `unconfirmed` at the deadline, and RefusedError.
    """
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    is_repeat = in_doubt = False
    failure = ""
    while True:
        try:
            reply = await send(attempt_s)
        except QueueFullError as error:
            if not is_repeat:
                raise
            failure, retry_after_s = str(error), 0.0
        except NoAnswerError as error:
            in_doubt = True
            attempt_s *= 2
            is_less_specific = bool(failure) and isinstance(error, DeadlinePassedError)
            failure, retry_after_s = failure if is_less_specific else str(error), 0.0
        else:
            if reply.status in _SUCCESS:
                return reply.body
            if reply.status not in _RETRIABLE and (reply.is_from_halfway or not demand_halfway):
                raise error_of({"status": reply.status, **reply.body}, in_doubt=in_doubt)
            in_doubt = in_doubt or reply.status not in _NOT_CARRIED_OUT
            failure = f"{reply.status} {reply.body.get('error_code', '')}: {reply.body.get('detail', '')}"
            retry_after_s = reply.retry_after_s or 0.0
        is_repeat = True
        wait_s = retry_after_s + random.uniform(0, pause_s)  # noqa: S311 - jitter
        in_time = loop.time() + wait_s < deadline
        if in_time:
            await pause(wait_s)
        if not in_time or loop.time() >= deadline:
            raise unconfirmed(f"{call} has no final answer; the last attempt: {failure}")
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
