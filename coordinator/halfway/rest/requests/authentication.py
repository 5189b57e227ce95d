"""Who sends a request, and for which page: keys, client certificates, and what browsers say.

By the key in `Authorization: Bearer`, or by the client's certificate. What a browser may not do for a page of another
site is in docs/rest.md#browsers.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from halfway.domain.errors import ForbiddenError
from halfway.domain.principal import ANYBODY, Permission, Principal
from halfway.rest.requests.explain import short

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from aiohttp import web

    from halfway.service.ports import Authority

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
_OTHER_PAGES: Final = frozenset({"cross-site", "same-site"})
_LOOKS: Final = frozenset({"GET", "HEAD"})
_HOST: Final = re.compile(r"([^:@\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
_REMEMBERED: Final = 1_000


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
    principal = authority.authenticate(token, names_in(_certificate(request)), permission)
    authority.require(principal, permission)
    return principal


def _certificate(request: web.BaseRequest) -> Mapping[str, Any] | None:
    """Return what the client showed; the connection may be lost already, so its transport cannot be asked."""
    return getattr(request.protocol, "certificate", None)


def _token(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == _SCHEME else None


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what a certificate calls its holder: `DNS:…`, `URI:…`, `email:…`, and `subject:…` as in RFC 2253."""
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
    """Raise ForbiddenError for what a page of another site has a browser send.

    A link may be followed to what `changes_nothing`. To fetch a check does: it counts as asked, and nobody answers.

    A browser shows a client certificate for any page. It says where a request is from in `Sec-Fetch-Site` if it
    trusts the URL (https, or localhost), and else in `Origin` whenever a page changes something or wants to read it.
    """
    headers = request.headers
    site = headers.get("Sec-Fetch-Site")
    if site is None:
        if (origin := headers.get("Origin")) is not None:
            demand_same_origin(origin, headers.get("Host", ""))
    elif site in _OTHER_PAGES and not (
        changes_nothing and request.method in _LOOKS and headers.get("Sec-Fetch-Mode") == "navigate"
    ):
        raise ForbiddenError("a page of another site may not call halfway (Sec-Fetch-Site)")


def demand_same_origin(origin: str, host: str) -> None:
    """Raise ForbiddenError if an `Origin` is not of this host."""
    try:
        own = urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        own = False
    if not own:
        raise ForbiddenError(f"a page of {short(origin)} may not call halfway (Origin)")


class AllowedHosts:
    """The names by which this API may be called: `localhost`, addresses, and those that the operator names.

    A page can have its own name resolve to this machine. To the browser, halfway is then the page's own site; the
    header `Host` still says which name it asked for.
    """

    def __init__(self, patterns: Collection[str] = ()) -> None:
        """Take host names, `*` for any characters."""
        self._patterns = tuple(pattern.lower() for pattern in patterns)
        self._known: set[str] = set()

    def demand(self, request: web.BaseRequest) -> None:
        """Raise ForbiddenError if a request asks for another host; one of HTTP/1.0 may name none."""
        host = request.headers.get("Host")
        if host is None or host in self._known:
            return
        if not self._allows(host):
            raise ForbiddenError(
                f"{short(host)} is no name of this API: call it by localhost or by an address, or have the operator "
                "name it in HALFWAY_ALLOWED_HOSTS"
            )
        if len(self._known) < _REMEMBERED:
            self._known.add(host)

    def _allows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").removesuffix(".").lower()
        return name == "localhost" or _is_address(name) or any(fnmatchcase(name, one) for one in self._patterns)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
