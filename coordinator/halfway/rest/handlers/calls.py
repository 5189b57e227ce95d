"""The calls of the REST interface: their descriptions, and the request that a handler receives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPMethod, HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halfway.domain import errors
from halfway.rest.responses import errors as rest_errors
from halfway.rest.responses.errors import MalformedJsonError, invalid

if TYPE_CHECKING:
    from aiohttp import web

    from halfway.domain.errors import HalfwayError
    from halfway.domain.principal import Permission, Principal
    from halfway.rest.requests.validation import Validation
    from halfway.rest.responses.answer import Answer
    from halfway.rest.responses.refusal_log import RefusalLog
    from halfway.rest.responses.slices import GiveWay
    from halfway.rest.responses.unsent import Unsent
    from halfway.service.coordinator import Coordinator
    from halfway.service.fairness import Places

SUBPROTOCOL: Final = "halfway.stream.v1"
"""The subprotocol of the WebSocket (docs/stream.md#connect)."""
_MAX_EMPTY_BYTES: Final = 1024
"""A longer body is refused without parsing it: it is not an empty object."""

Handler = Callable[["Call"], Awaitable["Answer"]]
Errors = tuple[type["HalfwayError"], ...]

ALWAYS: Final[Errors] = (
    rest_errors.BadHttpError,
    errors.UnauthenticatedError,
    errors.ForbiddenError,
    errors.OverloadedError,
    rest_errors.InternalError,
    errors.ShuttingDownError,
    errors.KafkaUnavailableError,
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call: its path, parameters and answers.

    `responses` maps a status to its description and model. `errors` are the errors of this call, in addition to
    `ALWAYS`. `waits` is set if the call may wait long for an event: it does not count among the requests in flight, and
    HEAD is refused because its answer must be read. `upgrades` is set if the connection becomes a stream after a
    successful answer. `begins` is set if the call begins a transaction: under overload such calls are delayed first.
    """

    id: str
    method: HTTPMethod
    path: str
    summary: str
    handler: Handler
    access: Permission
    """The permission that the caller needs. There is no default, so that no call goes without one."""
    responses: Mapping[HTTPStatus, tuple[str, Any]]
    errors: Errors = ()
    parameter: tuple[str, Any] | None = None
    query: Any = None
    body: Any = None
    takes_body: bool = False
    headers: Sequence[str] = ()
    waits: bool = False
    upgrades: bool = False
    begins: bool = False
    listens: bool = False
    """Whether the answer is an endless stream of events."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that all calls share."""

    coordinator: Coordinator
    validation: Validation
    openapi: bytes
    max_batch_items: int
    unsent: Unsent
    large_answers: Places
    refusals: RefusalLog


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One request: the parameter in its path, its body, and its deadline on the event loop's clock."""

    site: Site
    request: web.BaseRequest
    parameter: str
    deadline: float
    principal: Principal
    """The caller, for every item of the request."""
    id: str
    """The id of the request, as in the header X-Request-Id and in the log."""
    body: bytes = b""
    group: str | None = None
    """The group in the body, for the log."""
    subject: str | None = None
    """The id of a transaction in the body, for the log."""

    @property
    def has_reader(self) -> bool:
        """Whether the client is still connected and reads its answers."""
        transport = self.request.transport
        return transport is not None and not transport.is_closing() and self.site.unsent.has_room(self.principal.group)

    @asynccontextmanager
    async def large_answer(self) -> AsyncIterator[GiveWay]:
        """Hold a place to make a large answer, in slices: give way before each. Few are made at once."""
        caller = self.principal.group
        try:
            await self.site.large_answers.enter(caller, until=self.deadline)
        except TimeoutError:
            raise errors.OverloadedError("too many large answers are being made: try again later") from None
        try:
            yield partial(self.site.coordinator.turns.next, caller)
        finally:
            self.site.large_answers.leave()

    @property
    def query(self) -> tuple[Mapping[str, str], list[str]]:
        """The query parameters, and the names that occur more than once."""
        parameters: dict[str, str] = {}
        repeated = []
        for name, value in self.request.rel_url.query.items():
            if name in parameters:
                repeated.append(name)
            parameters[name] = value
        return parameters, repeated


def nothing_in(body: bytes) -> None:
    """Accept an absent body or an empty object.

    Raises:
        MalformedJsonError: the body is not JSON.
        InvalidRequestError: it is JSON, but not an empty object, or it is too long.

    """
    if not body:
        return
    if len(body) > _MAX_EMPTY_BYTES:
        raise invalid([("", "this call takes no fields: send no body, or {}")])
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedJsonError(f"the body is not one JSON document: {error}") from None
    if document != {}:
        raise invalid([("", "this call takes no fields: send no body, or {}")])
