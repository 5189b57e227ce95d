"""Background tasks while a client is open: fetching checks, and maintaining the barrier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from halfway.client.barrier.maintenance import BarrierMaintenance
from halfway.client.sending import NoBarrierError
from halfway.client.worker import CheckWorker

if TYPE_CHECKING:
    from halfway.client.checks import Decide
    from halfway.client.client import Halfway

log = logging.getLogger(__name__)


def beside(client: Halfway, check_urls: Sequence[str], decide: Decide | None) -> list[Coroutine[Any, Any, None]]:
    """Return the tasks to run until the client is closed; raises NoBarrierError if nothing can answer checks."""
    running = []
    if not check_urls:
        if decide is None and client.barrier is not None:
            decide = client.barrier.decide
        if decide is None:
            raise NoBarrierError("nothing answers the group's checks: give the client a barrier, or `decide`")
        running.append(CheckWorker(client, decide).run(patiently=True))
    if client.barrier is not None:
        running.append(BarrierMaintenance(client, client.barrier).run())
    return running


def tell(task: asyncio.Task[None]) -> None:
    """Log the error that ended a task, if one did."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task in the background of the client ended", exc_info=error)
