"""One function for each call: read the request, ask the service, show the answer."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from halfway.rest.handlers.calls import SUBPROTOCOL, nothing_in
from halfway.rest.requests import convert, models
from halfway.rest.requests.authentication import demand_same_origin
from halfway.rest.requests.validation import cause_of, parameters, path_parameter, to_end, to_list_query
from halfway.rest.responses.answer import Answer, answer, answer_in_pieces
from halfway.rest.responses.errors import UpgradeRequiredError
from halfway.rest.responses.slices import is_large, with_messages

if TYPE_CHECKING:
    from halfway.rest.handlers.calls import Call


async def put_group(call: Call) -> Answer:
    """Register a group or replace it."""
    return await _write_group(call, models.GroupRequest)


async def patch_group(call: Call) -> Answer:
    """Register a group or add to it."""
    return await _write_group(call, models.GroupAdditions)


async def _write_group(call: Call, model: type[models.GroupRequest | models.GroupAdditions]) -> Answer:
    validation = call.site.validation
    name = path_parameter("group", call.parameter, models.NewGroupName)
    spec = validation.read(model, call.body, partial(validation.to_group, name=name))
    view = await call.site.coordinator.put_group(spec, deadline=call.deadline, principal=call.principal)
    shown = convert.group_shown(view)
    if view.created:
        return answer(HTTPStatus.CREATED, shown, ("Location", f"/v1/groups/{name}"))
    return answer(HTTPStatus.OK, shown)


async def list_groups(call: Call) -> Answer:
    """Show a page of the groups."""
    given = parameters(models.GroupParameters, *call.query)
    page = await call.site.coordinator.list_groups(
        limit=given.limit, after=given.cursor, deadline=call.deadline, principal=call.principal
    )
    shown = [convert.group_shown(view) for view in page.groups]
    return answer(HTTPStatus.OK, models.GroupList(groups=shown, next=page.next))


async def get_group(call: Call) -> Answer:
    """Show a group."""
    name = path_parameter("group", call.parameter, models.GroupName)
    view = await call.site.coordinator.get_group(name, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, convert.group_shown(view))


async def get_check_secrets(call: Call) -> Answer:
    """Show what a group's checks are signed with."""
    name = path_parameter("group", call.parameter, models.GroupName)
    secrets = await call.site.coordinator.check_secrets(name, deadline=call.deadline, principal=call.principal)
    return answer(
        HTTPStatus.OK, models.CheckSecretsResponse(group=name, secrets=list(secrets)), ("Cache-Control", "no-store")
    )


async def delete_group(call: Call) -> Answer:
    """Remove a group."""
    name = path_parameter("group", call.parameter, models.GroupName)
    await call.site.coordinator.delete_group(name, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.NO_CONTENT)


async def fetch_checks(call: Call) -> Answer:
    """Hand out due checks, waiting for the first."""
    name = path_parameter("group", call.parameter, models.GroupName)
    given = parameters(models.PollParameters, *call.query)
    checks = await call.site.coordinator.lease_checks(
        name,
        at_most=given.max,
        wait_s=given.wait_s,
        principal=call.principal,
        is_connected=lambda: call.has_reader,
    )
    if not any(is_large(check.messages) for check in checks):
        return answer(HTTPStatus.OK, models.CheckList(checks=[convert.fetched(check) for check in checks]))
    async with call.large_answer() as give_way:
        return answer_in_pieces(HTTPStatus.OK, await convert.fetched_in_pieces(checks, give_way))


async def prepare(call: Call) -> Answer:
    """Prepare a transaction."""
    validation = call.site.validation
    wanted = validation.read(models.PrepareRequest, call.body, validation.to_prepare)
    call.group, call.subject = wanted.group, wanted.id
    done = await call.site.coordinator.prepare(wanted, deadline=call.deadline, principal=call.principal)
    location = ("Location", f"/v1/transactions/{done.id}")
    return answer(HTTPStatus.CREATED if done.created else HTTPStatus.OK, convert.prepared(done), location)


async def end(call: Call) -> Answer:
    """Commit, roll back, or leave it to check-back."""
    transaction_id = path_parameter("id", call.parameter, models.TransactionId)
    convert_end = partial(to_end, transaction_id=transaction_id, cause=cause_of(call.request.headers))
    wanted = call.site.validation.read(models.EndRequest, call.body, convert_end)
    done = await call.site.coordinator.end(wanted, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, models.EndResponse(id=done.id, state=done.state, changed=done.changed))


async def get_transaction(call: Call) -> Answer:
    """Show a transaction."""
    transaction_id = path_parameter("id", call.parameter, models.TransactionId)
    view = await call.site.coordinator.get(transaction_id, deadline=call.deadline, principal=call.principal)
    if view.messages is None or not is_large(view.messages):
        return answer(HTTPStatus.OK, convert.transaction(view))
    async with call.large_answer() as give_way:
        without = convert.transaction(msgspec.structs.replace(view, messages=()))
        return answer_in_pieces(HTTPStatus.OK, await with_messages(without, view.messages, give_way))


async def list_transactions(call: Call) -> Answer:
    """List transactions."""
    query = to_list_query(parameters(models.ListParameters, *call.query), call.site.coordinator.now_ms())
    page = await call.site.coordinator.list(query, deadline=call.deadline, principal=call.principal)
    await call.site.coordinator.turns.next(call.principal.group)
    return answer(HTTPStatus.OK, convert.page(page))


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
    """Ask the group now."""
    nothing_in(call.body)
    transaction_id = path_parameter("id", call.parameter, models.TransactionId)
    view = await call.site.coordinator.check(transaction_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.ACCEPTED, convert.summary(view))


async def resume(call: Call) -> Answer:
    """Take a parked transaction back among the prepared."""
    nothing_in(call.body)
    transaction_id = path_parameter("id", call.parameter, models.TransactionId)
    view = await call.site.coordinator.resume(transaction_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, convert.summary(view))


async def get_openapi(call: Call) -> Answer:
    """Serve the description of this interface."""
    return Answer(status=HTTPStatus.OK, body=call.site.openapi)
