"""Calls about keys: made, listed, rotated, revoked by operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from halfway.domain.audit_trail import Audited
from halfway.domain.errors import AccessControlOffError
from halfway.domain.message_json import rfc3339
from halfway.domain.principal import PrincipalKind
from halfway.rest.requests import key_models as models
from halfway.rest.requests.data import rfc3339_or_none
from halfway.rest.requests.validation import parameters, path_parameter
from halfway.rest.responses.answer import Answer, answer
from halfway.service.keys import KeySpec

if TYPE_CHECKING:
    from halfway.domain.keys import Key
    from halfway.rest.handlers.calls import Call
    from halfway.service.keys import Keys, NewKey


M = TypeVar("M")
T = TypeVar("T")


async def create_key(call: Call) -> Answer:
    """Make a key, or bind a certificate."""
    keys = _keys(call)
    wanted = call.site.validation.read(models.KeyRequest, call.body, _same)
    spec = KeySpec(
        kind=PrincipalKind(wanted.kind),
        name=wanted.name,
        expires_in_ms=_ms(wanted.expires_in_s),
        certificate=wanted.certificate,
    )
    work = keys.create(spec, deadline=call.deadline, principal=call.principal)
    return _made(await _audited(call, work, Audited.CREATE_KEY, wanted.name, _describe_new))


async def rotate_key(call: Call) -> Answer:
    """Make another key for the principal of a key, which then expires."""
    keys = _keys(call)
    key_id = path_parameter("id", call.parameter, models.KeyId)
    wanted = call.site.validation.read(models.RotateRequest, call.body or b"{}", _same)
    work = keys.rotate(
        key_id,
        keep_ms=round(wanted.keep_s * 1000),
        expires_in_ms=_ms(wanted.expires_in_s),
        deadline=call.deadline,
        principal=call.principal,
    )
    return _made(await _audited(call, work, Audited.ROTATE_KEY, key_id, _describe_new))


async def list_keys(call: Call) -> Answer:
    """Show a page of the keys, without their secrets."""
    keys = _keys(call)
    given = parameters(models.KeyParameters, *call.query)
    page = await keys.page(
        name=given.name, limit=given.limit, after=given.cursor, deadline=call.deadline, principal=call.principal
    )
    shown = [models.KeyResponse(**_fields(key)) for key in page.keys]
    return answer(HTTPStatus.OK, models.KeyList(keys=shown, next=page.next))


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


def _same(request: M) -> M:
    return request


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _made(new: NewKey) -> Answer:
    shown = models.NewKeyResponse(**_fields(new.key), key=new.text)
    return answer(HTTPStatus.CREATED, shown, ("Location", f"/v1/keys/{new.key.id}"), ("Cache-Control", "no-store"))


def _fields(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "kind": key.kind.value,
        "name": key.name,
        "created_at": rfc3339(key.created_at),
        "expires_at": rfc3339_or_none(key.expires_at),
        "certificate": key.certificate,
    }
