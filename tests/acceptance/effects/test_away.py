"""Orders are taken while halfway or Kafka is away, and each takes effect once."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.acceptance.effects.test_effects import SEED, new_database
from tests.support.brokers.guarded import GuardedKafka
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import Server
from tests.support.effects.story import PARTITIONS, Story

DRIVERS = ("postgresql+psycopg", "sqlite")
"""`python -m tests.orders` goes on for longer, on others."""
ORDERS, KILLS = 300, 3
AWAY_S = 1.0
PAUSE_S = 0.2

pytestmark = pytest.mark.xdist_group("guarded_kafka")


@pytest.mark.timeout(1200)
async def test_orders_go_on_while_halfway_or_kafka_is_away(
    guarded_kafka: GuardedKafka, new_coordinator: NewCoordinator, servers: Mapping[str, Server], tmp_path: Path
) -> None:
    """Coordinator and broker are killed in turn, and the broker is frozen; services are killed all the time."""
    servers_of_kafka = guarded_kafka.bootstrap_servers
    topic = await Cluster(servers_of_kafka).make_topic(partitions=PARTITIONS)
    coordinator = new_coordinator({"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": servers_of_kafka}).start()
    print(f"seed {SEED}")  # noqa: T201 - shown with a failure

    @contextmanager
    def coordinator_away() -> Iterator[None]:
        coordinator.kill()
        yield
        time.sleep(AWAY_S)
        coordinator.start()

    @contextmanager
    def kafka_killed() -> Iterator[None]:
        guarded_kafka.kill()
        yield
        time.sleep(AWAY_S)
        guarded_kafka.start()

    @contextmanager
    def kafka_frozen() -> Iterator[None]:
        guarded_kafka.pause()
        try:
            yield
            time.sleep(AWAY_S)
        finally:
            guarded_kafka.resume()

    with ExitStack() as stack:
        place, effect = (stack.enter_context(new_database(servers, tmp_path, driver)) for driver in DRIVERS)
        story = Story(
            coordinator.url, servers_of_kafka, topic, (place, effect), tmp_path, SEED, stores=True, pause_s=PAUSE_S
        )
        outages = (coordinator_away, kafka_killed, kafka_frozen)
        happened = await asyncio.to_thread(story.play, ORDERS, KILLS, outages)
    assert happened["stored"] >= len(outages)
