"""As many effects as committed orders, even if processes are killed and messages are repeated."""

import asyncio
import os
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest

from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import Server
from tests.support.effects.story import PARTITIONS, Story

PAIRS = [("sqlite", "postgresql+psycopg"), ("postgresql+psycopg", "mysql+pymysql"), ("mysql+pymysql", "sqlite")]
ORDERS = int(os.environ.get("HALFWAY_TEST_EFFECTS_ORDERS", "200")) // len(PAIRS) + 1
SEED = int(os.environ.get("HALFWAY_TEST_EFFECTS_SEED", "") or random.randrange(10**9))
KILLS = max(3, ORDERS // 500)

pytestmark = pytest.mark.xdist_group("databases")


@pytest.mark.timeout(max(1200, ORDERS))
@pytest.mark.parametrize("drivers", PAIRS, ids="-to-".join)
async def test_each_message_of_a_committed_order_takes_effect_once(
    coordinator: CoordinatorProcess,
    cluster: Cluster,
    servers: Mapping[str, Server],
    tmp_path: Path,
    drivers: tuple[str, str],
) -> None:
    """The orders are placed in one database, and take effect in another one."""
    topic = await cluster.make_topic(partitions=PARTITIONS)
    print(f"seed {SEED}")  # noqa: T201 - shown with a failure
    with ExitStack() as stack:
        place, effect = (stack.enter_context(new_database(servers, tmp_path, driver)) for driver in drivers)
        story = Story(coordinator.url, cluster.bootstrap_servers, topic, (place, effect), tmp_path, SEED)
        happened = await asyncio.to_thread(story.play, ORDERS, KILLS)
    print(happened)  # noqa: T201 - the report of the long run
    assert happened["copies"] > 0


def new_database(servers: Mapping[str, Server], folder: Path, driver: str) -> AbstractContextManager[str]:
    """Yield the URL of an empty database."""
    if driver == "sqlite":
        return nullcontext(f"sqlite:///{folder / 'story.sqlite'}")
    return servers[driver.partition("+")[0]].new_database(driver)
