"""What the calls of the REST interface are, and what a handler is given of one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
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
    from halfway.rest.responses.unsent import Unsent
    from halfway.service.coordinator import Coordinator

SUBPROTOCOL: Final = "halfway.stream.v1"
"""Of the WebSocket (docs/stream.md#connect)."""
_NOTHING_BYTES: Final = 1024
"""A longer body is never an empty object."""

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

    `responses` maps a status to its description and model; `errors` are its own errors, beside `ALWAYS`. `waits` is set
    if it may wait long for an event, so it takes no place among the requests in flight; its answer must be read, so
    HEAD is refused. `upgrades` is set if the connection is a stream after a good answer. `begins` is set if it begins a
    transaction, so it is held up first under overload.
    """

    id: str
    method: HTTPMethod
    path: str
    summary: str
    handler: Handler
    access: Permission
    """What the caller must be allowed to do; there is no default, so that none is forgotten."""
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
    """Whether its answer is a stream of events, without an end."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls share."""

    coordinator: Coordinator
    validation: Validation
    openapi: bytes
    max_batch_items: int
    unsent: Unsent


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One request: the parameter of its path, its body, and its deadline on the loop's clock."""

    site: Site
    request: web.BaseRequest
    parameter: str
    deadline: float
    principal: Principal
    """Who calls: for every item of the request."""
    id: str
    """Of the request, as in the header X-Request-Id and in the log."""
    body: bytes = b""

    @property
    def has_reader(self) -> bool:
        """Whether the client is still connected and reads answers."""
        transport = self.request.transport
        return transport is not None and not transport.is_closing() and self.site.unsent.has_room()

    @property
    def query(self) -> tuple[Mapping[str, str], list[str]]:
        """The query's parameters, and the names of those given more than once."""
        pairs = self.request.rel_url.query
        given: dict[str, str] = {}
        repeated = []
        for name, value in pairs.items():
            if name in given:
                repeated.append(name)
            given[name] = value
        return given, repeated


def nothing_in(body: bytes) -> None:
    """Accept no body or an empty object; raise MalformedJsonError or InvalidRequestError for any other."""
    if not body:
        return
    if len(body) > _NOTHING_BYTES:
        raise invalid([("", "this call takes no fields: send no body, or {}")])
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedJsonError(f"the body is not one JSON document: {error}") from None
    if document != {}:
        raise invalid([("", "this call takes no fields: send no body, or {}")])
