"""librdkafka's log lines as structlog events, how long quotas have delayed answers, and the round trips to brokers."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import suppress
from typing import ClassVar, Final

import msgspec
import structlog
from confluent_kafka import ThrottleEvent

_log = structlog.get_logger(__name__)
_REPEAT_S: Final = 10.0
# Every client of ours logs these once: a property that only producers or only consumers know.
_QUIET: Final = frozenset({"CONFWARN"})
_ADD_PARTITIONS: Final = re.compile(r"/(?P<broker>\d+): +ApiKey \S+ \(24\) Versions \d+\.\.(?P<highest>\d+)")
_COORDINATOR: Final = "TxnCoordinator"
"""librdkafka's name for its connection to the transaction coordinator of a producer."""


class LibrdkafkaLog:
    """The object for confluent-kafka's `logger` setting, which calls `log` on the thread that polls the client.

    librdkafka logs every failed attempt to connect. So at most one line of each facility is logged in ten seconds, with
    the number of lines that were left out.
    """

    def __init__(self) -> None:
        self._last_logged: dict[str, tuple[float, int]] = {}

    def log(self, level: int, _template: str, facility: str, client: str, text: str) -> None:
        """Log one line. librdkafka's lines name brokers and topics, never credentials or payloads."""
        if facility in _QUIET:
            level = logging.DEBUG
        logged_at, left_out = self._last_logged.get(facility, (-_REPEAT_S, 0))
        now = time.monotonic()
        if now < logged_at + _REPEAT_S:
            self._last_logged[facility] = (logged_at, left_out + 1)
            return
        self._last_logged[facility] = (now, 0)
        _log.log(
            min(level, logging.ERROR), "librdkafka", facility=facility, client=client, text=text, left_out=left_out
        )


class SessionWatch(LibrdkafkaLog):
    """Keeps why a consumer's session in its group has ended: librdkafka says so only in its log."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: str | None = None

    def take(self) -> str | None:
        """Return why the session has ended, once."""
        ended, self._ended = self._ended, None
        return ended

    def log(self, level: int, template: str, facility: str, client: str, text: str) -> None:
        if facility == "SESSTMOUT":
            self._ended = text
        super().log(level, template, facility, client, text)


class _DebugWatch(LibrdkafkaLog):
    """Reads what librdkafka says only in its log, at debug level: set `debug` to the context of its lines."""

    debug: ClassVar[str]

    def __init__(self, *, verbose: bool) -> None:
        """Log debug lines only if `verbose`."""
        super().__init__()
        self._verbose = verbose

    def see(self, facility: str, text: str) -> None:
        """Read one line."""
        raise NotImplementedError

    def log(self, level: int, template: str, facility: str, client: str, text: str) -> None:
        self.see(facility, text)
        if level > logging.DEBUG or self._verbose:
            super().log(level, template, facility, client, text)


class ApiVersionWatch(_DebugWatch):
    """Keeps which version of AddPartitionsToTxn each broker knows."""

    debug = "feature"

    def __init__(self, *, verbose: bool) -> None:
        super().__init__(verbose=verbose)
        self.versions: dict[int, int] = {}
        """The highest version by broker."""

    def see(self, facility: str, text: str) -> None:
        found = _ADD_PARTITIONS.search(text) if facility == "APIVERSION" else None
        if found is not None:
            self.versions[int(found["broker"])] = int(found["highest"])


class CoordinatorWatch(_DebugWatch):
    """Counts the connections of a producer to its transaction coordinator.

    Each begins with the versions of requests that the broker knows, and nothing else is asked on it before that. The
    context `broker`, which has each loss too, has three lines for each Kafka transaction.
    """

    debug = "feature"

    def __init__(self, *, verbose: bool) -> None:
        super().__init__(verbose=verbose)
        self.connections = 0

    def see(self, facility: str, text: str) -> None:
        if facility == "APIVERSION" and _COORDINATOR in text and text.endswith("Broker API support:"):
            self.connections += 1


log = structlog.get_logger(__name__)

_THROTTLE_REPEAT_S: Final = 30.0
_REMEDY: Final = "raise the quotas of halfway's user or client id (kafka-configs.sh --entity-type users or clients)"


class Throttling:
    """Adds up what the clients report; each reports on the thread that polls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_at = -_THROTTLE_REPEAT_S
        self.seconds = 0.0
        """How long answers were delayed in all."""

    def note(self, event: ThrottleEvent) -> None:
        """Count one delay; log one in a while."""
        if not event.throttle_time:
            return  # it has ended
        now = time.monotonic()
        with self._lock:
            self.seconds += event.throttle_time
            due = now >= self._logged_at + _THROTTLE_REPEAT_S
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


class _RoundTrip(msgspec.Struct):
    """The round trips to a broker since the statistics before, in microseconds."""

    avg: int
    p99: int
    cnt: int


class _Broker(msgspec.Struct):
    nodeid: int
    rtt: _RoundTrip


class _Statistics(msgspec.Struct):
    brokers: dict[str, _Broker]


class RoundTrips:
    """The round trips of one producer by broker, from librdkafka's statistics, on the thread that polls it.

    The statistics have 1 KB for each partition of the topics that the producer knows, 10 KB and 0.5 ms of CPU time with
    eight: only for a producer of few topics.
    """

    EVERY_MS: ClassVar[int] = 15_000

    def __init__(self) -> None:
        self.average_s: dict[str, float] = {}
        self.p99_s: dict[str, float] = {}

    def note(self, statistics: str) -> None:
        """Take the figures of the brokers that have answered; an exception would end the producer."""
        with suppress(msgspec.MsgspecError):
            brokers = msgspec.json.decode(statistics, type=_Statistics).brokers.values()
            answered = {str(one.nodeid): one.rtt for one in brokers if one.rtt.cnt}
            self.average_s = {broker: rtt.avg / 1e6 for broker, rtt in answered.items()}
            self.p99_s = {broker: rtt.p99 / 1e6 for broker, rtt in answered.items()}


ROUND_TRIPS: Final = RoundTrips()
"""Of the producer of half records."""
