"""First prepares and payloads in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from halfway.domain.errors import KafkaUnavailableError, MessageTooLargeError, OutcomeUnknownError, OverloadedError
from halfway.domain.records import Half, Parked
from halfway.domain.transaction import State
from halfway.memory.faults import Faults
from halfway.memory.log import MemoryLog, half_headers
from halfway.service.ports import Appended

T = TypeVar("T")


class MemoryHalfLog:
    """The port `service.ports.HalfLog`."""

    def __init__(self, log: MemoryLog, faults: Faults, *, max_record_bytes: int) -> None:
        """Refuse halves with a payload above `max_record_bytes`."""
        self._log = log
        self._faults = faults
        self._max_record_bytes = max_record_bytes

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        """Append half records; their offsets come later; errors as in the port."""
        loop = asyncio.get_running_loop()
        refused: list[tuple[T, int | Exception]] = []
        for half, token in halves:
            if half.size > self._max_record_bytes:
                detail = f"the transaction takes {half.size} bytes, {self._max_record_bytes} at most: send less"
                refused.append((token, MessageTooLargeError(detail)))
            elif loop.time() >= deadline:
                refused.append((token, OverloadedError("no time was left to write")))
            else:
                task = loop.create_task(self._append(shard, half))
                task.add_done_callback(partial(_pass_on, token, appended))
        if refused:
            appended(refused)

    async def _append(self, shard: int, half: Half) -> int:
        ambiguous = self._faults.take_append()
        await asyncio.sleep(0)
        if ambiguous is False:
            raise OutcomeUnknownError("the prepare was not confirmed", id=half.id)
        headers = half_headers(half, State.PREPARED)
        offset = self._log.shards[shard].half.append(half.id, half, headers)
        await asyncio.sleep(0)
        if ambiguous:
            raise OutcomeUnknownError("the prepare was not confirmed", id=half.id)
        return offset

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset, after verifying its key; errors as in the port."""
        await self._answering(deadline)
        record = self._log.shards[shard].half.at(offset)
        if record is None or record.key != transaction_id or not isinstance(record.value, Half):
            raise KafkaUnavailableError(f"half[{shard}]@{offset} does not hold {transaction_id!r}")
        return record.value

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset, after verifying its key; errors as in the port."""
        await self._answering(deadline)
        record = self._log.shards[shard].parked.at(offset)
        if record is None or record.key != transaction_id or not isinstance(record.value, Parked):
            raise KafkaUnavailableError(f"parked[{shard}]@{offset} does not hold {transaction_id!r}")
        return record.value

    async def half_end(self, shard: int, *, deadline: float) -> int:
        """Return the end offset of half[s]."""
        await self._answering(deadline)
        return self._log.shards[shard].half.end

    async def _answering(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not answer in time")


def _pass_on(token: T, appended: Appended[T], done: asyncio.Task[int]) -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is None:
        appended([(token, done.result())])
    elif isinstance(error, Exception):
        appended([(token, error)])
