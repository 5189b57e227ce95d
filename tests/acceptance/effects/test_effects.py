"""As many effects as orders that committed, whatever is killed and however often a message comes."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.effects.story import PARTITIONS, Story

ORDERS = int(os.environ.get("HALFWAY_TEST_EFFECTS_ORDERS", "200"))
SEED = int(os.environ.get("HALFWAY_TEST_EFFECTS_SEED", "") or random.randrange(10**9))
KILLS = max(6, ORDERS // 1000)


@pytest.mark.timeout(max(300, ORDERS))
async def test_each_message_of_a_committed_order_takes_effect_once(
    coordinator: CoordinatorProcess, cluster: Cluster, tmp_path: Path
) -> None:
    topic = await cluster.make_topic(partitions=PARTITIONS)
    print(f"seed {SEED}")  # noqa: T201 - shown with a failure
    story = Story(coordinator.url, cluster.bootstrap_servers, topic, tmp_path, SEED)
    happened = await asyncio.to_thread(story.play, ORDERS, KILLS)
    print(happened)  # noqa: T201 - what the long run tells
    assert happened["copies"] > 0
