"""The URL at which other instances reach this one, if none is set.

The name of a machine is often known to nobody else: in Kubernetes no pod can look up the name of another one. So it is
the address from which this machine reaches Kafka, which all instances reach too.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Final

_ANYWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation. The route to them is the default route; nothing is ever sent there."""
_DISCARD: Final = 9


def default_instance_url(*, host: str, port: int, bootstrap_servers: str, tls: bool) -> str:
    """Return the URL of an instance that listens on `host`. Names are looked up, which blocks.

    With TLS it has the name of the machine, because a certificate rarely has an address.
    """
    if tls:
        return f"https://{socket.gethostname()}:{port}"
    address = _listening_address(host, bootstrap_servers)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _listening_address(host: str, bootstrap_servers: str) -> str:
    try:
        is_wildcard = host == "" or ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = False
    if not is_wildcard:
        return host
    families = (socket.AF_INET, socket.AF_INET6) if ":" in host or not host else (socket.AF_INET,)
    brokers = [_host_of(server) for server in bootstrap_servers.split(",")]
    for family in families:
        for remote in (*brokers, _ANYWHERE[family]):
            local = _address_towards(remote, family)
            if local is not None:
                return local
    return socket.gethostname()


def _host_of(server: str) -> str:
    """Return the host of a bootstrap server such as `broker:9092`, `[::1]:9092` or `SSL://broker`."""
    _, _, place = server.strip().rpartition("//")
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]


def _address_towards(remote: str, family: socket.AddressFamily) -> str | None:
    """Return this machine's address on the route to a host; None if it is unknown or of no use to other machines."""
    try:
        [(_, _, _, _, target), *_] = socket.getaddrinfo(remote, _DISCARD, family, socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of UDP: it chooses a route, and sends nothing
            local = str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None
    address = ip_address(local)
    return None if address.is_loopback or address.is_link_local or address.is_unspecified else local
