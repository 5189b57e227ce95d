"""Background tasks of an open client: they fetch checks and maintain the barrier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from halfway.client.barrier.maintenance import BarrierMaintenance
from halfway.client.checks.fetching import CheckWorker
from halfway.client.producer.transaction import NoBarrierError

if TYPE_CHECKING:
    from halfway.client.checks.answers import Decide
    from halfway.client.producer.client import Halfway

log = logging.getLogger(__name__)


def services(client: Halfway, check_urls: Sequence[str], decide: Decide | None) -> list[Coroutine[Any, Any, None]]:
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
