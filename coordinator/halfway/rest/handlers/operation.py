"""What one call of the REST interface is, and how a request finds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPMethod, HTTPStatus
from typing import Any, Final

from halfway.domain import errors
from halfway.domain.errors import HalfwayError
from halfway.domain.principal import RULES, Permission
from halfway.rest.handlers.calls import Answer, Call
from halfway.rest.responses import errors as rest_errors
from halfway.rest.responses.errors import MethodNotAllowedError, UnknownPathError

Handler = Callable[[Call], Awaitable[Answer]]
Errors = tuple[type[HalfwayError], ...]

_PARAMETER_AT: Final = 3
"""The path parameter is always the third part: `/v1/groups/{group}/checks`."""

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


class Routes:
    """Finds the operation of a request."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Index the table by path and method; KeyError if nobody has said who may do one of them."""
        self._paths: dict[str, dict[str, Operation]] = {}
        for operation in operations:
            RULES[operation.access]
            self._paths.setdefault(_shape(operation.path), {})[operation.method] = operation

    def find(self, method: str, path: str) -> tuple[Operation, str]:
        """Return the operation and the parameter in its path, still quoted; "" if it has none.

        Raises:
            UnknownPathError, MethodNotAllowedError: there is none.

        """
        methods, parameter = self._paths.get(path), ""
        if methods is None:
            parts = path.split("/")
            if len(parts) > _PARAMETER_AT:
                parameter, parts[_PARAMETER_AT] = parts[_PARAMETER_AT], "{}"
                methods = self._paths.get("/".join(parts))
            if methods is None or not parameter:
                raise UnknownPathError
        operation = methods.get(method)
        if operation is None:
            shown = methods.get(HTTPMethod.GET)
            if method == HTTPMethod.HEAD and shown is not None and not shown.waits:
                return shown, parameter
            raise MethodNotAllowedError(method, sorted(methods))
        return operation, parameter


def _shape(path: str) -> str:
    parts = path.split("/")
    return "/".join("{}" if part.startswith("{") else part for part in parts)
