"""The settings of librdkafka that all kinds of clients share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = frozenset({"bootstrap.servers", "client.id", "debug", "log_level", "logger", "oauth_cb"})
_PREFIXES: Final = ("broker.", "reconnect.", "sasl.", "security.", "socket.", "ssl.")


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for connections to brokers, without those that only consumers have."""
    return {name: value for name, value in settings.items() if name in _NAMES or name.startswith(_PREFIXES)}
