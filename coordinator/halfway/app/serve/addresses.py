"""The addresses and ports of an instance: who may reach them, their certificate, and the URL for other instances."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from halfway.app.settings import Settings
from halfway.http.requests.authentication import AllowedHosts
from halfway.http.server.acceptor import open_listeners
from halfway.http.server.server import HttpServer, ServerTls
from halfway.protocol.errors import ConfigurationError

_LOCAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - to connect to, not to listen on


async def listen(server: HttpServer, host: str, port: int, setting: str, tls: ServerTls | None = None) -> None:
    server.serve(await listeners_of(host, port, setting), tls)


async def listeners_of(host: str, port: int, setting: str) -> list[socket.socket]:
    """Return sockets that listen on a host; raise ConfigurationError, with the setting of the port, if that fails."""
    try:
        return await open_listeners(host, port)
    except (OSError, ValueError) as error:  # ValueError: the text is not a legal host name
        raise cannot_listen(host, port, setting, error) from error


def cannot_listen(host: str, port: int, setting: str, error: Exception) -> ConfigurationError:
    """Return the error for a port that is taken, or for an address that this machine does not have."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        reason = "it is taken by another process"
    else:
        reason = str(getattr(error, "strerror", None) or error)
    return ConfigurationError(f"cannot listen on port {port} of {host} ({reason}): choose another with {setting}")


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    address = _LOCAL.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def demand_guarded(settings: Settings) -> None:
    """Raise ConfigurationError if the whole network would have access, and the operator did not permit that."""
    if settings.access_control or settings.open_access is True:
        return
    for variable, host in _api_hosts(settings).items():
        if not _is_loopback(host):
            cause = " because of HALFWAY_CONSOLE=health" if variable == "HALFWAY_HEALTH_HOST" else ""
            raise ConfigurationError(
                f"the API would listen on {host or 'every address'} without asking for keys{cause}: set "
                "HALFWAY_MASTER_SECRET (openssl rand -hex 32) and HALFWAY_OPERATOR_KEY (halfway keys generate), or "
                f"{variable}=127.0.0.1, or HALFWAY_OPEN_ACCESS=true if everybody who can reach it may do everything"
            )


def _api_hosts(settings: Settings) -> dict[str, str]:
    """Return the hosts that the API listens on, by setting. With the console, the health port serves the API too."""
    hosts = {"HALFWAY_HOST": settings.host}
    return hosts | ({"HALFWAY_HEALTH_HOST": settings.health_host} if settings.console == "health" else {})


def demand_host(settings: Settings) -> Callable[[web.BaseRequest], None]:
    """Return a function that raises ForbiddenError for requests with a host name that is not this API's.

    On loopback without keys, the address is the only protection. A web page gets around it with a name that resolves
    to that address.
    """
    allowed = settings.allowed_hosts
    if not allowed and (settings.access_control or not _is_loopback(settings.host)):
        return lambda _: None
    own = urlsplit(settings.instance_url or "").hostname
    return AllowedHosts(allowed if own is None else (*allowed, own)).demand


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def server_tls(settings: Settings) -> ServerTls | None:
    if settings.tls_certificate_file is None or settings.tls_key_file is None:
        return None
    return ServerTls(
        certificate=settings.tls_certificate_file,
        key=settings.tls_key_file,
        client_authorities=settings.tls_client_ca_file,
    )


# --- the URL at which other instances reach this one, if none is set

# The name of a machine is often known to nobody else: in Kubernetes no pod can look up the name of another one. So it
# is the address from which this machine reaches Kafka, which all instances reach too.
_ANYWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation. The route to them is the default route; nothing is ever sent there."""
_DISCARD: Final = 9


def instance_url_of(settings: Settings, port: int) -> str:
    """Return the default URL of an instance at a port. Names are looked up, which blocks."""
    servers = settings.kafka.get("bootstrap.servers")
    return default_instance_url(
        host=settings.host,
        port=port,
        bootstrap_servers="" if servers is None else servers.get_secret_value(),
        tls=settings.tls_certificate_file is not None,
    )


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
