"""Who sends a request: by the key in `Authorization: Bearer`, or by the client's certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.domain.principal import ANYBODY, Permission, Principal
from halfway.rest.requests.browsers import demand_own_page
from halfway.rest.server.server import client_names

if TYPE_CHECKING:
    from aiohttp import web

    from halfway.service.ports import Authority

_SCHEME: Final = "bearer"


def caller_of(request: web.BaseRequest, permission: Permission, authority: Authority) -> Principal:
    """Return who sends a request and may do this at all, to some group.

    Raises:
        UnauthenticatedError: no key is shown, or one that is not valid.
        ForbiddenError: no caller of this kind may do it; or a browser sends it for a page of another site.

    """
    if permission is Permission.DESCRIBE:
        return ANYBODY
    demand_own_page(request, changes_nothing=permission is not Permission.FETCH_CHECKS)
    token = _token(request.headers.get("Authorization"))
    principal = authority.authenticate(token, client_names(request), permission)
    authority.require(principal, permission, principal.group)
    return principal


def _token(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == _SCHEME else None
