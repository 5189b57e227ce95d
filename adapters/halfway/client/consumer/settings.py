"""The settings of librdkafka that all kinds of clients share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OF_CONSUMERS: Final = frozenset(
    {
        "allow.auto.create.topics",
        "check.crcs",
        "consume.callback.max.messages",
        "coordinator.query.interval.ms",
        "default.topic.config",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "on_commit",
        "partition.assignment.strategy",
        "session.timeout.ms",
    }
)
_PREFIXES_OF_CONSUMERS: Final = ("auto.", "enable.auto.", "enable.partition.", "fetch.", "group.", "offset.", "queued.")


_MAX_IDLE_MS: Final = 120_000
_ANSWER_MS: Final = 10_000
_MARGIN_MS: Final = 1_000
_FETCH_WAIT_MS: Final = 500
"""librdkafka's default of `fetch.wait.max.ms`."""


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with ours where librdkafka's own would wait for minutes.

    A firewall or balancer forgets an idle connection, and then drops what is sent on it without a word. So it is closed
    before that, and a connection on which no answer comes is given up.
    """
    fetch_ms = int(settings.get("fetch.wait.max.ms", _FETCH_WAIT_MS))
    return {
        "connections.max.idle.ms": _MAX_IDLE_MS,
        "socket.timeout.ms": max(_ANSWER_MS, fetch_ms + _MARGIN_MS),  # librdkafka refuses a shorter one
        "socket.keepalive.enable": True,
        **settings,
    }


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only consumers have: all that is about connections, as it was given."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _OF_CONSUMERS and not name.startswith(_PREFIXES_OF_CONSUMERS)
    }
