"""The messages of one database transaction: prepared before its commit, ended after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol
from uuid import uuid4

from halfway.client.errors import HalfwayError
from halfway.client.messages import Message
from halfway.client.outcome import Outcome


class MixedProducersError(HalfwayError):
    """Two producers send in one database transaction: send all its messages with one of them."""


class NoBarrierError(HalfwayError, TypeError):
    """The client has no barrier, which says after a crash whether the database has committed: give it one."""


class Endings(Protocol):
    """What is called of a client."""

    def prepare(self, messages: Iterable[Message], *, id: str) -> None:  # noqa: A002 - what REST calls it
        """Store messages out of sight."""

    def end(
        self,
        id: str,  # noqa: A002 - as above
        outcome: Outcome,
        *,
        remark: str | None = None,
        confirm: bool,
    ) -> None:
        """End a transaction."""


class Sending:
    """The messages of one database transaction, which are one transaction of halfway's."""

    def __init__(self) -> None:
        """Choose the id."""
        self.id: Final = uuid4().hex
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        """Add a message; raises UnserialisableMessageError here, where it is sent, not at the commit."""
        message.as_json()
        self._messages.append(message)

    def keep(self, count: int) -> None:
        """Drop all messages but the first `count`: what came later was rolled back to a savepoint."""
        del self._messages[count:]

    def commit(
        self, client: Endings, *, insert: Callable[[str], None], commit: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Commit the database transaction, and with it the messages.

        1. Write the barrier's row. It is locked until the commit, so a check that comes meanwhile is told `unknown`.
        2. Prepare. If this or the row fails, the database transaction is rolled back.
        3. Commit the database transaction. If this raises, it may have committed: check-back asks the barrier.
        4. Send the end, without waiting for it: the local outcome stands whatever becomes of it.
        """
        if not self._messages:
            commit()
            return
        try:
            insert(self.id)
            client.prepare(self._messages, id=self.id)
        except BaseException:
            with contextlib.suppress(Exception):  # the connection is lost, so the database rolls back by itself
                undo()
            raise
        try:
            commit()
        except BaseException as error:
            self._end(client, "unknown", type(error).__name__)
            raise
        self._end(client, "commit", None)

    def _end(self, client: Endings, outcome: Outcome, remark: str | None) -> None:
        with contextlib.suppress(HalfwayError):  # a closed client: check-back asks
            client.end(self.id, outcome, remark=remark, confirm=False)
