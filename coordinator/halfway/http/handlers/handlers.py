"""The calls of the REST interface: what a call is, the request of a handler, and the handlers of transactions.

A handler reads the request, asks the coordinator, and shows the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from http import HTTPMethod, HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from halfway.coordinator import tracing
from halfway.coordinator.access import Keys, KeySpec, NewKey
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.fairness import Places
from halfway.coordinator.requests import Moment, TransactionView, moment
from halfway.http import responses
from halfway.http.requests import models
from halfway.http.requests.authentication import demand_same_origin
from halfway.http.requests.validation import (
    Validation,
    cause_of,
    given,
    parameters,
    path_parameter,
    to_action,
    to_end,
    to_list_query,
    transaction_parameter,
)
from halfway.http.responses import (
    SMALL_BYTES,
    Answer,
    GiveWay,
    RefusalLog,
    Unsent,
    UpgradeRequiredError,
    answer,
    answer_in_pieces,
    is_large,
    with_messages,
)
from halfway.protocol import errors
from halfway.protocol.errors import AccessControlOffError, HalfwayError
from halfway.protocol.keys import Key
from halfway.protocol.principal import Permission, Principal, PrincipalKind
from halfway.protocol.records import Audited

SUBPROTOCOL: Final = "halfway.stream.v1"
"""The subprotocol of the WebSocket (docs/api.md#connect)."""

Handler = Callable[["Call"], Awaitable["Answer"]]
Errors = tuple[type["HalfwayError"], ...]

ALWAYS: Final[Errors] = (
    responses.BadHttpError,
    errors.UnauthenticatedError,
    errors.ForbiddenError,
    errors.OverloadedError,
    responses.InternalError,
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
    has_optional_body: bool = False
    headers: Sequence[str] = ()
    waits: bool = False
    upgrades: bool = False
    begins: bool = False

    @cached_property
    def id(self) -> str:
        """The name of its handler, as OpenAPI writes names."""
        first, *others = self.handler.__name__.split("_")
        return first + "".join(map(str.title, others))


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


async def put_group(call: Call) -> Answer:
    return await _write_group(call, models.GroupRequest)


async def patch_group(call: Call) -> Answer:
    return await _write_group(call, models.GroupAdditions)


async def _write_group(call: Call, model: type[models.GroupRequest | models.GroupAdditions]) -> Answer:
    validation = call.site.validation
    name = path_parameter("group", call.parameter, models.NewGroupName)
    spec = validation.read(model, call.body, partial(validation.to_group, name=name))
    view = await call.site.coordinator.put_group(spec, deadline=call.deadline, principal=call.principal)
    shown = msgspec.structs.replace(view, created=UNSET)
    if view.created:
        return answer(HTTPStatus.CREATED, shown, ("Location", f"/v1/groups/{name}"))
    return answer(HTTPStatus.OK, shown)


async def list_groups(call: Call) -> Answer:
    given = parameters(models.GroupParameters, *call.query)
    page = await call.site.coordinator.list_groups(
        limit=given.limit, after=given.cursor, deadline=call.deadline, principal=call.principal
    )
    shown = tuple(msgspec.structs.replace(view, created=UNSET) for view in page.groups)
    return answer(HTTPStatus.OK, msgspec.structs.replace(page, groups=shown))


async def get_group(call: Call) -> Answer:
    name = path_parameter("group", call.parameter, models.GroupName)
    view = await call.site.coordinator.get_group(name, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, msgspec.structs.replace(view, created=UNSET))


async def get_check_secrets(call: Call) -> Answer:
    name = path_parameter("group", call.parameter, models.GroupName)
    secrets = await call.site.coordinator.check_secrets(name, deadline=call.deadline, principal=call.principal)
    return answer(
        HTTPStatus.OK, models.CheckSecretsResponse(group=name, secrets=list(secrets)), ("Cache-Control", "no-store")
    )


async def delete_group(call: Call) -> Answer:
    name = path_parameter("group", call.parameter, models.GroupName)
    await call.site.coordinator.delete_group(name, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.NO_CONTENT)


async def fetch_checks(call: Call) -> Answer:
    name = path_parameter("group", call.parameter, models.GroupName)
    given = parameters(models.PollParameters, *call.query)
    checks = await call.site.coordinator.lease_checks(
        name, at_most=given.max, wait_s=given.wait_s, principal=call.principal, is_connected=lambda: call.has_reader
    )
    if not any(is_large(check.messages) for check in checks):
        return answer(HTTPStatus.OK, models.CheckList(checks=[models.fetched(check) for check in checks]))
    async with call.large_answer() as give_way:
        return answer_in_pieces(HTTPStatus.OK, await models.fetched_in_pieces(checks, give_way))


async def prepare(call: Call) -> Answer:
    validation = call.site.validation
    wanted = validation.read(models.PrepareRequest, call.body, validation.to_prepare)
    call.group, call.subject = wanted.group, wanted.id
    wanted = tracing.traced(wanted, call.request.headers)
    done = await call.site.coordinator.prepare(wanted, deadline=call.deadline, principal=call.principal)
    location = ("Location", f"/v1/transactions/{done.id}")
    status = HTTPStatus.CREATED if done.created else HTTPStatus.OK
    return answer(status, msgspec.structs.replace(done, created=UNSET), location)


async def end(call: Call) -> Answer:
    transaction_id = path_parameter("id", call.parameter, models.TransactionId)
    convert_end = partial(to_end, transaction_id=transaction_id, cause=cause_of(call.request.headers))
    wanted = tracing.traced(call.site.validation.read(models.EndRequest, call.body, convert_end), call.request.headers)
    done = await call.site.coordinator.end(wanted, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, done)


async def get_transaction(call: Call) -> Answer:
    transaction_id = transaction_parameter(call.parameter)
    get = partial(call.site.coordinator.get, transaction_id, deadline=call.deadline, principal=call.principal)
    view = await get(at_most=SMALL_BYTES)  # so that no payload is in memory while it waits for a place
    if not is_large(view.messages) and (view.size or 0) <= SMALL_BYTES:
        return answer(HTTPStatus.OK, models.transaction(view))
    async with call.large_answer() as give_way:
        if view.messages is None:
            view = await get()
        if view.messages is None:  # it has ended meanwhile, or the caller may not read payloads
            return answer(HTTPStatus.OK, models.transaction(view))
        without = models.transaction(msgspec.structs.replace(view, messages=()))
        return answer_in_pieces(HTTPStatus.OK, await with_messages(without, view.messages, give_way))


async def list_transactions(call: Call) -> Answer:
    query = to_list_query(parameters(models.ListParameters, *call.query), call.site.coordinator.now_ms())
    page = await call.site.coordinator.list(query, deadline=call.deadline, principal=call.principal)
    await call.site.coordinator.turns.next(call.principal.group)
    shown = tuple(models.summary(view) for view in page.transactions)
    return answer(HTTPStatus.OK, msgspec.structs.replace(page, transactions=shown))


async def stream(call: Call) -> Answer:
    """Judge a handshake; the connection is a stream after it."""
    headers = call.request.headers
    if headers.get("Upgrade", "").lower() != "websocket":
        raise UpgradeRequiredError(f"this path is a WebSocket of the subprotocol {SUBPROTOCOL}: send its handshake")
    offered = [name.strip() for name in headers.get("Sec-WebSocket-Protocol", "").split(",")]
    if SUBPROTOCOL not in offered:
        raise UpgradeRequiredError(f"none of the subprotocols is known here: offer {SUBPROTOCOL}")
    origin = headers.get("Origin")
    if origin is not None:
        demand_same_origin(origin, headers.get("Host", ""))
    return answer(HTTPStatus.SWITCHING_PROTOCOLS)


async def check(call: Call) -> Answer:
    return await _act(call, call.site.coordinator.check, HTTPStatus.ACCEPTED)


async def resume(call: Call) -> Answer:
    return await _act(call, call.site.coordinator.resume, HTTPStatus.OK)


async def _act(call: Call, do: Callable[..., Awaitable[TransactionView]], status: HTTPStatus) -> Answer:
    transaction_id = transaction_parameter(call.parameter)
    wanted = call.site.validation.read(models.ActionRequest, call.body or b"{}", to_action)
    view = await do(transaction_id, remark=given(wanted.remark), deadline=call.deadline, principal=call.principal)
    return answer(status, models.summary(view))


async def get_open_api(call: Call) -> Answer:
    return Answer(status=HTTPStatus.OK, body=call.site.openapi)


M = TypeVar("M")
T = TypeVar("T")


async def create_key(call: Call) -> Answer:
    keys = _keys(call)
    request = call.site.validation.read(models.KeyRequest, call.body, _identity)
    spec = KeySpec(
        kind=PrincipalKind(request.kind),
        name=request.name,
        expires_in_ms=_to_ms(request.expires_in_s),
        certificate=request.certificate,
    )
    work = keys.create(spec, deadline=call.deadline, principal=call.principal)
    return _created(await _audited(call, work, Audited.CREATE_KEY, request.name, _describe_new))


async def rotate_key(call: Call) -> Answer:
    keys = _keys(call)
    key_id = path_parameter("id", call.parameter, models.KeyId)
    request = call.site.validation.read(models.RotateRequest, call.body or b"{}", _identity)
    work = keys.rotate(
        key_id,
        keep_ms=round(request.keep_s * 1000),
        expires_in_ms=_to_ms(request.expires_in_s),
        deadline=call.deadline,
        principal=call.principal,
    )
    return _created(await _audited(call, work, Audited.ROTATE_KEY, key_id, _describe_new))


async def list_keys(call: Call) -> Answer:
    keys = _keys(call)
    query = parameters(models.KeyParameters, *call.query)
    page = await keys.page(
        name=query.name, limit=query.limit, after=query.cursor, deadline=call.deadline, principal=call.principal
    )
    listed = [models.KeyResponse(**_fields(key), valid=keys.is_valid(key)) for key in page.keys]
    return answer(HTTPStatus.OK, models.KeyList(keys=listed, next=page.next))


async def revoke_key(call: Call) -> Answer:
    keys = _keys(call)
    key_id = path_parameter("id", call.parameter, models.KeyId)
    work = keys.revoke(key_id, deadline=call.deadline, principal=call.principal)
    await _audited(call, work, Audited.REVOKE_KEY, key_id, _describe)
    return answer(HTTPStatus.NO_CONTENT)


def _keys(call: Call) -> Keys:
    keys = call.site.coordinator.keys
    if keys is None:
        raise AccessControlOffError
    return keys


async def _audited(
    call: Call, work: Awaitable[T], action: Audited, subject: str, describe: Callable[[T], dict[str, str]]
) -> T:
    return await call.site.coordinator.auditor.audit(work, call.principal, action, subject, describe=describe)


def _describe_new(new: NewKey) -> dict[str, str]:
    return _describe(new.key) | {"subject": new.key.id}


def _describe(key: Key) -> dict[str, str]:
    group = {"group": key.name} if key.kind is PrincipalKind.GROUP else {}
    return group | {"detail": f"of {key.kind.value} {key.name}"}


def _identity(request: M) -> M:
    return request


def _to_ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _created(new: NewKey) -> Answer:
    response = models.NewKeyResponse(**_fields(new.key), valid=True, key=new.text)
    return answer(HTTPStatus.CREATED, response, ("Location", f"/v1/keys/{new.key.id}"), ("Cache-Control", "no-store"))


def _fields(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "kind": key.kind.value,
        "name": key.name,
        "created_at": Moment(key.created_at),
        "expires_at": moment(key.expires_at),
        "certificate": key.certificate,
    }


async def get_history(call: Call) -> Answer:
    transaction_id = transaction_parameter(call.parameter)
    history = await call.site.coordinator.history(transaction_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, history)


async def get_statistics(call: Call) -> Answer:
    given = parameters(models.StatisticsParameters, *call.query)
    statistics = await call.site.coordinator.statistics.gather(
        group=given.group or call.principal.group, samples=given.samples, principal=call.principal
    )
    return answer(HTTPStatus.OK, statistics)
