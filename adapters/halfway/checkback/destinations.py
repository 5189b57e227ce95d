"""Decides which URLs and addresses may be called: at registration, for a check on demand, and per connection."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

from yarl import URL

from halfway.checkback.addresses import PRIVATE, Address, parse_literal, reachable_addresses, special_kind
from halfway.domain.urls import url_refusal

Network = IPv4Network | IPv6Network

_MAX_CACHED: Final = 1024
"""How many decisions are cached: every check needs reachable, and the settings do not change while the process runs."""

LOOPBACK_NETWORKS: Final[tuple[Network, ...]] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""The networks to allow if the services run on the coordinator's machine."""


class Destinations:
    """The hosts (names or patterns) and the networks that the operator's settings allow halfway to call.

    A call must match both. Without settings every address is allowed, except loopback and
    `addresses.RESERVED_NETWORKS`.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[str] = (),
        networks: Sequence[Network] = (),
        also_networks: Sequence[Network] = (),
        private_networks: bool = True,
    ) -> None:
        """Keep the settings `HALFWAY_CHECK_HOSTS`, `…_NETWORKS`, `…_ALSO_NETWORKS` and `…_PRIVATE_NETWORKS`.

        In a host `*` matches any characters. `networks` replace the default networks, `also_networks` extend them.
        """
        self._hosts = tuple(host.lower() for host in hosts)
        self._networks = tuple(networks)
        self._also_networks = tuple(also_networks)
        self._private_networks = private_networks
        self._cached_refusal = lru_cache(_MAX_CACHED)(self._url_refusal)

    def refusal(self, url: str | URL, connecting_to: Address | None = None) -> str | None:
        """Return why a URL may not be called, None if it may; the reason names the setting that would allow it.

        `connecting_to` is the address of a connection that is about to be opened for the URL, that is, the name's
        current address: so a name cannot evade the check by changing its address. Without `connecting_to` an address
        in the URL itself is checked; a name is checked when it is called.
        """
        return self._cached_refusal(url) if connecting_to is None else self._url_refusal(url, connecting_to)

    def _url_refusal(self, url: str | URL, connecting_to: Address | None = None) -> str | None:
        if isinstance(url, str):
            if (reason := url_refusal(url)) is not None:
                return reason
            url = URL(url)
        host = (url.host or "").lower().removesuffix(".")
        if self._hosts and not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            return f"the operator does not allow the host {host!r} (HALFWAY_CHECK_HOSTS)"
        literal = parse_literal(host)
        address = connecting_to or literal
        if address is None or (reason := self._address_refusal(address)) is None:
            return None
        subject = f"{host!r} is" if connecting_to is None or literal is not None else "the host name has"
        return f"{subject} {reason}"

    def _address_refusal(self, address: Address) -> str | None:
        direct, *embedded = reachable_addresses(address)
        if self._networks and not self._is_listed(direct):
            return "an address that the operator does not allow (HALFWAY_CHECK_NETWORKS)"
        for reachable in (direct, *embedded):
            kind = special_kind(reachable)
            if kind is None or self._is_listed(reachable):
                continue
            if kind != PRIVATE:
                return f"a {kind} address, which the operator does not allow (HALFWAY_CHECK_ALSO_NETWORKS)"
            if not self._private_networks:
                return "a private address, which the operator does not allow (HALFWAY_CHECK_PRIVATE_NETWORKS)"
        return None

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in (*self._networks, *self._also_networks))
