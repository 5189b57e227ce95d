"""`python -m bench frozen`: how long an instance that is paused in a Kafka transaction holds back consumers.

The instance is paused (SIGSTOP) between producing the real message and the commit. A `read_committed` consumer of that
partition then gets no records, not even those of a plain producer, until the transaction is aborted: by the instance
that takes over, or by the broker if there is none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPException
from typing import Annotated, Any, Final, Self

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from msgspec import Meta

from bench.figures import Record, Row, Say
from bench.plan import GROUP
from bench.scenarios import FLEET_SHARDS
from bench.system import SPARE_S, Broker, Instance, Rig, RigError, until
from halfway.client.ids import NewIds
from halfway.protocol.ids import IdMaker
from tests.faults.plan import Fault, Faults

AT: Final = "lane.4.tombstones.after"
"""Everything is produced, and the commit is not sent yet."""
EVERY_S: Final = 0.02
HELD_RECORDS: Final = 25
PARTITION: Final = 0
_REQUEST_S: Final = 20.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to try."""

    session: Annotated[tuple[float, ...], Meta(description="session time-outs in s, of one of two")] = (10.0, 6.0)
    timeout: Annotated[tuple[float, ...], Meta(description="transaction time-outs in s, of an only one")] = (45.0, 15.0)


def run(kafka: Broker, options: Options, say: Say) -> Record:
    """Pause one of two instances with each session time-out, then a single one with each transaction time-out."""
    rows = [_pause(kafka, 2, session, 45.0, say) for session in options.session]
    rows += [_pause(kafka, 1, 10.0, timeout, say) for timeout in options.timeout]
    return Record(
        title="an instance is frozen in an open Kafka transaction",
        rows=rows,
        clean=all(row["copies"] == 1 for row in rows),
    )


def _pause(kafka: Broker, instances: int, session: float, timeout: float, say: Say) -> Row:
    say(f"one of {instances} is frozen: session {session:g} s, transaction time-out {timeout:g} s")
    settings = {"HALFWAY_SESSION_TIMEOUT_S": f"{session:g}", "HALFWAY_TRANSACTION_TIMEOUT_S": f"{timeout:g}"}
    with ExitStack() as stack:
        name = f"frozen-{NewIds().new_id()[-6:]}"
        rig = Rig(kafka, name, settings=settings, instances=instances - 1, shards=FLEET_SHARDS)
        stack.enter_context(rig)
        faults = Faults(rig.directory / "faults")
        victim = rig.launch(faults=faults.directory)
        victim.ready()
        victim.register(rig.topic)
        own = {shard for shard, owner in enumerate(rig.owners()) if owner is victim}
        name = IdMaker(FLEET_SHARDS).make(time.time_ns() // 1_000_000, min(own))
        watch = stack.enter_context(_Watch(kafka.bootstrap_servers, rig.topic))
        _open_transaction(victim, faults, name, rig.topic, watch)
        victim.process.pause()
        try:
            frozen_at = time.monotonic()
            served_again = None
            if instances > 1:
                until(lambda: len(rig.first.served()), lambda found: found == FLEET_SHARDS, "not taken over")
                served_again = time.monotonic() - frozen_at
            held_back = watch.next_after(frozen_at) - frozen_at
        finally:
            faults.release()
            victim.process.resume()
        until(lambda: _commit(rig.first, name), lambda status: status == HTTPStatus.OK, "not committed")
        watch.catch_up()
        copies = watch.copies[name.encode()]
    return {
        "instances": instances,
        "session s": session,
        "transaction time-out s": timeout,
        "consumers held back s": held_back,
        "served again s": served_again,
        "copies": copies,
    }


def _open_transaction(victim: Instance, faults: Faults, name: str, topic: str, watch: _Watch) -> None:
    """Commit up to the point at which the Kafka transaction is open and holds the consumer back."""
    message = {"topic": topic, "partition": PARTITION, "value": "held back"}
    status, _ = victim.ask("POST", "/v1/transactions", {"group": GROUP, "id": name, "messages": [message]})
    if status != HTTPStatus.CREATED:
        raise RigError(f"the prepare was answered {status}")
    faults.plan(Fault(point=AT, action="pause"))
    threading.Thread(target=_commit, args=(victim, name), daemon=True).start()
    faults.until_reached(AT)
    until(watch.behind, lambda records: records > HELD_RECORDS, "the consumer is not held back")


def _commit(instance: Instance, name: str) -> int:
    """Return the status, 0 if there was no answer."""
    path = f"/v1/transactions/{name}/end"
    try:
        return instance.ask("POST", path, {"outcome": "commit"}, timeout_s=_REQUEST_S)[0]
    except (OSError, HTTPException):
        return 0


class _Watch:
    """A plain producer and a `read_committed` consumer of one partition, each on its own thread."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._servers, self._topic = bootstrap_servers, topic
        self._stopped = threading.Event()
        self._delivered = 0
        self._arrivals: list[float] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._produce, self._consume)]
        self.copies: Counter[Any] = Counter()
        """How often the message of each transaction was read."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: len(self._arrivals), lambda number: number > HELD_RECORDS, "nothing is consumed")
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
        return until(
            lambda: next((at for at in self._arrivals if at > moment), 0.0), bool, "it is held back", 2 * SPARE_S
        )

    def catch_up(self) -> None:
        """Wait until all that is in the partition by now is consumed, since later records are."""
        enough = self._delivered + HELD_RECORDS
        until(lambda: len(self._arrivals), lambda number: number > enough, "the consumer does not catch up")

    def _produce(self) -> None:
        producer = Producer({"bootstrap.servers": self._servers, "linger.ms": 0})

        def report(error: object, _: object) -> None:
            self._delivered += error is None

        while not self._stopped.wait(EVERY_S):
            producer.produce(self._topic, b"plain", partition=PARTITION, on_delivery=report)
            producer.poll(0)
        producer.flush(_REQUEST_S)

    def _consume(self) -> None:
        settings = {"group.id": "bench-frozen", "enable.auto.commit": False, "isolation.level": "read_committed"}
        consumer = Consumer({**settings, "bootstrap.servers": self._servers, "fetch.wait.max.ms": 20})
        consumer.assign([TopicPartition(self._topic, PARTITION, OFFSET_BEGINNING)])
        try:
            while not self._stopped.is_set():
                message = consumer.poll(0.1)
                if message is None or message.error() is not None:
                    continue
                if message.value() == b"plain":
                    self._arrivals.append(time.monotonic())
                else:
                    self.copies[dict(message.headers() or ())["halfway-transaction-id"]] += 1
        finally:
            consumer.close()
