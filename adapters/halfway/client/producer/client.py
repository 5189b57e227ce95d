"""The client of a producer: it registers the group, opens transactions, and answers checks that it fetches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypedDict, Unpack, overload

from halfway.client.barrier.maintenance import BarrierMaintenance, StoredSender
from halfway.client.calls.group import GroupCalls
from halfway.client.checks.answers import Check, Decide, decide_within, demand_decide
from halfway.client.errors import (
    AWAY,
    AlreadyEndedError,
    ClientClosedError,
    HalfwayError,
    RefusedError,
    UnavailableError,
    WrongEventLoopError,
    demand_positive,
)
from halfway.client.ids import require_id
from halfway.client.messages import Message, Outcome, require_messages
from halfway.client.producer.block import Begin, Block
from halfway.client.producer.transaction import NoBarrierError, Transaction, WhenAway, demand_no_block
from halfway.client.threads import call_async

log = logging.getLogger(__name__)

_START_S: Final = 30.0
_START_WITH_STORE_S: Final = 5.0
"""Such a service takes orders without halfway: it waits less for it."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_DECIDE_WITHIN_S: Final = 20.0
"""Less than 30 s, because halfway hands out a fetched check again after that."""


class TransactionOptions(TypedDict, total=False):
    """The keyword parameters of `Halfway.transaction`."""

    id: str | None
    check_after_s: float | None
    confirm: bool


class BlockOptions(TransactionOptions, total=False):
    """Those of a block that opens the local transaction."""

    when_away: WhenAway


