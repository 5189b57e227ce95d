"""The calls of operators: keys, histories and statistics.

See docs/api.md#statistics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

from halfway.coordinator.access import Keys, KeySpec, NewKey
from halfway.coordinator.requests import Moment, moment
from halfway.http.handlers.handlers import Call
from halfway.http.requests import models
from halfway.http.requests.validation import parameters, path_parameter, transaction_parameter
from halfway.http.responses.problems import Answer, answer
from halfway.protocol.errors import AccessControlOffError
from halfway.protocol.keys import Key
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import Audited

M = TypeVar("M")
T = TypeVar("T")


async def create_key(call: Call) -> Answer:
    """Create a key, or bind a certificate."""
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
    """Create another key for the principal of a key. The old key then expires."""
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
    """Show a page of the keys, without their secrets."""
    keys = _keys(call)
    query = parameters(models.KeyParameters, *call.query)
    page = await keys.page(
        name=query.name, limit=query.limit, after=query.cursor, deadline=call.deadline, principal=call.principal
    )
    listed = [models.KeyResponse(**_fields(key)) for key in page.keys]
    return answer(HTTPStatus.OK, models.KeyList(keys=listed, next=page.next))


async def revoke_key(call: Call) -> Answer:
    """Revoke a key."""
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
    response = models.NewKeyResponse(**_fields(new.key), key=new.text)
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
    """Show what happened to a transaction."""
    transaction_id = transaction_parameter(call.parameter)
    history = await call.site.coordinator.history(transaction_id, deadline=call.deadline, principal=call.principal)
    return answer(HTTPStatus.OK, history)


async def get_statistics(call: Call) -> Answer:
    """Show the statistics of all instances."""
    given = parameters(models.StatisticsParameters, *call.query)
    statistics = await call.site.coordinator.statistics.gather(
        group=given.group or call.principal.group, samples=given.samples, principal=call.principal
    )
    return answer(HTTPStatus.OK, statistics)
