"""`python -m bench frozen`: how long an instance that is paused in a Kafka transaction holds back consumers.

The instance is paused (SIGSTOP) between producing the real message and the commit. A `read_committed` consumer of that
partition then gets no records, not even those of a plain producer, until the transaction is aborted: by the instance
that takes over, or by the broker if there is none.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from typing import Final, Self
from uuid import uuid4

import msgspec
from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition

from bench.audit.copies import Auditor
from bench.plan import GROUP
from bench.system.fleet import FleetRig, register, served, until, until_even
from bench.system.rig import RigError
from halfway.domain.ids import shard_of
from tests.faults.plan import Fault
from tests.support.coordinator.faulty import FaultyCoordinator
from tests.support.coordinator.fleet import SHARDS
from tests.support.coordinator.process import CoordinatorProcess

AT: Final = "lane.4.tombstones.after"
"""Everything is produced, and the commit is not sent yet."""
LONGEST_S: Final = 180.0
EVERY_S: Final = 0.02
HELD_RECORDS: Final = 25
PARTITION: Final = 0
_REQUEST_S: Final = 20.0


class FrozenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to try: session time-outs with another instance, transaction time-outs without one."""

    sessions_s: tuple[float, ...] = (10.0, 6.0)
    timeouts_s: tuple[float, ...] = (45.0, 15.0)


class FrozenLine(msgspec.Struct, frozen=True, kw_only=True):
    """One pause; seconds from it until the consumer got a record, and until all shards were served."""

    instances: int
    session_s: float
    transaction_timeout_s: float
    held_back_s: float
    served_again_s: float | None
    """None without another instance."""
    copies: int
    """Copies of the message after the commit was sent again; it must be 1."""


def measure_frozen(rig: FleetRig, options: FrozenOptions, *, say: Callable[[str], None]) -> list[FrozenLine]:
    """Pause one of two instances with each session time-out, then a single one with each transaction time-out."""
    lines = []
    for session_s in options.sessions_s:
        say(f"one of two is frozen, session {session_s:g} s")
        lines.append(_pause(rig, 2, session_s, 45.0, say))
    for timeout_s in options.timeouts_s:
        say(f"the only one is frozen, transaction time-out {timeout_s:g} s")
        lines.append(_pause(rig, 1, 10.0, timeout_s, say))
    return lines


def _pause(rig: FleetRig, instances: int, session_s: float, timeout_s: float, say: Callable[[str], None]) -> FrozenLine:
    settings = {
        "HALFWAY_SESSION_TIMEOUT_S": f"{session_s:g}",
        "HALFWAY_TRANSACTION_TIMEOUT_S": f"{timeout_s:g}",
    }
    auditor = Auditor(rig.bootstrap_servers, rig.topic)
    start_offsets = auditor.ends()
    with rig.fleet(instances - 1, settings) as fleet, ExitStack() as stack:
        victim = fleet.add_faulty()
        victim.start()
        register(victim, rig.topic)
        own = until_even(fleet.members)[-1]
        name = next(candidate for candidate in iter(lambda: uuid4().hex, "") if shard_of(candidate, SHARDS) in own)
        watch = stack.enter_context(_Watch(rig.bootstrap_servers, rig.topic))
        _open_transaction(victim, name, rig.topic, watch)
        victim.pause()
        try:
            frozen_at = time.monotonic()
            others = fleet.members[:-1]
            served_again_s = None
            if others:
                until(lambda: served(others[0]), lambda arrival: len(arrival) == SHARDS, "not taken over", LONGEST_S)
                served_again_s = round(time.monotonic() - frozen_at, 2)
            held_back_s = watch.next_after(frozen_at) - frozen_at
            say(f"  held back for {held_back_s:.1f} s")
        finally:
            victim.faults.release()
            victim.resume()
        until(
            lambda: _commit(fleet.members[0], name), lambda status: status == HTTPStatus.OK, "not committed", LONGEST_S
        )
    copies = auditor.copies(start_offsets)
    return FrozenLine(
        instances=instances,
        session_s=session_s,
        transaction_timeout_s=timeout_s,
        held_back_s=round(held_back_s, 2),
        served_again_s=served_again_s,
        copies=sum(count for (transaction_id, _), count in copies.items() if transaction_id == name.encode()),
    )


def _open_transaction(victim: FaultyCoordinator, name: str, topic: str, watch: _Watch) -> None:
    """Commit up to the point at which the Kafka transaction is open and holds the consumer back."""
    message = {"topic": topic, "partition": PARTITION, "value": "held back"}
    status = _post(victim, "/transactions", {"group": GROUP, "id": name, "messages": [message]})
    if status != HTTPStatus.CREATED:
        raise RigError(f"the prepare was answered {status}")
    victim.faults.plan(Fault(point=AT, action="pause"))
    threading.Thread(target=_commit, args=(victim, name), daemon=True).start()
    victim.faults.until_reached(AT)
    until(watch.behind, lambda records: records > HELD_RECORDS, "the consumer is not held back")


def _commit(member: CoordinatorProcess, name: str) -> int:
    return _post(member, f"/transactions/{name}/end", {"outcome": "commit"})


def _post(member: CoordinatorProcess, path: str, body: object) -> int:
    """Return the status, 0 if there was no answer."""
    request = urllib.request.Request(  # noqa: S310 - our own process
        f"{member.url}/v1{path}", data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:  # noqa: S310 - the same
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class _Watch:
    """A plain producer and a `read_committed` consumer of one partition, each on its own thread."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._servers, self._topic = bootstrap_servers, topic
        self._stopped = threading.Event()
        self._delivered = 0
        self._arrivals: list[float] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._produce, self._consume)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self._arrivals), lambda count: count > HELD_RECORDS, "nothing is consumed")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def behind(self) -> int:
        """Return the number of records that were delivered and not yet consumed."""
        return self._delivered - len(self._arrivals)

    def next_after(self, moment: float) -> float:
        """Wait for the first record that is consumed after a moment, and return its time."""
        arrival = until(
            lambda: next((at for at in self._arrivals if at > moment), None), bool, "it is held back", LONGEST_S
        )
        return moment if arrival is None else arrival

    def _produce(self) -> None:
        producer = Producer({"bootstrap.servers": self._servers, "linger.ms": 0})

        def report(error: object, _: object) -> None:
            self._delivered += error is None

        while not self._stopped.wait(EVERY_S):
            producer.produce(self._topic, b"plain", partition=PARTITION, on_delivery=report)
            producer.poll(0)
        producer.flush(_REQUEST_S)

    def _consume(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "bench-frozen",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 20,
            }
        )
        consumer.assign([TopicPartition(self._topic, PARTITION, OFFSET_END)])
        try:
            while not self._stopped.is_set():
                message = consumer.poll(0.1)
                if message is not None and message.error() is None and message.value() == b"plain":
                    self._arrivals.append(time.monotonic())
        finally:
            consumer.close()
