"""The one table of calls: the server routes by it, and OpenAPI is generated from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPMethod, HTTPStatus
from typing import Any, Final

from halfway.domain import errors
from halfway.domain.errors import HalfwayError
from halfway.rest.handlers import batch, handlers
from halfway.rest.handlers.calls import CAUSE_HEADER, Answer, Call
from halfway.rest.requests import models
from halfway.rest.responses import errors as rest_errors
from halfway.rest.responses.errors import MethodNotAllowedError, UnknownPathError

Handler = Callable[[Call], Awaitable[Answer]]
Errors = tuple[type[HalfwayError], ...]

_PARAMETER_AT: Final = 3
"""The path parameter is always the third part: `/v1/groups/{group}/checks`."""

ALWAYS: Final[Errors] = (
    rest_errors.BadHttpError,
    errors.ForbiddenError,
    errors.OverloadedError,
    rest_errors.InternalError,
    errors.ShuttingDownError,
)
BODY: Final[Errors] = (
    rest_errors.MalformedJsonError,
    rest_errors.EmptyBodyError,
    rest_errors.BodyTimeoutError,
    rest_errors.BodyTooLargeError,
    rest_errors.UnsupportedMediaTypeError,
    errors.InvalidRequestError,
)
NO_FIELDS: Final[Errors] = tuple(error for error in BODY if error is not rest_errors.EmptyBodyError)
BUSY: Final[Errors] = (errors.ShardUnavailableError, errors.KafkaUnavailableError)
ONE: Final[Errors] = (errors.InvalidRequestError, errors.UnknownTransactionError, errors.OutcomeExpiredError)
WRITE: Final[Errors] = (
    errors.EndUnconfirmedError,
    errors.MessageTooLargeError,
    errors.TopicUnavailableError,
    errors.NotAuthorisedError,
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call: its path, parameters and answers.

    `responses` maps a status to its description and model; `errors` are its own errors, beside `ALWAYS`. `waits` is set
    if it may wait long for an event, so it takes no place among the requests in flight; its answer must be read, so
    HEAD is refused. `begins` is set if it begins a transaction, so it is held up first under overload.
    """

    id: str
    method: HTTPMethod
    path: str
    summary: str
    handler: Handler
    responses: Mapping[HTTPStatus, tuple[str, Any]]
    errors: Errors = ()
    parameter: tuple[str, Any] | None = None
    query: Any = None
    body: Any = None
    takes_body: bool = False
    headers: Sequence[str] = ()
    waits: bool = False
    begins: bool = False


