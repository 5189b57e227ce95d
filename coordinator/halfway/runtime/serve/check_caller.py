"""Builds the caller of check endpoints from the settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from halfway.checkback import Destinations, HttpCheckCaller
from halfway.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from halfway.runtime.settings import Settings


def check_authorities(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context that verifies endpoints, None for the system's authorities.

    Raises ConfigurationError as `authorities` does.
    """
    return authorities("HALFWAY_CHECK_CA_FILE", settings.check_ca_file)


def authorities(setting: str, file: Path | None) -> ssl.SSLContext | None:
    """Return a TLS context that trusts the authorities in a file, None for the system's authorities.

    Raises:
        ConfigurationError: the file has no certificate in PEM format.

    """
    try:
        return None if file is None else ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{setting} {str(file)!r} contains no certificate in PEM format: {error}") from None


def check_caller(settings: Settings, secrets_of: Callable[[str], Sequence[bytes]] | None = None) -> HttpCheckCaller:
    """Return a caller that signs checks with the secrets of their group. It has opened no connection yet.

    Raises ConfigurationError as `check_authorities` does.
    """
    return HttpCheckCaller(
        timeout_s=settings.check_timeout_s,
        connect_timeout_s=settings.check_connect_timeout_s,
        demand_nonce=settings.check_demand_nonce,
        secrets_of=secrets_of,
        destinations=Destinations(
            hosts=settings.check_hosts,
            networks=settings.check_networks,
            also_networks=settings.check_also_networks,
            private_networks=settings.check_private_networks,
        ),
        ssl_context=check_authorities(settings),
        proxy=None if settings.check_proxy is None else settings.check_proxy.get_secret_value(),
    )
