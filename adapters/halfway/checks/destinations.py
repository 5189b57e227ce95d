"""Decides which URLs and addresses may be called: at registration, for a check on demand, and per connection.

An IP address counts in every spelling that a URL allows, and with all addresses that a connection to it may reach.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from yarl import URL

from halfway.protocol.records import url_refusal

Address = IPv4Address | IPv6Address

RESERVED_NETWORKS = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",
        "255.255.255.255/32",
        "100.100.100.200/32",  # Alibaba Cloud's metadata
        "168.63.129.16/32",  # Azure's platform
        "192.0.0.192/32",  # Oracle Cloud's metadata
        "fd00:ec2::/32",  # AWS: metadata, credentials of pods, time, names
        "fd20:ce::254/128",  # Google Cloud's metadata
        "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud's metadata
        "fd00:42::42/128",  # Scaleway's metadata
    )
)
"""Networks that no check is sent to, besides loopback, link-local, multicast and unspecified addresses.

Most clouds serve secrets at the link-local address 169.254.169.254, and some of them at these addresses too.
"""

PRIVATE = "private"
_PRIVATE_NETWORKS = tuple(
    ip_network(network)
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # shared by a provider's customers; pods of some clusters
        "fc00::/7",
        "fec0::/10",
    )
)

_LOOPBACK = "127.0.0.1"
_IPV4_COMPATIBLE = IPv6Network("::/96")
_IPV4_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
_NUMBERS = re.compile(r"[0-9a-fx.]+", re.IGNORECASE)


def parse_literal(host: str) -> Address | None:
    """Return the address that the host of a URL spells, None for a name.

    The C library, which resolves names, also accepts `2852039166`, `0xa9fea9fe`, `0251.0376.0251.0376` and
    `169.254.43518` for IPv4 addresses.
    """
    if host == "localhost" or host.endswith(".localhost"):
        return IPv4Address(_LOOPBACK)  # never looked up (RFC 6761)
    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return ip_address(bare)
    except ValueError:
        pass
    if _NUMBERS.fullmatch(bare) is None:
        return None
    try:
        return IPv4Address(socket.inet_aton(bare))
    except OSError:
        return None


def reachable_addresses(address: Address) -> tuple[Address, ...]:
    """Return the addresses that a packet to this one may reach: itself, then the IPv4 addresses embedded in it.

    Only IPv4-mapped addresses never appear on the wire. The network forwards the others or translates them to IPv4,
    depending on its configuration: 6to4, Teredo, NAT64, IPv4-compatible, IPv4-translated, ISATAP.
    """
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    embedded: list[IPv4Address] = []
    number = int(address)
    if address in _IPV4_COMPATIBLE and number > 1:
        embedded.append(_last_32_bits(number))
    if address in _NAT64 or address in _IPV4_TRANSLATED or (number >> 32) & 0xFFFF_FFFF in _ISATAP:
        embedded.append(_last_32_bits(number))
    if address in _NAT64_LOCAL:
        # With a shorter prefix the IPv4 address starts further left, around the octet of zeros (RFC 6052).
        readings = (_last_32_bits(number), *(_around_zeros(number, prefix) for prefix in (48, 56, 64)))
        embedded += [reading for reading in readings if int(reading) >> 24]
    if address.sixtofour is not None:
        embedded.append(address.sixtofour)
    if address.teredo is not None:
        embedded += address.teredo
    return (address, *embedded)


def _last_32_bits(number: int) -> IPv4Address:
    return IPv4Address(number & 0xFFFF_FFFF)


def _around_zeros(number: int, prefix: int) -> IPv4Address:
    octets = number.to_bytes(16, "big")
    return IPv4Address((octets[:8] + octets[9:])[prefix // 8 :][:4])


def special_kind(address: Address) -> str | None:
    """Return the kind of a special address, such as `PRIVATE`; None for any other address."""
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast:
        return "multicast"
    if address.is_unspecified:
        return "unspecified"
    if any(address in network for network in RESERVED_NETWORKS):
        return "reserved"
    return PRIVATE if any(address in network for network in _PRIVATE_NETWORKS) else None


Network = IPv4Network | IPv6Network
PUBLIC: Final = "public"
"""Among allowed networks: all addresses that are neither private nor special."""

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
        networks: Sequence[Network | str] = (),
        also_networks: Sequence[Network] = (),
    ) -> None:
        """Keep the settings `HALFWAY_CHECK_HOSTS`, `…_NETWORKS` and `…_ALSO_NETWORKS`.

        In a host `*` matches any characters. `networks`, with `PUBLIC` among them for all public addresses, replace the
        default networks; `also_networks` extend them.
        """
        self._hosts = tuple(host.lower() for host in hosts)
        self._has_networks = bool(networks)
        self._is_public_allowed = PUBLIC in networks
        self._networks = tuple(one for one in (*networks, *also_networks) if not isinstance(one, str))
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
        is_public = self._is_public_allowed and special_kind(direct) is None
        if self._has_networks and not self._is_listed(direct) and not is_public:
            return "an address that the operator does not allow (HALFWAY_CHECK_NETWORKS)"
        for reachable in (direct, *embedded):
            kind = special_kind(reachable)
            if kind is None or self._is_listed(reachable):
                continue
            if kind != PRIVATE:
                return f"a {kind} address, which the operator does not allow (HALFWAY_CHECK_ALSO_NETWORKS)"
            if self._has_networks:
                return "a private address, which the operator does not allow (HALFWAY_CHECK_NETWORKS)"
        return None

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)
