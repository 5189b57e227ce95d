"""librdkafka's log lines as structlog events."""

from __future__ import annotations

import logging
import time
from typing import Final

import structlog

_log = structlog.get_logger(__name__)
_REPEAT_S: Final = 10.0
# Said once for each of our clients: a property that only a producer or only a consumer knows.
_QUIET: Final = frozenset({"CONFWARN"})
_COORDINATOR: Final = "TxnCoordinator"
"""librdkafka's name for its connection to the transaction coordinator of a producer."""


class LibrdkafkaLog:
    """The object for confluent-kafka's `logger` setting, which calls `log` on the thread that polls the client.

    librdkafka logs every failed attempt to connect: each facility's lines are passed on at most once in ten seconds,
    with the count of those left out.
    """

    def __init__(self) -> None:
        """Nothing said yet."""
        self._said: dict[str, tuple[float, int]] = {}

    def log(self, level: int, _template: str, facility: str, client: str, text: str) -> None:
        """Pass one line on; librdkafka's lines name brokers and topics, never credentials or payloads."""
        if facility in _QUIET:
            level = logging.DEBUG
        said_at, left_out = self._said.get(facility, (-_REPEAT_S, 0))
        now = time.monotonic()
        if now < said_at + _REPEAT_S:
            self._said[facility] = (said_at, left_out + 1)
            return
        self._said[facility] = (now, 0)
        _log.log(
            min(level, logging.ERROR), "librdkafka", facility=facility, client=client, text=text, left_out=left_out
        )


class CoordinatorWatch(LibrdkafkaLog):
    """Counts how often a producer's connection to its transaction coordinator was lost.

    librdkafka reports this only in its log, and each loss only at the debug level: `debug` must hold `broker`.
    """

    debug: Final = "broker"

    def __init__(self, *, verbose: bool) -> None:
        """Pass debug lines on only if `verbose`."""
        super().__init__()
        self._verbose = verbose
        self.losses = 0

    def log(self, level: int, template: str, facility: str, client: str, text: str) -> None:
        if facility == "FAIL" and _COORDINATOR in text:
            self.losses += 1
        if level > logging.DEBUG or self._verbose:
            super().log(level, template, facility, client, text)
