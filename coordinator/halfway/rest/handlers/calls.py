"""The calls that handlers take and the answers that they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from halfway.domain.errors import UnauthenticatedError
from halfway.rest.responses.errors import MalformedJsonError, invalid
from halfway.rest.responses.problems import encoded, problem, retry_after

if TYPE_CHECKING:
    from aiohttp import web

    from halfway.domain.errors import HalfwayError
    from halfway.domain.principal import Principal
    from halfway.rest.requests.validation import Validation
    from halfway.rest.responses.unsent import Unsent
    from halfway.service.coordinator import Coordinator

ENCODER = msgspec.json.Encoder()
SUBPROTOCOL = "halfway.stream.v1"
"""Of the WebSocket (docs/stream.md#connect)."""
_NOTHING_BYTES = 1024
"""A longer body is never an empty object."""


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


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer: a body of JSON, or none."""

    status: int
    body: bytes | None
    headers: tuple[tuple[str, str], ...] = ()
    error_code: str | None = None


def answer(status: int, body: Any = None, *headers: tuple[str, str]) -> Answer:
    """Answer with a model, or with nothing."""
    return Answer(status=status, body=None if body is None else ENCODER.encode(body), headers=headers)


def refusal(error: HalfwayError, *, instance: str | None = None) -> Answer:
    """Answer with a problem document."""
    document = problem(error)
    if instance is not None:
        document["instance"] = instance
    wait = retry_after(error)
    headers = () if wait is None else (("Retry-After", wait),)
    if isinstance(error, UnauthenticatedError):
        headers = (("WWW-Authenticate", 'Bearer realm="halfway"'),)
    return Answer(status=document["status"], body=encoded(document), headers=headers, error_code=error.code)


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
