"""A short order story: many orders, several topics, lost answers, and a service that is killed."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.coordinator.command_line import run_command

RUN = Path(__file__).resolve().parents[3] / "examples" / "orders" / "run.py"


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("short_lived_brokers")
async def test_the_order_database_the_topics_and_halfway_agree_in_the_end(tmp_path: Path) -> None:
    """Every kind of failure happens, and every transaction has the outcome of its order."""
    ended = await run_command(tmp_path, sys.executable, str(RUN), "--json", "--orders", "60")

    print(ended.err)  # noqa: T201  shown with a failure: the seed and the tables
    assert ended.status == 0, ended.out[-4000:]
    told = json.loads(ended.out.strip().splitlines()[-1])
    assert told["problems"] == []
    assert all(count > 0 for count in told["faults"].values()), told["faults"]
    assert told["kills"] > 0
