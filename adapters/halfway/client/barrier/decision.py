"""Answering a check from the barrier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from halfway.client.barrier.barrier import Barrier, Outcome, Steps
from halfway.client.barrier.drivers import carry_out, carry_out_async
from halfway.client.checks import Check

log = logging.getLogger(__name__)

Connect = Callable[[], AbstractContextManager[Any]]
"""Gives a connection with a transaction that commits when the context is left: SQLAlchemy's `engine.begin`."""
ConnectAsync = Callable[[], AbstractAsyncContextManager[Any]]
"""The same of an asynchronous driver: the `begin` of SQLAlchemy's asynchronous engine."""


def decide(barrier: Barrier, connect: Connect) -> Callable[[Check], Awaitable[Outcome]]:
    """Return what answers checks from the barrier through a synchronous driver, in a thread."""

    def run(check: Check) -> Outcome:
        decision = _decision(barrier, check)
        try:
            steps = next(decision)
            while True:
                try:
                    with connect() as connection:
                        result = carry_out(steps, connection)
                except Exception as error:  # noqa: BLE001 - the decision says what follows
                    steps = decision.throw(error)
                else:
                    steps = decision.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the outcome

    async def in_thread(check: Check) -> Outcome:
        return await asyncio.to_thread(run, check)

    return in_thread


def decide_async(barrier: Barrier, connect: ConnectAsync) -> Callable[[Check], Awaitable[Outcome]]:
    """Return what answers checks from the barrier through an asynchronous driver."""

    async def run(check: Check) -> Outcome:
        decision = _decision(barrier, check)
        try:
            steps = next(decision)
            while True:
                try:
                    async with connect() as connection:
                        result = await carry_out_async(steps, connection)
                except Exception as error:  # noqa: BLE001 - the decision says what follows
                    steps = decision.throw(error)
                else:
                    steps = decision.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the outcome

    return run


def _decision(barrier: Barrier, check: Check) -> Generator[Steps[Any], Any, Outcome]:
    """Yield the transactions that answer a check, one after the other, and return the outcome.

    Each looks in a transaction of its own, so that no isolation level hides what was committed in between.
    """
    outcome: Outcome | None = yield barrier.look(check.id)
    if outcome is not None:
        return outcome
    if barrier.may_be_cleaned(check.prepared_at):
        log.warning("transaction %s is older than the barrier remembers: it is left open", check.id)
        return "unknown"
    try:
        first: bool = yield barrier.take_place(check.id)
    except Exception as error:  # noqa: BLE001 - any: the row is locked by a local transaction that is open
        log.info("the check of %s is answered unknown: %s", check.id, type(error).__name__)
        return "unknown"
    if first:
        return "rollback"
    outcome = yield barrier.look(check.id)
    return outcome or "unknown"
