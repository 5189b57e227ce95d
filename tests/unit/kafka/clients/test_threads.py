"""How abandoned clients are ended."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer

from halfway.kafka.clients import threads
from halfway.kafka.clients.threads import ClientCloser
from tests.support.waiting import GENEROUS_S, until_true


class HeldProducer(Producer):
    """One whose open transaction cannot be aborted, because Kafka does not answer."""

    released = threading.Event()

    def close(self) -> bool:
        self.released.wait(GENEROUS_S)
        return super().close()


def settings(name: str) -> dict[str, str]:
    return {"bootstrap.servers": "127.0.0.1:1", "transactional.id": name}


@contextmanager
def held_closer() -> Iterator[ClientCloser]:
    """A closer that has begun with a client that it cannot end yet."""
    closer = ClientCloser()
    HeldProducer.released.clear()
    try:
        closer.take(HeldProducer(settings("held")), "held")
        yield closer
    finally:
        HeldProducer.released.set()


async def test_a_client_that_cannot_be_ended_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka hangs for hours: each incarnation that cannot begin leaves three clients, with threads and connections."""
    monkeypatch.setattr(threads, "_HELD_S", 0.0)
    with held_closer() as closer:
        for number in range(20):
            closer.take(Producer(settings(f"{number}")), f"{number}")
        await until_true(lambda: all(closer.has_closed(f"{number}") for number in range(20)))
        assert not closer.has_closed("held")
    await until_true(lambda: closer.has_closed("held"))


async def test_a_client_that_waits_behind_one_that_is_held_up_is_ended_at_last() -> None:
    with held_closer() as closer:
        closer.take(Producer(settings("next")), "next")
    await until_true(lambda: closer.has_closed("held") and closer.has_closed("next"))
