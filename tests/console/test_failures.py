"""Failures on a real broker: topics that cannot be written, the reason and the remedy, and the lane's quarantine."""

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from tests.support.brokers.fixtures import Kafka
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually


@pytest_asyncio.fixture(loop_scope="session")
async def rest(coordinator: CoordinatorProcess) -> AsyncIterator[Rest]:
    async with aiohttp.ClientSession() as session:
        yield Rest(session, coordinator.url, coordinator.health_url)


def row(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("table", name=table).locator("tbody tr").filter(has_text=text)


async def too_large(cluster: Cluster, rest: Rest, group: str) -> tuple[str, str]:
    """Cause a refused commit by lowering the limit of its topic after the prepare; return the topic and the id."""
    topic = await cluster.make_topic(group, config={"max.message.bytes": "400000"})
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    own = await rest.prepared(group, [message(topic, "x" * 300_000)])
    await cluster.set_config(topic, "max.message.bytes", "100000")
    await eventually(lambda: rest.end(own, "commit"), lambda answer: answer.error_code == "message_too_large")
    return topic, own


async def test_a_deleted_topic_is_shown_with_its_remedy_until_it_is_there_again(
    page: Page, kafka: Kafka, coordinator: CoordinatorProcess, rest: Rest
) -> None:
    cluster = Cluster(kafka.bootstrap_servers)
    topic = await cluster.make_topic("doomed")
    (await rest.put_group("doomed", topics=[topic], policy=QUIET)).expect(201)
    own = await rest.prepared("doomed", [message(topic, "v")])
    await cluster.delete_topic(topic)
    await eventually(lambda: rest.end(own, "commit"), lambda answer: answer.error_code == "topic_unavailable")
    await page.goto(f"{coordinator.url}/console/#/failures")
    failing = row(page, "Topics that cannot be written", topic)
    await expect(failing).to_contain_text("does not exist: create it, and the end can be done")
    await expect(row(page, "Ends that were refused", own)).to_contain_text(topic)
    await cluster.make_exactly(topic)
    await eventually(lambda: rest.end(own, "commit"), lambda answer: answer.status == 200)
    await expect(failing).to_have_count(0)
    await expect(row(page, "Ends that were refused", own)).to_have_count(0)


async def test_a_write_in_the_quarantine_of_the_lane_is_shown_until_it_is_done(
    page: Page, kafka: Kafka, coordinator: CoordinatorProcess, rest: Rest
) -> None:
    """The limit of its topic was lowered after the prepare, so a Kafka transaction of the lane fails."""
    cluster = Cluster(kafka.bootstrap_servers)
    topic, own = await too_large(cluster, rest, "small")
    await page.goto(f"{coordinator.url}/console/#/failures")
    held = row(page, "Writes in quarantine", own)
    await expect(held).to_contain_text("message_too_large")
    await expect(held).to_contain_text(topic)
    await page.get_by_role("link", name="Overview").click()
    await expect(page.get_by_role("listitem").filter(has_text="in quarantine")).to_contain_text(topic)
    await cluster.set_config(topic, "max.message.bytes", "400000")
    await eventually(lambda: rest.end(own, "commit"), lambda answer: answer.status == 200)
    await page.get_by_role("link", name="Failures").click()
    await expect(held).to_have_count(0)
    await expect(row(page, "Topics that cannot be written", topic)).to_have_count(0)


async def test_a_rollback_takes_a_write_out_of_the_quarantine(
    page: Page, kafka: Kafka, coordinator: CoordinatorProcess, rest: Rest
) -> None:
    _, own = await too_large(Cluster(kafka.bootstrap_servers), rest, "smaller")
    await page.goto(f"{coordinator.url}/console/#/failures")
    held = row(page, "Writes in quarantine", own)
    await expect(held).to_be_visible()
    await eventually(lambda: rest.end(own, "rollback"), lambda answer: answer.status == 200)
    await expect(held).to_have_count(0)
