"""One Kafka for all workers of a test run, as long as one of them lives."""

import asyncio
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.brokers.keeper import address_of, kept_kafka
from tests.support.waiting import until_true

ROOT = Path(__file__).parents[3]
ANOTHER_WORKER = """
import sys
from tests.support.brokers.keeper import kept_kafka
with kept_kafka("kafka-2:9092", sys.argv[1]) as bootstrap_servers:
    print(bootstrap_servers, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run() -> str:
    return uuid4().hex


def wait_for_end(run: str) -> None:
    asyncio.run(until_true(lambda: not address_of(run).exists(), "the keeper ends"))


def test_all_workers_share_the_kafka_of_the_first(run: str) -> None:
    with kept_kafka("kafka-1:9092", run) as first:
        with kept_kafka("kafka-2:9092", run) as second:
            assert first == second == "kafka-1:9092"
        with kept_kafka("kafka-2:9092", run) as third:
            assert third == "kafka-1:9092"
    wait_for_end(run)
    with kept_kafka("kafka-2:9092", run) as later:
        assert later == "kafka-2:9092"
    wait_for_end(run)


def test_it_ends_with_a_worker_that_is_killed(run: str) -> None:
    command = [sys.executable, "-c", ANOTHER_WORKER, run]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"kafka-2:9092\n"
        assert address_of(run).exists()
        worker.kill()
        wait_for_end(run)
