"""What an operator may bring along: which endpoints may be called, and how a check is signed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Protocol

from yarl import URL

SCHEMES = ("http", "https")
Network = IPv4Network | IPv6Network


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


class AllowedHosts(AnyAddress):
    """What the operator's settings let halfway call: hosts by name or pattern, and the networks they must lie in.

    Both must hold. Where no networks are named, every address is allowed but link-local, multicast and unspecified
    ones: no service is checked there, and a cloud's metadata server answers on a link-local address.
    """

    def __init__(self, hosts: Sequence[str] = (), networks: Sequence[Network] = ()) -> None:
        """Keep lower-case host names, with `*` for any characters, and networks; empty means no limit of that kind."""
        self._hosts = tuple(host.lower() for host in hosts)
        self._networks = tuple(networks)

    def refusal(self, url: URL) -> str | None:
        refused = super().refusal(url)
        if refused is not None:
            return refused
        host = (url.host or "").lower().removesuffix(".")
        if self._hosts and not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            return f"the operator does not allow the host {host!r} (HALFWAY_CHECK_HOSTS)"
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return None
        return None if self.allows(address) else f"the operator does not allow {host!r} (HALFWAY_CHECK_NETWORKS)"

    def allows(self, address: IPv4Address | IPv6Address) -> bool:
        # The same machine is reached by an IPv4 address in IPv6's clothes.
        plain = getattr(address, "ipv4_mapped", None) or address
        if self._networks:
            return any(plain in network for network in self._networks)
        return not (plain.is_link_local or plain.is_multicast or plain.is_unspecified)


class Signer(Protocol):
    """Signs checks after the Standard Webhooks specification."""

    def headers(self, group: str, check_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:
        """Return the headers to add for a request with these `webhook-id`, `webhook-timestamp` (s) and body."""


class Unsigned:
    """The default: no signature."""

    def headers(self, group: str, check_id: str, timestamp: int, body: bytes) -> Mapping[str, str]:  # noqa: ARG002
        return {}
