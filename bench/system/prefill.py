"""Prepares many transactions and leaves them pending."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from bench.load.wire import Requests, items_in, split
from bench.system.rig import Rig, RigError
from halfway.embedded.ports import HOST

_CALLERS: Final = 8
_BATCH: Final = 100
_READ: Final = 65_536


def fill(rig: Rig, group: str, count: int) -> None:
    """Prepare at least `count` transactions of a group in batches, as fast as the coordinator answers."""
    asyncio.run(_fill(rig, group, count))


async def _fill(rig: Rig, group: str, count: int) -> None:
    requests = Requests(host=f"{HOST}:{rig.port}", topic=rig.topic, batch=_BATCH, groups=(group,))
    left = [-(-count // _BATCH)]
    async with asyncio.TaskGroup() as tasks:
        for _ in range(_CALLERS):
            tasks.create_task(_caller(rig.port, requests, left))


async def _caller(port: int, requests: Requests, left: list[int]) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        while left[0] > 0:
            left[0] -= 1
            writer.write(requests.next_prepare()[1])
            received = b""
            while (answer := split(received)) is None:
                more = await reader.read(_READ)
                if not more:
                    raise RigError("a connection was closed")
                received += more
            refused = answer[0] != HTTPStatus.OK or any(
                status != HTTPStatus.CREATED for status, _ in items_in(answer[1])[0]
            )
            if refused:
                raise RigError(f"a batch of prepares was answered {answer[0]}: {answer[1][:300]!r}")
    finally:
        writer.close()
