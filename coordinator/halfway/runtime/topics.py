"""`halfway topics`: what the internal topics must be, whether they are, and creating them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from halfway.domain.errors import HalfwayError
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.kafka.topics.required_config import plans
from halfway.runtime.cli_remote import Remote, objects_of
from halfway.runtime.terminal import complain, printable, say, say_rows

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

_BROKERS: Final = 3
"""What is needed is shown for a cluster of this size if HALFWAY_REPLICATION_FACTOR is not set."""


def show(settings: Settings) -> int:
    """Print each internal topic with the partitions, replication and settings that it needs; ask nothing of Kafka."""

    async def shown(_: InternalTopics) -> int:
        config = settings.kafka_config("")
        rows = [
            (plan.name, str(plan.partitions), str(plan.replication), _settings(plan.settings))
            for plan in plans(config, _BROKERS)
        ]
        say_rows(("topic", "partitions", "replication", "settings"), rows)
        return 0

    return _with_topics(settings, shown)


def compare(settings: Settings) -> int:
    """Print what is unsafe or missing, and return exit status 1 if anything is."""

    async def compared(topics: InternalTopics) -> int:
        problems = await topics.watch()
        for problem in problems:
            say(printable(str(problem)))
        if not problems:
            say("every internal topic is as it must be")
        return 1 if problems else 0

    return _with_topics(settings, compared)


def prepare(settings: Settings) -> int:
    """Create what is missing and verify the rest."""

    async def prepared(topics: InternalTopics) -> int:
        await topics.ensure()
        say("every internal topic is there and as it must be")
        return 0

    return _with_topics(settings, prepared)


def not_acquired(health_url: str) -> int:
    """Print the shards that an instance cannot acquire; exit status 1 if there are any."""
    answer = Remote(health_url, None).ask("GET", "/health/ready", expected=HTTPStatus.SERVICE_UNAVAILABLE)
    found = objects_of(answer, "not_acquired")
    columns = ("shard", "since", "tries", "error", "remedy")
    if found:
        say_rows(columns, [[row.get(column) for column in columns] for row in found])
    else:
        say("no shard of this instance fails to be acquired")
    return 1 if found else 0


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
