"""The one table of calls: the server routes by it, and OpenAPI is generated from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPMethod, HTTPStatus
from typing import Any, Final

from halfway.domain import errors
from halfway.domain.errors import HalfwayError
from halfway.domain.principal import RULES, Permission
from halfway.rest.handlers import batch, handlers, job_handlers, key_handlers, statistics_handlers
from halfway.rest.handlers.calls import CAUSE_HEADER, Answer, Call
from halfway.rest.requests import history_models, job_models, key_models, models, statistics_models
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


KEYS: Final[Errors] = (errors.AccessControlOffError, errors.KafkaUnavailableError)

GROUP: Final = ("group", models.GroupName)
KEY: Final = ("id", key_models.KeyId)
NEW_KEY: Final = key_models.NewKeyResponse
JOB: Final = ("id", job_models.JobId)
TRANSACTION: Final = ("id", models.TransactionId)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        id="putGroup",
        method=HTTPMethod.PUT,
        path="/v1/groups/{group}",
        summary="Register a producer group or change it; answered once it stands in the log",
        handler=handlers.put_group,
        access=Permission.PUT_GROUP,
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
        access=Permission.LIST_GROUPS,
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
        access=Permission.GET_GROUP,
        parameter=GROUP,
        responses={HTTPStatus.OK: ("The group", models.GroupResponse)},
        errors=(errors.InvalidRequestError, errors.UnknownGroupError),
    ),
    Operation(
        id="getCheckSecrets",
        method=HTTPMethod.GET,
        path="/v1/groups/{group}/check-secrets",
        summary="Show a group's own service what its checks are signed with",
        handler=handlers.get_check_secrets,
        access=Permission.READ_CHECK_SECRETS,
        parameter=GROUP,
        responses={HTTPStatus.OK: ("The secrets; none if checks are not signed", models.CheckSecretsResponse)},
        errors=(errors.InvalidRequestError, errors.UnknownGroupError, errors.KafkaUnavailableError),
    ),
    Operation(
        id="deleteGroup",
        method=HTTPMethod.DELETE,
        path="/v1/groups/{group}",
        summary="Remove a group that has no pending and no parked transaction",
        handler=handlers.delete_group,
        access=Permission.DELETE_GROUP,
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
        access=Permission.FETCH_CHECKS,
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
        access=Permission.PREPARE,
        begins=True,
        body=models.PrepareRequest,
        responses={
            HTTPStatus.CREATED: ("It is durably prepared", models.PreparedResponse),
            HTTPStatus.OK: ("The same prepare was there already; look at state", models.PreparedResponse),
        },
        errors=(
            *BODY,
            errors.PreparesRejectedError,
            errors.GroupLimitedError,
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
        access=Permission.END,
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
        access=Permission.BATCH,
        body=models.BatchRequest,
        headers=(CAUSE_HEADER,),
        responses={HTTPStatus.OK: ("The answers, in the order of the request", batch.BatchResponse)},
        errors=BODY,
    ),
    Operation(
        id="stream",
        method=HTTPMethod.GET,
        path="/v1/stream",
        summary="Open a WebSocket for many prepares, ends and checks: docs/stream.md is its specification",
        handler=handlers.stream,
        access=Permission.STREAM,
        headers=(CAUSE_HEADER,),
        responses={HTTPStatus.SWITCHING_PROTOCOLS: ("The connection is a stream from now on", None)},
        errors=(rest_errors.UpgradeRequiredError, errors.InvalidRequestError),
        waits=True,
        upgrades=True,
    ),
    Operation(
        id="getTransaction",
        method=HTTPMethod.GET,
        path="/v1/transactions/{id}",
        summary="Show a transaction, with its messages while it is prepared or parked",
        handler=handlers.get_transaction,
        access=Permission.GET,
        parameter=TRANSACTION,
        responses={HTTPStatus.OK: ("The transaction", models.TransactionResponse)},
        errors=(*ONE, *BUSY),
    ),
    Operation(
        id="getHistory",
        method=HTTPMethod.GET,
        path="/v1/transactions/{id}/history",
        summary="Show what happened to a transaction, and where its messages stand in Kafka once it is committed",
        handler=statistics_handlers.get_history,
        access=Permission.GET,
        parameter=TRANSACTION,
        responses={HTTPStatus.OK: ("Its history, as far as it is known", history_models.HistoryResponse)},
        errors=(*ONE, *BUSY),
    ),
    Operation(
        id="listTransactions",
        method=HTTPMethod.GET,
        path="/v1/transactions",
        summary="List what is prepared, parked and lately ended, oldest prepare first",
        handler=handlers.list_transactions,
        access=Permission.LIST,
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
        access=Permission.CHECK,
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
        access=Permission.RESUME,
        parameter=TRANSACTION,
        takes_body=True,
        responses={HTTPStatus.OK: ("It is prepared", models.TransactionSummary)},
        errors=(*NO_FIELDS, *ONE[1:], errors.AlreadyEndedError, *WRITE, *BUSY),
    ),
    Operation(
        id="getStatistics",
        method=HTTPMethod.GET,
        path="/v1/statistics",
        summary="Show what all instances know now: counts, rates, groups, shards, failures; and what is away",
        handler=statistics_handlers.get_statistics,
        query=statistics_models.StatisticsParameters,
        access=Permission.READ_STATISTICS,
        responses={HTTPStatus.OK: ("The figures", statistics_models.StatisticsResponse)},
        errors=(errors.InvalidRequestError,),
    ),
    Operation(
        id="getEvents",
        method=HTTPMethod.GET,
        path="/v1/events",
        summary="Listen to the same as server-sent events, at most one a second",
        handler=statistics_handlers.get_events,
        access=Permission.READ_STATISTICS,
        query=statistics_models.EventParameters,
        responses={HTTPStatus.OK: ("A stream of events (text/event-stream)", None)},
        errors=(errors.InvalidRequestError,),
        waits=True,
        listens=True,
    ),
    Operation(
        id="startJob",
        method=HTTPMethod.POST,
        path="/v1/jobs",
        summary="Accept a job, one action on everything that a filter finds; or preview what it would act on",
        handler=job_handlers.start_job,
        access=Permission.RUN_JOBS,
        body=job_models.JobRequest,
        responses={
            HTTPStatus.ACCEPTED: ("It is accepted: nothing is done yet", job_models.JobResponse),
            HTTPStatus.OK: (
                "It was accepted before, and stands like this; or a preview",
                job_models.JobResponse | job_models.JobPreview,
            ),
        },
        errors=(*BODY, errors.JobIdReusedError, errors.UnknownGroupError, *BUSY),
    ),
    Operation(
        id="listJobs",
        method=HTTPMethod.GET,
        path="/v1/jobs",
        summary="Show the jobs of all instances, the newest first",
        handler=job_handlers.list_jobs,
        access=Permission.LIST_JOBS,
        responses={HTTPStatus.OK: ("The jobs, and the instances that could not be asked", job_models.JobListResponse)},
    ),
    Operation(
        id="getJob",
        method=HTTPMethod.GET,
        path="/v1/jobs/{id}",
        summary="Show a job: its progress, and a page of its items with their results",
        handler=job_handlers.get_job,
        access=Permission.LIST_JOBS,
        parameter=JOB,
        query=job_models.JobParameters,
        responses={HTTPStatus.OK: ("The job; next is the cursor of the next page", job_models.JobPage)},
        errors=(errors.InvalidRequestError, errors.UnknownJobError, *BUSY),
    ),
    Operation(
        id="stopJob",
        method=HTTPMethod.DELETE,
        path="/v1/jobs/{id}",
        summary="Stop a job: what is under way is finished, and nothing more is begun",
        handler=job_handlers.stop_job,
        access=Permission.RUN_JOBS,
        parameter=JOB,
        responses={HTTPStatus.ACCEPTED: ("The job as it stands", job_models.JobResponse)},
        errors=(errors.InvalidRequestError, errors.UnknownJobError, *BUSY),
    ),
    Operation(
        id="createKey",
        method=HTTPMethod.POST,
        path="/v1/keys",
        summary="Make a key, or bind a client certificate; the key is shown this once",
        handler=key_handlers.create_key,
        access=Permission.MANAGE_KEYS,
        body=key_models.KeyRequest,
        responses={HTTPStatus.CREATED: ("It is valid here at once, and at every instance within a second", NEW_KEY)},
        errors=(*BODY, errors.TooManyKeysError, *KEYS),
    ),
    Operation(
        id="listKeys",
        method=HTTPMethod.GET,
        path="/v1/keys",
        summary="List keys by their public ids, without their secrets",
        handler=key_handlers.list_keys,
        access=Permission.MANAGE_KEYS,
        query=key_models.KeyParameters,
        responses={HTTPStatus.OK: ("A page; next is the cursor of the one after it", key_models.KeyList)},
        errors=(errors.InvalidRequestError, *KEYS),
    ),
    Operation(
        id="rotateKey",
        method=HTTPMethod.POST,
        path="/v1/keys/{id}/rotate",
        summary="Make another key for the same principal; the one named expires after keep_s",
        handler=key_handlers.rotate_key,
        access=Permission.MANAGE_KEYS,
        parameter=KEY,
        takes_body=True,
        responses={HTTPStatus.CREATED: ("The new key, shown this once", NEW_KEY)},
        errors=(*NO_FIELDS, errors.UnknownKeyError, errors.TooManyKeysError, *KEYS),
    ),
    Operation(
        id="revokeKey",
        method=HTTPMethod.DELETE,
        path="/v1/keys/{id}",
        summary="Revoke a key: no instance takes it any more, within a second",
        handler=key_handlers.revoke_key,
        access=Permission.MANAGE_KEYS,
        parameter=KEY,
        responses={HTTPStatus.NO_CONTENT: ("It is revoked", None)},
        errors=(errors.InvalidRequestError, errors.UnknownKeyError, *KEYS),
    ),
    Operation(
        id="getOpenApi",
        method=HTTPMethod.GET,
        path="/openapi.json",
        summary="This description",
        handler=handlers.get_openapi,
        access=Permission.DESCRIBE,
        responses={HTTPStatus.OK: ("OpenAPI 3.1", dict[str, Any])},
    ),
)


class Routes:
    """Finds the operation of a request."""

    def __init__(self, operations: Sequence[Operation] = OPERATIONS) -> None:
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