class Halfway(GroupCalls):
    """A producer group's client.

    Open it once in the event loop that uses it:

        async with Halfway("http://halfway:8080", group="shop") as halfway:
            async with halfway.transaction([Message(topic="orders", key="42", value={"total": 9.9})]) as transaction:
                ...  # the local transaction

    Any number of tasks of that loop may share it. After a fork, open a new one in the child.
    """

    async def register(
        self,
        *,
        topics: Iterable[str],
        check_urls: Sequence[str] = (),
        policy: Mapping[str, object] | None = None,
        replace: bool = False,
        timeout_s: float = 30.0,
    ) -> Mapping[str, Any]:
        """Register the group, or add to it, and return the group with its policy. To repeat it changes nothing.

        Call it whenever the service starts. The topics are added to those of the group. Without `check_urls` a new
        group fetches its checks (`CheckWorker`), and a registered one keeps its checks as they are; the same holds for
        each part of the policy. With `replace` the group is replaced: what is not named is taken away or gets its
        default. Raises InvalidRetentionError if the client's barrier would delete rows that halfway may still ask
        about, and MissingTableError if its table does not exist. A database that cannot be reached is only logged.
        """
        body: dict[str, object] = {"topics": _list_of("topics", topics)}
        if check_urls or replace:
            body["check"] = {"urls": _list_of("check_urls", check_urls)} if check_urls else {"mode": "pull"}
        if policy is not None:
            body["policy"] = dict(policy)
        group = await self._call("PUT" if replace else "PATCH", self._path, body, timeout_s=timeout_s)
        if self.barrier is not None:
            self.barrier.check_policy(group["policy"])
            try:
                await call_async(self.barrier.learn)
            except HalfwayError:  # the connection factory is unusable, or the table is missing
                raise
            except Exception as error:  # noqa: BLE001 - of any driver; a service may start before its database
                log.warning("the barrier's table could not be read: %s: %s", type(error).__name__, error)
        return group

    async def start(
        self,
        *,
        topics: Iterable[str],
        check_urls: Sequence[str] = (),
        policy: Mapping[str, object] | None = None,
        decide: Decide | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> Mapping[str, Any]:
        """Register the group, then fetch checks and maintain the barrier until the client is closed.

        Without `check_urls`, the client fetches checks and answers them with `decide`, or with the barrier by default.
        A BarrierMaintenance maintains the barrier. The registration may take 30 s by default. If the barrier has a
        store, it may take 5 s, and the client starts without halfway too: then this returns {}, and the group is
        registered in the background.
        """
        topics = _list_of("topics", topics)
        coroutines = _services(self, check_urls, decide)
        group: Mapping[str, Any] = {}
        has_store = self.barrier is not None and self.barrier.store.bounds is not None
        if timeout_s is None:
            timeout_s = _START_WITH_STORE_S if has_store else _START_S
        register = partial(self.register, topics=topics, check_urls=check_urls, policy=policy, replace=replace)
        try:
            group = await register(timeout_s=timeout_s)
        except BaseException as error:
            if isinstance(error, (UnavailableError, *AWAY)) and has_store:
                log.warning("the group %s is registered when halfway is back: %s", self.group, error)
                coroutines.append(when_back(register))
            else:
                for coroutine in coroutines:
                    coroutine.close()
                raise
        for coroutine in coroutines:
            self.keep_running(coroutine)
        return group

    def keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this until the client is closed. If it fails, this is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._services.add(task)
        task.add_done_callback(self._services.discard)
        task.add_done_callback(_log_failure)

    @overload
    def transaction(self, messages: Iterable[Message], begin: Begin, **options: Unpack[BlockOptions]) -> Block: ...

    @overload
    def transaction(
        self, messages: Iterable[Message], begin: None = None, **options: Unpack[TransactionOptions]
    ) -> Transaction: ...

    def transaction(
        self,
        messages: Iterable[Message],
        begin: Begin | None = None,
        *,
        id: str | None = None,
        check_after_s: float | None = None,
        confirm: bool = True,
        when_away: WhenAway = "raise",
    ) -> Transaction | Block:
        """Return a transaction for `async with`. Its body runs only after a durable prepare.

        With `begin`, it opens the local transaction, writes the barrier's row first, and yields the connection: see
        `Block`. Without it, it yields a `Transaction`, for a local transaction that is opened elsewhere, or is none of
        a database. The end of the body commits, and an exception rolls back. With `confirm=False` the end is sent in
        the background. With `when_away="store"` the local transaction stores the messages if halfway does not confirm
        the prepare, and a background task of `start` sends them later. An `id` of your own is a UUIDv7, such as that
        of `transaction_id(key, at)`; InvalidIdError otherwise.
        """
        own = self.new_id() if id is None else require_id(id)
        transaction = Transaction(
            self, require_messages(messages), id=own, new_id=id is None, check_after_s=check_after_s, confirm=confirm
        )
        if begin is not None:
            return Block(transaction, begin, self.barrier, self.group, when_away)
        if when_away != "raise":
            raise TypeError("when_away='store' needs the block that opens the local transaction: give `begin`")
        return transaction

    def demand_no_block(self) -> None:
        """Raise NestedTransactionError if a `transaction` of this client is open in this task."""
        demand_no_block(self)


async def when_back(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call, such as the registration of a group, until halfway is back and lets it succeed."""
    pause_s = _FIRST_PAUSE_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            await call()
        except (ClientClosedError, WrongEventLoopError):
            raise
        except HalfwayError as error:
            log.warning("halfway is not back yet: %s", error)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        else:
            return


def _list_of(name: str, texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name} is a str: give a list, [{texts!r}]")
    return list(texts)


class CheckWorker:
    """Fetches a group's checks and ends their transactions."""

    def __init__(self, client: GroupCalls, decide: Decide, *, side_by_side: int = 16, wait_s: float = 20.0) -> None:
        """Configure the worker: it answers up to `side_by_side` checks concurrently, and a poll waits for `wait_s`."""
        demand_decide(decide, has_loop=True)
        demand_positive(wait_s=wait_s)
        demand_positive(1, side_by_side=side_by_side)
        self._client = client
        self._decide = decide
        self._side_by_side = side_by_side
        self._wait_s = wait_s

    async def run(self, *, patiently: bool = False) -> None:
        """Run until cancelled. Failures are logged, and halfway asks again.

        Raises ClientClosedError, WrongEventLoopError, and RefusedError if halfway refuses the first call, such as
        UnknownGroupError before the group is registered. With `patiently`, the first call is retried too.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                checks = await self._client.fetch_checks(wait_s=self._wait_s, max_checks=self._side_by_side)
            except (ClientClosedError, WrongEventLoopError):
                raise
            except HalfwayError as error:
                if isinstance(error, RefusedError) and not patiently:
                    raise
                log.warning("halfway gave no checks: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)  # a group that has check URLs gets no checks for a long time
                continue
            pause_s = _FIRST_PAUSE_S
            patiently = True  # a later refusal may be temporary: a key, a group or a proxy may be in change
            await asyncio.gather(*map(self._answer, checks))

    async def _answer(self, document: Mapping[str, Any]) -> None:
        outcome: Outcome = "unknown"
        try:
            check = Check.from_json(document, is_verified=True)
            outcome = await decide_within(check, self._decide, _DECIDE_WITHIN_S)
            await self._client.end(check.id, outcome, check_id=check.check_id)
        except RefusedError as error:
            if isinstance(error, AlreadyEndedError) and outcome != "unknown":
                log.exception("a check was answered with %s, but the transaction has the opposite outcome", outcome)
            else:
                log.info("the transaction of a check was ended by another caller: %s", error)
        except HalfwayError as error:
            log.warning("a check was not answered: %s", error)


def _services(client: GroupCalls, check_urls: Sequence[str], decide: Decide | None) -> list[Coroutine[Any, Any, None]]:
    """Return the coroutines to run until the client is closed; raises NoBarrierError if nothing can answer checks."""
    coroutines = []
    if not check_urls:
        if decide is None and client.barrier is not None:
            decide = client.barrier.decide
        if decide is None:
            raise NoBarrierError("nothing answers the group's checks: give the client a barrier, or `decide`")
        coroutines.append(CheckWorker(client, decide).run(patiently=True))
    if client.barrier is not None:
        coroutines.append(BarrierMaintenance(client, client.barrier).run())
        if client.barrier.store.bounds is not None:
            coroutines.append(StoredSender(client, client.barrier).run())
    return coroutines


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the client failed", exc_info=error)
