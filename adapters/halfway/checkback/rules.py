"""What an operator may bring along: which endpoints may be called, and how a check is signed."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from yarl import URL

SCHEMES = ("http", "https")


class UrlRule(Protocol):
    """Which addresses the operator lets halfway call; asked before every request, never cached."""

    def refusal(self, url: URL) -> str | None:
        """Return why this URL may not be called, None when it may. The reason is shown to users: no secrets in it."""

    def allows(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether a connection to this address may be opened.

        It sees what the name resolved to for the very connection that is opened, so a name that changes its address
        between two look-ups cannot get past it. Behind a proxy it sees the proxy's address.
        """


class AnyAddress:
    """The default: http and https to any host, without user name and password in the URL."""

    def refusal(self, url: URL) -> str | None:
        if url.scheme not in SCHEMES:
            return f"the URL's scheme is {url.scheme!r}, not http or https"
        if not url.host:
            return "the URL has no host"
        if url.user is not None or url.password is not None:
            return "the URL has a user name or password in it"
        return None

    def allows(self, address: IPv4Address | IPv6Address) -> bool:  # noqa: ARG002 - the protocol's name
        return True


class Signer(Protocol):
    """Signs checks after the Standard Webhooks specification."""

    def headers(self, group: str, check_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
        """Return the headers to add for a request with these `webhook-id`, `webhook-timestamp` (s) and body."""


class Unsigned:
    """The default: no signature."""

    def headers(self, group: str, check_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:  # noqa: ARG002
        return {}
