"""The messages of one database transaction, which are prepared before its commit and ended after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol
from uuid import uuid4

from halfway.client.errors import HalfwayError
from halfway.client.messages import Message
from halfway.client.outcome import Outcome

log = logging.getLogger(__name__)


class MixedProducersError(HalfwayError):
    """Two producers send in one database transaction: send all its messages with one of them."""


class NoBarrierError(HalfwayError, TypeError):
    """The client has no barrier, which is needed to know after a crash whether the database committed: give it one."""


class SendingClient(Protocol):
    """The client calls that `Sending` needs."""

    def prepare(self, messages: Iterable[Message], *, id: str, new_id: bool) -> None:  # noqa: A002 - what REST calls it
        """Prepare messages."""

    def begin_end(
        self,
        id: str,  # noqa: A002 - as above
        outcome: Outcome,
        *,
        remark: str | None = None,
    ) -> Callable[[], None]:
        """Send an end; return a function that waits until it is final or given up."""


class Sending:
    """The messages of one database transaction. They are one halfway transaction."""

    def __init__(self) -> None:
        """Generate the id."""
        self.id: Final = uuid4().hex
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        """Add a message; raises UnserialisableMessageError already here, not at the commit."""
        message.as_json()
        self._messages.append(message)

    def keep(self, count: int) -> None:
        """Keep only the first `count` messages, after a rollback to a savepoint."""
        del self._messages[count:]

    def commit(
        self,
        client: SendingClient,
        *,
        insert: Callable[[str], None],
        commit: Callable[[], None],
        rollback: Callable[[], None],
        confirm: bool,
        afterwards: Callable[[Callable[[], None]], None] = lambda wait: wait(),
    ) -> None:
        """Commit the database transaction, and with it the messages.

        1. Write the barrier's row. It is locked until the commit, so the answer to a check in the meantime is
           `unknown`.
        2. Prepare. If this or the row fails, roll the database transaction back.
        3. Commit the database transaction. If this raises, it may have committed: check-back asks the barrier.
        4. Send the end at once. It continues in the background even if an exception is raised from now on. The local
           outcome is final: if the end fails, this is logged, not raised, and check-back resolves the transaction.
        5. With `confirm`, wait until the end is final, at most `end_timeout_s`. `afterwards` may delay this wait until
           the database connection is returned to its pool.
        """
        if not self._messages:
            commit()
            return
        try:
            insert(self.id)
            client.prepare(self._messages, id=self.id, new_id=True)
        except BaseException:
            with contextlib.suppress(Exception):  # if the connection is lost, the database rolls back by itself
                rollback()
            raise
        try:
            commit()
        except BaseException as error:
            self._begin_end(client, "unknown", type(error).__name__)
            raise
        wait = self._begin_end(client, "commit", None)
        if confirm:
            afterwards(wait)

    def _begin_end(self, client: SendingClient, outcome: Outcome, remark: str | None) -> Callable[[], None]:
        """Send the end, and return a function that waits for it.

        Neither raises an exception: it would look as if the database had not committed.
        """
        try:
            wait = client.begin_end(self.id, outcome, remark=remark)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("the %s of transaction %s is left to check-back: %s", outcome, self.id, error)
            return lambda: None

        def wait_quietly() -> None:
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("the wait for the %s of transaction %s failed: %s", outcome, self.id, error)

        return wait_quietly
