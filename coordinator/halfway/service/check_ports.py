"""The port for checks of producer groups, which `halfway.checkback` and `halfway.memory` implement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.domain.records import Group, Message
    from halfway.domain.transaction import Outcome


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One check: a question to a producer group."""

    check_id: str
    id: str
    group: str
    prepared_at: int
    attempt: int
    messages: tuple[Message, ...]


class CheckAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request of a check, and its result."""

    host: str
    """The endpoint's scheme, host and port; the rest of its URL may hold a secret."""
    sent: bool
    answered: bool
    """Whether a verdict was received."""
    status: int | None
    detail: str
    excerpt: str | None
    """The beginning of the body, as far as it was read."""
    duration_s: float


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a check.

    `sent` is whether the request was sent on a connection, `answered` whether a verdict was received. `reachable` is
    False if the endpoint refused, hung or could not be found: the circuit breaker counts those.
    """

    outcome: Outcome
    sent: bool
    answered: bool
    reachable: bool
    detail: str
    remark: str | None = None
    attempts: tuple[CheckAttempt, ...] = ()
    """In the order in which they were made."""


class CheckCaller(Protocol):
    """Sends checks to a producer group over HTTP (docs/protocol.md#scan-and-check-back)."""

    def refusal(self, url: str) -> str | None:
        """Return why the operator does not allow an endpoint, None if it is allowed. The reason is shown to users."""

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Call the endpoints in the given order, the next one when one fails, within a bounded time. Never raises."""
