"""What an operator may bring along: which endpoints may be called."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Network
from typing import Protocol

from yarl import URL

from halfway.checkback.addresses import Address, destinations, is_no_service, literal

SCHEMES = ("http", "https")
Network = IPv4Network | IPv6Network


class UrlRule(Protocol):
    """Which addresses the operator lets halfway call; asked before every request, never cached."""

    def refusal(self, url: URL) -> str | None:
        """Return why this URL may not be called, None when it may. The reason is shown to users: no secrets in it."""

    def allows(self, address: Address) -> bool:
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

    def allows(self, address: Address) -> bool:  # noqa: ARG002 - the protocol's name
        return True


class AllowedHosts(AnyAddress):
    """What the operator's settings let halfway call: hosts by name or pattern, and the networks they must lie in.

    Both must hold. If no networks are named, every address is allowed except those of `addresses.NO_SERVICE`.
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
        address = literal(host)
        if address is None or self.allows(address):
            return None
        return f"the operator does not allow the address {host!r} (HALFWAY_CHECK_NETWORKS)"

    def allows(self, address: Address) -> bool:
        on_the_wire, *written_in_it = destinations(address)
        if self._networks and not self._named(on_the_wire):
            return False
        return not any(is_no_service(one) and not self._named(one) for one in (on_the_wire, *written_in_it))

    def _named(self, address: Address) -> bool:
        return any(address in network for network in self._networks)
