"""The port `GroupStore`: the registered groups, read back from `<prefix>groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Final
from weakref import WeakValueDictionary

from confluent_kafka import Message

from halfway.domain.errors import KafkaUnavailableError, MessageTooLargeError
from halfway.domain.records import Group
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.compacted_table import CompactedTable
from halfway.kafka.log.exclusive_writer import ExclusiveWriter, FencedError, Record
from halfway.kafka.records.codec import KIND_GROUP, encode_group, record_headers
from halfway.kafka.records.validation import group_in
from halfway.service.ports import Observer

_RETRY_S: Final = (0.01, 0.05)
_ATTEMPT_S: Final = 5.0
_FETCH_MS: Final = 50
"""The end of a Kafka transaction is not a record: the consumer learns of it at the end of an empty fetch."""
_RANDOM: Final = SystemRandom()


@dataclass(frozen=True, eq=False)
class _Change:
    """A change that waits to be made."""

    name: str
    decide: Callable[[Group | None], Group | None]
    done: asyncio.Future[None]

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class KafkaGroups(CompactedTable[Group]):
    """The groups by name."""

    not_read_event = "groups_not_read"

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        super().__init__(config, "groups", observer, **{"fetch.wait.max.ms": _FETCH_MS})
        self._groups: dict[str, Group] = {}
        self._exclusive = ExclusiveWriter(config, self._topic, "groups")
        self._waiting: list[_Change] = []
        self._changing: asyncio.Task[None] | None = None
        self._reason = "others are being changed"
        self._group_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The changes of a group run one after the other, so that a busy group does not delay the others."""

    def get(self, name: str) -> Group | None:
        """Return a group by its name."""
        return self._groups.get(name)

    def all(self) -> Sequence[Group]:
        """Return every group, by name."""
        return [self._groups[name] for name in sorted(self._groups)]

    async def stop(self) -> None:
        """End the threads; waiting changes are not made."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait([self._changing])
        await self._exclusive.stop()
        await super().stop()

    async def change(self, name: str, decide: Callable[[Group | None], Group | None], *, deadline: float) -> None:
        """See the port. Changes of one group wait for each other; changes of several groups are written together."""
        await self.refresh(deadline=deadline)
        if decide(self.get(name)) == self.get(name):  # a caller that may not change it holds up no other
            return
        change = _Change(name, decide, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout_at(deadline), self._group_locks.setdefault(name, asyncio.Lock()):
                self._waiting.append(change)
                if self._changing is None:
                    self._changing = asyncio.create_task(self._change_all())
                await change.done
        except TimeoutError:
            raise KafkaUnavailableError(f"group {name!r} could not be changed in time: {self._reason}") from None

    async def _change_all(self) -> None:
        """Make the waiting changes. If another instance wrote in between, decide them again."""
        try:
            while self._waiting:
                try:
                    await self._change_some()
                except (FencedError, KafkaUnavailableError) as error:
                    self._reason = str(error)
                    await asyncio.sleep(_RANDOM.uniform(*_RETRY_S))
                    self._waiting = [change for change in self._waiting if not change.done.done()]
        finally:
            self._changing = None
            waiting, self._waiting = self._waiting, []
            for change in waiting:
                change.fail(KafkaUnavailableError("groups can no longer be changed: halfway is stopping"))

    async def _change_some(self) -> None:
        """Decide and write the waiting changes in one Kafka transaction (docs/protocol.md#changes-of-groups)."""
        deadline = asyncio.get_running_loop().time() + _ATTEMPT_S
        await self._exclusive.fence_others(deadline=deadline)  # Step 1
        await self.refresh(deadline=deadline)  # Step 2
        changes, self._waiting = self._waiting, []
        decided = [(change, record) for change in changes if (record := self._decide(change)) is not None]
        if not decided:
            return
        try:
            offset = await self._exclusive.write([record for _, record in decided], deadline=deadline)  # Step 3
            await self._read_up_to(offset + 1, deadline)
        except MessageTooLargeError as error:
            for change, _ in decided:
                change.fail(error)
            return
        except BaseException:
            self._exclusive.give_up()  # nothing is decided before it is read
            self._waiting = [*(change for change, _ in decided), *self._waiting]
            raise
        for change, _ in decided:
            if not change.done.done():
                change.done.set_result(None)

    def _decide(self, change: _Change) -> Record | None:
        """Return the record that makes a change; None if nothing changes, or no caller waits for it any more."""
        if change.done.done():
            return None
        before = self.get(change.name)
        try:
            after = change.decide(before)
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            change.fail(error)
            return None
        if after == before:
            change.done.set_result(None)
            return None
        headers = record_headers(KIND_GROUP, change.name, "deleted" if after is None else "registered")
        return change.name.encode(), None if after is None else encode_group(after), headers

    def _decode(self, message: Message) -> tuple[str, Group | None]:
        return group_in(message)

    def _changed(self, name: str, value: Group | None) -> None:
        if value is None:
            self._groups.pop(name, None)
        else:
            self._groups[name] = value
