"""The client of a producer: register the group, answer its checks, open transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from halfway.client.errors import HalfwayError
from halfway.client.messages import Message
from halfway.client.producer.background import log_failure, services
from halfway.client.producer.calls import GroupCalls
from halfway.client.producer.transaction import Transaction, demand_no_block
from halfway.client.threads import call_async

if TYPE_CHECKING:
    from halfway.client.checks.answers import Decide

log = logging.getLogger(__name__)


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
        timeout_s: float = 30.0,
    ) -> Mapping[str, Any]:
        """Register the group, then fetch checks and maintain the barrier until the client is closed.

        Without `check_urls`, the client fetches checks and answers them with `decide`, or with the barrier by default.
        A BarrierMaintenance maintains the barrier.
        """
        coroutines = services(self, check_urls, decide)
        try:
            group = await self.register(
                topics=topics, check_urls=check_urls, policy=policy, replace=replace, timeout_s=timeout_s
            )
        except BaseException:
            for coroutine in coroutines:
                coroutine.close()
            raise
        for coroutine in coroutines:
            task = asyncio.get_running_loop().create_task(coroutine)
            self._services.add(task)
            task.add_done_callback(log_failure)
        return group

    def transaction(
        self,
        messages: Iterable[Message],
        *,
        id: str | None = None,
        check_after_s: float | None = None,
        confirm: bool = True,
    ) -> Transaction:
        """Return a transaction for `async with`. Its body runs only after a durable prepare.

        The end of the body commits, an exception rolls back, and an uncertain outcome is left to check-back: see
        `Transaction`. With `confirm=False` the end is sent in the background.
        """
        return Transaction(
            self, tuple(messages), id=id or uuid4().hex, new_id=id is None, check_after_s=check_after_s, confirm=confirm
        )

    def demand_no_block(self) -> None:
        """Raise NestedTransactionError if a `transaction` of this client is open in this task."""
        demand_no_block(self)


def _list_of(name: str, texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name} is a str: give a list, [{texts!r}]")
    return list(texts)
