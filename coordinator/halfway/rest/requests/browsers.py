"""What a browser is not to do here for a page of another site (docs/rest.md#browsers)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from halfway.domain.errors import ForbiddenError
from halfway.rest.requests.explain import short

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp import web

_OTHER_PAGES: Final = frozenset({"cross-site", "same-site"})
_LOOKS: Final = frozenset({"GET", "HEAD"})
_HOST: Final = re.compile(r"([^:@\[\]]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
_REMEMBERED: Final = 1_000


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


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
