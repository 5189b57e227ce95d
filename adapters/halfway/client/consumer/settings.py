"""The settings of librdkafka that all kinds of clients share, and when a message is tried again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from halfway.client.errors import HalfwayError

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


class RejectedMessageError(HalfwayError):
    """Raise it in a handler if a retry cannot help: the message becomes a dead letter at once."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A message is tried `attempts` times. The pause doubles up to `max_pause_s`, and is shortened at random.

    Only the message's own partition waits.
    """

    attempts: int = 5
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError for settings without an attempt or without a pause."""
        if self.attempts < 1 or not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"{self}: give at least 1 attempt, and 0 < first_pause_s <= max_pause_s")

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row."""
        longest = min(self.first_pause_s * 2.0 ** min(failures - 1, 60), self.max_pause_s)
        return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads consumers that failed at the same time
