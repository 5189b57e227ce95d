"""The background tasks of an open client: fetched checks are answered, and the barrier is maintained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

from halfway.client.barrier.maintenance import BarrierMaintenance
from halfway.client.checks.answers import Check, Decide, decide_within
from halfway.client.errors import AlreadyEndedError, ClientClosedError, HalfwayError, RefusedError, WrongEventLoopError
from halfway.client.messages import Outcome
from halfway.client.producer.calls import GroupCalls
from halfway.client.producer.transaction import NoBarrierError

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_DECIDE_WITHIN_S: Final = 20.0
"""Less than 30 s, because halfway hands out a fetched check again after that."""


class CheckWorker:
    """Fetches a group's checks and ends their transactions."""

    def __init__(self, client: GroupCalls, decide: Decide, *, side_by_side: int = 16, wait_s: float = 20.0) -> None:
        """Configure the worker: it answers up to `side_by_side` checks concurrently, and a poll waits for `wait_s`."""
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


def services(client: GroupCalls, check_urls: Sequence[str], decide: Decide | None) -> list[Coroutine[Any, Any, None]]:
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
    return coroutines


def log_failure(task: asyncio.Task[None]) -> None:
    """Log the error of a task if it failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the client failed", exc_info=error)
