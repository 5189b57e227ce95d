"""`halfway topics`: what the internal topics must be, whether they are, and creating them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.table import Table

from halfway.domain.errors import HalfwayError
from halfway.kafka.layout import plans
from halfway.kafka.topics import InternalTopics

if TYPE_CHECKING:
    from halfway.runtime.settings import Settings

_BROKERS: Final = 3
"""What is needed is shown for a cluster of this size where HALFWAY_REPLICATION_FACTOR is not set."""


def show(settings: Settings) -> int:
    """Print each internal topic with the partitions, replication and settings that it needs; ask nothing of Kafka."""

    async def shown(_: InternalTopics) -> int:
        config = settings.kafka_config("")
        table = Table("topic", "partitions", "replication", "settings")
        for plan in plans(config, _BROKERS):
            needed = "\n".join(f"{name}={value}" for name, value in sorted(plan.settings.items()))
            table.add_row(plan.name, str(plan.partitions), str(plan.replication), needed)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
        return 0

    return _with_topics(settings, shown)


def compare(settings: Settings) -> int:
    """Print what is unsafe or missing; exit status 1 where anything is."""

    async def compared(topics: InternalTopics) -> int:
        problems = await topics.watch()
        for problem in problems:
            click.echo(str(problem))
        if not problems:
            click.echo("every internal topic is as it must be")
        return 1 if problems else 0

    return _with_topics(settings, compared)


def prepare(settings: Settings) -> int:
    """Create what is missing and verify the rest."""

    async def prepared(topics: InternalTopics) -> int:
        await topics.ensure()
        click.echo("every internal topic is there and as it must be")
        return 0

    return _with_topics(settings, prepared)


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
        click.echo(f"halfway: {error.detail}", err=True)
        return 1