GROUP: Final = ("group", models.GroupName)
TRANSACTION: Final = ("id", models.TransactionId)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        id="putGroup",
        method=HTTPMethod.PUT,
        path="/v1/groups/{group}",
        summary="Register a producer group or change it; answered once it stands in the log",
        handler=handlers.put_group,
        parameter=("group", models.NewGroupName),
        body=models.GroupRequest,
        responses={
            HTTPStatus.CREATED: ("It is new", models.GroupResponse),
            HTTPStatus.OK: ("It is changed", models.GroupResponse),
        },
        errors=(*BODY, errors.KafkaUnavailableError),
    ),
    Operation(
        id="listGroups",
        method=HTTPMethod.GET,
        path="/v1/groups",
        summary="Show the groups, each with its policy in force",
        handler=handlers.list_groups,
        query=models.GroupParameters,
        responses={HTTPStatus.OK: ("A page; next is the cursor of the one after it", models.GroupList)},
        errors=(errors.InvalidRequestError,),
    ),
    Operation(
        id="getGroup",
        method=HTTPMethod.GET,
        path="/v1/groups/{group}",
        summary="Show a group with its policy in force",
        handler=handlers.get_group,
        parameter=GROUP,
        responses={HTTPStatus.OK: ("The group", models.GroupResponse)},
        errors=(errors.InvalidRequestError, errors.UnknownGroupError),
    ),
    Operation(
        id="deleteGroup",
        method=HTTPMethod.DELETE,
        path="/v1/groups/{group}",
        summary="Remove a group that has no pending and no parked transaction",
        handler=handlers.delete_group,
        parameter=GROUP,
        responses={HTTPStatus.NO_CONTENT: ("It is removed", None)},
        errors=(
            errors.InvalidRequestError,
            errors.UnknownGroupError,
            errors.GroupInUseError,
            errors.KafkaUnavailableError,
        ),
    ),
    Operation(
        id="fetchChecks",
        method=HTTPMethod.GET,
        path="/v1/groups/{group}/checks",
        summary="Pull mode: fetch due checks, waiting for the first; end them with their check_id",
        handler=handlers.fetch_checks,
        parameter=GROUP,
        query=models.PollParameters,
        responses={HTTPStatus.OK: ("The checks, none where none came due", models.CheckList)},
        errors=(errors.InvalidRequestError, errors.UnknownGroupError, *BUSY),
        waits=True,
    ),
    Operation(
        id="prepare",
        method=HTTPMethod.POST,
        path="/v1/transactions",
        summary="Prepare a transaction: its messages are durable, and invisible until it is committed",
        handler=handlers.prepare,
        begins=True,
        body=models.PrepareRequest,
        responses={
            HTTPStatus.CREATED: ("It is durably prepared", models.PreparedResponse),
            HTTPStatus.OK: ("The same prepare was there already; look at state", models.PreparedResponse),
        },
        errors=(
            *BODY,
            errors.PreparesRejectedError,
            errors.UnknownGroupError,
            errors.IdReusedError,
            errors.MessageTooLargeError,
            errors.TopicNotAllowedError,
            errors.UnknownTopicError,
            errors.OutcomeUnknownError,
            errors.NotAuthorisedError,
            *BUSY,
        ),
    ),
    Operation(
        id="end",
        method=HTTPMethod.POST,
        path="/v1/transactions/{id}/end",
        summary="Commit or roll back a transaction, or say that its outcome is unknown",
        handler=handlers.end,
        parameter=TRANSACTION,
        body=models.EndRequest,
        headers=(CAUSE_HEADER,),
        responses={HTTPStatus.OK: ("The state that stands, and whether this call changed it", models.EndResponse)},
        errors=(*BODY, *ONE[1:], errors.AlreadyEndedError, *WRITE, *BUSY),
    ),
    Operation(
        id="batch",
        method=HTTPMethod.POST,
        path="/v1/batch",
        summary="Many prepares and ends, done at the same time, each with an answer of its own",
        handler=batch.batch,
        body=models.BatchRequest,
        headers=(CAUSE_HEADER,),
        responses={HTTPStatus.OK: ("The answers, in the order of the request", batch.BatchResponse)},
        errors=BODY,
    ),
    Operation(
        id="getTransaction",
        method=HTTPMethod.GET,
        path="/v1/transactions/{id}",
        summary="Show a transaction, with its messages while it is prepared or parked",
        handler=handlers.get_transaction,
        parameter=TRANSACTION,
        responses={HTTPStatus.OK: ("The transaction", models.TransactionResponse)},
        errors=(*ONE, *BUSY),
    ),
    Operation(
        id="listTransactions",
        method=HTTPMethod.GET,
        path="/v1/transactions",
        summary="List what is prepared, parked and lately ended, oldest prepare first",
        handler=handlers.list_transactions,
        query=models.ListParameters,
        responses={HTTPStatus.OK: ("A page; next is the cursor of the one after it", models.TransactionList)},
        errors=(errors.InvalidRequestError, errors.UnknownGroupError, *BUSY),
    ),
    Operation(
        id="check",
        method=HTTPMethod.POST,
        path="/v1/transactions/{id}/check",
        summary="Ask the group about a prepared transaction now",
        handler=handlers.check,
        parameter=TRANSACTION,
        takes_body=True,
        responses={HTTPStatus.ACCEPTED: ("The group is asked", models.TransactionSummary)},
        errors=(*NO_FIELDS, *ONE[1:], errors.AlreadyEndedError, errors.NotPendingError, *BUSY),
    ),
    Operation(
        id="resume",
        method=HTTPMethod.POST,
        path="/v1/transactions/{id}/resume",
        summary="Take a parked transaction back among the prepared, with its count of checks at 0",
        handler=handlers.resume,
        parameter=TRANSACTION,
        takes_body=True,
        responses={HTTPStatus.OK: ("It is prepared", models.TransactionSummary)},
        errors=(*NO_FIELDS, *ONE[1:], errors.AlreadyEndedError, *WRITE, *BUSY),
    ),
    Operation(
        id="getOpenApi",
        method=HTTPMethod.GET,
        path="/openapi.json",
        summary="This description",
        handler=handlers.get_openapi,
        responses={HTTPStatus.OK: ("OpenAPI 3.1", dict[str, Any])},
    ),
)


class Routes:
    """Finds the operation of a request."""

    def __init__(self, operations: Sequence[Operation] = OPERATIONS) -> None:
        """Index the table by path and method."""
        self._paths: dict[str, dict[str, Operation]] = {}
        for operation in operations:
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
