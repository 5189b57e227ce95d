"""`halfway topics`: lists, verifies and creates the internal topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from halfway.domain.errors import HalfwayError
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.kafka.topics.required_config import plans
from halfway.runtime.cli.remote import HEALTH_DOUBT, Remote, objects_of
from halfway.runtime.terminal import complain, printable, say, say_rows

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

_BROKERS: Final = 3
"""The assumed size of a cluster that does not answer."""
_ANSWER_S: Final = 5.0


def show(settings: Settings) -> int:
    """Print each internal topic with its required partitions, replication and settings.

    Without HALFWAY_REPLICATION_FACTOR the replication depends on the number of brokers, so Kafka is asked.
    """

    async def print_plans(topics: InternalTopics) -> int:
        config = settings.kafka_config("")
        try:
            planned = await topics.plans(timeout_s=_ANSWER_S) if config.replication_factor is None else None
        except HalfwayError as error:
            complain(f"{error.detail}: this shows what a cluster of {_BROKERS} brokers needs")
            planned = None
        rows = [
            (plan.name, str(plan.partitions), str(plan.replication), _settings(plan.settings))
            for plan in planned or plans(config, _BROKERS)
        ]
        say_rows(("topic", "partitions", "replication", "settings"), rows)
        return 0

    return _with_topics(settings, print_plans)


def compare(settings: Settings) -> int:
    """Print unsafe and missing topics; return exit status 1 if there are any."""

    async def print_problems(topics: InternalTopics) -> int:
        problems = await topics.watch()
        for problem in problems:
            say(printable(str(problem)))
        if not problems:
            say("every internal topic has the required settings")
        return 1 if problems else 0

    return _with_topics(settings, print_problems)


def prepare(settings: Settings) -> int:
    """Create missing topics, and verify the others."""

    async def ensure(topics: InternalTopics) -> int:
        await topics.ensure()
        say("every internal topic exists and has the required settings")
        return 0

    return _with_topics(settings, ensure)


def not_acquired(health_url: str) -> int:
    """Print the shards that an instance cannot acquire; return exit status 1 if there are any."""
    answer = Remote(health_url, None, HEALTH_DOUBT).ask("GET", "/health/ready", expected=HTTPStatus.SERVICE_UNAVAILABLE)
    shards = objects_of(answer, "not_acquired", HEALTH_DOUBT)
    columns = ("shard", "since", "tries", "error", "remedy")
    if shards:
        say_rows(columns, [[shard.get(column) for column in columns] for shard in shards])
    else:
        say("this instance can acquire all its shards")
    return 1 if shards else 0


def _settings(needed: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(needed.items()))


def _with_topics(settings: Settings, work: Callable[[InternalTopics], Awaitable[int]]) -> int:
    async def run() -> int:
        topics = InternalTopics(settings.kafka_config(""))
        try:
            return await work(topics)
        finally:
            topics.close()

    try:
        return asyncio.run(run())
    except HalfwayError as error:
        complain(error.detail)
        return 1
