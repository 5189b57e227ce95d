"""Quotas: how long brokers have delayed the answers to this process."""

from __future__ import annotations

import threading
import time
from typing import Final

import structlog
from confluent_kafka import ThrottleEvent

log = structlog.get_logger(__name__)

_REPEAT_S: Final = 30.0
_REMEDY: Final = "raise the quotas of halfway's user or client id (kafka-configs.sh --entity-type users or clients)"


class Throttling:
    """Adds up what the clients report; each reports on the thread that polls it."""

    def __init__(self) -> None:
        """Start with nothing reported."""
        self._lock = threading.Lock()
        self._logged_at = -_REPEAT_S
        self.seconds = 0.0
        """How long answers were delayed in all."""

    def note(self, event: ThrottleEvent) -> None:
        """Count one delay; log one in a while."""
        if not event.throttle_time:
            return  # it has ended
        now = time.monotonic()
        with self._lock:
            self.seconds += event.throttle_time
            due = now >= self._logged_at + _REPEAT_S
            if due:
                self._logged_at = now
        if due:
            log.warning(
                "kafka_throttled",
                broker=event.broker_name,
                seconds=event.throttle_time,
                total_s=round(self.seconds, 3),
                remedy=_REMEDY,
            )


THROTTLING: Final = Throttling()
