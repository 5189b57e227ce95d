"""Which URLs and addresses checks may go to: decided at registration, for a check on demand, for each connection."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

from yarl import URL

from halfway.checkback.addresses import PRIVATE, Address, kind_of, literal, reached_by
from halfway.domain.urls import url_refusal

Network = IPv4Network | IPv6Network

_REMEMBERED: Final = 1024
"""How many decisions are cached: settings do not change while the process runs, and every check asks."""

LOOPBACK_NETWORKS: Final[tuple[Network, ...]] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""What a coordinator names whose services run on the same machine."""


class Destinations:
    """What the operator's settings let halfway call: hosts by name or pattern, and the networks they must lie in.

    Both must hold. Without settings every address is allowed except loopback and those of `addresses.NO_SERVICE`.
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

        Hosts have `*` for any characters. `networks` replace what is allowed by default, `also_networks` extend it.
        """
        self._hosts = tuple(host.lower() for host in hosts)
        self._networks = tuple(networks)
        self._also = tuple(also_networks)
        self._private = private_networks
        self._spelt_refusal = lru_cache(_REMEMBERED)(self._judge)

    def refusal(self, url: str | URL, connecting_to: Address | None = None) -> str | None:
        """Return why a URL may not be called, None if it may; the reason names the setting that would allow it.

        `connecting_to` is the address of a connection that is about to be opened for it: what the name has at this very
        moment, so that a name which changes its address gets past nothing. Without it, the address counts that the
        URL itself spells; a name is judged when it is called.
        """
        return self._spelt_refusal(url) if connecting_to is None else self._judge(url, connecting_to)

    def _judge(self, url: str | URL, connecting_to: Address | None = None) -> str | None:
        if isinstance(url, str):
            if (reason := url_refusal(url)) is not None:
                return reason
            url = URL(url)
        host = (url.host or "").lower().removesuffix(".")
        if self._hosts and not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            return f"the operator does not allow the host {host!r} (HALFWAY_CHECK_HOSTS)"
        spelt = literal(host)
        address = connecting_to or spelt
        if address is None or (reason := self._address_refusal(address)) is None:
            return None
        named = f"{host!r} is" if connecting_to is None or spelt is not None else "the host name has"
        return f"{named} {reason}"

    def _address_refusal(self, address: Address) -> str | None:
        on_the_wire, *written_in_it = reached_by(address)
        if self._networks and not self._names(on_the_wire):
            return "an address that the operator does not allow (HALFWAY_CHECK_NETWORKS)"
        for one in (on_the_wire, *written_in_it):
            kind = kind_of(one)
            if kind is None or self._names(one):
                continue
            if kind != PRIVATE:
                return f"a {kind} address, which the operator does not allow (HALFWAY_CHECK_ALSO_NETWORKS)"
            if not self._private:
                return "a private address, which the operator does not allow (HALFWAY_CHECK_PRIVATE_NETWORKS)"
        return None

    def _names(self, address: Address) -> bool:
        return any(address in network for network in (*self._networks, *self._also))
