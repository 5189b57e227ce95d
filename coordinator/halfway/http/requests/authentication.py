"""Authenticates the caller of a request, and refuses requests that a browser sends for another site.

A caller is identified by the key in `Authorization: Bearer`, or by its client certificate. docs/api.md#permissions has
what a browser may not do for a page of another site.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from halfway.coordinator.ports import Authority
from halfway.http.requests.validation import short
from halfway.protocol.errors import ForbiddenError
from halfway.protocol.principal import ANYBODY, Permission, Principal

_SCHEME: Final = "bearer"
_SHORT: Final = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "stateOrProvinceName": "ST",
    "localityName": "L",
    "domainComponent": "DC",
    "userId": "UID",
    "streetAddress": "street",
}
_ALTERNATIVE: Final = ("DNS", "URI", "email")
_FOREIGN_SITES: Final = frozenset({"cross-site", "same-site"})
_READ_METHODS: Final = frozenset({"GET", "HEAD"})
_HOST: Final = re.compile(r"([^:@\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
_MAX_CACHED_HOSTS: Final = 1_000


def caller_of(request: web.BaseRequest, permission: Permission, authority: Authority) -> Principal:
    """Return the caller of a request, once it has the permission for at least one group.

    Raises:
        UnauthenticatedError: the caller shows no key, or one that is not valid.
        ForbiddenError: no caller of this kind has the permission, or a browser sends the request for another site.
    """
    if permission is Permission.DESCRIBE:
        return ANYBODY
    demand_own_page(request, changes_nothing=permission is not Permission.FETCH_CHECKS)
    token = _token(request.headers.get("Authorization"))
    certificate = getattr(request.protocol, "certificate", None)  # the transport of a lost connection has none
    principal = authority.authenticate(token, names_in(certificate), permission)
    authority.require(principal, permission)
    return principal


def _token(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == _SCHEME else None


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a certificate: `DNS:…`, `URI:…`, `email:…`, and `subject:…` as in RFC 2253."""
    if not certificate:
        return ()
    alternative = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ()) if kind in _ALTERNATIVE]
    subject = ",".join(_relative_names(certificate.get("subject", ())))
    return (*alternative, f"subject:{subject}") if subject else tuple(alternative)


def _relative_names(subject: Any) -> Iterator[str]:
    for relative in reversed(subject):
        yield "+".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in relative)


def _escaped(value: str) -> str:
    escaped = "".join(f"\\{char}" if char in ',+"\\<>;' else char for char in value)
    if escaped.startswith(("#", " ")):
        escaped = "\\" + escaped
    return f"{escaped[:-1]}\\ " if value.endswith(" ") and len(value) > 1 else escaped


def demand_own_page(request: web.BaseRequest, *, changes_nothing: bool = True) -> None:
    """Raise ForbiddenError if a browser sends the request for a page of another site.

    A link on another site may lead to a call that `changes_nothing`. Fetching a check is not such a call: the check
    counts as sent, and nobody answers it.

    A browser presents a client certificate for every page. It names the origin of a request in `Sec-Fetch-Site` if it
    trusts the URL (https, or localhost). Otherwise it sends `Origin` if a page changes something or reads the answer.
    """
    headers = request.headers
    site = headers.get("Sec-Fetch-Site")
    if site is None:
        if (origin := headers.get("Origin")) is not None:
            demand_same_origin(origin, headers.get("Host", ""))
    elif site in _FOREIGN_SITES and not (
        changes_nothing and request.method in _READ_METHODS and headers.get("Sec-Fetch-Mode") == "navigate"
    ):
        raise ForbiddenError("a page of another site may not call halfway (Sec-Fetch-Site)")


def demand_same_origin(origin: str, host: str) -> None:
    """Raise ForbiddenError if an `Origin` is not this host."""
    try:
        own = urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        own = False
    if not own:
        raise ForbiddenError(f"a page of {short(origin)} may not call halfway (Origin)")


class AllowedHosts:
    """The host names of this API: `localhost`, IP addresses, and the names that the operator configures.

    A web page can make its own host name resolve to this machine. To the browser, halfway then belongs to the page's
    site, but the header `Host` still carries the name that was requested.
    """

    def __init__(self, patterns: Collection[str] = ()) -> None:
        """Take host names, with `*` for any characters."""
        self._patterns = tuple(pattern.lower() for pattern in patterns)
        self._allowed: set[str] = set()

    def demand(self, request: web.BaseRequest) -> None:
        """Raise ForbiddenError if a request names another host. A request in HTTP/1.0 may name none."""
        host = request.headers.get("Host")
        if host is None or host in self._allowed:
            return
        if not self._is_allowed(host):
            raise ForbiddenError(
                f"{short(host)} is not a name of this API: use localhost or an IP address, or ask the operator to add "
                "the name to HALFWAY_ALLOWED_HOSTS"
            )
        if len(self._allowed) < _MAX_CACHED_HOSTS:
            self._allowed.add(host)

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".").lower()
        return name == "localhost" or _is_address(name) or any(fnmatchcase(name, pattern) for pattern in self._patterns)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
